"""Toy tokenizers with the special tokens, chat templates and stop ids of published instruct models.

The published files are in tests/data/instruct_models; SOURCES.md there says where they come from.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, models, processors
from transformers import PreTrainedTokenizerFast

from tools.byte_tokenizer import byte_tokenizer

DATA = Path(__file__).resolve().parents[1] / "data" / "instruct_models"
NAMES = sorted(path.name for path in DATA.iterdir() if path.is_dir())


def published(name: str, file: str) -> dict:
    """Return a JSON file of a model as published, with its real ids."""
    return json.loads((DATA / name / file).read_text())


def build_tokenizer(name: str, directory: Path, real_ids: bool = False) -> dict[str, int]:
    """Write a tokenizer directory of a model, with a vocabulary of bytes; return {special token: toy id}.

    The directory gets tokenizer.json, tokenizer_config.json, the published chat template, config.json (names and ids
    only: the shape is not the toy's) and, if there is one, generation_config.json, in which every id stands for the
    token of the published id. The toy ids follow the 256 bytes in the order of the published ids; with ``real_ids`` the
    tokens have the published ones, as programs that know them expect (openai_harmony), and the bytes those of OpenAI.
    """
    tokens = published(name, "tokens.json")
    added = {**tokens["special"], **tokens["not_special"]}
    backend = byte_tokenizer([])
    if real_ids:
        backend.model = models.BPE(vocab={**backend.get_vocab(), **added}, merges=[])
    for content in sorted(added, key=added.get):
        token = AddedToken(content, normalized=False, special=content in tokens["special"])
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    ids = {content: backend.token_to_id(content) for content in added}
    if tokens["encode_adds"]:
        backend.post_processor = processors.TemplateProcessing(
            single=[*tokens["encode_adds"], "$A"],
            special_tokens=[(token, ids[token]) for token in tokens["encode_adds"]],
        )
    named = {key: tokens[key] for key in ("bos_token", "eos_token", "pad_token") if tokens[key]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = (DATA / name / "chat_template.jinja").read_text()
    tokenizer.save_pretrained(directory)
    toy_ids = {added[content]: ids[content] for content in added}
    for file in ("config.json", "generation_config.json"):
        if (DATA / name / file).exists():
            settings = {key: _renumber(key, value, toy_ids) for key, value in published(name, file).items()}
            if file == "config.json":
                settings = {k: v for k, v in settings.items() if k in ("architectures", "model_type") or _is_id(k)}
            (Path(directory) / file).write_text(json.dumps(settings, indent=2))
    return ids


def _renumber(key: str, value, toy_ids: dict[int, int]):
    """Return the value of a setting, with toy ids if it has ids."""
    if not _is_id(key):
        return value
    return [toy_ids[i] for i in value] if isinstance(value, list) else toy_ids[value]


def _is_id(key: str) -> bool:
    return key.endswith("_token_id")
