"""Whole runs with an environment: every kind of engine, and every kind of rollout; a fault costs one row.

examples/grpo/quickstart_tools.sh, killed and started again.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from chain_model import make_chain_model
from ranks import REPO, run_torchrun
from run_files import json_lines, metrics_of, without
from server_double import Double
from slow import slow_except
from test_rollout import KEY, vllm_server
from transformers import AutoModelForCausalLM

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.rollout.ledger.content import read
from megatron_grpo.rollout.unfinished import read_groups
from tools.make_tiny_model import build_parser, make, make_tokenizer
from tools.resume_check import differences

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

PLUGIN = Path(__file__).resolve().parents[1] / "data/echo_environment.py"
FLAGS = """--tokenizer-type HuggingFaceTokenizer --transformer-impl local --max-prompt-length 40 --num-generations 4
    --max-completion-length 30 --max-environment-tokens 50 --environment echo --max-turns 4
    --reward-funcs environment --micro-batch-size 4 --global-batch-size 32 --lr 1e-3 --train-iters 2
    --no-shuffle --num-completions-to-log 64""".split()


def run_echo(ranks, model, tmp_path, *flags, env=None, name="run", check=True):
    """Return (output, rows of metrics) of a run with the environment echo."""
    data = tmp_path / "train.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    save = tmp_path / name
    # Every tenth byte ends a turn, so that random weights have several.
    ends = ["--stop-token-ids", *range(0, 250, 10)]
    env = (env or {}) | {"ECHO_CALLS": str(tmp_path / "calls")}
    run = run_torchrun(
        ranks, "pretrain_grpo.py", "--load-hf", model, "--tokenizer-model", model, "--train-data-path", data, *FLAGS,
        "--external-plugins", PLUGIN, *ends, "--save", save, *flags, env=env, check=check,
    )  # fmt: skip
    return run.stdout, metrics_of(save)


def check_echo(output, metrics, completions):
    """Logged completions have their turns; log-probabilities agree over whole trajectories."""
    assert "the environment failed in 4 episodes: raised OSError: no connection" in output
    first = metrics[0]
    assert len(metrics) == 2 and first["environment/failed"] == 4 / completions
    assert first["environment/turns"] > 1.5 and first["environment/tokens"] > 10
    assert all(row["mismatch/mean_abs"] < 1e-5 for row in metrics)
    assert all(abs(row["reward/mean"]) > 0 for row in metrics)


@pytest.mark.parametrize("engine", slow_except(["vllm"], ["megatron", "vllm"]))
def test_a_run(engine, tiny_models, tmp_path):
    layout = ["--tensor-model-parallel-size", 2, "--sequence-parallel"] if engine == "megatron" else []
    if engine == "vllm":  # The failed episode of the probe is none of the batch's.
        layout += ["--vllm-max-num-seqs", 16, "--advantage-estimator", "turn_returns", "--check-weight-sync"]
    ranks = 2 if engine == "megatron" else 1
    layout += ["--rollout-engine", engine, "--global-batch-size", 16]
    check_echo(*run_echo(ranks, tiny_models["qwen3"], tmp_path, *layout), 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        "--rollout-engine megatron",
        "--rollout-ranks 1 --vllm-max-num-seqs 16",
        "--rollout-ranks 1 --vllm-max-num-seqs 16 --val-before-train --valid-data-path DATA",
    ],
)
def test_a_rollout_without_an_episode_ends_the_run(engine, tiny_models, tmp_path):
    """Started again, the run generates the episodes anew: it uses no failed ones of the ledger."""
    engine = engine.replace("DATA", str(tmp_path / "train.jsonl"))
    flags = f"{engine} --environment down --ledger".split() + [tmp_path / "ledger"]
    ranks = 2 if "--rollout-ranks" in engine else 1
    output, rows = run_echo(ranks, tiny_models["qwen3"], tmp_path, *flags, check=False)
    assert " episodes: raised OSError: nobody answers" in output and not rows
    reason = (
        "lines above" if ranks == 2 else "the environment failed in [0-9]+ episodes: raised OSError: nobody answers.*"
    )
    assert re.search(rf"error: every episode of the rollout failed \(.*{reason}\), and nothing", output)
    _, rows = run_echo(ranks, tiny_models["qwen3"], tmp_path, *flags, env={"ECHO_WORKS": "1"})
    assert [row["environment/failed"] for row in rows if row["iteration"]] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_servers(kind, tiny_models, tmp_path):
    """Two ranks send turns; each is a request of its own, after the tokens so far."""
    model = tiny_models["qwen3"]
    double = Double(kind, make_model=lambda: AutoModelForCausalLM.from_pretrained(model).float().eval())
    flags = {"vllm": ["--vllm-mode", "server"], "sglang": ["--rollout-engine", "sglang"]}[kind]
    flags += [f"--{kind}-server-base-url", double.url, "--global-batch-size", 16]
    try:
        check_echo(*run_echo(2, model, tmp_path, *flags), 16)
    finally:
        double.stop()
    bodies = [body for path, body in double.calls if path in ("/v1/completions", "/generate")]
    prompts = [body["prompt"] if kind == "vllm" else body["input_ids"][0] for body in bodies]
    # A later turn's prompt begins with an earlier one's.
    continued = [p for p in prompts if any(len(q) < len(p) and p[: len(q)] == q for q in prompts)]
    assert len(continued) > 16


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_drafts_from_earlier_turns(ranks, tmp_path):
    """Every turn says the same, so n-gram drafts of later turns are accepted; on two ranks one is an engine."""
    tokenizer, model = make_tokenizer("bytes"), tmp_path / "model"
    said = [*tokenizer.encode(" rstuvwxy"), tokenizer.eos_token_id]  # none of `run_echo` ends a turn
    make_chain_model(model, dict(pairwise(said)), len(tokenizer))
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    flags = ["--vllm-speculative-config", json.dumps(drafts), "--lr", 1e-9, "--vllm-max-num-seqs", 16]
    flags += ["--rollout-ranks", 1] if ranks > 1 else []
    _, metrics = run_echo(ranks, model, tmp_path, *flags)
    assert len(metrics) == 2
    tokens = 3 * (len(said) - 1)  # of three turns, of which each has its end token
    for row, failed in zip(metrics, (4, 0), strict=True):
        assert row["environment/failed"] == failed / 32 and row["mismatch/mean_abs"] < 1e-5
        assert row["reward/mean"] == pytest.approx(3 * 8 / 10)
        assert row["completion/length_mean"] * 32 == pytest.approx(tokens * (32 - failed))
        # Two turns of three have drafts of three tokens. At least five of nine tokens need no step of their own.
        assert row["drafts/accepted"] >= 2 * 5 * (32 - failed)
        assert row["drafts/acceptance_length"] > 2 and row["drafts/proposed"] >= row["drafts/accepted"]


@pytest.mark.slow
def test_the_ledger_replays_a_run_without_its_environment(tiny_models, tmp_path):
    """A replay ends with the same metrics and the same weights, bit for bit; no environment is called."""
    save, model = tmp_path / "run", tiny_models["qwen3"]
    gigpo = ["--advantage-estimator", "gigpo", "--turn-gamma", 0.9]  # reads the rewards and states of turns
    flags = ["--vllm-max-num-seqs", 16, "--ledger", save / "ledger", "--global-batch-size", 16, *gigpo]
    output, metrics = run_echo(1, model, tmp_path, *flags)
    check_echo(output, metrics, 16)
    calls = (tmp_path / "calls").read_text()
    assert calls.count("3\n") > 8  # third turns
    replay = ["--global-batch-size", 16, "--replay-rollouts", save, *gigpo]
    _, again = run_echo(1, model, tmp_path, *replay, name="again")
    first, second = (without(rows) for rows in (metrics, again))
    assert first == second and (tmp_path / "calls").read_text() == calls
    weights = [(tmp_path / run / "hf_model" / "model.safetensors").read_bytes() for run in ("run", "again")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_rollouts_and_updates_apart(tiny_models, tmp_path):
    """--rollout-only calls the environment; --train-only has its tokens, rewards and states, and calls none."""
    model, gigpo = tiny_models["qwen3"], ["--advantage-estimator", "gigpo", "--turn-gamma", 0.9]
    flags = ["--global-batch-size", 16, *gigpo]
    output, made = run_echo(1, model, tmp_path, *flags, "--vllm-max-num-seqs", 16, "--rollout-only")
    assert "the environment failed in 4 episodes: raised OSError: no connection" in output
    assert made[0]["environment/failed"] == 4 / 16 and all("loss" not in row for row in made)
    calls = (tmp_path / "calls").read_text()
    _, learnt = run_echo(1, model, tmp_path, *flags, "--train-only", tmp_path / "run", name="learnt")
    assert (tmp_path / "calls").read_text() == calls and calls.count("3\n") > 8  # third turns
    names = ("environment/turns", "environment/tokens", "environment/failed", "reward/mean", "tokens/rollout")
    assert [[row[name] for name in names] for row in learnt] == [[row[name] for name in names] for row in made]
    assert all(row["grad_norm"] > 0 for row in learnt) and learnt[0]["mismatch/mean_abs"] < 1e-5


def held_in(checkpoint, ended=()):
    """Return the completions that a checkpoint holds, without groups that have ``ended``."""
    groups = read_groups(checkpoint / "unfinished", 0, lambda row, ids: Prompt(row, ids, {}, ""))
    left = [group for number, group in groups.items() if number not in ended]
    return [c for group in left for c in group.completions if c is not None]


def states_of(completions):
    """Return `Completion.episode_state` of the unfinished ones."""
    return [c.episode_state for c in completions if c.episode_state is not None]


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["saved", "kept", "echo", "changed", "split"])
def test_partial_rollouts(environment, tiny_models, tmp_path):
    """Episodes go on under newer weights, also after a resume: with a snapshot no turn is repeated.

    Without one all are, and episodes whose repeated turns get other answers start again. "kept": the engine goes on
    with its requests, until the resume.
    """
    flags = "--vllm-max-num-seqs 16 --partial-rollouts --max-staleness 2 --save-interval 2 --global-batch-size 8"
    flags += " --rollout-importance-sampling-mode token_truncate --steps-per-generation 1 --lr 1e-6"
    save, model = tmp_path / "run", tiny_models["qwen3"]
    if environment == "split":  # the template renders texts that are no UTF-8 otherwise, which begins a sample
        flags += " --environment saved --on-rewritten-history split --max-environment-tokens 200"
    elif environment == "kept":
        flags += " --environment saved --weight-update keep"
    else:
        flags += f" --environment {environment}"
    flags += " --train-iters 4"
    run_echo(1, model, tmp_path, *flags.split(), "--exit-interval", 2)
    begun = held_in(save / "iter_0000002")
    held = states_of(begun)
    assert len(held) > 1 and any(state["turns"] > 0 for state in held)
    assert any(c.sample_starts for c in begun if c.episode_state) == (environment == "split")
    output, metrics = run_echo(1, model, tmp_path, *flags.split(), "--load", save)
    assert "at iteration 2" in output and [row["iteration"] for row in metrics] == [1, 2, 3, 4]
    assert max(row["staleness/interrupted"] for row in metrics) > 0 and metrics[-1]["staleness/max"] <= 2
    assert sum(row["environment/failed"] for row in metrics) == 4 / 8  # the four of row 3, in one batch
    assert all(row["mismatch/mean_abs"] < 1e-3 for row in metrics)
    lines = (tmp_path / "calls").read_text().splitlines()
    restored = lines.count("restored saved")
    # A turn of each failed episode is counted, which its environment never saw.
    seen = sum(row["environment/turns"] * 8 for row in metrics) - 4
    left = held_in(save / "iter_0000004")
    seen += sum(len(state["environment"]["turns"]) for state in states_of(left))
    seen += sum(c.turns for c in left if c.episode_state is None)  # these have ended
    asked_again = sum(len(state["environment"]["turns"]) for state in held)
    unanswered = sum(len(s["environment"]["turns"]) == len(s["environment"]["answers"]) for s in held)
    again = re.search(r"(\d+) interrupted episodes? of the checkpoint started again", output)
    if environment in ("saved", "kept", "split"):
        assert restored == len(held) and len(lines) - restored == seen + unanswered and again is None
        if environment != "kept":
            _, whole = run_echo(1, model, tmp_path, *flags.split(), name="whole")  # without a stop
            names = ("loss", "grad_norm", "reward/mean", "environment/turns", "environment/tokens")
            assert [[row[name] for name in names] for row in metrics] == [
                [row[name] for name in names] for row in whole
            ]
    elif environment == "echo":
        assert len(lines) == seen + asked_again and again is None
    else:
        assert int(again[1]) == sum(len(state["environment"]["answers"]) > 1 for state in held)


PLACED = """--rollout-ranks 1 --max-staleness 2 --rollout-importance-sampling-mode token_truncate --train-iters 6
    --global-batch-size 8 --environment saved --lr 1e-6 --save-interval 2 --valid-data-path {data} --eval-interval 3
    --eval-max-prompts 4"""


@pytest.mark.slow
@pytest.mark.parametrize("servers", [False, True])
def test_engines_of_their_own(servers, tiny_models, tmp_path):
    """Episodes are generated while the trainer updates; a resume and a replay go on from what was finished."""
    model, save, flags = tiny_models["qwen3"], tmp_path / "run", PLACED.format(data=tmp_path / "train.jsonl").split()
    double = Double(make_model=lambda: AutoModelForCausalLM.from_pretrained(model).float().eval()) if servers else None
    server = ["--vllm-mode", "server", "--vllm-server-base-url", double.url] if double else []
    few = ["--vllm-max-num-seqs", 4]  # so that a checkpoint holds unfinished episodes
    engine = server or ["--vllm-engine-kwargs", json.dumps({"kv_cache_memory_bytes": 2**25}), *few]
    try:
        run_echo(2, model, tmp_path, *flags, *engine, "--exit-interval", 2)
        ended = {key.number for key in read(save / "ledger").groups}
        held = states_of(held_in(save / "iter_0000002", ended))
        assert "restored" not in (tmp_path / "calls").read_text()
        output, metrics = run_echo(2, model, tmp_path, *flags, *engine, "--load", save)
    finally:
        if double:
            double.stop()
    metrics = [row for row in metrics if "loss" in row]
    assert "at iteration 2" in output and [row["iteration"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert max(row["staleness/max"] for row in metrics) in (1, 2)
    assert all(row["mismatch/mean_abs"] < 1e-3 for row in metrics)
    assert sum(row["environment/failed"] for row in metrics) == 4 / 8  # the four of row 3
    assert max(row["environment/turns"] for row in metrics) > 2
    calls = (tmp_path / "calls").read_text()
    assert calls.count("restored saved") == len(held)
    replay = [word for word in flags if word not in ("--rollout-ranks", "1")]
    _, again = run_echo(1, model, tmp_path, *replay, "--replay-rollouts", save, name="again")
    assert [row["loss"] for row in again if "loss" in row] == [row["loss"] for row in metrics]
    assert (tmp_path / "calls").read_text() == calls


@pytest.mark.slow
def test_a_real_server(tiny_models, tmp_path):
    model = tiny_models["qwen3"]
    with vllm_server(model, tmp_path) as url:
        flags = ["--vllm-mode", "server", "--vllm-server-base-url", url, "--vllm-server-timeout", 300]
        check_echo(*run_echo(2, model, tmp_path, *flags, env={"VLLM_API_KEY": KEY}), 32)


AGENTS = """
import os
from openai import OpenAI

def run(base_url, row, **metadata):
    ask = OpenAI(base_url=base_url, api_key=metadata["api_key"]).chat.completions.create
    messages = list(row["messages"])
    for text in ("more", "and more"):
        answer = ask(model="policy", messages=messages, max_tokens=24).choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
    return sum(character.isalpha() for character in answer) / 10


def branches(base_url, row, **metadata):
    ask = OpenAI(base_url=base_url, api_key=metadata["api_key"]).chat.completions.create
    conversations = list(row["messages"]), [{"role": "user", "content": "another"}]
    answers = [ask(model="policy", messages=each, max_tokens=12).choices[0].message.content for each in conversations]
    return sum(character.isalpha() for answer in answers for character in answer or "") / 10


def runs_once(base_url, row, **metadata):
    directory = os.path.dirname(__file__)
    with open(f"{directory}/begun", "a") as file:
        file.write("x\\n")
    reward = run(base_url, row, **metadata)
    with open(f"{directory}/ended", "a") as file:
        file.write("x\\n")
    return reward


def of_smolagents(base_url, row, **metadata):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: the first number
            b: the second number
        '''
        return a + b

    planning = {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""}
    templates = {"system_prompt": "Use tools.", "planning": planning, "managed_agent": {"task": "", "report": ""}}
    templates["final_answer"] = {"pre_messages": "Answer.", "post_messages": "{{task}}"}
    model = OpenAIServerModel(metadata["model"], api_base=base_url, api_key=metadata["api_key"], max_tokens=12)
    agent = ToolCallingAgent([add], model, prompt_templates=templates, max_steps=2, verbosity_level=0)
    answer = str(agent.run(row["messages"][0]["content"]))
    return {"digits": sum(character.isdigit() for character in answer) / 10}
"""


def run_agents(tmp_path, model, ranks, function, *flags, name="run"):
    """Return the rows of metrics of a run with an agent program of AGENTS."""
    data = tmp_path / "train.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = tmp_path / "agents_of_test.py"
    program.write_text(f"import sys\nsys.path.append({str(tmp_path / 'library')!r})\n{AGENTS}")
    run_torchrun(
        ranks, "pretrain_grpo.py", "--load-hf", model, "--tokenizer-model", model, "--train-data-path", data,
        *([] if "--max-tokens-per-microbatch" in flags else ["--micro-batch-size", 4]),
        *"--transformer-impl local --num-generations 4 --reward-funcs environment".split(),
        *"--global-batch-size 16 --lr 1e-3 --environment-timeout 300 --no-save-hf".split(),
        "--agent", f"{program}:{function}", *flags, "--save", tmp_path / name,
    )  # fmt: skip
    return metrics_of(tmp_path / name)


@pytest.mark.slow
def test_agents_on_two_ranks_of_one_engine(tiny_models, tmp_path):
    """The second rank gets the calls by broadcast; log-probabilities agree over whole trajectories."""
    flags = "--rollout-engine megatron --tensor-model-parallel-size 2 --max-prompt-length 40 --train-iters 2"
    flags += " --max-completion-length 30 --max-environment-tokens 200"
    rows = run_agents(tmp_path, tiny_models["qwen3"], 2, "run", *flags.split())
    assert len(rows) == 2
    for row in rows:
        assert row["environment/turns"] == 2 and row["environment/failed"] == 0 and row["mismatch/mean_abs"] < 1e-5


GOING_ON = [
    f"{kind}{update}"
    for kind in ("--partial-rollouts", "--rollout-ranks 1")
    for update in ("", " --weight-update keep")
]


@pytest.mark.slow
@pytest.mark.parametrize("flags", GOING_ON)
def test_agents_go_on_under_new_weights(flags, tiny_models, tmp_path):
    """The weights change while programs wait for answers: every token has its version, no program runs twice."""
    asynchronous = "rollout-ranks" in flags
    flags += (
        " --max-staleness 2 --rollout-importance-sampling-mode token_truncate --train-iters 6 --max-prompt-length 40"
    )
    flags += (
        " --global-batch-size 8 --steps-per-generation 1 --lr 1e-6 --max-completion-length 60 --vllm-max-num-seqs 8"
    )
    flags += " --max-environment-tokens 200 --vllm-engine-kwargs {kv}"
    kv = json.dumps({"kv_cache_memory_bytes": 2**25})
    words = [kv if word == "{kv}" else word for word in flags.split()]
    rows = run_agents(tmp_path, tiny_models["qwen3"], 1 + asynchronous, "runs_once", *words)
    assert len(rows) == 6
    for row in rows:
        assert row["environment/turns"] == 2 and row["environment/failed"] == 0 and row["mismatch/mean_abs"] < 1e-3
    assert max(row["staleness/interrupted"] for row in rows) > 0 and max(row["staleness/max"] for row in rows) in (1, 2)
    begun, trained = (len((tmp_path / name).read_text().split()) for name in ("begun", "ended"))
    assert 6 * 8 <= trained <= begun <= 6 * 8 + 3 * 8  # beside the batches, at most those that --max-staleness allows


@pytest.mark.slow
def test_agents_with_servers_and_a_ledger(tiny_models, tmp_path):
    """Two ranks send the calls to a server; a replay trains alike, from the ledger alone."""
    model, both = tiny_models["qwen3"], "--max-prompt-length 40 --max-completion-length 30 --train-iters 2"
    both += " --max-environment-tokens 58"
    double = Double("vllm", make_model=lambda: AutoModelForCausalLM.from_pretrained(model).float().eval())
    flags = ["--vllm-mode", "server", "--vllm-server-base-url", double.url, "--ledger", tmp_path / "run" / "ledger"]
    try:
        rows = run_agents(tmp_path, model, 2, "run", *both.split(), *flags)
    finally:
        double.stop()
    assert all(row["environment/turns"] == 2 and row["environment/failed"] == 0 for row in rows)
    assert all(row["mismatch/mean_abs"] < 1e-5 for row in rows)
    again = run_agents(tmp_path, model, 2, "run", *both.split(), "--replay-rollouts", tmp_path / "run", name="again")
    kept = ("loss", "grad_norm", "reward/mean", "tokens/update", "environment/turns")
    assert len(again) == 2 and [[row[key] for key in kept] for row in again] == [
        [row[key] for key in kept] for row in rows
    ]


@pytest.mark.slow
def test_a_program_of_smolagents(tmp_path):
    """20 updates of an agent that others wrote: ToolCallingAgent of smolagents, from PyPI."""
    library, model = tmp_path / "library", tmp_path / "model"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        library,
        "smolagents==1.26.0",
    ]
    if subprocess.run(install).returncode:
        pytest.skip("smolagents cannot be installed from PyPI")
    words = f"--save {model} --tokenizer bytes --steps 0 --quiet --num-layers 2 --hidden-size 64 --ffn-hidden-size 96"
    make(build_parser().parse_args([*words.split(), "--max-position-embeddings", "8192"]))
    flags = "--rollout-engine vllm --vllm-max-num-seqs 16 --max-prompt-length 200 --train-iters 20"
    flags += " --max-completion-length 48 --max-environment-tokens 4000 --tool-call-parser hermes"
    rows = run_agents(tmp_path, model, 1, "of_smolagents", *flags.split())
    assert len(rows) == 20
    for row in rows:  # two steps and the final answer; the latter begins a tree of its own
        assert row["environment/turns"] >= 3 and row["environment/failed"] == 0 and row["mismatch/mean_abs"] < 1e-5
        assert row["grad_norm"] > 0


def write_guesser(directory, letters):
    """Write a model that says a letter in brackets, each of ``letters`` with the same probability."""
    tokenizer = make_tokenizer("bytes")
    space, opens, closes, *guesses = tokenizer.encode(f" []{letters}")
    following = {space: opens, closes: tokenizer.eos_token_id} | dict.fromkeys(guesses, closes)
    make_chain_model(directory, following, len(tokenizer))
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.lm_head.weight[:, opens] = 0.0
        model.lm_head.weight[guesses, opens] = 2.0
    model.config.max_position_embeddings = 8192
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


HANGMAN = {"taskset": {"id": "textarena", "game": "Hangman-v0"}}
HANGMAN |= {"player": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 12}}


@pytest.mark.slow
def test_an_environment_of_verifiers(tmp_path, monkeypatch):
    """Updates with TextArena's Hangman of the wheel of verifiers, unchanged, in a virtual environment of its own.

    VERIFIERS_PYTHON names an interpreter that has it; else the packages are installed from PyPI.
    """
    python = Path(os.environ.get("VERIFIERS_PYTHON", tmp_path / "venv/bin/python"))
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", "verifiers[ta]==0.4.0", "uv"]).returncode:
            pytest.skip("verifiers cannot be installed from PyPI")
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")  # of uv
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))  # the words that the game would download
    (tmp_path / "nltk/corpora/words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (tmp_path / "nltk/corpora/words" / name).write_text("nose\nsea\nease\nstone\ntoast\nonset\n")
    config, data = tmp_path / "hangman.json", tmp_path / "train.jsonl"
    config.write_text(json.dumps(HANGMAN))
    export = REPO / "megatron_grpo/environments/libraries/of_verifiers.py"
    subprocess.run([python, export, config, "--count", "16", "--save", data], check=True)
    model, save = tmp_path / "model", tmp_path / "run"
    write_guesser(model, "aeonst")
    flags = f"""--load-hf {model} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}
        --train-data-path {data} --agent verifiers:{config} --agent-python {python} --environment-timeout 500
        --reward-funcs environment --num-generations 4 --micro-batch-size 4 --global-batch-size 4 --lr 1e-3
        --transformer-impl local --train-iters 3 --max-prompt-length 2000 --max-completion-length 200
        --max-environment-tokens 5000 --num-completions-to-log 16 --save {save} --no-save-hf"""
    run_torchrun(1, "pretrain_grpo.py", *flags.split())
    metrics = metrics_of(save)
    assert len(metrics) == 3
    for row in metrics:
        assert row["environment/failed"] == 0 and row["environment/turns"] > 1 and row["mismatch/max_abs"] < 1e-4
    assert any(row["grad_norm"] > 0 for row in metrics), [row["reward/mean"] for row in metrics]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


OPENENV = """
from megatron_grpo.environments.builtin.openenv_server import OpenEnv, openenv_tools
from megatron_grpo.environments.registry import register_environment


@register_environment("echo")
class Echo(OpenEnv):
    url, field = "{echo}", "message"


@register_environment("adder")
class Adder(OpenEnv):
    url, tools = "{adder}", openenv_tools("{adder}")
"""


@pytest.mark.slow
def test_environments_of_openenv(tmp_path):
    """Updates with the environment that `openenv init` writes, unchanged, and with one that has a tool.

    OPENENV_PYTHON names an interpreter that has openenv 0.10; else it is installed from PyPI.
    """
    python = Path(os.environ.get("OPENENV_PYTHON", tmp_path / "venv/bin/python"))
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", "openenv==0.10.0"]).returncode:
            pytest.skip("openenv cannot be installed from PyPI")
    subprocess.run([python.parent / "openenv", "init", "echo_env"], cwd=tmp_path, check=True)
    app = tmp_path / "echo_env/server/app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=64,"))
    ports = {name: free_port() for name in ("echo", "adder")}
    commands = {
        "echo": [python, "-m", "uvicorn", "echo_env.server.app:app", "--port", str(ports["echo"])],
        "adder": [python, REPO / "tests/data/openenv/adder.py", str(ports["adder"])],
    }
    with contextlib.ExitStack() as stack:
        for name, command in commands.items():
            server = stack.enter_context(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL))
            stack.callback(server.terminate)
            while not answers(ports[name]):
                assert server.poll() is None, f"the server {name} ended"
                time.sleep(0.1)
        plugin, data, model, save = (tmp_path / name for name in ("plugin.py", "train.jsonl", "model", "run"))
        plugin.write_text(OPENENV.format(**{name: f"http://127.0.0.1:{port}" for name, port in ports.items()}))
        rows = [{"prompt": [{"role": "user", "content": "Say"}], "environment": name} for name in ports]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
        words = f"--save {model} --tokenizer bytes --steps 0 --quiet --max-position-embeddings 2048"
        make(build_parser().parse_args(words.split()))
        ends = " ".join(map(str, range(0, 250, 10)))  # so that random weights have several turns
        flags = f"""--load-hf {model} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}
            --stop-token-ids {ends} --train-data-path {data} --external-plugins {plugin} --environment echo
            --tool-call-parser hermes --reward-funcs environment --num-generations 8 --micro-batch-size 4
            --global-batch-size 16 --lr 1e-3 --transformer-impl local --train-iters 3 --max-prompt-length 200
            --max-completion-length 60 --max-turns 3 --max-environment-tokens 1000 --save {save} --no-save-hf"""
        run_torchrun(1, "pretrain_grpo.py", *flags.split())
    metrics = metrics_of(save)
    assert len(metrics) == 3
    for row in metrics:
        assert row["environment/failed"] == 0 and row["environment/turns"] > 1 and row["mismatch/max_abs"] < 1e-4
        assert row["reward/mean"] > 0  # of the echo: the adder gives none


@pytest.mark.slow
def test_the_quickstart_with_a_tool(tmp_path):
    """Held-out accuracy goes from below 0.2 to above 0.9 by ten updates with the calculator, and stays at 0 without it;
    a run that was killed after its first checkpoint has the same rows, completions and weights as an undisturbed one.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = ["bash", "examples/grpo/quickstart_tools.sh"]

    def start(work, log):
        own = environment | {"WORK": str(work), "UPDATES": "10"}
        with open(log, "w") as file:
            return subprocess.Popen(command, cwd=REPO, env=own, stdout=file, stderr=file, start_new_session=True)

    def rows(work, run):
        file = work / run / "metrics.jsonl"
        return json_lines(file) if file.exists() else []

    killed, log = tmp_path / "killed", tmp_path / "log"
    process = start(killed, log)
    while len(rows(killed, "with_tool")) < 8:  # those of update 0, the evaluation, to 7
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    undisturbed = tmp_path / "undisturbed"
    for name in ("data", "model_hf"):
        shutil.copytree(killed / name, undisturbed / name)
    for work in (undisturbed, killed):
        assert start(work, log).wait() == 0, log.read_text()[-3000:]
    assert "at iteration 5" in log.read_text()  # it has resumed
    assert differences(killed / "with_tool", undisturbed / "with_tool") == []

    accuracy = {run: [row["eval/greedy_accuracy"] for row in rows(killed, run) if "eval/greedy_accuracy" in row]
                for run in ("with_tool", "without_tool")}  # fmt: skip
    assert accuracy["with_tool"][0] < 0.2 and accuracy["with_tool"][-1] > 0.9, accuracy
    assert max(accuracy["without_tool"]) < 0.05, accuracy
    turns = [row["environment/turns"] for row in rows(killed, "with_tool") if "environment/turns" in row]
    assert turns[0] < 1.4 and turns[-1] > 1.8


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--max-tokens-per-microbatch 400", "--hybrid-context-parallel"])
def test_agents_with_context_parallelism(flags, tiny_models, tmp_path):
    """Two ranks share each sample of a trajectory, and train as one rank does, on the same rollouts."""
    both = "--max-prompt-length 40 --max-completion-length 30 --max-environment-tokens 200 --train-iters 2"
    ledger = ["--ledger", tmp_path / "run" / "ledger"]
    rows = run_agents(tmp_path, tiny_models["qwen3"], 1, "branches", *both.split(), *ledger)
    if "hybrid" in flags:
        flags += " --max-tokens-per-microbatch 200"
    flags = [*both.split(), *flags.split(), "--context-parallel-size", "2", "--replay-rollouts", tmp_path / "run"]
    shared = run_agents(tmp_path, tiny_models["qwen3"], 2, "branches", *flags, name="shared")
    for row, expected in zip(shared, rows, strict=True):
        for name in ("loss", "grad_norm", "reward/mean", "entropy", "environment/turns"):
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
