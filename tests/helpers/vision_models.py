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


def make(directory: Path, tied: bool = False, layers: int = 4, shape: str = "qwen2_5_vl") -> torch.nn.Module:
    """Save a model whose parts all have an effect, in several shards, and its processor; return the model."""
    tokenizer = tool.make_tokenizer(shape)
    sizes = {"layers": layers, "hidden": 128, "depth": 3, "width": 64}
    model = tool.make_model(tokenizer, **sizes, tied=tied, seed=17, shape=shape).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if ("norm" in name and not name.endswith("bias")) or "ln_q" in name else 0.0
            parameter.copy_(centre + 0.1 * torch.randn(parameter.shape))
    tool.save_model(model, directory, max_shard_size="400KB")
    tool.make_processor(tokenizer, 24, shape).save_pretrained(directory)
    return model


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return an encoded picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()
