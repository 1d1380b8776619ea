"""Runs in which an environment or an agent shows screenshots: layouts, partial rollouts, ledgers."""

import json
from pathlib import Path

import pytest
import ranks
from PIL import Image
from ranks import run_torchrun
from run_files import CLOCKS, metrics_of, without
from slow import slow_except
from vision_models import FORGETFUL, check_equal, encoded, make, odd_pictures, picture, tool

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]

PLUGIN = Path(__file__).resolve().parents[1] / "data/screen_environment.py"
AGENT = f"{Path(__file__).resolve().parents[1]}/data/picture_agent.py:play"
ODD = Path(__file__).resolve().parents[1] / "data/odd_pictures.py"
FLAGS = """--transformer-impl local --vllm-max-num-seqs 16 --num-generations 4 --global-batch-size 16 --lr 1e-3
    --max-prompt-length 200 --max-completion-length 24 --max-environment-tokens 280
    --reward-funcs environment --train-iters 2 --no-shuffle --beta 0.02"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows with an image and with none."""
    directory, rows = tmp_path_factory.mktemp("screens"), []
    (directory / "own.png").write_bytes(picture(60, 80, 1))
    for seed in range(12):
        images = {"images": ["own.png"]} if seed % 2 else {}
        rows.append({"messages": [{"role": "user", "content": f"game {seed}"}], "seed": seed, **images})
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def run(data, ranks, save, *flags, shape="qwen2_5_vl", agent=None, environment="screen") -> list[dict]:
    if not (data / shape).exists():
        make(data / shape, shape=shape)
    # Every tenth byte ends a turn, so that random weights have several.
    ends = ["--stop-token-ids", *range(10, 250, 10)]
    program = f"--agent {agent}" if agent else f"--external-plugins {PLUGIN} --environment {environment} --max-turns 4"
    words = f"--load-hf {data}/{shape} --train-data-path {data}/train.jsonl {program} {FLAGS}"
    run_torchrun(ranks, "pretrain_grpo.py", *words.split(), *ends, "--save", save, *flags,
                 env={"SCREEN_CALLS": str(save) + ".calls"})  # fmt: skip
    return metrics_of(save)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision"])
def test_a_run_and_its_replay(data, tmp_path, shape):
    """The ledger holds the screenshots: a replay calls no environment and has the same numbers, bit for bit."""
    flags = ["--micro-batch-size", "4", "--no-save-hf"]
    rows = run(data, 1, tmp_path / "run", *flags, "--ledger", tmp_path / "run" / "ledger", shape=shape)
    assert len(rows) == 2 and all(row["mismatch/mean_abs"] < 1e-5 for row in rows)
    assert all(row["environment/turns"] > 1.5 and row["environment/failed"] == 0 for row in rows)
    assert all(row["reward/std"] > 0 and row["grad_norm"] > 0 for row in rows)
    if shape != "qwen2_5_vl":
        return
    calls = (tmp_path / "run.calls").read_text()
    assert calls.count("3\n") > 4  # third turns
    again = run(data, 1, tmp_path / "again", *flags, "--replay-rollouts", tmp_path / "run", shape=shape)
    assert not (tmp_path / "again.calls").exists()
    kept = without(rows, (*CLOCKS, "memory/"))
    assert kept == [{k: again[i][k] for k in row} for i, row in enumerate(kept)]


LAYOUTS = {
    "TP2 SP, engine TP2": "--tensor-model-parallel-size 2 --sequence-parallel --vllm-tensor-parallel-size 2",
    "DP2": "--micro-batch-size 2",
    "PP2": "--pipeline-model-parallel-size 2",
    "CP2, a token budget": "--context-parallel-size 2 --max-tokens-per-microbatch 600",
}


@pytest.fixture(scope="module")
def one_rank(data):
    return run(data, 1, data / "one", "--micro-batch-size", "4", "--no-save-hf")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(data, one_rank, tmp_path, layout):
    rows = run(data, 2, tmp_path / "run", *LAYOUTS[layout].split(), "--no-save-hf")
    check_equal(rows, one_rank, "flops/update")


@pytest.mark.slow
def test_rollouts_and_updates_apart(data, tmp_path):
    """--train-only has the screenshots of --rollout-only, and calls no environment."""
    flags = ["--micro-batch-size", "4", "--no-save-hf"]
    run(data, 1, tmp_path / "made", *flags, "--rollout-only")
    calls = (tmp_path / "made.calls").read_text()
    rows = run(data, 1, tmp_path / "learnt", *flags, "--train-only", tmp_path / "made")
    assert calls.count("2\n") > 4 and not (tmp_path / "learnt.calls").exists()
    assert rows[0]["mismatch/mean_abs"] < 1e-5 and all(row["grad_norm"] > 0 for row in rows)


STREAM = """--lr 1e-12 --train-iters 4 --global-batch-size 8 --micro-batch-size 4 --no-save-hf --max-staleness 2
    --rollout-importance-sampling-mode token_truncate"""


@pytest.mark.slow
def test_partial_rollouts_and_their_replay(data, tmp_path):
    """Interrupted episodes go on after their screenshots, with the same log-probabilities (the weights hardly move)."""
    flags = [*STREAM.split(), "--partial-rollouts", "--vllm-max-num-seqs", "16"]
    rows = run(data, 1, tmp_path / "run", *flags)
    assert all(row["mismatch/max_abs"] < 1e-4 for row in rows)
    assert any(row["staleness/interrupted"] > 0 for row in rows)
    again = run(data, 1, tmp_path / "again", *flags, "--replay-rollouts", tmp_path / "run")
    for row, expected in zip(again, rows, strict=True):
        for name in ("reward/mean", "grad_norm", "loss", "mismatch/mean_abs"):
            assert row[name] == expected[name], name


@pytest.mark.slow
def test_engines_on_ranks_of_their_own(data, tmp_path):
    rows = run(data, 2, tmp_path / "run", *STREAM.split(), "--rollout-ranks", "1", shape="qwen3_vl")
    assert len(rows) == 4 and all(row["mismatch/max_abs"] < 1e-4 for row in rows)
    assert max(row["environment/turns"] for row in rows) > 1.5


@pytest.mark.slow
def test_a_resume_has_the_screenshots_of_unfinished_episodes(data, tmp_path):
    """They go on after them, and the run has the numbers of one that was not interrupted."""
    flags = [*STREAM.split(), "--partial-rollouts", "--vllm-max-num-seqs", "16", "--save-interval", "2"]
    save = tmp_path / "run"
    run(data, 1, save, *flags, "--exit-interval", "2")
    rows = run(data, 1, save, *flags, "--load", save)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert all(row["mismatch/max_abs"] < 1e-4 for row in rows)
    assert any(row["staleness/interrupted"] > 0 for row in rows[2:])
    whole = run(data, 1, tmp_path / "whole", *flags)
    for row, expected in zip(rows, whole, strict=True):
        for name in ("reward/mean", "environment/turns", "environment/tokens"):
            assert row[name] == expected[name], name


AGENT_FLAGS = ["--environment-timeout", "300"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision"])
def test_an_agent_with_pictures_and_its_replay(data, tmp_path, shape):
    """Branches of a conversation share pictures; the engine and the trainer see the same ones."""
    flags = [*AGENT_FLAGS, "--micro-batch-size", "4", "--no-save-hf"]
    rows = run(data, 1, tmp_path / "run", *flags, "--ledger", tmp_path / "run" / "ledger", shape=shape, agent=AGENT)
    assert len(rows) == 2 and all(row["mismatch/mean_abs"] < 1e-5 for row in rows)
    assert all(row["environment/turns"] > 5 and row["environment/failed"] == 0 for row in rows)
    assert all(row["reward/std"] > 0 and row["grad_norm"] > 0 for row in rows)
    if shape != "qwen2_5_vl" or not ranks.thorough:  # the videos of an environment are replayed in every run
        return
    again = run(data, 1, tmp_path / "again", *flags, "--replay-rollouts", tmp_path / "run", shape=shape, agent=AGENT)
    kept = without(rows, (*CLOCKS, "memory/"))
    assert kept == [{k: again[i][k] for k in row} for i, row in enumerate(kept)]


COUNT = """
import hashlib, os, sys

def noted(kind, data):
    with open(os.environ["SCREEN_CALLS"], "a") as file:
        file.write(f"{kind} {hashlib.md5(data).hexdigest()}\\n")

def decode(source, number):
    if isinstance(source, bytes):  # the rows have files
        noted("decoded", source)
    return decoded(source, number)

def process(self, processor, data, *more):
    for image in data.get("images", ()):
        noted("processed", str(image.size).encode() + image.tobytes())
    return processed(self, processor, data, *more)

if sys.argv[0].endswith("pretrain_grpo.py"):  # not in the processes of rewards and agents: they would import vLLM
    from vllm.multimodal.processing.context import InputProcessingContext
    from megatron_grpo.vision import images

    decoded, processed = images.decoded, InputProcessingContext.call_hf_processor
    images.decoded, InputProcessingContext.call_hf_processor = decode, process
"""


@pytest.mark.slow  # tests/unit/rollout/test_agent_images.py has it without an engine
def test_each_picture_of_an_agent_is_decoded_and_processed_once(data, tmp_path):
    """Under one load of the weights: every call of an episode shows all earlier pictures."""
    (tmp_path / "count.py").write_text(COUNT)
    flags = [*AGENT_FLAGS, "--micro-batch-size", "4", "--no-save-hf", "--train-iters", "1"]
    rows = run(data, 1, tmp_path / "run", *flags, "--external-plugins", tmp_path / "count.py", agent=AGENT)
    assert rows[0]["environment/turns"] > 5
    lines = (tmp_path / "run.calls").read_text().splitlines()
    assert len(lines) == len(set(lines)) and len({line for line in lines if line.startswith("processed")}) > 8


AGENT_LAYOUTS = {
    "TP2 SP, engine TP2": "--tensor-model-parallel-size 2 --sequence-parallel --vllm-tensor-parallel-size 2",
    "DP2": "--micro-batch-size 2",
    "PP2": "--pipeline-model-parallel-size 2",
    "CP2, a token budget": "--context-parallel-size 2 --max-tokens-per-microbatch 1600",
}

# Adam's first step has the sign of each gradient, also of one that is rounding: at 1e-3 the KL divergence after it is
# 0.3, and differs by 2e-5 of that.
SMALL_STEP = ["--lr", "1e-4", "--no-save-hf"]


@pytest.fixture(scope="module")
def one_rank_of_agents(data):
    return run(data, 1, data / "agents", *AGENT_FLAGS, *SMALL_STEP, "--micro-batch-size", "4", agent=AGENT)


@pytest.mark.slow
@pytest.mark.parametrize("layout", AGENT_LAYOUTS)
def test_agents_in_layouts(data, one_rank_of_agents, tmp_path, layout):
    flags = [*AGENT_FLAGS, *AGENT_LAYOUTS[layout].split(), *SMALL_STEP]
    rows = run(data, 2, tmp_path / "run", *flags, agent=AGENT)
    check_equal(rows, one_rank_of_agents)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ("--partial-rollouts --vllm-max-num-seqs 16", 1),
        ("--rollout-ranks 1", 2),
        ("--rollout-ranks 1 --micro-batch-size 2", 3),
        ("--rollout-ranks 2 --vllm-tensor-parallel-size 2 --pipeline-model-parallel-size 2", 4),
    ],
)
def test_interrupted_agents(data, tmp_path, more, ranks):
    """Calls go on after their pictures under new weights, which hardly differ."""
    rows = run(data, ranks, tmp_path / "run", *AGENT_FLAGS, *STREAM.split(), *more.split(), agent=AGENT)
    assert len(rows) == 4 and all(row["mismatch/max_abs"] < 1e-4 for row in rows)
    assert all(row["environment/failed"] == 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen2_5_vl", "qwen3_vl"])
def test_split_episodes(data, tmp_path, shape):
    """The template shows the first letter of the policy's turns: samples begin anew, with all screenshots so far."""
    if not (data / shape).exists():
        make(data / shape, shape=shape)
    (tmp_path / "template").write_text(tool.TEMPLATE.replace(*FORGETFUL))
    flags = ["--chat-template", tmp_path / "template", "--on-rewritten-history", "split", "--no-save-hf"]
    flags += ["--max-prompt-length", "120", "--max-environment-tokens", "360", "--ledger", tmp_path / "run" / "ledger"]
    rows = run(data, 1, tmp_path / "run", *flags, "--micro-batch-size", "4", shape=shape)
    assert len(rows) == 2 and all(row["mismatch/mean_abs"] < 1e-5 for row in rows)
    assert all(row["environment/turns"] > 1.2 and row["environment/failed"] == 0 for row in rows)
    for layout in ("DP2", "PP2", "CP2, a token budget"):
        check_equal(run(data, 2, tmp_path / layout, *flags[:-2], *AGENT_LAYOUTS[layout].split(), shape=shape), rows)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision"])
def test_odd_pictures(data, tmp_path, shape):
    """In rows, environments and agents: vLLM and the trainer see the same ones; refused ones do not end the run."""
    odd = {name: picture for name, (picture, _) in odd_pictures().items()}
    odd |= {"too wide": picture(20000, 10), "32 bits": encoded(Image.new("F", (30, 30)), "TIFF")}
    for name, file in odd.items():
        (tmp_path / name).write_bytes(file)
    refused = ["too wide", "32 bits"] if shape.startswith("qwen") else ["32 bits"]  # the others cut it into tiles
    question = {"prompt": [{"role": "user", "content": "?"}]}
    rows = [question | {"images": [name]} for name in refused]  # bad rows
    for name in odd:
        rows.append(question | {"shown": str(tmp_path / name), "images": [] if name in refused else [name, name]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--train-data-path", tmp_path / "rows.jsonl", "--bad-rows", "skip", "--num-generations", "2"]
    flags += ["--global-batch-size", str(2 * len(odd)), "--train-iters", "1", "--no-save-hf"]
    flags += ["--max-tokens-per-microbatch", "1600"]
    (row,) = run(data, 1, tmp_path / "run", *flags, "--external-plugins", ODD, shape=shape, environment="odd")
    assert row["mismatch/mean_abs"] < 1e-5 and row["environment/failed"] == len(refused) / len(odd)
    (row,) = run(data, 1, tmp_path / "agent", *flags, *AGENT_FLAGS, shape=shape, agent=f"{ODD}:play")
    assert row["mismatch/mean_abs"] < 1e-5 and row["environment/failed"] == 0
    assert row["reward/mean"] == pytest.approx(len(refused) / len(odd))


@pytest.mark.parametrize("shape", slow_except(["qwen3_vl"], ["qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision"]))
def test_an_environment_with_videos_and_its_replay(data, tmp_path, shape):
    flags = ["--micro-batch-size", "4", "--no-save-hf", "--max-prompt-length", "160", "--max-environment-tokens", "320"]
    flags += ["--global-batch-size", "8"]
    more = {"shape": shape, "environment": "clip"}
    rows = run(data, 1, tmp_path / "run", *flags, "--ledger", tmp_path / "run" / "ledger", **more)
    assert len(rows) == 2 and all(row["mismatch/mean_abs"] < 1e-5 for row in rows)
    assert all(row["environment/turns"] > 1.5 and row["environment/failed"] == 0 for row in rows)
    if not ranks.thorough:  # tests/unit/training/test_recorded_rollouts.py has a replay
        return
    again = run(data, 1, tmp_path / "again", *flags, "--replay-rollouts", tmp_path / "run", **more)
    kept = without(rows, (*CLOCKS, "memory/"))
    assert kept == [{k: again[i][k] for k in row} for i, row in enumerate(kept)]
