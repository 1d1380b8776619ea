"""Write random weights in the shape of a published config.json, as Hugging Face files.

    python tools/benchmark/random_checkpoint.py --config Qwen3-8B/config.json --tokenizer DIR --save random

For measurements of whole runs, from directory to directory, where the published weights are not at hand. The weights
are normal with a standard deviation of --deviation, norms are 1. Each layer is a file. The tokenizer's files are
copied.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

TOKENIZER = "tokenizer*.json", "*token*.json", "vocab.json", "merges.txt", "generation_config.json", "*.jinja"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the model's config.json")
    parser.add_argument("--tokenizer", required=True, type=Path, metavar="DIR", help="directory with tokenizer files")
    parser.add_argument("--save", required=True, type=Path, metavar="DIR", help="directory to write")
    parser.add_argument("--deviation", type=float, default=0.02, metavar="X", help="standard deviation [0.02]")
    own = parser.parse_args()
    own.save.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(own.config.parent)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    files: dict[str, list[str]] = {}
    for name in tensors:
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, names in files.items():
        found = {}
        for name in names:
            like = tensors[name]
            value = torch.empty(like.shape, dtype=like.dtype, device=device)
            found[name] = value.fill_(1) if like.ndim == 1 else value.normal_(0, own.deviation, generator=generator)
        save_file({name: value.cpu() for name, value in found.items()}, own.save / file, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    places = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (own.save / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for pattern in TOKENIZER:
        for file in own.tokenizer.glob(pattern):
            shutil.copy(file, own.save)
    shutil.copy(own.config, own.save / "config.json")
    print(f"{own.save}: {total / 1e9:.1f} GB in {len(files)} files")


if __name__ == "__main__":
    main()
