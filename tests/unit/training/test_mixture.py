"""Demonstrations beside the rollout: loss and gradient of a whole update against transformers, resume, refused flags.

pretrain_grpo.py runs in this process, with a stub as engine that completes every prompt with the token 1 and the end.
"""

import json
import math

import bad_input_runs
import numpy as np
import pytest
import torch
from bad_input_bench import ROWS, Bench
from bad_input_runs import TRAIN, launch
from good_args import validated
from run_files import metrics_of, without
from safetensors.torch import load_file
from slow import slow_except
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_grpo.estimate.dry_run import dry_run_report
from megatron_grpo.models.forward import MicroBatches
from megatron_grpo.training.mixture import Mixture, parts_of_groups
from megatron_grpo.utils.errors import GrpoError

GAMMA, TEMPERATURE, ENTROPY = 0.3, 0.5, 0.2
# Demonstrations of the prompts 1, 2 and 4: an update of "luffy" has that of one of its two prompts, or of both.
DEMONSTRATIONS = [{"prompt": f"{a}+1=", "answer": answer} for a, answer in ((1, "2"), (2, "333"), (4, "55"))]
COMMON = f"""--no-shuffle --temperature {TEMPERATURE} --entropy-coef {ENTROPY} --clip-grad 0 --max-prompt-length 40
 --no-shuffle-completions"""
CASES = {
    "sft": "--sft-loss-type sft --sft-batch-size 2 --chord-mu-peak 0.3",
    "chord": "--sft-loss-type chord --sft-batch-size 2 --chord-mu-peak 0.9 --chord-mu-valley 0.1"
    " --chord-mu-decay-steps 4",
    "luffy": f"--sft-loss-type luffy --luffy-gamma {GAMMA}",
}


def start(bench: Bench, case: str, more: str = "") -> int:
    rows = "".join(json.dumps(row) + "\n" for row in DEMONSTRATIONS)
    words = ["--sft-data-path", str(bench.write("sft.jsonl", rows)), *COMMON.split(), *CASES[case].split()]
    return launch(TRAIN, [*bench.good, *words, *more.split()])


def by_hand(model_directory, case: str) -> dict[str, float]:
    """The first update by a loop over its tokens, in float64: two prompts, each with four equal completions."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float64)
    said = [1, tokenizer.eos_token_id]

    def scored(prompt, completion, temperature):
        """(log-probability, entropy) of each token of the completion."""
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0] / temperature
        return [
            (row.log_softmax(-1)[token], -(row.softmax(-1) * row.log_softmax(-1)).sum())
            for row, token in zip(logits[len(prompt) - 1 :], completion, strict=False)
        ]

    prompts = [tokenizer.encode(row["prompt"]) for row in ROWS[:2]]
    drawn = DEMONSTRATIONS[:2]  # in the order of the file; with luffy those of both prompts
    answers = [[*tokenizer.encode(row["answer"], add_special_tokens=False), tokenizer.eos_token_id] for row in drawn]
    demonstrated = [
        [lp for lp, _ in scored(tokenizer.encode(row["prompt"]), answer, 1.0)]
        for row, answer in zip(drawn, answers, strict=True)
    ]
    rollout = [pair for prompt in prompts for pair in scored(prompt, said, TEMPERATURE)]  # each four times
    advantages = [0.0, 0.0]
    if case == "luffy":  # rewards 0, 0, 0, 0 and 1
        std = math.sqrt((4 * 0.2**2 + 0.8**2) / 4)
        advantages = [-0.2 / (std + 1e-4), 0.8 / (std + 1e-4)]
    of_rollout = [-advantages[0] * lp - ENTROPY * entropy for lp, entropy in rollout]  # the ratio is 1
    # In value the ratio is 1 and not its logarithm.
    values = [-advantages[0] - ENTROPY * entropy.item() for _, entropy in rollout]
    if case == "luffy":
        own = [-advantages[1] * lp.exp() / (lp.exp() + GAMMA) for lps in demonstrated for lp in lps]
        weights = [1 / (10 * len(lps)) for lps in demonstrated for _ in lps]
        share, of_demonstrations = 8 / 10, sum(w * one for w, one in zip(weights, own, strict=True))
    else:
        mu = {"sft": 0.3, "chord": 0.9}[case]
        flat = [lp for lps in demonstrated for lp in lps]
        phi = [1.0 if case == "sft" else (lp.exp() * (1 - lp.exp())).item() for lp in flat]
        share, of_demonstrations = 1 - mu, mu * sum(-f * lp for f, lp in zip(phi, flat, strict=True)) / len(flat)
    (share * sum(of_rollout) / len(of_rollout) + of_demonstrations).backward()
    norm = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum().sqrt()
    flat = [lp.item() for lps in demonstrated for lp in lps]
    return {
        "loss": share * sum(values) / len(values) + of_demonstrations.item(),
        "grad_norm": norm.item(),
        "sft/loss": -sum(flat) / len(flat),
        "sft/tokens": len(flat),
        "entropy": sum(entropy.item() for _, entropy in rollout) / len(rollout),
        "advantage/mean": advantages[0],
    }


@pytest.mark.parametrize("case", slow_except(["chord", "luffy"], CASES))
def test_an_update_is_that_of_a_loop_by_hand(case, tiny_models, tmp_path):
    bench = Bench(tmp_path, tiny_models["qwen3"])
    assert start(bench, case) == 0
    first, second = metrics_of(bench.save)
    expected = by_hand(tiny_models["qwen3"], case)
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=2e-6, abs=1e-7)
    # The rollout's statistics know nothing of the demonstrations: two tokens of each of 8 completions.
    assert first["completion/length_mean"] == 2 and first["ratio/max"] == first["ratio/min"] == 1
    assert first["tokens/update"] == sum(4 * (2 + len(row["prompt"])) for row in ROWS[:2])
    assert first["reward/mean"] == 0 and first["clip/masked"] == 0
    if case == "luffy":  # of the prompts 3 and 4 the second has a demonstration
        assert first["sft/advantage"] > 0 and second["sft/tokens"] == 3 and "sft/mu" not in first
    else:
        mu = {"sft": (0.3, 0.3), "chord": (0.9, 0.1 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)}[case]
        assert (first["sft/mu"], second["sft/mu"]) == pytest.approx(mu)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--micro-batch-size 2", "--max-tokens-per-microbatch 90"])
@pytest.mark.parametrize("case", CASES)
def test_micro_batches_change_no_number(case, more, tiny_models, tmp_path):
    bench = Bench(tmp_path, tiny_models["qwen3"])
    given = bench.without("--micro-batch-size") or ""
    assert start(bench, case, f"{given} {more} --global-batch-size 8") == 0
    expected = by_hand(tiny_models["qwen3"], case)
    first = metrics_of(bench.save)[0]
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=2e-6, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_draws_the_demonstrations_of_one_that_never_stopped(case, tiny_models, tmp_path, monkeypatch):
    """Four updates, and two and two; the schedule of mu goes on, too. With adapters."""
    more, saves, drawn, mixed = "--lora-rank 4 --lora-weight-sync merged --save-interval 2", [], [], Mixture.next_batch

    def noted(self, update):
        batch = mixed(self, update)
        drawn.append((update, batch.row_ids.tolist()))
        return batch

    monkeypatch.setattr(Mixture, "next_batch", noted)
    for name, lengths in {"one": (4,), "two": (2, 4)}.items():
        (tmp_path / name).mkdir()
        bench = Bench(tmp_path / name, tiny_models["qwen3"])
        for number, iters in enumerate(lengths):
            load = f"--load {bench.save}" if number else ""
            assert start(bench, case, f"{more} {load} --train-iters {iters} --lr-decay-iters 4") == 0
        saves.append(bench.save)
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :] and len(drawn) == (0 if case == "luffy" else 8)
    assert without(metrics_of(saves[0])) == without(metrics_of(saves[1]))
    ours, theirs = (load_file(save / "adapter" / "adapter_model.safetensors") for save in saves)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_warm_up_before_it(tiny_models, tmp_path):
    bench = Bench(tmp_path, tiny_models["qwen3"])
    assert start(bench, "sft", "--sft-iters 2 --sft-lr 1e-3") == 0
    rows = metrics_of(bench.save)
    assert [row["iteration"] for row in rows] == [-2, -1, 1, 2]
    assert all("sft/loss" in row for row in rows) and [row.get("sft/mu") for row in rows] == [None, None, 0.3, 0.3]


@pytest.mark.parametrize(("case", "notes"), [("luffy", 0), pytest.param("sft", 1, marks=pytest.mark.slow)])
def test_equal_rewards_teach_where_a_demonstration_has_another_one(case, notes, tiny_models, tmp_path, capfd):
    """All rewards are 0, and that of a demonstration in the groups is 1."""
    bench = Bench(tmp_path, tiny_models["qwen3"])
    assert start(bench, case, "--train-iters 4") == 0
    assert capfd.readouterr().out.count("rewards teach nothing") == notes
    assert any(row["grad_norm"] > 0 for row in metrics_of(bench.save))


def test_mu_of_0_draws_nothing(tiny_models, tmp_path):
    bench = Bench(tmp_path, tiny_models["qwen3"])
    assert start(bench, "sft", "--chord-mu-warmup-steps 2") == 0
    first, second = metrics_of(bench.save)
    assert not any(name.startswith("sft/") for name in first) and second["sft/mu"] == 0.15


def test_a_demonstration_is_in_the_update_of_its_group():
    groups, halves = np.array([7, 7, 7, 3, 3, 3, 5, 5]), [np.array([0, 1, 2, 4]), np.array([3, 5, 6, 7])]
    assert parts_of_groups(groups, halves, np.array([5, 7, 3])).tolist() == [1, 0, 1]


@pytest.mark.slow
def test_several_updates_of_a_rollout(tiny_models, tmp_path):
    """The first has the prompt 1, whose demonstration has two tokens, the second the prompt 2, with four."""
    bench = Bench(tmp_path, tiny_models["qwen3"])
    bench.without("--micro-batch-size")
    assert start(bench, "luffy", "--micro-batch-size 4 --global-batch-size 4 --steps-per-generation 2") == 0
    assert [row["sft/tokens"] for row in metrics_of(bench.save)] == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sft", "luffy"])
def test_a_replay_repeats_the_run(case, tiny_models, tmp_path, monkeypatch, capfd):
    """With --train-only the demonstrations are those of the run, too; other prompts in the files end a replay."""
    bench = Bench(tmp_path, tiny_models["qwen3"])
    assert start(bench, case, f"--ledger {tmp_path / 'ledger'}") == 0
    wanted = metrics_of(bench.save)
    monkeypatch.setattr(bad_input_runs, "StubEngine", None)
    for how in ["--replay-rollouts"] + ["--train-only"] * (case == "sft"):
        assert start(bench, case, f"{how} {tmp_path / 'ledger'} --save {tmp_path / how}") == 0
        rows = metrics_of(tmp_path / how)
        names = [name for name in wanted[0] if name.startswith(("sft/", "loss", "grad_norm", "advantage/", "entropy"))]
        assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in wanted]
    if case == "luffy":
        rows = bench.data(*map(json.dumps, ROWS[::-1]), name="reversed.jsonl")
        more = f"{' '.join(rows)} --replay-rollouts {tmp_path / 'ledger'} --save {tmp_path / 'other'}"
        assert start(bench, case, more) == 1
        assert "--train-data-path, which has another prompt there now" in capfd.readouterr().err


MIX = "--sft-data-path demos.jsonl --sft-loss-type"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss-type chord", "--loss-type chord learns demonstrations"),
        ("--sft-loss-type sft --sft-batch-size 4 --chord-mu-peak 0.1", "--sft-data-path is missing"),
        (f"{MIX} sft --chord-mu-peak 0.1", "--sft-batch-size is missing"),
        (f"{MIX} sft --sft-batch-size 4", "--chord-mu-peak is missing"),
        (f"{MIX} sft --sft-batch-size 4 --chord-mu-peak 1.5", "--chord-mu-peak (1.5)"),
        ("--chord-mu-peak 0.1", "--chord-mu-peak needs --sft-loss-type"),
        ("--luffy-reward 1", "--luffy-reward needs --sft-loss-type"),
        (f"{MIX} chord --sft-batch-size 4 --chord-mu-peak 0.9 --chord-mu-valley 0.1", "--chord-mu-valley needs"),
        (f"{MIX} chord --sft-batch-size 4 --chord-mu-peak 0.9 --chord-mu-decay-steps 9", "--chord-mu-valley needs"),
        (f"{MIX} luffy --sft-batch-size 4", "--sft-batch-size has no effect with --sft-loss-type luffy"),
        (f"{MIX} luffy --chord-mu-peak 0.5", "--chord-mu-peak has no effect with --sft-loss-type luffy"),
        (f"{MIX} sft --sft-batch-size 4 --chord-mu-peak 0.1 --luffy-reward 1", "--luffy-reward has no effect"),
        (f"{MIX} sft --sft-batch-size 4 --chord-mu-peak 0.1 --luffy-gamma 1", "--luffy-gamma has no effect"),
        (f"{MIX} sft --sft-batch-size 4 --chord-mu-peak 0.1 --rollout-only --ledger l", "cannot both be given"),
        (f"{MIX} luffy --advantage-estimator reinforce_plus_plus", "gives a demonstration an advantage in the group"),
        (f"{MIX} luffy --beta 0.1 --kl-in-reward", "--kl-in-reward changes the rewards"),
        (f"{MIX} luffy --loss-type real", "--loss-type real replaces the advantages"),
        (f"{MIX} luffy --dynamic-sample", "--dynamic-sample leaves out groups of equal rewards, to which one adds"),
        (f"{MIX} luffy --train-only l --beta 0", "--train-only has not"),
    ],
)
def test_flags_that_do_not_belong_together(flags, message):
    with pytest.raises(GrpoError) as refused:
        validated(flags)
    assert message in str(refused.value)


def test_luffy_without_a_demonstration_of_a_prompt_ends_the_run(tiny_models, tmp_path, capfd):
    bench = Bench(tmp_path, tiny_models["qwen3"])
    rows = bench.write("others.jsonl", '{"prompt": "7*7=", "answer": "49"}\n')
    assert start(bench, "luffy", f"--sft-data-path {rows}") == 1
    assert "none of the first 8 prompts of --train-data-path has a demonstration" in capfd.readouterr().err


def test_the_dry_run_names_it():
    flags = "chord --sft-batch-size 16 --chord-mu-peak 0.9 --chord-mu-valley 0.05 --chord-mu-decay-steps 200"
    line = "demonstrations beside the rollout: 16 in each update (demos.jsonl), loss chord, mu 0.9 to 0.05"
    assert line in dry_run_report(validated(f"{MIX} {flags} --dry-run --beta 0"), 8)
    line = "demonstrations beside the rollout: one of each prompt that has one (demos.jsonl), loss luffy"
    assert line in dry_run_report(validated(f"{MIX} luffy --dry-run --beta 0"), 8)


def test_packs_of_rollout_and_demonstrations_have_one_length():
    """The longer one; packs without a length are as long as they are. The parts stay as they were."""
    rollout, demonstrations = (
        MicroBatches([lambda length: ("rollout", length)] * 2, 8),
        MicroBatches([lambda length: length], 16),
    )
    both = rollout + demonstrations
    assert list(both) == [("rollout", 16)] * 2 + [16]
    assert (list(rollout), list(demonstrations)) == ([("rollout", 8)] * 2, [16])
    assert list(rollout + MicroBatches([])) == [("rollout", 8)] * 2
    assert (MicroBatches([lambda length: length]) + MicroBatches([lambda length: length]))[:] == [None, None]
