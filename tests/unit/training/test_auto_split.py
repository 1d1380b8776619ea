"""--rollout-ranks auto: the times of the run that is resumed, an estimate for others, and refusals."""

import json
import threading

import good_args
import pytest
import torch.distributed as dist

from megatron_grpo.parallel import initialize
from megatron_grpo.parallel.roles import check_same_split
from megatron_grpo.training import split
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.split import resolve_split
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError

AUTO = """--rollout-ranks auto --max-staleness 1 --rollout-importance-sampling-mode token_truncate
    --max-tokens-per-microbatch 4096"""


@pytest.fixture(autouse=True)
def _without_files_of_a_checkpoint(monkeypatch):
    monkeypatch.setattr(split, "resolve_origin", lambda args, resume: args)


def args_of(flags="", base=good_args.MODEL + good_args.RUN):
    return parse_args(f"{base} {AUTO} {flags}".split())


def folder_of_run(root, engines, trainers, rows, start=0, **changed):
    """A --save directory: steps of 10 s; the trainers wait 6 s of it, and engines are never idle."""
    args = good_args.validated(f"{AUTO} --rollout-ranks {engines}", world_size=trainers)
    stored = {dest: value for dest, value in vars(args).items() if dest != "explicit"} | changed
    (root / "args.json").write_text(json.dumps(stored, default=str))
    (root / "environment.json").write_text(json.dumps({"start_iteration": start}))
    times = {"time/step": 10.0, "stream/trainer_wait": 6.0, "stream/engine_idle": 0.0}
    (root / "metrics.jsonl").write_text(
        "".join(json.dumps({"iteration": i} | times) + "\n" for i in range(1, rows + 1))
    )
    (root / "latest_checkpointed_iteration.txt").write_text(f"{rows}")
    return root


@pytest.mark.parametrize(
    ("placed", "ranks", "best"),
    [
        (
            (4, 4),
            8,
            5,
        ),  # 40 rank seconds of engines, 16 of trainers: 8 and 5.33 s with 5 and 3; 6.67 and 8 with 6 and 2
        ((1, 1), 4, 3),  # 10 and 4: 3.33 and 4 s
        ((6, 2), 8, 7),  # 60 and 8: 8.57 and 8 s
    ],
)
def test_a_resume_takes_the_measured_times(tmp_path, capsys, placed, ranks, best):
    folder_of_run(tmp_path, *placed, rows=6)
    assert resolve_split(args_of(f"--load {tmp_path}"), ranks) == best
    assert f"--rollout-ranks auto: {best} of {ranks}: " in capsys.readouterr().out


def test_a_run_that_has_measured_too_little_keeps_its_split(tmp_path, capsys):
    """Of its rows only those since its last start count, because the split may have been another one before."""
    folder_of_run(tmp_path, 3, 5, rows=8, start=5)
    assert resolve_split(args_of(f"--load {tmp_path}"), 8) == 3
    assert "3 of 8: as before" in capsys.readouterr().out


def test_a_split_without_any_update_is_not_kept(tmp_path, capsys):
    """As a number of engines whose trainers ran out of memory in their first update, and then auto."""
    folder_of_run(tmp_path, 3, 5, rows=5, start=5)
    assert resolve_split(args_of(f"--load {tmp_path}"), 8) == resolve_split(args_of(), 8) != 3
    assert capsys.readouterr().out.count("estimated") == 2


def test_an_estimate_for_a_new_run_and_for_another_batch(tmp_path, capsys):
    """Trainers with the passes of a reference model and four updates need more ranks than those with one update."""
    new = resolve_split(args_of(), 8)
    more = resolve_split(args_of("--num-iterations 4 --train-iters 40"), 8)
    assert 1 <= more <= new <= 7
    assert "estimated" in capsys.readouterr().out
    folder_of_run(tmp_path, 4, 4, rows=6, max_completion_length=17)
    assert resolve_split(args_of(f"--load {tmp_path}"), 8) == new
    assert "estimated" in capsys.readouterr().out
    folder_of_run(tmp_path, 4, 4, rows=6)
    assert resolve_split(args_of(f"--load {tmp_path} --finetune"), 8) == new  # no resume
    (tmp_path / "metrics.jsonl").write_text("{\n")
    assert resolve_split(args_of(f"--load {tmp_path}"), 8) == new


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_size": 4096},
        {"tensor_model_parallel_size": 2},
        {"vllm_tensor_parallel_size": 2},
        {"world_size": None},
        {"world_size": "4"},
        {"updates_per_rollout": 0},
    ],
    ids=str,
)
def test_times_of_another_model_and_damaged_files_are_not_used(tmp_path, capsys, changed):
    folder_of_run(tmp_path, 4, 4, rows=6, **changed)
    assert resolve_split(args_of(f"--load {tmp_path}"), 8) == resolve_split(args_of(), 8)
    assert capsys.readouterr().out.count("estimated") == 2


@pytest.mark.parametrize("missing", ["vllm_mode", "world_size", "rollout_ranks", "updates_per_rollout", "environment"])
def test_files_without_an_entry_are_not_used(tmp_path, capsys, missing):
    folder_of_run(tmp_path, 4, 4, rows=6)
    file = tmp_path / ("environment.json" if missing == "environment" else "args.json")
    stored = json.loads(file.read_text())
    del stored["start_iteration" if missing == "environment" else missing]
    file.write_text(json.dumps(stored))
    assert resolve_split(args_of(f"--load {tmp_path}"), 8) == resolve_split(args_of(), 8)
    assert capsys.readouterr().out.count("estimated") == 2


def test_the_split_of_a_run_remains_possible_whatever_the_estimate_of_its_memory(tmp_path, capsys, monkeypatch):
    """Measured are 40 rank seconds of engines and 16 of trainers: 5 and 3 are faster than the present 4 and 4."""
    folder_of_run(tmp_path, 4, 4, rows=6)
    monkeypatch.setattr(split, "gpu_memory", lambda args: 1e-3)
    assert resolve_split(args_of(f"--load {tmp_path}"), 8) == 4
    assert "5 would be faster, but its trainers would not fit into the 0.001 GiB" in capsys.readouterr().out


def test_a_new_run_that_fits_nowhere_is_split_by_time(capsys, monkeypatch):
    monkeypatch.setattr(split, "estimated", lambda args: lambda engines, trainers: (1 / engines, 0.0))
    monkeypatch.setattr(split, "gpu_memory", lambda args: 1e-3)
    assert resolve_split(args_of(), 8) == 7
    assert "the trainers of no split fit into the 0.001 GiB of a GPU" in capsys.readouterr().out


def test_trainers_without_room_for_the_optimizer_are_left_out(monkeypatch):
    """A GPU that holds the state of a model of eight trainers, and not that of one."""
    flags = "--use-distributed-optimizer --hidden-size 8192 --ffn-hidden-size 65536 --vocab-size 256000 --bf16"
    args = args_of(flags)
    monkeypatch.setattr(split, "estimated", lambda args: lambda engines, trainers: (1 / engines, 0.0))
    assert resolve_split(args, 8) == 7
    peaks = {n: split.Plan(split.resolve_args(replaced(args, rollout_ranks=n), 8 - n)).peak() for n in range(1, 8)}
    assert sorted(peaks.values()) == list(peaks.values()) and peaks[1] < peaks[3] < peaks[4]
    gpu = (peaks[3] + peaks[4]) / 2 / split.GIB + split.ROOM
    monkeypatch.setattr(split, "gpu_memory", lambda args: gpu)
    assert resolve_split(args, 8) == 3


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ("", 1, "1 processes cannot be split"),
        ("--tensor-model-parallel-size 8", 8, "cannot be split"),
        ("--vllm-mode server", 8, "these ranks need no GPU; give a number"),
        ("--eval-only", 8, "the split is that of training; give a number"),
    ],
)
def test_refusals(flags, ranks, message):
    with pytest.raises(GrpoError, match=message):
        resolve_split(args_of(flags), ranks)


def test_a_batch_that_depends_on_the_split_is_refused():
    base = good_args.without("--global-batch-size")
    with pytest.raises(GrpoError, match="auto without --global-batch-size: the batch would depend on"):
        resolve_split(args_of(base=base), 8)
    assert resolve_split(args_of("--generation-batch-size 64", base), 8)


def test_ranks_with_different_numbers_do_not_start():
    store = dist.HashStore()
    waiting = threading.Thread(target=check_same_split, args=(3, store, 1))
    waiting.start()
    check_same_split(3, store, 0)
    waiting.join(60)
    with pytest.raises(GrpoError, match="--rollout-ranks is 2 on rank 5 and 3 on rank 0"):
        check_same_split(2, store, 5)


def test_rank_0_calculates_for_all_ranks(monkeypatch):
    """The other ranks read no file: they take the number, or the error; a number on one of them is compared."""
    monkeypatch.setattr(initialize, "_met", None)  # restored after the test
    store = dist.HashStore()

    def of_rank(rank, calculate):
        monkeypatch.setattr(initialize, "_meet", lambda timeout: (store, rank, 2))
        return initialize.agreed_rollout_ranks(calculate, 1)

    def refused():
        raise GrpoError("no split")

    assert of_rank(0, lambda: 3) == 3
    assert of_rank(1, refused) == 3
    with pytest.raises(GrpoError, match="no split"):
        of_rank(0, refused)
    with pytest.raises(GrpoError, match="no split"):
        of_rank(1, lambda: 3)
    with pytest.raises(GrpoError, match="no split"):
        check_same_split(3, store, 1)
