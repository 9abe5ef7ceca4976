#!/usr/bin/env bash
# Lint, types and every test that this machine can run, in a virtual environment of the checkout's own.
#
#   scripts/test.sh [PYTEST ARGUMENT...]
#
# Run it again at any time: what is installed already is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
make_venv .venv dev

ruff check .
ruff format --check .
mypy
# Two at a time: most tests wait for processes of their own; those of one file share a set-up.
if (($#)); then
    exec python -m pytest --numprocesses 2 --dist loadfile "$@"
fi
# Not those of a GPU, which look at how full it is.
python -m pytest --numprocesses 2 --dist loadfile -m "not gpu"
exec python -m pytest -m gpu
