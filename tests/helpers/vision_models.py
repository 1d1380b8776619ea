"""Tiny vision-language models with random weights, and pictures for them."""

import io
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from ranks import REPO

sys.path.insert(0, str(REPO / "tools"))
import make_tiny_vision_model as tool


def make(directory: Path, tied: bool = False, layers: int = 4) -> tool.Qwen2_5_VLForConditionalGeneration:
    """Save a Qwen2.5-VL whose parts all have an effect, in several shards, and its processor; return the model."""
    tokenizer = tool.make_tokenizer()
    model = tool.make_model(tokenizer, layers, hidden=128, depth=3, width=64, tied=tied, seed=17).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((1.0 if "norm" in name or "ln_q" in name else 0.0) + 0.1 * torch.randn(parameter.shape))
    model.save_pretrained(directory, max_shard_size="400KB")
    tool.make_processor(tokenizer, max_tokens=24).save_pretrained(directory)
    return model


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return an encoded picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()
