"""A run that starts from a directory in which another run still saves keeps to the checkpoint that it began with."""

import json
from argparse import Namespace

import pytest

from megatron_grpo.checkpointing.checkpoint_directory import find, pinned
from megatron_grpo.training import setup
from megatron_grpo.utils.errors import GrpoError


def save(root, iteration, **args):
    """Add a checkpoint to the run in ``root``, as far as it is read here."""
    directory = root / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text("{}")
    (directory / "args.json").write_text(json.dumps(args))
    (directory / "files.json").write_text(json.dumps({"metadata.json": [2, None]}))
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return str(directory)


def start(resume=False, **given):
    defaults = dict.fromkeys(["load", "finetune", "pretrained_checkpoint", "ref_load", "lora_rank", "dry_run"])
    return setup._start_checkpoints(Namespace(**(defaults | {"beta": 0.1, "loss_type": "grpo"} | given)), resume)


@pytest.mark.parametrize("dest", ["pretrained_checkpoint", "ref_load", "load"])
def test_a_start_and_its_resume_take_the_same_checkpoint(tmp_path, dest):
    live, own = tmp_path / "live", tmp_path / "own"
    first = save(live, 2)
    given = {dest: str(live), "finetune": dest == "load"}
    assert start(**given) == {dest: first}
    save(own, 10, **{dest: first})
    save(live, 4)
    # --finetune is not given to a resume; its restart by torchrun has --load in place of --pretrained-checkpoint.
    again = "pretrained_checkpoint" if dest == "load" else dest
    assert start(resume=True, **{again: str(live), "load": str(own)}) == {again: first}
    assert find(first) == (2, live / "iter_0000002")


def test_another_directory_on_a_resume_is_taken(tmp_path):
    first, other = save(tmp_path / "live", 2), save(tmp_path / "other", 3)
    save(tmp_path / "own", 10, pretrained_checkpoint=first)
    given = {"pretrained_checkpoint": str(tmp_path / "other"), "load": str(tmp_path / "own")}
    assert start(resume=True, **given) == {"pretrained_checkpoint": other}


def test_what_is_not_read_need_not_be_there(tmp_path):
    assert start(resume=True, beta=0.0, pretrained_checkpoint="gone", load=str(tmp_path)) == {}
    assert start(dry_run=True, pretrained_checkpoint="gone") == {}
    with pytest.raises(GrpoError, match="no checkpoint in gone"):
        start(pretrained_checkpoint="gone")


def test_a_checkpoint_of_a_converter_stays_the_directory(tmp_path):
    (tmp_path / "release").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert pinned(tmp_path) == str(tmp_path)
