"""Names of the files of --valid-data-path."""

import pytest

from megatron_grpo.data.held_out_files import valid_files
from megatron_grpo.utils.errors import GrpoError


@pytest.mark.parametrize(
    ("word", "name", "path"),
    [
        ("data/test.jsonl", "test", "data/test.jsonl"),
        ("test-00000-of-00001.parquet", "test-00000-of-00001", "test-00000-of-00001.parquet"),
        ("saved/aime.v2", "aime.v2", "saved/aime.v2"),  # a directory of save_to_disk
        ("saved/aime/", "aime", "saved/aime/"),
        ("hf:openai/gsm8k:main:test", "gsm8k:main:test", "hf:openai/gsm8k:main:test"),
        ("gsm8k=data/test.jsonl", "gsm8k", "data/test.jsonl"),
        ("math=hf:math:test", "math", "hf:math:test"),
        ("./lr=1/test.jsonl", "test", "./lr=1/test.jsonl"),  # a directory with the name lr=1
        ("a=b=c.jsonl", "a", "b=c.jsonl"),
    ],
)
def test_a_file_has_its_own_name_or_the_given_one(word, name, path):
    assert valid_files([word]) == {name: path}


def test_files_stay_in_their_order():
    assert list(valid_files(["b.jsonl", "a=c.jsonl", "z.parquet"])) == ["b", "a", "z"]
    assert valid_files(None) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gsm8k/test.parquet", "math/test.parquet"], "gsm8k=gsm8k/test.parquet math=math/test.parquet"),
        (["a.jsonl", "a.parquet"], 'two files with the name "a"'),
        (["x=a.jsonl", "x=b.jsonl"], 'two files with the name "x"'),
        (["a.jsonl", "b=a.jsonl"], "has a.jsonl twice"),
    ],
)
def test_a_file_or_a_name_is_given_once(words, message):
    with pytest.raises(GrpoError, match=message):
        valid_files(words)
