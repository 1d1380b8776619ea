"""Rollouts of a real vLLM in two ranks: one engine each, and one engine over both; rollout_worker.py makes them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_torchrun
from rollout_worker import GENERATIONS, LENGTHS, MAX_TOKENS
from sharp_model import make_sharp_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from tools.make_tiny_model import build_parser, make

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]

STOP_WORDS = ["5", "9"]
TWO = ["--vllm-tensor-parallel-size", "2", "--tensor-model-parallel-size", "2"]
LAYOUTS = {
    "an engine a rank": ("qwen3", ["--stop-words", *STOP_WORDS]),
    "an engine over two ranks": ("qwen3", TWO),
    "latent attention and experts": ("deepseek_v3", [*TWO, "--sequence-parallel"]),
}
SIZES = """--tokenizer bytes --steps 0 --quiet --hidden-size 64 --ffn-hidden-size 96 --kv-channels 32
    --max-position-embeddings 512""".split()  # experts have 24 channels: vLLM on a CPU pads them to a multiple of 32
TOLERANCE = 1e-5  # nats, mean over tokens


class Results:
    """What the ranks of one launch wrote."""

    def __init__(self, directory: Path, layout: str):
        self.directory, self.layout = directory, layout
        self.facts = [json.loads((directory / f"facts.{rank}.json").read_text()) for rank in range(2)]

    def batch(self, name: str) -> RolloutBatch:
        return RolloutBatch.load(self.directory / f"{name}.0.npz")

    def trainer_log_probs(self, name: str) -> np.ndarray:
        return np.load(self.directory / f"{name}.0.npy")

    def mismatch(self, name: str) -> float:
        """Mean absolute difference between engine and trainer over the completions' tokens."""
        batch = self.batch(name)
        gap = np.abs(batch.rollout_log_probs - self.trainer_log_probs(name))[batch.loss_mask == 1]
        assert len(gap) > 100 and np.isfinite(gap).all()
        return float(gap.mean())


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def model(layout, tmp_path_factory):
    """A Hugging Face directory."""
    directory = tmp_path_factory.mktemp("rollout")
    make(build_parser().parse_args(["--save", str(directory / "random"), "--shape", LAYOUTS[layout][0], *SIZES]))
    return make_sharp_model(directory / "random", directory / "model")


@pytest.fixture(scope="module")
def results(layout, model, tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    run_torchrun(2, "tests/rollout_worker.py", out, "--load-hf", model, *LAYOUTS[layout][1])
    return Results(out, layout)


@pytest.fixture(scope="module")
def by_transformers(model):
    """The same model and its tokenizer, by transformers."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(model)


def completions(batch: RolloutBatch) -> list[list[int]]:
    return [
        batch.tokens[begin + prompt : end].tolist()
        for begin, prompt, end in zip(batch.cu_seqlens, batch.prompt_lengths, batch.cu_seqlens[1:], strict=False)
    ]


def prompts(batch: RolloutBatch) -> list[list[int]]:
    return [batch.tokens[b : b + n].tolist() for b, n in zip(batch.cu_seqlens, batch.prompt_lengths, strict=False)]


@pytest.mark.parametrize("name", ["first", "cool", "no end"])
def test_log_probs_are_the_trainers(results, name):
    assert results.mismatch(name) < TOLERANCE


def test_log_probs_are_transformers(results, by_transformers):
    """Neither the engine's nor the trainer's own idea of the model: an independent one."""
    batch, (model, _) = results.batch("first"), by_transformers
    gaps = []
    for begin, middle, end in zip(
        batch.cu_seqlens, batch.cu_seqlens[:-1] + batch.prompt_lengths, batch.cu_seqlens[1:], strict=False
    ):
        ids = torch.from_numpy(batch.tokens[begin:end].astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        gaps.append(np.abs(batch.rollout_log_probs[middle:end] - log_p[middle - begin - 1 :].numpy()))
    gaps = np.concatenate(gaps)
    assert gaps.mean() < TOLERANCE
    # ... and the model is one whose log-probabilities say something.
    assert np.nanstd(batch.rollout_log_probs) > 0.5


def test_log_probs_come_when_asked_for(results):
    batch = results.batch("first")
    assert np.array_equal(np.isnan(batch.rollout_log_probs), batch.loss_mask == 0)
    assert np.isnan(results.batch("same seed").rollout_log_probs).all()


def test_seeds(results):
    first = completions(results.batch("first"))
    assert completions(results.batch("same seed")) == first
    other = completions(results.batch("other seed"))
    assert sum(a != b for a, b in zip(first, other, strict=True)) > len(first) // 2
    assert all(len(set(map(tuple, first[i : i + GENERATIONS]))) > 1 for i in range(0, len(first), GENERATIONS))
    twins = completions(results.batch("twins"))  # one text twice: replicas with the same work must not do the same
    assert twins[:GENERATIONS] != twins[GENERATIONS:]


def test_the_trainers_random_state_is_kept(results):
    for facts in results.facts:
        kept = {name: value for name, value in facts.items() if name.endswith("kept the random state")}
        assert len(kept) > 8 and all(kept.values()), kept


def test_every_rank_has_the_whole_batch_in_one_order(results, by_transformers):
    names = sorted(path.name.removesuffix(".0.npz") for path in results.directory.glob("*.0.npz"))
    assert len(names) > 8
    for name in names:
        one, other = (RolloutBatch.load(results.directory / f"{name}.{rank}.npz") for rank in range(2))
        assert one.tokens.tobytes() == other.tokens.tobytes(), name
        for a, b in zip(one.to_buffers(), other.to_buffers(), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), name
    batch, (_, tokenizer) = results.batch("first"), by_transformers
    n = len(LENGTHS) * GENERATIONS
    assert batch.sample_ids.tolist() == list(range(n))
    assert batch.group_ids.tolist() == [i // GENERATIONS for i in range(n)]
    assert batch.row_ids.tolist() == [100 + i // GENERATIONS for i in range(n)]
    assert batch.prompt_lengths.tolist() == [LENGTHS[i // GENERATIONS] for i in range(n)]
    texts = [tokenizer.decode(ids) for ids in prompts(batch)]
    assert [text for text in texts[::GENERATIONS] for _ in range(GENERATIONS)] == texts
    assert texts[0] == texts[GENERATIONS] and len(set(texts)) == len(LENGTHS) - 1


def test_rewards_belong_to_their_completions(results):
    for name in ("first", "greedy") + ("stop words",) * ("--stop-words" in LAYOUTS[results.layout][1]):
        batch = results.batch(name)
        assert batch.rewards.tolist() == np.stack([batch.completion_lengths, batch.row_ids], 1).tolist()
        assert results.facts[0][f"{name} failures"] == 0


def test_one_prompt_leaves_the_other_replica_idle(results):
    batch = results.batch("one prompt")
    assert batch.sample_ids.tolist() == list(range(GENERATIONS))
    assert batch.row_ids.tolist() == [103] * GENERATIONS


@pytest.mark.parametrize("name", ["first", "cool", "other seed", "greedy", "fresh"])
def test_ends(results, by_transformers, name):
    eos = by_transformers[1].eos_token_id
    batch = results.batch(name)
    for ids, reason in zip(completions(batch), batch.finish_reasons, strict=True):
        if reason == FinishReason.STOP:  # by its end of sequence, which belongs to it
            assert ids.index(eos) == len(ids) - 1 < MAX_TOKENS
        else:
            assert reason == FinishReason.LENGTH
            assert eos not in ids and len(ids) == MAX_TOKENS
    if name == "first":
        assert set(batch.finish_reasons) == {FinishReason.STOP, FinishReason.LENGTH}


def test_ignoring_the_end(results, by_transformers):
    batch = results.batch("no end")
    assert (batch.completion_lengths == MAX_TOKENS).all()
    assert (batch.finish_reasons == FinishReason.LENGTH).all()
    assert any(by_transformers[1].eos_token_id in ids[:-1] for ids in completions(batch))


def greedy(batch: RolloutBatch, model, eos: int) -> list[list[int]]:
    """Greedy completions of a batch's prompts by transformers."""
    outputs = []
    for ids in prompts(batch):
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=eos,
            pad_token_id=eos,
        )
        outputs.append(out[0, len(ids) :].tolist())
    return outputs


def test_greedy_completions_are_transformers(results, by_transformers):
    batch, (model, tokenizer) = results.batch("greedy"), by_transformers
    assert completions(batch) == greedy(batch, model, tokenizer.eos_token_id)
    assert len(set(map(tuple, completions(batch)))) > 2


def test_stop_words(results, by_transformers):
    if "--stop-words" not in LAYOUTS[results.layout][1]:
        assert not (results.directory / "stop words.0.npz").exists()
        return
    batch, whole = results.batch("stop words"), completions(results.batch("greedy"))
    stops = [by_transformers[1].encode(word)[0] for word in STOP_WORDS]
    cut = 0
    for ids, reason, full in zip(completions(batch), batch.finish_reasons, whole, strict=True):
        places = [place for place, token in enumerate(full) if token in stops]
        assert ids == (full[: places[0] + 1] if places else full)
        assert reason == FinishReason.LENGTH or places or ids[-1] == by_transformers[1].eos_token_id
        cut += len(ids) < len(full)
    assert cut > 0


def test_aborted_requests_do_not_come_back(results):
    assert [facts["not aborted"] for facts in results.facts] == [[1], [1]]


def test_new_weights_reach_the_engine(results):
    """Until the sync the engine has the old ones, afterwards the new ones, also for prompts that it had cached."""
    stale, fresh, first = (results.batch(name) for name in ("stale", "fresh", "first"))
    assert completions(stale) == completions(first)
    assert results.mismatch("stale") > 0.1
    assert completions(fresh) != completions(first)
    assert results.mismatch("fresh") < TOLERANCE
    assert set(stale.weight_version) == {0} and set(fresh.weight_version) == {3}
