#!/usr/bin/env bash
# What weights survive on this machine, event by event: restart, kill -9, watchdog, daemon-reexec, …
#
#   scripts/survival.sh [--device cpu|cuda] [--size 16GiB] [--supervisor auto|systemd|direct] [--help]
#
# Takes the python of PYTHON, or python3, with torch; packages that it lacks come from .whl, if that is
# there. A machine without systemd boots the one whose packages are in .sd/deb; scripts/survival.py
# says the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if ! "$python" -c 'import msgspec, tomli_w' 2>/dev/null && compgen -G '.whl/*.whl' >/dev/null; then
  found=$(mktemp -d)
  trap 'rm -rf "$found"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-cache-dir --target "$found" .whl/*.whl
  export PYTHONPATH=$found${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$python" scripts/survival.py "$@"
