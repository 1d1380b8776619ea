"""Tiny vision-language models with random weights, their processors, and rows with pictures; for make_tiny_model.py.

The tokenizer has one token for each byte, and the family's special tokens and chat template.
"""

import io
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    InternVLProcessor,
    LlavaOnevisionProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
)
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.models.llava_onevision.image_processing_llava_onevision import LlavaOnevisionImageProcessor
from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from megatron_grpo.data.pack import IGNORED_LABEL
from megatron_grpo.data.row_files import read_rows
from megatron_grpo.utils.errors import GrpoError
from tools.byte_tokenizer import byte_tokenizer

SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|>
    <|video_pad|>""".split()
# Qwen2.5-VL-Instruct's template, without its branches for numbered pictures and videos.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGE, VIDEO = (f"<|vision_start|><|{medium}_pad|><|vision_end|>" for medium in ("image", "video"))
# Family -> processors of images, of videos and of both, and pixels along a patch.
PROCESSORS = {
    "qwen2_5_vl": (Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen2_5_VLProcessor, 14),
    "qwen3_vl": (Qwen2VLImageProcessor, Qwen3VLVideoProcessor, Qwen3VLProcessor, 16),
    "qwen3_5": (Qwen2VLImageProcessor, Qwen3VLVideoProcessor, Qwen3VLProcessor, 16),
}
INTERNVL_SPECIAL = "<|endoftext|> <|im_start|> <|im_end|> <img> </img> <IMG_CONTEXT> <quad> </quad>".split()
INTERNVL_VIDEO = "<video>"  # as published, behind the tokens that have an embedding
TILE, TILE_TOKENS = 56, 4  # of InternVL: pixels along each side, and tokens
LLAVA_SPECIAL = "<|endoftext|> <|im_start|> <|im_end|> <image> <video> <unused0> <unused1> <unused2>".split()
LLAVA_TILE = 28  # pixels along each side; a patch of 14 pixels is a token
# Heights and widths to which images are scaled. Of more than 9 tiles the features are scaled down: at most 46 tokens.
LLAVA_SIZES = [[height * LLAVA_TILE, width * LLAVA_TILE] for height in range(1, 5) for width in range(1, 5)]
# As in transformers' conversion of the published model: lists of parts only, images before videos before the text.
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(shape: str = "qwen2_5_vl") -> PreTrainedTokenizerFast:
    """Build a tokenizer of bytes with the family's special tokens, and Qwen2.5-VL's template."""
    special, template = SPECIAL, TEMPLATE
    if shape == "internvl":
        special, template = INTERNVL_SPECIAL, TEMPLATE.replace(IMAGE, "<IMG_CONTEXT>\n").replace(VIDEO, "<video>\n")
    if shape == "llava_onevision":
        special, template = LLAVA_SPECIAL, LLAVA_TEMPLATE
    made = byte_tokenizer(before=special)
    made.add_special_tokens([*special, INTERNVL_VIDEO] if shape == "internvl" else special)
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    names |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    if shape == "internvl":
        names = {"start_image_token": "<img>", "end_image_token": "</img>"}
        names |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    if shape == "llava_onevision":
        names = {"image_token": "<image>", "video_token": "<video>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        extra_special_tokens=names,
        chat_template=template,
    )


def make_processor(tokenizer: PreTrainedTokenizerFast, max_tokens: int, shape: str = "qwen2_5_vl") -> Any:
    """Build the processor, which scales images to at most `max_tokens` visual tokens."""
    if shape == "internvl":
        tile = {"height": TILE, "width": TILE}
        return InternVLProcessor(
            # A thumbnail is a tile, too.
            image_processor=GotOcr2ImageProcessor(size=tile, max_patches=max(1, max_tokens // TILE_TOKENS - 1)),
            tokenizer=tokenizer,
            video_processor=InternVLVideoProcessor(size=tile),
            image_seq_length=TILE_TOKENS,
            chat_template=tokenizer.chat_template,
        )
    if shape == "llava_onevision":
        tile = {"height": LLAVA_TILE, "width": LLAVA_TILE}
        return LlavaOnevisionProcessor(
            image_processor=LlavaOnevisionImageProcessor(size=tile, image_grid_pinpoints=LLAVA_SIZES),
            tokenizer=tokenizer,
            video_processor=LlavaOnevisionVideoProcessor(size=tile),
            num_image_tokens=(LLAVA_TILE // 14) ** 2,
            vision_feature_select_strategy="full",
            chat_template=tokenizer.chat_template,
        )
    of_images, of_videos, both, side = PROCESSORS[shape.removesuffix("_moe")]
    low, high = (2 * side) ** 2, (2 * side) ** 2 * max_tokens
    sizes = {"patch_size": side, "min_pixels": low, "max_pixels": high}
    # Qwen3-VL's are of all frames of a video, Qwen2.5-VL's of each.
    video_sizes = {"patch_size": side, "size": {"shortest_edge": low, "longest_edge": high}}
    more = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if side == 16 else {}
    return both(
        image_processor=of_images(**sizes, **more),
        tokenizer=tokenizer,
        video_processor=of_videos(**video_sizes),
        chat_template=TEMPLATE,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast,
    layers: int,
    hidden: int,
    depth: int,
    width: int,
    tied: bool,
    seed: int,
    shape: str = "qwen2_5_vl",
) -> torch.nn.Module:
    """Build a float32 model: `layers` of `hidden` channels above a tower of `depth` blocks with `width` channels."""
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*SPECIAL, *INTERNVL_SPECIAL, *LLAVA_SPECIAL)}
    section: dict[str, Any] = {"mrope_section": [4, 6, 6]}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer) - (shape == "internvl"),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": tied,
    }
    vision: dict[str, Any] = {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": width // 32,
        "out_hidden_size": hidden,
    }
    if shape == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [depth // 2]}
    else:
        section = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        text["head_dim"] = 32
        vision["num_position_embeddings"] = 64
    if shape.startswith("qwen3_vl"):
        vision["deepstack_visual_indexes"] = list(range(min(depth, 2)))
    if shape.startswith("qwen3_5"):
        section = {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
        text |= {"head_dim": 64, "layer_types": [("linear_attention", "full_attention")[i % 2] for i in range(layers)]}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}  # with 128 the only ones of vLLM's CPU kernel
    if shape.endswith("_moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * hidden // 8}
    if shape == "qwen3_vl_moe":
        text |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    if shape == "qwen3_5_moe":
        text["shared_expert_intermediate_size"] = 3 * hidden // 8
    if shape == "internvl":
        vision = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 32}
        vision |= {"num_hidden_layers": depth, "attention_bias": True, "image_size": [TILE] * 2, "patch_size": [14] * 2}
        text |= {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        config = AutoConfig.for_model(
            shape,
            text_config=text,
            vision_config=vision,
            image_token_id=ids["<IMG_CONTEXT>"],
            image_seq_length=TILE_TOKENS,
            tie_word_embeddings=tied,
        )
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    if shape == "llava_onevision":
        vision = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 32}
        vision |= {"num_hidden_layers": depth, "image_size": LLAVA_TILE, "patch_size": 14, "vision_use_head": False}
        text |= {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        config = AutoConfig.for_model(
            shape,
            text_config=text,
            vision_config={"model_type": "siglip_vision_model", **vision},
            image_token_index=ids["<image>"],
            video_token_index=ids["<video>"],
            image_grid_pinpoints=LLAVA_SIZES,
            tie_word_embeddings=tied,
        )
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, **section}
    config = AutoConfig.for_model(
        shape,
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def save_model(model: PreTrainedModel, directory: Path, **options: Any) -> None:
    """Save the model with the names and shapes of published files.

    transformers 5 writes the experts of Qwen3-VL as it computes with them, transposed against the published ones, each
    expert of Qwen3.5 apart, and leaves a part of the names in LLaVA-OneVision's tower out.
    """
    kind = model.config.model_type
    llava = "vision_tower.", "vision_tower.vision_model."
    shortened = llava if kind == "llava_onevision" else ("", "")
    transposed = ".mlp.experts." if kind == "qwen3_vl_moe" else "no such name"
    model.save_pretrained(directory, save_original_format=kind != "qwen3_5_moe", **options)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        published = {
            name.replace(*shortened, 1): tensor.mT.contiguous() if transposed in name else tensor
            for name, tensor in tensors.items()
        }
        if any(published.get(name) is not tensor for name, tensor in tensors.items()):
            save_file(published, file, metadata={"format": "pt"})
    for index in directory.glob("*.safetensors.index.json"):
        index.write_text(index.read_text().replace(*shortened))


class Rows:
    """Rows as tensors: ids and labels [rows, longest], pixels [rows, patches, channels]; one picture a row."""

    at_a_time = 100  # rows of one forward pass without gradients

    def __init__(self, paths: list[Path], processor: Any):
        tokenizer, sequences, pictures = processor.tokenizer, [], []
        for where, row in (item for path in paths for item in read_rows(path)):
            if row["prompt"].count("<image>") != 1 or len(row["images"]) != 1:
                raise GrpoError(f"{where}: expected one <image> in the prompt, and one picture")
            pictures.append(Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB"))
            sequences.append((row["prompt"].replace("<image>", IMAGE), row["answer"]))
        found = processor.image_processor(images=pictures, return_tensors="pt")
        grids = found["image_grid_thw"]
        if not (grids == grids[0]).all():
            raise GrpoError("the pictures differ in size: the warm-up needs equal ones")
        self.grid, self.pixels = grids[:1], found["pixel_values"].view(len(pictures), int(grids[0].prod()), -1)
        token, count = tokenizer.convert_tokens_to_ids("<|image_pad|>"), int(grids[0].prod()) // 4
        encoded = []
        for prompt, answer in sequences:
            ids = [one for id_ in tokenizer.encode(prompt) for one in [id_] * (count if id_ == token else 1)]
            encoded.append((ids, [*tokenizer.encode(answer), tokenizer.eos_token_id]))
        longest = max(len(prompt) + len(answer) for prompt, answer in encoded) - 1
        self.ids = torch.full((len(encoded), longest), tokenizer.pad_token_id)
        self.labels = torch.full_like(self.ids, IGNORED_LABEL)
        for i, (prompt, answer) in enumerate(encoded):
            whole = torch.tensor(prompt + answer)
            self.ids[i, : len(whole) - 1] = whole[:-1]
            self.labels[i, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
        self.token = token

    def logits(self, model: torch.nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return the logits [chosen, longest, vocabulary] of these rows."""
        ids = self.ids[chosen]
        return model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),  # padding is behind all labels
            mm_token_type_ids=(ids == self.token).int(),
            pixel_values=self.pixels[chosen].flatten(0, 1),
            image_grid_thw=self.grid.expand(len(chosen), -1),
        ).logits
