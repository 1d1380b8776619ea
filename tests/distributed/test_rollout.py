"""Rollouts of a real vLLM in two ranks: one engine each, and one engine over both; rollout_worker.py makes them."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from importance_sampling_loops import check_against_loops
from ranks import run_torchrun
from rollout_worker import GENERATIONS, MAX_TOKENS, PATTERN, PENALIZED, TRUNCATED, lengths
from safetensors.torch import load_file, save_file
from sharp_model import make_sharp_model
from slow import slow_except
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_grpo.algorithm.arguments import IMPORTANCE_SAMPLING_MODES
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from tools.cpu_server import cpu_server
from tools.make_tiny_model import build_parser, make

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]

STOP_WORDS = ["5", "9"]
COLOCATED = ["--vllm-enforce-eager"]
TWO = [*COLOCATED, "--vllm-tensor-parallel-size", "2", "--tensor-model-parallel-size", "2"]
COOL = 0.7
SMALL_BATCHES = ["--vllm-engine-kwargs", '{"max_num_batched_tokens": 512}']  # less than the prompts of a replica
LAYOUTS = {
    "an engine a rank": ("qwen3", [*COLOCATED, *SMALL_BATCHES, "--stop-words", *STOP_WORDS]),
    "a server": ("qwen3", ["--vllm-mode", "server", "--stop-words", *STOP_WORDS]),
    "an engine over two ranks": ("qwen3", [*TWO, "--temperature", str(COOL)]),
    "latent attention and experts": ("deepseek_v3", [*TWO, "--sequence-parallel"]),
}
SIZES = """--tokenizer bytes --steps 0 --quiet --hidden-size 64 --ffn-hidden-size 96 --kv-channels 32
    --max-position-embeddings 512""".split()  # experts have 24 channels: vLLM on a CPU pads them to a multiple of 32
KEY = "secret of test_rollout"
TOLERANCE = 1e-5  # nats, mean over tokens


class Results:
    """What the ranks of one launch wrote."""

    def __init__(self, directory: Path, layout: str):
        self.directory, self.layout = directory, layout
        self.lengths = lengths(SMALL_BATCHES[0] in LAYOUTS[layout][1])
        self.temperature = COOL if "--temperature" in LAYOUTS[layout][1] else 1.0
        self.facts = [json.loads((directory / f"facts.{rank}.json").read_text()) for rank in range(2)]

    def batch(self, name: str) -> RolloutBatch:
        return RolloutBatch.load(self.directory / f"{name}.0.npz")

    def trainer_log_probs(self, name: str) -> np.ndarray:
        return np.load(self.directory / f"{name}.0.npy")

    def mismatch(self, name: str) -> float:
        """Mean absolute difference between engine and trainer over the completions' tokens."""
        batch = self.batch(name)
        gap = np.abs(batch.rollout_log_probs - self.trainer_log_probs(name))[batch.response_mask == 1]
        assert len(gap) > 100 and np.isfinite(gap).all()
        return float(gap.mean())


@pytest.fixture(scope="module", params=slow_except(["an engine a rank"], LAYOUTS))
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def model(layout, tmp_path_factory):
    """A Hugging Face directory."""
    directory = tmp_path_factory.mktemp("rollout")
    make(build_parser().parse_args(["--save", str(directory / "random"), "--shape", LAYOUTS[layout][0], *SIZES]))
    return make_sharp_model(directory / "random", directory / "model")


@pytest.fixture(scope="module")
def results(layout, model, tmp_path_factory, request):
    """What one launch wrote: all rollouts if a slow case of this file was selected, else the few of the others."""
    out = tmp_path_factory.mktemp("results")
    flags = ["--load-hf", model, *LAYOUTS[layout][1]]
    selected = [item for item in request.session.items if item.path == request.node.path]
    if not any(item.get_closest_marker("slow") for item in selected):
        flags.append("--few")
    if layout == "a server":
        with vllm_server(model, out) as url:
            environment = {"VLLM_API_KEY": KEY}
            run_torchrun(
                2, "tests/distributed/rollout_worker.py", out, *flags, "--vllm-server-base-url", url, env=environment
            )
    else:
        run_torchrun(2, "tests/distributed/rollout_worker.py", out, *flags)
    return Results(out, layout)


@contextlib.contextmanager
def vllm_server(model: str, out: Path, options: str = ""):
    """The address of a vLLM server as a user starts it; its weights are not the model's, so that a sync is needed."""
    source = out / "other"
    shutil.copytree(model, source)
    weights = load_file(source / "model.safetensors")
    save_file({name: tensor.flip(0).contiguous() for name, tensor in weights.items()}, source / "model.safetensors")
    options = f"--logprobs-mode raw_logprobs {options}"
    with cpu_server(source, out / "server.log", options, VLLM_API_KEY=KEY) as (url, _):
        yield url


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


@pytest.mark.parametrize("name", slow_except(["first"], ["first", "no end"]))
def test_log_probs_are_the_trainers(results, name):
    assert results.mismatch(name) < TOLERANCE


@pytest.mark.parametrize("name", slow_except(["truncated"], ["truncated", "penalized"]))
def test_log_probs_are_from_before_truncation_and_penalties_at_temperature_1(results, name):
    """At another temperature they are not, which is why rollout/arguments.py refuses it together with these."""
    assert (results.mismatch(name) < TOLERANCE) == (results.temperature == 1)
    assert results.temperature == 1 or results.mismatch(name) > 0.01


def log_distributions(batch: RolloutBatch, model, temperature: float):
    """transformers' log-probabilities of the whole vocabulary wherever a token was sampled, completion by completion:
    (log-probabilities, the tokens, the engine's log-probabilities).
    """
    for begin, prompt, end in zip(batch.cu_seqlens, batch.prompt_lengths, batch.cu_seqlens[1:], strict=False):
        ids = torch.from_numpy(batch.tokens[begin:end].astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids[None]).logits[0, prompt - 1 : -1] / temperature, -1)
        yield log_p, ids[prompt:], batch.rollout_log_probs[begin + prompt : end]


def test_log_probs_are_transformers(results, by_transformers):
    """Neither the engine's nor the trainer's own idea of the model: an independent one."""
    batch = results.batch("first")
    distributions = log_distributions(batch, by_transformers[0], results.temperature)
    gaps = [np.abs(log_p.gather(1, ids[:, None])[:, 0].numpy() - engine) for log_p, ids, engine in distributions]
    assert np.concatenate(gaps).mean() < TOLERANCE
    # ... and the model is one whose log-probabilities say something.
    assert np.nanstd(batch.rollout_log_probs) > 0.5


@pytest.mark.parametrize("name", ["first", "truncated"])
def test_truncation_is_the_samplers(results, by_transformers, name):
    """Of the most likely tokens that are left, with the temperature applied; without it others are sampled too."""
    outside = 0
    for log_p, ids, _ in log_distributions(results.batch(name), by_transformers[0], results.temperature):
        for row, token in zip(log_p.exp(), ids.tolist(), strict=True):
            row = row * (row >= TRUNCATED["min_p"] * row.max() - 1e-5)
            likeliest = (row / row.sum()).topk(TRUNCATED["top_k"])
            before = (likeliest.values / likeliest.values.sum()).cumsum(0).roll(1)
            before[0] = 0.0
            left = likeliest.indices[before < TRUNCATED["top_p"] + 1e-5].tolist()
            outside += token not in left
    assert outside > 50 if name == "first" else outside == 0


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_importance_sampling_of_a_recorded_rollout(results, mode):
    """Of an engine with old weights: real ratios, of which each mode bounds some."""
    batch = results.batch("stale")
    recorded = (results.trainer_log_probs("stale"), batch.rollout_log_probs, batch.response_mask, batch.cu_seqlens)
    bound = float(np.exp(np.nanmedian(recorded[0] - recorded[1])))
    assert 0 < check_against_loops(mode, *recorded, bound, bound / 2) < 1


def test_log_probs_come_when_asked_for(results):
    batch = results.batch("first")
    assert np.array_equal(np.isnan(batch.rollout_log_probs), batch.response_mask == 0)
    assert np.isnan(results.batch("same seed").rollout_log_probs).all()


def test_seeds(results):
    first = completions(results.batch("first"))
    assert completions(results.batch("same seed")) == first
    other = completions(results.batch("other seed"))
    assert sum(a != b for a, b in zip(first, other, strict=True)) > len(first) // 2
    assert all(len(set(map(tuple, first[i : i + GENERATIONS]))) > 1 for i in range(0, len(first), GENERATIONS))
    twins = completions(results.batch("twins"))  # one text twice: replicas with the same work must not do the same
    assert twins[:GENERATIONS] != twins[GENERATIONS:]


def test_samples_do_not_depend_on_the_replica(results):
    assert completions(results.batch("other replicas")) == completions(results.batch("first"))


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
        assert one.arrays().keys() == other.arrays().keys()
        for a, b in zip(one.arrays().values(), other.arrays().values(), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), name
    batch, (_, tokenizer) = results.batch("first"), by_transformers
    n = len(results.lengths) * GENERATIONS
    assert batch.sample_ids.tolist() == list(range(n))
    assert batch.group_ids.tolist() == [i // GENERATIONS for i in range(n)]
    assert batch.row_ids.tolist() == [100 + i // GENERATIONS for i in range(n)]
    assert batch.prompt_lengths.tolist() == [results.lengths[i // GENERATIONS] for i in range(n)]
    texts = [tokenizer.decode(ids) for ids in prompts(batch)]
    assert [text for text in texts[::GENERATIONS] for _ in range(GENERATIONS)] == texts
    assert texts[0] == texts[GENERATIONS] and len(set(texts)) == len(results.lengths) - 1


REWARDED = ["first", "other replicas", "greedy", "one prompt", "trainer", "over-sampled", "resampled", "stop words"]


@pytest.mark.parametrize("name", slow_except(REWARDED[:3], REWARDED))
def test_rewards_belong_to_their_completions(results, name):
    """Also those of a group-wise function: by vLLM and by the trainer, on one replica and on two, of one completion a
    prompt, and of groups that were complete while others were aborted.
    """
    if name == "stop words" and "--stop-words" not in LAYOUTS[results.layout][1]:
        return
    batch = results.batch(name)
    lengths, groups = batch.completion_lengths, batch.group_ids
    shorter = [(lengths[groups == group] < length).sum() for group, length in zip(groups, lengths, strict=True)]
    assert batch.rewards.tolist() == np.stack([lengths, batch.row_ids, shorter], 1).tolist()
    assert results.facts[0][f"{name} failures"] == 0
    assert any(shorter) or name in ("greedy", "stop words") or lengths.min() == lengths.max()


@pytest.mark.slow
def test_one_prompt_leaves_the_other_replica_idle(results):
    batch = results.batch("one prompt")
    assert batch.sample_ids.tolist() == list(range(GENERATIONS))
    assert batch.row_ids.tolist() == [103] * GENERATIONS


@pytest.mark.parametrize("name", ["first", "truncated", "other seed", "greedy", "fresh"])
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_penalties(results, by_transformers):
    """Greedy tokens of transformers' logits, penalized here: once for being there, and for each time."""
    batch, (model, tokenizer) = results.batch("greedy, penalized"), by_transformers
    for prompt, found in zip(prompts(batch), completions(batch), strict=True):
        ids: list[int] = []
        while len(ids) < MAX_TOKENS and tokenizer.eos_token_id not in ids:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, -1]
            for token in set(prompt + ids):
                factor = PENALIZED["repetition_penalty"]
                logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
            for token in set(ids):
                logits[token] -= PENALIZED["presence_penalty"] + PENALIZED["frequency_penalty"] * ids.count(token)
            ids.append(int(logits.argmax()))
        assert found == ids
    assert completions(batch) != completions(results.batch("greedy"))


@pytest.mark.slow
def test_the_trainer_generates_alike(results):
    """--rollout-engine megatron: the same greedy completions, and sampled ones that are exactly on-policy."""
    assert completions(results.batch("trainer greedy")) == completions(results.batch("greedy"))
    assert results.mismatch("trainer") < 2e-6
    assert len(set(map(tuple, completions(results.batch("trainer"))))) > len(results.lengths)


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


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["", "trainer "])
def test_interrupted_completions_go_on(results, whose):
    """Every three tokens a completion continues in another rollout, as if nothing was; vLLM's and the trainer's."""
    if results.layout == "a server":
        return
    assert completions(results.batch(f"{whose}greedy in pieces")) == completions(results.batch("greedy"))
    assert results.mismatch(f"{whose}in pieces") < TOLERANCE
    sampled = results.batch(f"{whose}in pieces")
    assert len(set(map(tuple, completions(sampled)))) > len(results.lengths)
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(sampled.finish_reasons)
    assert sampled.completion_lengths.max() == MAX_TOKENS
    if "--stop-words" in LAYOUTS[results.layout][1]:
        whole, pieces = results.batch(f"{whose}pairs"), results.batch(f"{whose}pairs in pieces")
        assert completions(whole) == completions(pieces)
        assert whole.finish_reasons.tolist() == pieces.finish_reasons.tolist()
        assert 4 in whole.completion_lengths  # a stop word of the third and the fourth token
        assert results.facts[0][f"{whose}pairs"]


@pytest.mark.slow
def test_constrained_completions_match(results, by_transformers):
    """They end by themselves, and their log-probabilities are of another distribution than the trainer's."""
    if "--stop-words" not in LAYOUTS[results.layout][1]:
        assert not (results.directory / "constrained.0.npz").exists()
        return
    batch, tokenizer = results.batch("constrained"), by_transformers[1]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions(batch)]
    assert len(set(texts)) > len(texts) // 2
    for text, ids, reason in zip(texts, completions(batch), batch.finish_reasons, strict=True):
        assert re.fullmatch(PATTERN, text)
        assert reason == FinishReason.STOP and ids[-1] == tokenizer.eos_token_id
    gap = (batch.rollout_log_probs - results.trainer_log_probs("constrained"))[batch.response_mask == 1]
    assert gap.mean() > 0.1 and gap.min() > -1e-4  # what the pattern leaves has all the probability


@pytest.mark.slow
def test_rows_sample_in_their_own_way(results, by_transformers):
    if "--stop-words" not in LAYOUTS[results.layout][1]:
        return
    batch, tokenizer = results.batch("rows"), by_transformers[1]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions(batch)]
    short, chosen, _, stopped, _ = (range(g * GENERATIONS, (g + 1) * GENERATIONS) for g in range(5))
    assert max(batch.completion_lengths[short]) <= 3 and max(batch.completion_lengths) > 3
    assert {texts[i] for i in chosen} <= {"yes", "no"}
    assert all("5" not in texts[i][:-1] for i in stopped)
    known = ~np.isnan(batch.rollout_log_probs)
    for i in range(batch.num_completions):  # constrained ones are not asked for theirs, the others are the trainer's
        inside = slice(batch.cu_seqlens[i] + batch.prompt_lengths[i], batch.cu_seqlens[i + 1])
        assert (~known[inside]).all() if i in chosen else known[inside].all()
    gap = np.abs(batch.rollout_log_probs - results.trainer_log_probs("rows"))[known]
    assert gap.mean() < TOLERANCE


@pytest.mark.slow
def test_the_first_complete_groups_are_kept(results):
    batch = results.batch("over-sampled")
    assert batch.group_ids.tolist() == [g for g in range(3) for _ in range(GENERATIONS)]
    rows = batch.row_ids[::GENERATIONS].tolist()
    assert batch.row_ids.tolist() == [row for row in rows for _ in range(GENERATIONS)]
    assert results.mismatch("over-sampled") < TOLERANCE
    for facts in results.facts:
        unused, metrics = facts["over-sampled"]
        assert sorted(rows + [100 + number for number in unused]) == [
            100 + place for place in range(len(results.lengths))
        ]
        assert metrics["sampling/aborted_groups"] == len(results.lengths) - 3
    again = results.batch("over-sampled again")
    if results.layout != "a server":  # whose order of finishing is a matter of time
        assert completions(again) == completions(batch) and again.row_ids.tolist() == batch.row_ids.tolist()


@pytest.mark.slow
def test_groups_without_signal_are_resampled_and_then_taken(results):
    """All are alike: the two of the first round are replaced, and in the end taken for want of better ones."""
    batch = results.batch("resampled")
    assert sorted(set(batch.row_ids)) == [100, 101]
    for facts in results.facts:
        unused, metrics = facts["resampled"]
        assert unused == [] and metrics["sampling/resampled_groups"] == 2 and metrics["sampling/rounds"] == 1


@pytest.mark.slow
def test_aborted_requests_do_not_come_back(results):
    assert [facts["not aborted"] for facts in results.facts] == [[1], [1]]


@pytest.mark.slow
def test_keys_and_values_of_older_weights_are_not_served(results):
    """New weights come while a request runs: the next one, whose prompt is cached, is as without the cache."""
    if results.layout == "a server":
        pytest.skip("servers have no requests when they get weights")
    for facts in results.facts:
        before, beside, alone = map(np.array, facts["cached prompt"])
        np.testing.assert_allclose(beside, alone, atol=TOLERANCE)
        assert abs(before - alone).max() > 0.01
        assert facts["versions"] == [0] * facts["versions"].count(0) + [77] * facts["versions"].count(77)
        assert set(facts["versions"]) == {0, 77}


def test_new_weights_reach_the_engine(results):
    """Until the sync the engine has the old ones, afterwards the new ones, also for prompts that it had cached."""
    stale, fresh, first = (results.batch(name) for name in ("stale", "fresh", "first"))
    assert completions(stale) == completions(first)
    assert results.mismatch("stale") > 0.1
    assert completions(fresh) != completions(first)
    assert results.mismatch("fresh") < TOLERANCE
    assert set(stale.weight_version) == {0} and set(fresh.weight_version) == {3}


def test_the_check_of_a_sync_passes_right_weights(results):
    for facts in results.facts:
        assert facts["checked fresh"] == facts["checked mended"] == [None, None]


def test_a_bit_that_changes_between_ranks_ends_the_run(results):
    """Where a rank has all that its engine reads, nothing is sent."""
    found = {facts.get("flipped") for facts in results.facts}  # every rank must end
    assert len(found) == 1
    if results.layout == "an engine over two ranks":
        (message,) = found
        assert message.startswith("the weights of update 4 reached the engine with other bytes than the trainer sent")
        assert ": on rank 1 model." in message


def test_the_check_of_a_sync_finds_a_missed_one_by_both_means(results):
    for facts in results.facts:  # every rank must end
        tensors, log_probs = facts["checked stale"]
        assert "more tensors" in tensors
        if results.layout == "a server":  # which has been sent the weights once more by then
            assert "model.embed_tokens.weight of http://" in tensors and log_probs is None
        else:
            assert "model.embed_tokens.weight: " in tensors
            assert "other log-probabilities than the trainer" in log_probs


@pytest.mark.slow
@pytest.mark.parametrize("case", ["corrupted", "left out"])
def test_the_check_of_a_sync_names_the_tensor(results, case):
    for facts in results.facts:
        assert len(facts[case]) > 5
        for name, message in facts[case]:
            if results.layout == "a server":  # what was left out it had from the check before
                seen = case == "corrupted" and ("norm" in name or "embed" in name)  # not what vLLM packs on a CPU
                assert (f":{name} of http" in message and "more tensors" not in message) if seen else message is None
                continue
            count = "2" if case == "corrupted" else ""  # a fused parameter of which a part is missing is lost
            assert f": on rank 0 {name}: {count}" in message and "; model" not in message
