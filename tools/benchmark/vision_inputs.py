"""Make Qwen2.5-VL-3B's shape with random weights, and rows with a picture of about one megapixel each.

    python tools/benchmark/vision_inputs.py RUN_DIR [--rows 256]

Writes RUN_DIR/model (Hugging Face files in bfloat16, 7.5 GB, with the processor and the byte tokenizer of
tools/tiny_vision_model.py) and RUN_DIR/data/train.jsonl. A picture of 1008 x 1008 pixels becomes 1,296 tokens.
tools/benchmark/vision.sh trains on them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from tools.tiny_vision_model import SPECIAL, make_processor, make_tokenizer

SIDE = 1008  # pixels
# config.json of Qwen/Qwen2.5-VL-3B-Instruct; the ids of special tokens are those of the tokenizer here.
SHAPE: dict[str, Any] = {
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
    "tie_word_embeddings": True,
}


def make_model(directory: Path) -> None:
    """Write the model and its processor."""
    processor = make_processor(make_tokenizer(), max_tokens=(SIDE // 28) ** 2)
    ids = {name: processor.tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    ends = {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        **SHAPE | {"text_config": SHAPE["text_config"] | ends},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def make_rows(directory: Path, count: int) -> None:
    """Write the pictures, of random colours in squares of 8 x 8 pixels, and the rows."""
    (directory / "pictures").mkdir(parents=True)
    rng = np.random.default_rng(1)
    with open(directory / "train.jsonl", "w") as file:
        for number in range(count):
            squares = rng.integers(0, 256, (SIDE // 8, SIDE // 8, 3), np.uint8)
            Image.fromarray(squares.repeat(8, 0).repeat(8, 1)).save(directory / "pictures" / f"{number}.png")
            row = {"prompt": "<image>What is it?", "images": [f"pictures/{number}.png"], "answer": "noise"}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Parse the command line and make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="folder of both")
    parser.add_argument("--rows", type=int, default=256, metavar="N", help="rows, of one picture each [256]")
    options = parser.parse_args()
    if not (options.directory / "data").exists():
        make_rows(options.directory / "data", options.rows)
    if not (options.directory / "model").exists():
        make_model(options.directory / "model")


if __name__ == "__main__":
    main()
