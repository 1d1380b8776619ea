"""The directory of a checkpoint under kills and damage."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from stand_in_checkpoints import save
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_grpo.checkpointing import checkpoint_directory as cd
from megatron_grpo.checkpointing import data_files
from megatron_grpo.checkpointing.checksums import CHECKSUMS
from megatron_grpo.utils.errors import GrpoError

ROOT = Path(__file__).resolve().parents[3]


def names(root):
    return sorted(path.name for path in Path(root).iterdir())


def test_layout_is_megatron_lms(tmp_path):
    assert cd.latest_iteration(tmp_path) is None
    save(tmp_path, 20)
    assert names(tmp_path) == ["iter_0000020", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "20"
    assert cd.latest_iteration(tmp_path) == 20
    assert cd.find(tmp_path) == (20, tmp_path / "iter_0000020")
    assert cd.read_checkpoint_args(tmp_path) == {"num_layers": 4}
    cd.verify(tmp_path / "iter_0000020")


def test_rotation_counts_what_is_on_the_disk(tmp_path):
    for iteration in (5, 10):
        save(tmp_path, iteration)
    save(tmp_path, 20, keep=2)  # as after a restart: nothing is remembered of the first two
    assert names(tmp_path) == ["iter_0000010", "iter_0000020", cd.LATEST]
    save(tmp_path, 15, keep=1)  # gone back and on: the newest is the one just written, not the largest number
    assert names(tmp_path) == ["iter_0000015", cd.LATEST]
    assert cd.latest_iteration(tmp_path) == 15


def test_writing_the_same_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 20, payload="first")
    save(tmp_path, 20, payload="second")
    assert names(tmp_path) == ["iter_0000020", cd.LATEST]
    assert (tmp_path / "iter_0000020" / "__0_0.distcp").read_text() == "second" * 100


def check_loadable(root, acceptable):
    """The newest checkpoint is whole and of an acceptable iteration, with the content written for that iteration."""
    iteration, directory = cd.find(root)
    cd.verify(directory)
    assert iteration in acceptable
    assert (directory / "metadata.json").read_text() == f"metadata.json {iteration}"


@pytest.mark.parametrize("target", ["next", "same"])
def test_a_failure_at_any_rename_leaves_a_loadable_checkpoint(tmp_path, monkeypatch, target):
    """os.replace, by which everything takes effect, fails once before and once after it acts, at each of its calls."""
    real = os.replace
    call = 0
    while True:
        for acts in (False, True):
            root = tmp_path / f"{call}-{acts}"
            save(root, 10)
            save(root, 20)
            count = 0

            def failing(source, destination, acts=acts):
                nonlocal count
                count += 1
                if count == call + 1:  # noqa: B023
                    if acts:
                        real(source, destination)
                    raise KeyboardInterrupt
                real(source, destination)

            monkeypatch.setattr(os, "replace", failing)
            try:
                save(root, 30 if target == "next" else 20, keep=2, best=best(30 if target == "next" else 20, 1.0))
                finished = True
            except KeyboardInterrupt:
                finished = False
            monkeypatch.setattr(os, "replace", real)
            check_loadable(root, {20, 30} if target == "next" else {20})
            cd.read_best(root)
            save(root, 40, keep=2)  # the next start cleans up and goes on
            check_loadable(root, {40})
            assert not [name for name in names(root) if name.endswith((".tmp", ".old"))]
        call += 1
        if finished:
            break
    assert call > 3


FORKER = """
import os, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests/helpers"]
from stand_in_checkpoints import save
for line in sys.stdin:
    if (child := os.fork()) == 0:
        for iteration in range(int(line), 10**6):
            save(sys.argv[1], iteration, keep=2)
            print(os.getpid(), iteration, flush=True)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


@pytest.mark.slow
def test_a_process_killed_at_random_moments_leaves_a_loadable_checkpoint(tmp_path):
    root = tmp_path / "run"
    save(root, 1)
    rng = random.Random(0)
    iteration = 1
    program = [sys.executable, "-c", FORKER.format(root=str(ROOT)), str(root)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forker:
        for _ in range(8):
            forker.stdin.write(f"{iteration + 1}\n")
            forker.stdin.flush()
            process, saved = map(int, forker.stdout.readline().split())
            assert saved == iteration + 1
            time.sleep(rng.uniform(0, 0.03))  # it is now at any moment of the next saves
            os.kill(process, signal.SIGKILL)
            while (line := forker.stdout.readline()) != "killed\n":
                assert line, "the process that forks has ended"
            newest = cd.latest_iteration(root)
            assert newest > iteration
            check_loadable(root, {newest})
            iteration = newest


def test_leftovers_are_cleared_away(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "iter_0000020.tmp").mkdir()
    (tmp_path / "iter_0000020.tmp" / "__0_0.distcp").write_text("half")
    (tmp_path / "iter_0000010").rename(tmp_path / "iter_0000010.old")  # killed between two renames
    assert cd.find(tmp_path) == (10, tmp_path / "iter_0000010.old")
    cd.clean_up(tmp_path)
    assert names(tmp_path) == ["iter_0000010", cd.LATEST]


def damage_missing(directory):
    (directory / "__0_0.distcp").unlink()


def damage_truncated(directory):
    os.truncate(directory / "__0_0.distcp", 100)


def damage_metadata(directory):
    (directory / ".metadata").write_text(".metadata 02")


def damage_absent(directory):
    directory.rename(directory.parent / "elsewhere")


def damage_latest(directory):
    (directory.parent / cd.LATEST).write_text("twenty")


def damage_manifest(directory):
    (directory / cd.MANIFEST).write_text("[")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, r"iter_0000020 is damaged: __0_0.distcp is missing; .*: iter_0000010$"),
        (damage_truncated, r"iter_0000020 is damaged: __0_0.distcp has 100 bytes instead of 700"),
        (damage_metadata, r"iter_0000020 is damaged: the content of .metadata has changed since it was written"),
        (damage_absent, r"names iteration 20, but .*iter_0000020 does not exist; .*: iter_0000010$"),
        (damage_latest, r"holds 'twenty', not an iteration; in .*: iter_0000010, iter_0000020$"),
        (damage_manifest, r"files.json is not valid JSON"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    save(tmp_path, 10)
    save(tmp_path, 20)
    damage(tmp_path / "iter_0000020")
    with pytest.raises(GrpoError, match=message):
        cd.verify(cd.find(tmp_path)[1])


def test_a_single_checkpoint_can_be_given_in_place_of_its_parent(tmp_path):
    save(tmp_path, 20)
    save(tmp_path, 40)
    assert cd.find(tmp_path / "iter_0000020") == (20, tmp_path / "iter_0000020")
    assert cd.latest_iteration(tmp_path / "iter_0000020") == 20
    assert cd.note(tmp_path / "iter_0000020") == ""
    assert cd.run_directory(tmp_path / "iter_0000020") == cd.run_directory(tmp_path) == tmp_path


@pytest.mark.parametrize("reached", ["files.json", "data"])
def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_damaged(tmp_path, monkeypatch, reached):
    save(tmp_path, 20)
    directory = cd.find(tmp_path)[1]

    def deleted(*_):
        shutil.rmtree(directory)
        yield "__0_0.distcp is missing"

    if reached == "data":
        monkeypatch.setattr(cd, "damage", deleted)
    else:
        shutil.rmtree(directory)
    with pytest.raises(GrpoError, match=r"deleted meanwhile.*start again") as refusal:
        cd.verify(directory)
    assert "damaged" not in str(refusal.value) and cd.LATEST not in str(refusal.value)


def test_the_next_checkpoint_is_found_if_its_run_deletes_the_newest_meanwhile(tmp_path, monkeypatch):
    save(tmp_path, 20)
    save(tmp_path, 40, keep=1)
    read = iter([20])
    latest_iteration = cd.latest_iteration
    monkeypatch.setattr(cd, "latest_iteration", lambda root: next(read, None) or latest_iteration(root))
    assert cd.find(tmp_path) == (40, tmp_path / "iter_0000040")


def best(iteration, value):
    return {"iteration": iteration, "metric": "eval/greedy_accuracy", "value": value}


def test_the_best_checkpoint_stays_until_another_is_better(tmp_path):
    save(tmp_path, 10, keep=1, best=best(10, 0.5))
    save(tmp_path, 20, keep=1)
    save(tmp_path, 30, keep=1)
    assert names(tmp_path) == [cd.BEST, "iter_0000010", "iter_0000030", cd.LATEST]
    assert cd.read_best(tmp_path) == best(10, 0.5)
    save(tmp_path, 40, keep=2, best=best(40, 0.75))
    assert names(tmp_path) == [cd.BEST, "iter_0000030", "iter_0000040", cd.LATEST]
    save(tmp_path, 50, keep=2)
    save(tmp_path, 60, keep=2)
    assert names(tmp_path) == [cd.BEST, "iter_0000040", "iter_0000050", "iter_0000060", cd.LATEST]


def test_a_best_checkpoint_that_was_deleted_by_hand_is_none(tmp_path):
    save(tmp_path, 20, best=best(20, 0.5))
    cd.write_best(tmp_path, best(30, 0.5))
    assert cd.read_best(tmp_path) is None
    cd.write_best(tmp_path, None)
    assert not (tmp_path / cd.BEST).exists()


@pytest.mark.parametrize("text", ["{}", "[]", "nothing", '{"iteration": 10, "metric": 1, "value": 0.5}'])
def test_a_damaged_best_json_is_named(tmp_path, text):
    (tmp_path / cd.BEST).write_text(text)
    with pytest.raises(GrpoError, match=r"best\.json"):
        cd.read_best(tmp_path)


def test_megatron_lms_own_checkpoints_are_found(tmp_path):
    (tmp_path / cd.LATEST).write_text("release")
    (tmp_path / "release").mkdir()
    with pytest.raises(GrpoError, match=r"not a checkpoint of megatron.core.dist_checkpointing: .metadata is missing"):
        cd.verify(cd.find(tmp_path)[1])
    for name in cd.CORE_FILES:
        (tmp_path / "release" / name).write_text("{}")
    iteration, directory = cd.find(tmp_path)
    cd.verify(directory)
    assert (iteration, directory) == (0, tmp_path / "release")
    assert cd.read_checkpoint_args(tmp_path) == {}


def test_without_the_pointer_the_newest_whole_checkpoint_is_taken(tmp_path):
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    (tmp_path / cd.LATEST).unlink()
    (tmp_path / "iter_0000030" / "metadata.json").unlink()
    assert cd.find(tmp_path) == (20, tmp_path / "iter_0000020")
    assert cd.note(tmp_path).endswith("iteration 20 is its newest whole checkpoint")
    for iteration in (10, 20):
        (tmp_path / f"iter_{iteration:07d}" / cd.MANIFEST).unlink()
    with pytest.raises(GrpoError, match=r"holds checkpoints .*iter_0000010, .*none of them is known to be whole"):
        cd.find(tmp_path)


def test_an_older_checkpoint_than_the_newest_is_said(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert cd.note(tmp_path) == ""
    (tmp_path / cd.LATEST).write_text("10")
    assert cd.note(tmp_path).endswith("names iteration 10: iter_0000020 not used")


def test_a_run_that_went_back_keeps_the_checkpoint_that_it_went_back_to(tmp_path):
    """The later ones, of spoilt weights perhaps, are deleted first."""
    for iteration in (2, 4, 7, 8):
        cd.publish(cd.start(tmp_path, iteration), {}, keep=3)
    assert [path.name[-1] for path in cd.iterations(tmp_path)] == ["4", "7", "8"]
    (tmp_path / cd.LATEST).write_text("4")
    for iteration, kept in ((6, ["4", "6", "8"]), (7, ["4", "6", "7"]), (9, ["6", "7", "9"])):
        cd.publish(cd.start(tmp_path, iteration), {}, keep=3)
        assert [path.name[-1] for path in cd.iterations(tmp_path)] == kept
        assert cd.latest_iteration(tmp_path) == iteration


def test_a_short_write_is_never_published(tmp_path):
    temporary = cd.start(tmp_path, 20)
    (temporary / CHECKSUMS).write_text(json.dumps({"__0_0.distcp": [[4, "0"], [4, "0"]]}))
    with pytest.raises(GrpoError, match=r"__0_0.distcp is not there"):
        cd.publish(temporary, {})
    (temporary / "__0_0.distcp").write_text("1234567")
    with pytest.raises(GrpoError, match=r"__0_0.distcp has 7 of 8 bytes"):
        cd.publish(temporary, {})
    assert cd.latest_iteration(tmp_path) is None


VERIFY = [sys.executable, str(ROOT / "tools/checkpoint/verify.py")]


def test_a_directory_that_cannot_be_looked_at_ends_the_tool_with_one_line(tmp_path):
    run = subprocess.run([*VERIFY, tmp_path / ("a" * 300)], capture_output=True, text=True)
    assert run.returncode == 1 and re.fullmatch(r"verify\.py: .*File name too long: .*\n", run.stderr)


def test_the_tool_names_every_damaged_file(tmp_path):
    for iteration in (10, 20):
        save(tmp_path, iteration)
    run = subprocess.run([*VERIFY, tmp_path, "--all"], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.count("all as they were written") == 2
    for name in ("__0_0.distcp", "metadata.json"):
        data = bytearray((tmp_path / "iter_0000010" / name).read_bytes())
        data[-1] ^= 1
        (tmp_path / "iter_0000010" / name).write_bytes(data)
    run = subprocess.run([*VERIFY, tmp_path, "--iteration", "10"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "damaged: __0_0.distcp has changed since it was written, in bytes 0 to 700" in run.stdout
    assert "damaged: the content of metadata.json has changed" in run.stdout
    assert subprocess.run([*VERIFY, tmp_path], capture_output=True).returncode == 0


def test_a_full_disk_is_the_reason_of_a_file_that_torch_cannot_write(tmp_path):
    for tensor in (torch.zeros(4), torch.zeros(100_000)):  # within and beyond Python's buffer
        with pytest.raises(OSError, match="No space left on device"):
            data_files.write_items(Path("/dev/full"), [(MetadataIndex("weight"), tensor)])
