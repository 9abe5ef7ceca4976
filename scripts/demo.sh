#!/usr/bin/env bash
# Shows the main job on this machine's CPU, with a real language model: up, attach, kill -9, down.
#
# Makes a virtual environment and the model in the checkout; run it again at any time.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
make_venv .venv demo
python scripts/smollm2.py .demo/SmolLM2-135M-Instruct
exec python scripts/demo.py .demo/SmolLM2-135M-Instruct
