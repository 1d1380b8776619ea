"""Tiny vision-language models with random weights, and pictures for them."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tools import tiny_vision_model as tool

# Of a chat template: earlier turns of the policy are shown by their first letter.
FORGETFUL = (
    "{% if message['content'] is string %}",
    "{% if message['role'] == 'assistant' %}{{ message['content'][:1] }}<|im_end|>\n"
    "{% elif message['content'] is string %}",
)


def make(directory: Path, tied: bool = False, layers: int = 4, shape: str = "qwen2_5_vl") -> torch.nn.Module:
    """Save a model whose parts all have an effect, in several shards, and its processor; return the model."""
    tokenizer = tool.make_tokenizer(shape)
    sizes = {"layers": layers, "hidden": 128, "depth": 3, "width": 64}
    model = tool.make_model(tokenizer, **sizes, tied=tied, seed=17, shape=shape).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if ("norm" in name and not name.endswith("bias")) or "ln_q" in name else 0.0
            if shape.startswith("qwen3_5") and "language_model." in name and "linear_attn." not in name:
                centre = 0.0  # these norms multiply by 1 + weight
            parameter.copy_(centre + 0.1 * torch.randn(parameter.shape))
            if shape.startswith("qwen3_5"):  # vLLM's engine has them in bfloat16 on a CPU, without rounding
                parameter.copy_(parameter.bfloat16())
    tool.save_model(model, directory, max_shard_size="400KB")
    tool.make_processor(tokenizer, 24, shape).save_pretrained(directory)
    return model


def forward(model, pack) -> torch.Tensor:
    """Return the log-probabilities and entropies of a pack, as pretrain_grpo.py computes them."""
    from megatron_grpo.models.gpt import packed_seq_params

    arrays = {name: torch.from_numpy(array) for name, array in pack.device_arrays().items()}
    return model(
        arrays["tokens"][None],
        arrays["position_ids"][None],
        attention_mask=None,
        labels=arrays["labels"][None],
        packed_seq_params=packed_seq_params(torch.from_numpy(pack.cu_seqlens), pack.max_seqlen, "local"),
        rope_positions=arrays.get("rope_positions"),
        images=pack.images,
    )


def check_equal(rows: list[dict], one_rank: list[dict], *more: str) -> None:
    """Metrics of a parallel configuration are those of one rank, and the engine agrees with the trainer."""
    for row, expected in zip(rows, one_rank, strict=True):
        assert row["mismatch/mean_abs"] < 1e-5
        for name in ("reward/mean", "grad_norm", "entropy", "kl", "loss", *more):
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=2e-6), (name, row[name], expected[name])


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return an encoded picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()


def encoded(image: Image.Image, kind: str = "PNG", **more) -> bytes:
    """Return the file of a picture."""
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def odd_pictures() -> dict[str, tuple[bytes, np.ndarray]]:
    """Return by name pictures that are seldom seen, as files, and their pixels in RGB.

    The pixels of a JPEG file are those of Pillow's decoder.
    """
    noise = np.random.default_rng(3).integers(0, 256, (60, 44, 4), dtype=np.uint8)
    rgb, grey = noise[..., :3], noise[..., 0]
    palette = Image.fromarray(grey // 16).convert("P")
    palette.putpalette(noise[:16, 0, :3].tobytes())
    colours = noise[:16, 0, :3][grey // 16]
    frames = [Image.fromarray(255 - grey) for _ in range(2)]
    cmyk = encoded(Image.fromarray(noise, "CMYK"), "JPEG", quality=100)
    with Image.open(io.BytesIO(cmyk)) as opened:
        inks = 255 - np.asarray(opened).astype(int)
    found = {
        "one pixel": (encoded(Image.fromarray(rgb[:1, :1])), rgb[:1, :1]),
        "three pixels high": (encoded(Image.fromarray(rgb[:3])), rgb[:3]),
        "a column": (encoded(Image.fromarray(rgb[:, :1])), rgb[:, :1]),
        "16 bits": (encoded(Image.fromarray(grey.astype(np.uint16) * 257)), np.stack([grey] * 3, -1)),
        "transparent": (encoded(Image.fromarray(noise)), rgb),
        "grey and transparent": (encoded(Image.fromarray(noise[..., :2], "LA")), np.stack([grey] * 3, -1)),
        "a transparent colour": (encoded(palette, transparency=3), colours),
        "transparent colours": (encoded(palette, transparency=bytes(range(0, 160, 10))), colours),
        "animated": (
            encoded(Image.fromarray(grey), "GIF", save_all=True, append_images=frames),
            np.stack([grey] * 3, -1),
        ),
        "CMYK": (cmyk, np.round(inks[..., :3] * inks[..., 3:] / 255)),
    }
    return found
