"""Host memory of the ranks of one host, against arithmetic by hand."""

import pytest
from dry_run_worker import arguments
from test_dry_run import GIB, LLAMA_8B

from megatron_grpo.estimate import host_memory
from megatron_grpo.estimate.host_memory import check_host_memory, host_bytes, needed
from megatron_grpo.utils.errors import GrpoError

FLAGS = f"{LLAMA_8B} --bf16 --micro-batch-size 1 --max-completion-length 512 --max-prompt-length 512 --beta 0"
ALL = "--offload-model --offload-optimizer --offload-gradients"
PARAMETERS = 8.03e9


def test_what_the_offloads_keep():
    state = PARAMETERS * (2 + 12)  # bf16 weights; float32 copy and two moments; gradients are not kept
    assert needed(arguments(f"{FLAGS} {ALL} --sleep-level 2", 1), 1) == pytest.approx(state, rel=0.01)
    assert needed(arguments(f"{FLAGS} {ALL} --sleep-level 1", 1), 1) == pytest.approx(state + 2 * PARAMETERS, rel=0.01)
    assert needed(arguments(f"{FLAGS} {ALL} --sleep-level 2", 2), 2) == pytest.approx(2 * state, rel=0.01)


def test_what_background_saves_keep():
    """Of two ranks with the same weights one writes them; each writes its shard of a distributed optimizer's state."""
    flags = f"{FLAGS} --sleep-level 2 --save runs/a --async-save"
    assert needed(arguments(flags, 1), 1) == pytest.approx(PARAMETERS * (2 + 12), rel=0.01)
    assert needed(arguments(f"{flags} --use-distributed-optimizer", 2), 2) == pytest.approx(
        PARAMETERS * (2 + 12), rel=0.01
    )
    assert needed(arguments(f"{flags} --use-distributed-optimizer", 16), 8) == pytest.approx(
        PARAMETERS * (2 + 12 / 2), rel=0.01
    )
    split = f"{flags} --tensor-model-parallel-size 2 --sequence-parallel"
    assert needed(arguments(split, 2), 2) == pytest.approx(PARAMETERS * (2 + 12), rel=0.01)


def test_what_references_keep():
    """bf16: a reference of 2 bytes and the policy's weights while it computes; its average has 4 bytes."""
    flags = FLAGS.replace("--beta 0", "--beta 0.1") + " --sleep-level 2"
    average = f"{flags} --sync-ref-model"
    assert needed(arguments(flags, 1), 1) == pytest.approx(PARAMETERS * (2 + 2), rel=0.01)
    assert needed(arguments(average, 1), 1) == pytest.approx(PARAMETERS * (4 + 2), rel=0.01)
    saved = needed(arguments(f"{average} --save runs/a --async-save", 1), 1)
    assert saved == pytest.approx(PARAMETERS * (4 + 2) + PARAMETERS * (2 + 12 + 4), rel=0.01)
    split = "--tensor-model-parallel-size 2 --sequence-parallel --ref-tensor-model-parallel-size 1"
    assert needed(arguments(f"{flags} {split}", 2), 2) == pytest.approx(2 * PARAMETERS * 2, rel=0.01)  # whole on each


def test_too_small_a_host_is_refused_with_what_each_flag_saves(monkeypatch):
    args = arguments(f"{FLAGS} {ALL} --sleep-level 2", 2)
    monkeypatch.setattr(host_memory, "host_bytes", lambda: 256 * GIB)
    check_host_memory(args, 2)
    monkeypatch.setattr(host_memory, "host_bytes", lambda: 128 * GIB)
    with pytest.raises(GrpoError, match=r"2 processes of this host keep 209 GiB .* it has 128 GiB: leave out") as error:
        check_host_memory(args, 2)
    with pytest.raises(GrpoError, match=r"leave out --async-save \(105 GiB less\)"):
        check_host_memory(arguments(f"{FLAGS} {ALL} --sleep-level 2 --save runs/a --async-save", 2), 2)
    assert "--offload-optimizer (179 GiB less), leave out --offload-model (30 GiB less), use more hosts" in str(error)


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    limits = tmp_path / "memory.max", tmp_path / "absent"
    monkeypatch.setattr(host_memory, "LIMITS", limits)
    limits[0].write_text("max\n")
    whole = host_bytes()
    limits[0].write_text(f"{GIB}\n")
    assert host_bytes() == GIB < whole
