"""Tokens that end completions: from the files of a model, and from flags."""

import json

import pytest

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data.end_of_turn import describe, end_token_ids
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError


class Ten:
    """A tokenizer of ten tokens, of which 7 to 9 are special."""

    vocab_size, eos_id, special_tokens = 10, 9, {"<a>": 7, "<b>": 8, "<eos>": 9}

    def decode(self, ids, skip_special_tokens=True):
        assert not skip_special_tokens
        return "".join(f"<{token}>" for token in ids)


def directory(path, **files):
    path.mkdir()
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("files", "flags", "ids"),
    [
        ({}, "", (9,)),
        ({"generation_config": {"eos_token_id": [9, 3]}, "config": {"eos_token_id": 4}}, "", (9, 3, 4)),
        ({"generation_config": {"eos_token_id": 3}}, "--stop-token-ids 5 3", (9, 5, 3)),
        ({"generation_config": {}, "config": {"eos_token_id": None}}, "", (9,)),
        ({"config": {"text_config": {"eos_token_id": [1, 2]}}}, "", (9, 1, 2)),
        ({}, "--stop-words text <b>", (9, 8)),
        ({"generation_config": {"eos_token_id": [9, 3]}}, "--ignore-eos", ()),
        ({"generation_config": {"eos_token_id": [9, 3]}}, "--ignore-eos --stop-words <b>", (8,)),
    ],
)
def test_all_sources_of_end_tokens(tmp_path, files, flags, ids):
    model = directory(tmp_path / "model", **files)
    assert end_token_ids(parse_args(["--tokenizer-model", model, *flags.split()]), Ten()) == ids


def test_the_weights_directory_counts_beside_that_of_the_tokenizer(tmp_path):
    model = directory(tmp_path / "model", generation_config={"eos_token_id": [1, 2]})
    tokenizer = directory(tmp_path / "tokenizer", generation_config={"eos_token_id": 2})
    flags = parse_args(["--load-hf", model, "--tokenizer-model", tokenizer])
    assert end_token_ids(flags, Ten()) == (9, 2, 1)
    assert end_token_ids(parse_args(["--tokenizer-model", str(tmp_path / "a SentencePiece file.model")]), Ten()) == (9,)


@pytest.mark.parametrize(
    ("files", "flags", "message"),
    [
        ({"config": {"eos_token_id": 10}}, "", r"config\.json: the end token 10 is not in the .* vocabulary of 10"),
        ({}, "--stop-token-ids 10", "--stop-token-ids: the end token 10 is not in"),
        ({"generation_config": {"eos_token_id": "2"}}, "", "eos_token_id is '2'; expected a whole number"),
        ({"generation_config": [2]}, "", "generation_config.json is not a JSON object"),
    ],
)
def test_bad_end_tokens_are_refused(tmp_path, files, flags, message):
    model = directory(tmp_path / "model", **files)
    with pytest.raises(GrpoError, match=message):
        end_token_ids(parse_args(["--tokenizer-model", model, *flags.split()]), Ten())


def test_the_banner_names_them():
    assert describe((9, 3), Ten()) == "<9> (9), <3> (3)"
    assert describe((), Ten()) == "the maximum length only"
