"""Runs with --rollout-ranks: real vLLM on ranks of its own beside the trainer's."""

import json
import os
import signal
import time
from collections import Counter

import pytest
import ranks
from run_files import metrics_of
from safetensors.torch import load_file
from sharp_model import make_sharp_model

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]
SIZE = 4
PLUGIN = """
from megatron_grpo.rewards.registry import register_reward

@register_reward("even")
def even(sample):
    return sum(token % 2 == 0 for token in sample.token_ids) / 16
"""
COMMON = f"""--transformer-impl local --num-generations {SIZE} --global-batch-size 16 --micro-batch-size 8 --lr 1e-3
    --max-prompt-length 48 --max-completion-length 48 --ignore-eos --vllm-max-num-seqs 8 --reward-funcs even
    --num-completions-to-log 16 --eval-num-generations 2 --eval-max-prompts 4"""
# Prompts fill a block of the cache. The probe after each publication has the same prompts: the limit of the mismatch
# ends the run if one of them is served from keys and values of older weights.
CACHED = """--vllm-engine-kwargs {"kv_cache_memory_bytes":33554432,"block_size":32}"""
ADAPTER = "--lora-rank 4 --lora-weight-sync adapter"  # every sync is compared with the engines' slots, bit by bit
STALE = "--max-staleness 2 --rollout-importance-sampling-mode token_truncate --mismatch-limit 0.01"


@pytest.fixture(scope="module")
def flags(tiny_models, tmp_path_factory):
    """The flags of all runs."""
    root = tmp_path_factory.mktemp("placed")
    model = make_sharp_model(tiny_models["qwen3"], root / "model")
    rows = [{"prompt": f"the numbers {n} and their sevenfold {7 * n}", "answer": "1"} for n in range(200)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "plugin.py").write_text(PLUGIN)
    data = f"--train-data-path {root}/rows.jsonl --valid-data-path {root}/rows.jsonl"
    small = ["--vllm-engine-kwargs", json.dumps({"kv_cache_memory_bytes": 2**25})]
    return [*f"--load-hf {model} {data} --external-plugins {root}/plugin.py {COMMON}".split(), *small]


def rows_of(save, name="metrics.jsonl"):
    """The rows of a JSON-lines file, without times and without what only engines on ranks of their own report."""
    rows = [json.loads(line) for line in (save / name).read_text().split("\n") if line]
    apart = ("time/", "perf/", "stream/", "staleness/", "lora/base_seconds", "lora/adapter_sec", "lora/check_sec")
    return [{key: value for key, value in row.items() if not key.startswith(apart)} for row in rows]


def trained_rows(save):
    """The row of each group, in the order of the updates; each has all its completions in one batch."""
    rows = Counter((row["iteration"], row["row"]) for row in rows_of(save, "completions.jsonl"))
    assert set(rows.values()) == {SIZE}
    return [row for _, row in rows]


def test_an_engine_on_a_rank_of_its_own(flags, tmp_path):
    """At a temperature, its log-probabilities are the trainer's, before and after it gets the weights of an update.

    Two ranks have one split.
    """
    words = [*flags, "--train-iters", "2", "--val-before-train", "--temperature", "0.7", "--rollout-ranks", "auto"]
    words += ["--save", tmp_path]
    assert "--rollout-ranks auto: 1 of 2: " in ranks.run_torchrun(2, "pretrain_grpo.py", *words).stdout
    assert json.loads((tmp_path / "args.json").read_text())["rollout_ranks"] == 1
    evaluation, *rows = rows_of(tmp_path)
    assert "eval/greedy_reward" in evaluation
    assert len(rows) == 2 and all(row["mismatch/mean_abs"] < 1e-5 and row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "trained"),
    [("", "hf_model/model.safetensors"), ("--lora-rank 4", "adapter/adapter_model.safetensors")],
)
def test_without_staleness_a_run_is_that_of_a_colocated_engine_bit_for_bit(flags, tmp_path, more, trained):
    words = [*flags, *more.split(), "--train-iters", "2", "--eval-interval", "2", "--val-before-train"]
    ranks.run_torchrun(1, "pretrain_grpo.py", *words, "--save", tmp_path / "colocated")
    ranks.run_torchrun(2, "pretrain_grpo.py", *words, "--save", tmp_path / "placed", "--rollout-ranks", 1)
    one, other = (tmp_path / name for name in ("colocated", "placed"))
    assert rows_of(one) == rows_of(other) and len(rows_of(one)) == 3
    for name in ("completions.jsonl", "eval_completions.jsonl"):
        assert rows_of(one, name) == rows_of(other, name)
    first, second = (load_file(save / trained) for save in (one, other))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
    if not ranks.thorough:  # tests/unit/training/test_evaluation_runs.py has --eval-only with an engine of its own
        return
    # --eval-only sends the checkpoint's weights to the engine rank, and repeats the last evaluation.
    words += ["--save", other, "--load", other, "--rollout-ranks", 1, "--eval-only"]
    ranks.run_torchrun(2, "pretrain_grpo.py", *words)
    (entry,) = json.loads((other / "evaluation.json").read_text())["evaluations"]
    for row in entry["rows"]:
        assert row["reward"] == rows_of(other)[-1][f"eval/{row['kind']}_reward"]


def start(words, tmp_path, nproc):
    ranks.start_warm_ranks()
    output = open(tmp_path / "output", "a")  # noqa: SIM115  of the ranks
    return ranks.WarmRun(
        nproc, [str(ranks.REPO / "pretrain_grpo.py"), *map(str, words)], ranks._environment(), output.name
    )


def wait_for_rows(run, save, count):
    file = save / "metrics.jsonl"
    while run.poll() is None and not (file.exists() and file.read_text().count("\n") >= count):
        time.sleep(0.05)
    assert run.poll() is None, (save.parent / "output").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "more"),
    [
        (2, "--rollout-ranks 1"),
        (3, "--rollout-ranks 2 --vllm-tensor-parallel-size 2"),
        pytest.param(4, f"--rollout-ranks 2 --weight-update keep {CACHED}", id="keep"),
        (3, f"--rollout-ranks 2 --vllm-tensor-parallel-size 2 {ADAPTER}"),
        pytest.param(4, f"--rollout-ranks 2 --weight-update keep {CACHED} {ADAPTER}", id="keep, lora"),
        (3, "--rollout-ranks 2 --weight-update drain --dynamic-sample"),
        (3, "--rollout-ranks 1 --tensor-model-parallel-size 2 --num-iterations 2 --beta 0.1"),
        pytest.param(3, "--rollout-ranks auto", id="auto, then two engines"),
    ],
)
def test_a_run_that_a_signal_ends_goes_on_with_what_had_started(flags, tmp_path, nproc, more):
    """SIGTERM reaches all ranks, as torchrun sends it; the trainer saves, the engines end with it.

    Three ranks in one engine and two trainers may go on as two engines and one trainer.
    """
    save, updates = tmp_path / "save", 6
    words = [*flags, *STALE.split(), *more.split(), "--train-iters", updates, "--save", save, "--exit-signal-handler"]
    words += ["--no-save-hf", "--eval-interval", "2"]
    run = start(words, tmp_path, nproc)
    wait_for_rows(run, save, 2)
    for pid in run.pids:
        os.kill(pid, signal.SIGTERM)
    assert run.wait(300) == 0, (tmp_path / "output").read_text()
    stopped = latest_iteration(save)
    assert 2 <= stopped < updates

    words += ["--load", save]
    if "auto" in more:
        was = json.loads((save / "args.json").read_text())["rollout_ranks"]
        words += ["--rollout-ranks", 3 - was]
    run = start(words, tmp_path, nproc)
    assert run.wait(300) == 0, (tmp_path / "output").read_text()
    metrics = metrics_of(save)
    assert [row["iteration"] for row in metrics] == list(range(1, updates + 1))
    taken = [row for row in metrics if "staleness/max" in row]
    assert all(row["staleness/max"] <= 2 for row in taken) and any(row["staleness/max"] > 0 for row in taken)
    trained = trained_rows(save)
    rollouts = updates // 2 if "--num-iterations 2" in more else updates
    assert len(set(trained)) == len(trained) == 4 * rollouts  # every group once, over the resume


@pytest.mark.slow
def test_a_lost_engine_ends_the_run_and_a_restart_goes_on(flags, tmp_path):
    """Also with the files of the ledger that are left when one checkpoint is kept."""
    save = tmp_path / "save"
    words = [*flags, *STALE.split(), "--rollout-ranks", 1, "--train-iters", 10, "--save", save, "--save-interval", 2]
    words += ["--eval-interval", 10, "--max-checkpoints-to-keep", 1]
    run = start(words, tmp_path, 2)
    wait_for_rows(run, save, 7)
    os.kill(run.pids[1], signal.SIGKILL)
    assert run.wait(300) != 0
    assert latest_iteration(save) >= 6
    # Groups of the first two batches began before update 2; those that a resume needs, at update 4 or later.
    assert not {"batches-0000.bin", "groups-00000-0000.bin"} & {path.name for path in (save / "ledger").iterdir()}
    trained_before = trained_rows(save)
    run = start([*words, "--load", save], tmp_path, 2)
    assert run.wait(300) == 0, (tmp_path / "output").read_text()
    assert latest_iteration(save) == 10
    trained = trained_rows(save)
    assert len(set(trained)) == len(trained) == 40
    assert trained[: len(trained_before)] == trained_before  # those after the checkpoint: as the ledger has them
