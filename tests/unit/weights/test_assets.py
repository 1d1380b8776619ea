"""Files of a model directory that checkpoints and exports copy, against transformers, which reads and writes them."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast, tokenization_utils_base, utils
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import families, hf
from tools import tiny_vision_model as tool

# transformers' constants: settings and templates. Weights are written anew; the others are no files of these models.
CONSTANTS = """CONFIG_NAME GENERATION_CONFIG_NAME FEATURE_EXTRACTOR_NAME IMAGE_PROCESSOR_NAME VIDEO_PROCESSOR_NAME
    PROCESSOR_NAME CHAT_TEMPLATE_FILE LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE""".split()
TOKENIZER = "SPECIAL_TOKENS_MAP_FILE ADDED_TOKENS_FILE TOKENIZER_CONFIG_FILE FULL_TOKENIZER_FILE".split()
# Of published directories: a tokenizer that transformers reads with mistral-common, a system prompt, terms of use.
PUBLISHED = [
    "tekken.json",
    "SYSTEM_PROMPT.txt",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE.txt",
    "USE_POLICY.md",
    "qwen.tiktoken",
]


def names_of_tokenizers() -> set[str]:
    """Return the names of the vocabulary files of the families' tokenizers."""
    import transformers

    found = set()
    for family in families.FAMILIES:
        kind = getattr(transformers, TOKENIZER_MAPPING_NAMES.get(family) or "PreTrainedTokenizerFast")
        found |= set(kind.vocab_files_names.values())
    return found


def test_every_file_that_transformers_reads_is_copied(tmp_path):
    names = {getattr(utils, name) for name in CONSTANTS} | {
        getattr(tokenization_utils_base, name) for name in TOKENIZER
    }
    names |= names_of_tokenizers() | set(PUBLISHED)
    assert {"vocab.json", "merges.txt", "preprocessor_config.json"} <= names
    source = tmp_path / "source"
    source.mkdir()
    for name in [*names, "model.safetensors", "README.md"]:
        (source / name).write_text("{}")
    hf.copy_assets(source, tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == names


@pytest.fixture
def templates(tmp_path):
    """A tokenizer with a template of its own for tools, as transformers writes it."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools", "rag": "documents"}
    tokenizer.save_pretrained(tmp_path / "source")
    assert (tmp_path / "source" / utils.CHAT_TEMPLATE_DIR / "tool_use.jinja").exists()
    return tokenizer


def test_templates_that_have_names_are_copied(templates, tmp_path):
    for _ in range(2):  # every save copies them
        hf.copy_assets(tmp_path / "source", tmp_path / "copy")
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").chat_template == templates.chat_template


def test_a_template_of_the_flag_replaces_them(templates, tmp_path):
    hf.copy_assets(tmp_path / "source", tmp_path / "copy", "mine")
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").chat_template == "mine"


BOUNDS = [{"min_pixels": 3136, "max_pixels": 6272}, {"max_pixels": 6272}, {"min_pixels": 3136}]


@pytest.mark.parametrize("bounds", BOUNDS, ids=lambda bounds: " ".join(bounds))
@pytest.mark.parametrize("layout", ["transformers 5", "published", "published, size only"])
@pytest.mark.parametrize("shape", ["qwen2_5_vl", "qwen3_vl"])
def test_the_bounds_of_an_image_are_those_of_the_run(tmp_path, bounds, layout, shape):
    source = tmp_path / "source"
    processor = tool.make_processor(tool.make_tokenizer(shape), 24, shape)
    processor.save_pretrained(source)
    if layout != "transformers 5":  # a file of the image processor's own
        settings = json.loads((source / "processor_config.json").read_text())["image_processor"]
        low, high = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
        if layout == "published":
            del settings["size"]
            settings |= {"min_pixels": low, "max_pixels": high}
        (source / "processor_config.json").unlink()
        (source / "preprocessor_config.json").write_text(json.dumps(settings))
    original = AutoProcessor.from_pretrained(source)
    before, of_videos = dict(original.image_processor.size), dict(original.video_processor.size)
    assert before == dict(processor.image_processor.size)
    hf.copy_assets(source, tmp_path / "copy", bounds=bounds)
    again = AutoProcessor.from_pretrained(tmp_path / "copy")
    expected = {
        "shortest_edge": bounds.get("min_pixels", before["shortest_edge"]),
        "longest_edge": bounds.get("max_pixels", before["longest_edge"]),
    }
    assert dict(again.image_processor.size) == expected
    assert dict(again.video_processor.size) == of_videos  # no flag sets them
    hf.copy_assets(tmp_path / "copy", tmp_path / "copy", bounds={"max_pixels": 9408})  # a resumed run with another flag
    assert AutoProcessor.from_pretrained(tmp_path / "copy").image_processor.size["longest_edge"] == 9408


def test_settings_that_cannot_be_read_have_a_message(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(GrpoError, match=r"preprocessor_config\.json is not valid JSON"):
        hf.copy_assets(tmp_path, tmp_path / "copy", bounds={"max_pixels": 9408})
