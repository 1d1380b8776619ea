"""Colocated vLLM on GPUs beside a trainer in bf16: random numbers, log-probabilities, weights, memory."""

import math
from itertools import chain

import models
import pytest
import torch
from launch import engine_flags, found

FLAT = 0.3  # standard deviation of logits: two samples of 32 tokens are never equal by chance
SHARP = 6.0  # the largest of 4,096 is then about 22


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """`model(family, logits, **keys of config.json)`: a Hugging Face directory, made once."""
    made: dict[tuple, str] = {}

    def get(family: str, logits: float, **keys: object) -> str:
        kind = family, logits, *keys.items()
        if kind not in made:
            made[kind] = models.make(tmp_path_factory.mktemp(family), family, logits, **keys)
        return made[kind]

    return get


def all_differ(*rollouts: list[list[int]]) -> bool:
    completions = list(map(tuple, chain(*rollouts)))
    return len(set(completions)) == len(completions)


def share_equal(one: list[list[int]], other: list[list[int]]) -> float:
    return sum(map(list.__eq__, one, other)) / len(one)


def check_weights(facts: dict, limit: float) -> None:
    """The engine had the trainer's weights, not those that changed since, and has them after a sync (nats)."""
    before, stale, after = facts["weights"]
    print(f"mismatch {before:.4f}, with stale weights {stale:.4f}, with new ones {after:.4f}")
    assert before < limit and after < limit and stale > 2 * limit, facts["weights"]


EAGER = "--vllm-enforce-eager"
ONE_LAUNCH = pytest.mark.xdist_group("dense")  # of the tests that read what `dense` found


@pytest.fixture(scope="module")
def dense(tmp_path_factory, model):
    """One replica of a dense model, with CUDA graphs as in a run."""
    out = tmp_path_factory.mktemp("dense") / "out"
    cases, flags = "seeds,queued,cache,weights", ["--vllm-enable-prefix-caching"]
    return found(out, 1, cases, model("qwen3", FLAT), *flags, env={"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"})[0]


@ONE_LAUNCH
def test_rollouts_differ_and_repeat(dense):
    """Of one prompt, so that only the random numbers differ."""
    assert dense["runner of its own"], "this is for the runner that draws seeds from numpy"
    assert all_differ(dense["a"], dense["b"])
    assert dense["c"] == dense["a"]


@ONE_LAUNCH
def test_nothing_of_a_rollout_reaches_the_next(dense):
    first, second, third = dense["queued"]
    assert first == second == third and all_differ(first)


@ONE_LAUNCH
def test_no_prefix_of_earlier_weights_is_used(dense):
    assert dense["cache"] < 0.05


@ONE_LAUNCH
def test_new_weights_while_a_step_is_under_way(dense):
    """A running request has the tokens of the old weights up to them, and then others."""
    tokens, undisturbed, others = dense["seam"]
    assert tokens >= 2 and undisturbed and others


@pytest.mark.parametrize("flags", [[], ["--lora-rank", "8"]], ids=["all weights", "adapter"])
def test_short_decode_steps_sample_the_same(tmp_path, model, flags):
    """As vLLM's: the same kernels, whose rows are those of the graph's batch in the head, too."""
    facts = found(tmp_path / "out", 1, "short_steps", model("qwen3", FLAT), *flags)[0]["short steps"]
    truncated = facts.pop("1.0 True 0.9")
    assert truncated == [46, 46, 0], facts  # vLLM's sampler truncates
    for equal, completions, steps in facts.values():
        assert equal == completions == 46 and steps > 20, facts


@pytest.mark.parametrize("flags", [[], ["--lora-rank", "8"]], ids=["all weights", "adapter"])
def test_decode_steps_of_several_tokens_sample_the_same(tmp_path, model, flags):
    facts = found(tmp_path / "out", 1, "several_tokens", model("qwen3", FLAT), *flags)[0]["several tokens"]
    for equal, completions, single, several in facts.values():
        assert equal == completions == 23 and 8 <= several < single / 2, facts


# Sequences of up to 512 tokens, up to 512 at a time, in a cache that holds them.
MANY = "--max-completion-length 440 --vllm-max-num-seqs 512".split()


def needs_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("our kernel of decode steps has been measured on Hopper alone")


def check_attention(facts: dict) -> None:
    """Graphs recorded the kernel of the choice, and completions are right on both sides of it."""
    least, graphs = facts["least"] or math.inf, facts["graphs"]
    assert "our time over FlashAttention's" in facts["line"], facts["line"]
    assert graphs[-1] == 512 and facts["recorded"] == [size for size in graphs if size >= least], facts
    assert all(gap < 0.05 for gap in facts["mismatch"].values()), facts["mismatch"]  # `max` passes over NaN


@pytest.mark.alone
def test_decode_steps_attend_by_the_chosen_kernel(tmp_path, model):
    needs_hopper()
    check_attention(found(tmp_path / "out", 1, "attention", model("qwen3", FLAT), *MANY)[0]["attention"])


def test_both_kernels_of_decode_steps_are_right(tmp_path, model):
    """Without CUDA graphs, where the fixed rule holds and a test can change the choice."""
    needs_hopper()
    facts = found(tmp_path / "out", 1, "each_attention", model("qwen3", FLAT), EAGER)[0]["each attention"]
    assert "a fixed rule" in facts["line"] and "from 128 sequences on" in facts["line"]
    ours, none = facts["calls"]
    assert ours >= 4 * 20 and none == 0, facts  # of four layers and most of 32 tokens
    assert all(gap < 0.05 for gap in facts["mismatch"]), facts


@pytest.mark.gpus(2)
def test_ranks_attend_by_the_same_kernel(tmp_path, model):
    needs_hopper()
    flags = *MANY, "--vllm-tensor-parallel-size", "2", "--tensor-model-parallel-size", "2"
    first, second = found(tmp_path / "out", 2, "attention", model("qwen3", FLAT), *flags)
    assert first == second
    check_attention(first["attention"])


@pytest.mark.alone
@pytest.mark.parametrize(
    ("family", "level"),
    [("qwen3", "2"), *((family, level) for family in ("qwen3_5_text", "nemotron_h") for level in ("1", "2"))],
)
def test_sleep_and_offload_free_memory(tmp_path, model, family, level):
    """And completions after it are those before it, of hybrids with new states."""
    flags = EAGER, "--sleep-level", level, *(hybrid_flags(family) if family != "qwen3" else ())
    facts = found(tmp_path / "out", 1, "sleep", model(family, FLAT), *flags)[0]["sleep"]
    awake, asleep, offloaded, again = facts["free"]
    assert asleep - awake > 256 << 20  # the cache, and the weights
    assert offloaded - asleep > 0.5 * facts["moved"] > 10 << 20  # torch's allocator keeps part of a few blocks
    assert abs(again - awake) < 64 << 20
    assert facts["weights came back"] and facts["answers are the same"]


@ONE_LAUNCH
def test_weights_reach_the_engine(dense):
    check_weights(dense, 0.05)


def test_experts_sample_anew_in_every_rollout(tmp_path, model):
    """Mixtures of experts have vLLM's first runner, in which the rollout has a seed and not the request."""
    facts = found(tmp_path / "out", 1, "seeds,weights", model("qwen3_moe", FLAT), EAGER)[0]
    assert all_differ(facts["a"], facts["b"]) and facts["c"] == facts["a"]
    check_weights(facts, 0.05)


def hybrid_flags(family: str) -> list[str]:
    """Flags of models with recurrent states."""
    options = {"gdn_prefill_backend": "triton"} if family.startswith("qwen3_5") else {}
    return ["--use-distributed-optimizer", *engine_flags(512, **options)]


HYBRIDS = [(family, {}) for family in ("qwen3_5_text", "qwen3_5_moe_text", "nemotron_h")]


@pytest.mark.parametrize(("family", "keys"), [*HYBRIDS, ("nemotron_h", {"hybrid_override_pattern": "M*M-"})], ids=str)
def test_hybrids_sample_and_follow(tmp_path, model, family, keys):
    """States of a rollout do not reach the next, and weights reach the engine.

    Rows of this Nemotron-H's Mamba projection are no multiple of 16 bytes, which inductor would pad.
    """
    directory = model(family, FLAT, **keys)
    facts = found(tmp_path / "out", 1, "seeds,compared,weights", directory, *hybrid_flags(family))[0]
    assert all_differ(facts["a"], facts["b"]) and facts["c"] == facts["a"]
    assert facts["compared"] == []
    check_weights(facts, 0.05)


GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 128,
    "hidden_size_per_layer_input": 0,
}
COMPILED = [("gemma4_text", GEMMA4_EXPERTS), *((family, {}) for family in ("gemma4_text", *models.EXPERTS))]


@pytest.mark.parametrize(("family", "keys"), COMPILED, ids=str)
def test_families_follow(tmp_path, model, family, keys):
    """Compiled, as in a run: vLLM then computes the gates of experts outside of its operator for experts."""
    facts = found(tmp_path / "out", 1, "seeds,weights", model(family, FLAT, **keys))[0]
    assert all_differ(facts["a"], facts["b"]) and facts["c"] == facts["a"]
    # Where rounding chooses other experts, Gemma 4's new weights are 0.05 off.
    check_weights(facts, 0.1 if keys else 0.05)


@pytest.mark.parametrize("family", ["gemma4_text", "minimax_m2", "glm4_moe_lite"])
def test_families_follow_without_compilation(tmp_path, model, family):
    facts = found(tmp_path / "out", 1, "seeds,weights", model(family, FLAT), EAGER)[0]
    assert all_differ(facts["a"], facts["b"]) and facts["c"] == facts["a"]
    check_weights(facts, 0.05)


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_hybrids_reuse_prefixes(tmp_path, model, family):
    """A request goes on from the states at the end of a cached prefix, which new weights drop.

    vLLM's blocks are as large as a state: a prompt of 1,100 tokens has whole ones.
    """
    flags = *hybrid_flags(family), "--vllm-enable-prefix-caching", "--max-prompt-length", "1100"
    facts = found(tmp_path / "out", 1, "prefix,cache", model(family, FLAT), *flags)[0]
    first, least, most = facts["prefix"]["cached"]
    assert first == 0 and 256 <= facts["prefix"]["block"] <= least <= most < 1100, facts["prefix"]
    assert facts["prefix"]["mismatch"] < 0.05 and facts["cache"] < 0.05, facts


def test_temperature_and_caps_cost_no_exactness(tmp_path, model):
    """Logits are cooled and soft-capped in float32, as by the trainer: in bf16 each would be rounded by up to 0.06."""
    cool = found(tmp_path / "cool", 1, "temperatures", model("qwen3", SHARP), EAGER, "--temperature", "0.7")[0]
    capped = found(tmp_path / "cap", 1, "temperatures", model("gemma2", SHARP), EAGER, "--temperature", "1")[0]
    plain = cool["mismatch"]["1.0"]
    assert min(plain, capped["mismatch"]["1.0"]) > 1e-3, "a model that is sure of its tokens has nothing to round"
    print(f"mismatch {cool['mismatch']}, capped {capped['mismatch']}")
    assert cool["mismatch"]["0.7"] < 1.3 * plain
    assert capped["mismatch"]["1.0"] < 1.3 * plain


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_kept_tokens(tmp_path, model, family):
    """Of both of vLLM's runners: engine and trainer agree over the tokens that truncation keeps."""
    flags = "--temperature 0.6 --top-k 8 --top-p 0.9".split()
    gap, fewest, most = found(tmp_path / "out", 1, "kept_tokens", model(family, SHARP), EAGER, *flags)[0]["kept tokens"]
    assert gap < 0.1 and fewest < most <= 8, (gap, fewest, most)


def test_quantized_engine(tmp_path, model):
    """8-bit weights are other weights; they follow the trainer's all the same."""
    facts = found(tmp_path / "out", 1, "seeds,weights", model("qwen3", FLAT), EAGER, "--vllm-quantization", "fp8")[0]
    assert all_differ(facts["a"], facts["b"]) and facts["c"] == facts["a"]
    check_weights(facts, 0.2)


@pytest.mark.gpus(2)
@ONE_LAUNCH
def test_two_replicas_share_no_samples(tmp_path, model, dense):
    """Nor do samples depend on which replica makes them, but for rounding."""
    first, second = found(tmp_path / "out", 2, "seeds", model("qwen3", FLAT))
    assert first == second and all_differ(first["a"], first["b"]) and first["c"] == first["a"]
    assert share_equal(first["a"], dense["a"]) > 0.8


@pytest.mark.gpus(2)
@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
def test_ranks_of_a_replica_draw_alike(tmp_path, model, layout):
    flags = EAGER, "--vllm-tensor-parallel-size", "2", *layout.split()
    first, second = found(tmp_path / "out", 2, "ranks,seeds,weights", model("qwen3", FLAT), *flags)
    assert first == second and all_differ(first["rank"]) and all_differ(first["a"], first["b"])
    check_weights(first, 0.05)


def check_adapter(facts: dict) -> None:
    zero, stale, fresh, woken = facts["mismatch"]  # nats
    assert all(gap < 0.05 for gap in (zero, fresh, woken)) and stale > 0.1, facts["mismatch"]
    assert facts["probe"] is None and facts["weights"] == []
    assert "does not hold the adapter" in facts["withheld"]
    assert facts["metrics"]["lora/sync_bytes"] > 0
    print(f"proof of an adapter: {1e3 * facts['metrics']['lora/check_seconds']:.1f} ms")


@pytest.mark.alone
@pytest.mark.parametrize(("level", "rank"), [("0", "16"), ("1", "16"), ("2", "6")])
def test_an_adapter_reaches_the_engine(tmp_path, model, level, rank):
    """Rank 6 is padded to 8. With CUDA graphs, which hold the addresses of the slots."""
    flags = "--lora-rank", rank, "--sleep-level", level
    check_adapter(found(tmp_path / "out", 1, "adapter", model("qwen3", FLAT), *flags)[0]["adapter"])


@pytest.mark.alone
def test_an_adapter_of_attention_beside_experts(tmp_path, model):
    flags = "--lora-rank 8 --sleep-level 2 --lora-target-modules q_proj k_proj v_proj o_proj".split()
    check_adapter(found(tmp_path / "out", 1, "adapter", model("qwen3_moe", FLAT), EAGER, *flags)[0]["adapter"])


@pytest.mark.gpus(2)
@pytest.mark.alone
def test_an_adapter_reaches_an_engine_over_two_gpus(tmp_path, model):
    flags = "--lora-rank 8 --sleep-level 2 --tensor-model-parallel-size 2 --vllm-tensor-parallel-size 2".split()
    for facts in found(tmp_path / "out", 2, "adapter", model("qwen3", FLAT), EAGER, *flags):
        check_adapter(facts["adapter"])
