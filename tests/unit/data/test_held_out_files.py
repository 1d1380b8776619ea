"""Names of the files of --valid-data-path."""

import shlex

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
    ("words", "names"),
    [
        (["gsm8k/test.parquet", "math/test.parquet"], ["gsm8k_test", "math_test"]),
        (["/d/gsm8k/test.parquet", "/d/math/test.jsonl", "/d/aime.jsonl"], ["gsm8k_test", "math_test", "aime"]),
        (["test.jsonl", "math/test.jsonl"], ["test", "math_test"]),
        (["test=a.jsonl", "math/test.jsonl"], ["test", "math_test"]),  # a given name stays
        (["hf:openai/gsm8k:test", "hf:mine/gsm8k:test"], ["openai_gsm8k:test", "mine_gsm8k:test"]),
        (["./x=y/test.jsonl", "./x=z/test.jsonl"], ["x=y_test", "x=z_test"]),
    ],
)
def test_files_of_one_name_are_named_by_their_folders_too(words, names):
    assert list(valid_files(words)) == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/1/data/test.jsonl", "/2/data/test.jsonl"], '2 files with the name "data_test"'),
        (["/1/x=y/test.jsonl", "/2/x=y/test.jsonl", "b.jsonl"], '"x=y_test".* x_y_test_1=/1/x=y/test.jsonl x_y_'),
        (["a.jsonl", "a.parquet", "a_1.jsonl"], "a_2=a.jsonl a_3=a.parquet"),
        (["x=a.jsonl", "x=b.jsonl", "x=c.jsonl"], '3 files with the name "x".* x_1=a.jsonl x_2=b.jsonl x_3=c.jsonl'),
        (["my data/test.jsonl", "/my data/test.jsonl"], "'my data_test_1=my data/test.jsonl'"),
    ],
)
def test_the_proposal_for_files_of_one_name_is_taken(words, message):
    with pytest.raises(GrpoError, match=message) as refusal:
        valid_files(words)
    proposed = shlex.split(str(refusal.value).partition("such as ")[2])
    paths = [word.partition("=")[2] for word in proposed]
    others = [word for word in words if word not in paths and word.partition("=")[2] not in paths]
    assert sorted(valid_files([*proposed, *others]).values()) == sorted([*paths, *others])


def test_a_file_is_given_once():
    with pytest.raises(GrpoError, match=r"has a\.jsonl twice"):
        valid_files(["a.jsonl", "b=a.jsonl"])
