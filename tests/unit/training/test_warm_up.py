"""Supervised warm-up: loss and gradient against transformers, a run that stops in it and goes on, and refused flags.

pretrain_grpo.py runs in this process, with a stub as engine.
"""

import json
import signal

import numpy as np
import pytest
import torch
from bad_input_bench import Bench
from bad_input_runs import TRAIN, launch
from good_args import validated
from noted_signal import raise_noted_signal
from PIL import Image
from run_files import metrics_of, without
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from vision_models import make, picture

from megatron_grpo.algorithm.losses import sft_loss
from megatron_grpo.algorithm.policy_term import update_statistics
from megatron_grpo.data.demonstrations import Demonstration, batch_of
from megatron_grpo.estimate.dry_run import dry_run_report
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.warm_up import SETTINGS, WarmUp
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONVERSATIONS = [[("hi", "yo"), ("2?", "4")], [("say a", "aa"), ("and b", "bcd")]]  # (user, assistant), each turn
UPDATES, STOP, RATE = 4, 3, 1e-2
FLAGS = f"""--max-prompt-length 40 --max-completion-length 40 --temperature 0.5 --sft-iters {UPDATES} --sft-lr {RATE}
 --lr-warmup-iters 1 --save-interval 2 --entropy-coef 0.1 --exit-signal-handler --clip-grad 0 --beta 0.1""".split()


def messages(turns):
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def start(bench: Bench, *more: str) -> int:
    rows = "".join(json.dumps({"messages": messages(turns)}) + "\n" for turns in CONVERSATIONS)
    words = ["--sft-data-path", str(bench.write("sft.jsonl", rows)), "--chat-template", TEMPLATE, *FLAGS]
    return launch(TRAIN, [*bench.good, *words, *more])


@pytest.fixture(scope="module")
def alone(tiny_models, tmp_path_factory) -> Bench:
    """A run of four supervised updates and two of the policy; each supervised one has each conversation four times."""
    bench = Bench(tmp_path_factory.mktemp("alone"), tiny_models["qwen3"])
    assert start(bench) == 0
    return bench


@pytest.fixture(scope="module")
def by_transformers(tiny_models) -> tuple[float, float, int]:
    """(cross-entropy with labels of -100 outside the assistant's turns, norm of its gradient, number of labels) of both
    conversations.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_models["qwen3"])
    model = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=torch.float32)
    ids, labels = [], []
    for turns in CONVERSATIONS:
        ids.append([])
        labels.append([])
        for user, assistant in turns:
            asked = tokenizer.encode(f"user: {user}\nassistant: ", add_special_tokens=False)
            said = tokenizer.encode(f"{assistant}<eos>", add_special_tokens=False)
            ids[-1] += asked + said
            labels[-1] += [-100] * len(asked) + said
    longest = max(map(len, ids))
    padded = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in ids])
    wanted = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
    attended = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    loss = model(padded, attention_mask=attended, labels=wanted).loss
    loss.backward()
    norm = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum().sqrt()
    return loss.item(), norm.item(), sum(label != -100 for row in labels for label in row)


def test_loss_and_gradient_are_those_of_transformers(alone, by_transformers):
    loss, norm, tokens = by_transformers
    for row in metrics_of(alone.save)[:2]:  # the first has the learning rate 0
        assert row["sft/loss"] == pytest.approx(loss, rel=1e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert row["sft/tokens"] == 4 * tokens


def test_the_warm_up_counts_apart_and_learns(alone):
    rows = metrics_of(alone.save)
    assert [row["iteration"] for row in rows] == [-4, -3, -2, -1, 1, 2]
    assert [row["lr"] for row in rows] == pytest.approx([0, RATE, RATE, RATE, 0, 1e-3])
    assert rows[3]["sft/loss"] < rows[2]["sft/loss"] < rows[1]["sft/loss"]
    for row in rows[:4]:
        assert not any(name.startswith(("reward", "ratio", "mismatch", "kl", "clip", "loss")) for name in row)
    assert not any(name.startswith("sft/") for row in rows[4:] for name in row)
    assert all("reward/mean" in row for row in rows[4:])
    # The reference is the policy after the warm-up, and row 5 has the values before the policy's first update.
    assert rows[4]["kl"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_a_run_that_stops_in_the_warm_up_goes_on_to_the_very_same_end(alone, tiny_models, tmp_path, monkeypatch):
    bench, drawn, next_batch = Bench(tmp_path, tiny_models["qwen3"]), [], WarmUp.next_batch
    kept = signal.getsignal(signal.SIGTERM)

    def counted(self):
        drawn.append(self.done)
        if len(drawn) == STOP:
            raise_noted_signal(signal.SIGTERM)
        return next_batch(self)

    monkeypatch.setattr(WarmUp, "next_batch", counted)
    try:
        assert start(bench) == 0
        assert [row["iteration"] for row in metrics_of(bench.save)] == [-4, -3, -2]
        assert start(bench, "--load", str(bench.save)) == 0
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert drawn == [0, 1, 2, 3]  # none is repeated
    assert without(metrics_of(bench.save)) == without(metrics_of(alone.save))
    ours, theirs = (load_file(save / "hf_model" / "model.safetensors") for save in (bench.save, alone.save))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_checkpoint_of_the_policys_updates_repeats_no_warm_up(alone, tmp_path, capfd):
    assert start(alone, "--load", str(alone.save), "--train-iters", "3") == 0
    rows = metrics_of(alone.save)
    assert [row["iteration"] for row in rows] == [-4, -3, -2, -1, 1, 2, 3]


@pytest.mark.slow
def test_a_bad_update_goes_back_to_the_checkpoint_of_the_warm_up(tiny_models, tmp_path, monkeypatch, capfd):
    judged, judge, bench = [], BadUpdates._judge, Bench(tmp_path, tiny_models["qwen3"])
    kept = signal.getsignal(signal.SIGTERM)

    def third_is_bad(self, loss, norm):
        judged.append(loss)
        return "made up" if len(judged) == 3 else judge(self, loss, norm)

    monkeypatch.setattr(BadUpdates, "_judge", third_is_bad)
    try:
        assert start(bench, "--on-bad-update", "restore") == 0
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert "update -2 is bad: made up" in capfd.readouterr().out
    rows = metrics_of(bench.save)
    assert [row["update/skipped"] for row in rows[:4]] == [0, 0, 1, 0] and rows[3]["lr"] == RATE
    # The checkpoint is that of the first update, whose learning rate was 0: update 4 has the loss of update 2.
    assert rows[3]["sft/loss"] == pytest.approx(rows[1]["sft/loss"], rel=1e-6) != pytest.approx(rows[2]["sft/loss"])


@pytest.mark.slow
def test_adapters_learn_demonstrations(tiny_models, tmp_path, by_transformers):
    bench = Bench(tmp_path, tiny_models["qwen3"])
    assert start(bench, *"--lora-rank 4 --lora-weight-sync merged --beta 0".split()) == 0
    losses = [row["sft/loss"] for row in metrics_of(bench.save)[:4]]
    assert losses[:2] == pytest.approx([by_transformers[0]] * 2, rel=1e-5) and losses[3] < losses[2] < losses[1]


@pytest.mark.slow
def test_images_of_demonstrations(tmp_path):
    """A vision-language model: the loss is transformers' for the same pixels, with the image in a later turn."""
    directory = tmp_path / "model"
    make(directory)
    (tmp_path / "red.png").write_bytes(picture(84, 56, 1))
    said = [("hi", "yo"), ("<image>what?", "red")]
    bench = Bench(tmp_path, directory)
    demos = bench.write("sft.jsonl", json.dumps({"messages": messages(said), "images": ["red.png"]}) + "\n")
    words = f"--max-prompt-length 80 --max-completion-length 80 --sft-iters 1 --sft-lr 1e-3 --sft-data-path {demos}"
    assert launch(TRAIN, [*bench.good, *words.split()]) == 0
    processor = AutoProcessor.from_pretrained(directory)
    shown = messages(said)
    shown[2]["content"] = [{"type": "image"}, {"type": "text", "text": "what?"}]
    text = processor.apply_chat_template(shown, add_generation_prompt=False, tokenize=False)
    inputs = processor(text=[text], images=[Image.open(tmp_path / "red.png")], return_tensors="pt")
    ids, labels = inputs["input_ids"][0], torch.full_like(inputs["input_ids"], -100)
    for answer in ("yo<|im_end|>", "red<|im_end|>"):
        wanted = torch.tensor(processor.tokenizer.encode(answer, add_special_tokens=False))
        (place,) = [i for i in range(len(ids)) if torch.equal(ids[i : i + len(wanted)], wanted)]
        labels[0, place : place + len(wanted)] = wanted
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    assert metrics_of(bench.save)[0]["sft/loss"] == pytest.approx(model(**inputs, labels=labels).loss.item(), rel=1e-5)


def test_the_loss_is_the_negative_log_probability():
    log_probs = torch.tensor([-1.5, -0.25], dtype=torch.float64, requires_grad=True)
    loss = sft_loss(log_probs).loss
    loss.sum().backward()
    assert loss.tolist() == [1.5, 0.25] and log_probs.grad.tolist() == [-1, -1]


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16 --exact-log-probs --kv-channels 64 --dry-run",
        "--rollout-importance-sampling-mode token_truncate",
        "--off-policy-sequence-mask-delta 0.5",
        "--m2po-threshold 0.04 --steps-per-generation 2",
    ],
)
def test_no_flag_asks_demonstrations_for_the_log_probabilities_of_an_engine(flags):
    args = replaced(validated(f"{flags} --beta 0 --loss-type grpo"), **SETTINGS)
    batch = batch_of([Demonstration(0, [5, 6], {}, "a row", completion=[7, 8], mask=[1, 1])])
    same, metrics = update_statistics(args, batch, np.arange(1), -1, scores=None)
    assert same is batch and metrics == {}


SFT = "--sft-iters 5 --sft-data-path demos.jsonl --sft-lr 1e-5"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sft-iters 5 --sft-lr 1e-5", "--sft-data-path is missing"),
        ("--sft-iters 5 --sft-data-path a.jsonl", "--sft-lr is missing"),
        ("--sft-data-path a.jsonl", "--sft-data-path needs --sft-iters"),
        ("--sft-lr 1e-5", "--sft-lr needs --sft-iters"),
        ("--loss-type sft", "--loss-type sft learns demonstrations"),
        (f"{SFT} --rollout-only --ledger l", "--sft-iters and --rollout-only cannot both be given"),
        (f"{SFT} --train-only l --beta 0", "--sft-iters and --train-only cannot both be given"),
        (f"{SFT} --replay-rollouts l", "--sft-iters and --replay-rollouts cannot both be given"),
        (
            f"{SFT} --eval-only --valid-data-path v.jsonl --load-hf m --eval-interval 2",
            "--sft-iters and --eval-only cannot both be given",
        ),
        (f"{SFT} --sft-data-path rows.csv", "rows.csv: a run reads no .csv"),
        (f"{SFT} --lora-rank 4 --beta 0.1", "--sft-iters with adapters and a reference"),
        (f"{SFT} --lora-rank 4 --beta 0 --loss-type dpo", "--sft-iters with adapters and a reference"),
    ],
)
def test_flags_that_do_not_belong_together(flags, message):
    with pytest.raises(GrpoError) as refused:
        validated(flags)
    assert message in str(refused.value)


def test_the_dry_run_names_and_counts_it():
    report = dry_run_report(validated(f"{SFT} --dry-run --beta 0"), 8)
    line = "supervised warm-up: 5 updates before the first rollout, each of 64 demonstrations (demos.jsonl)"
    assert f"{line}, learning rate 1e-05" in report
