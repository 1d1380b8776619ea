"""Every family in vLLM's CPU build: what the stream gives the engine is what the files would have given it."""

import functools
import json

import pytest
import torch
from ranks import run_torchrun
from slow import slow_except
from toy_checkpoints import DELTA, FAMILIES, GEMMA4, HYBRID, SHAPES, from_files, make

# Those of stream_worker.py.
PROMPTS = [[5, 9, 33, 7, 21, 90, 14], [44], [3 + 7 * i % 100 for i in range(40)]]
pytestmark = pytest.mark.vllm
# vLLM's kernels on a CPU want heads of 32 channels and experts of multiples of 32.
MULTI_LATENT = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "hidden_size": 128}
LONGROPE = {"short_factor": [1.0 + i / 4 for i in range(12)], "long_factor": [9.0] * 12}
WIDE = {"head_dim": 32, "global_head_dim": 64}
# With what config.json has on the Hub and transformers leaves out.
SIZES = (
    dict.fromkeys(HYBRID, DELTA | {"rms_norm_eps": 1e-6})  # the default: BFLOAT16 was measured with it
    | dict.fromkeys(GEMMA4, WIDE)
    | {
        "qwen2": {"hidden_size": 256},
        "phi3": {"hidden_size": 256, "rope_scaling": {**SHAPES["phi3"]["rope_scaling"], **LONGROPE}},
        "deepseek_v2": {**MULTI_LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        "glm4_moe_lite": {**MULTI_LATENT, "v_head_dim": 32},
        "deepseek_v3": {**MULTI_LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    }
)


# Mean |difference| of log-probabilities in nats; 0.012 to 0.039 were seen. The router may choose other experts.
BFLOAT16 = {"qwen3_5_text": 0.03, "qwen3_next": 0.05, "qwen3_5_moe_text": 0.05}
BY_DEFAULT = ("qwen3",)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Gives the directory of a family, with the engine's answers. Few families, or all the others, are started at once,
    half of them by each of two processes, as starting takes long.
    """

    @functools.cache
    def start(few: bool):
        root = tmp_path_factory.mktemp("stream")
        families = [family for family in FAMILIES if (family in BY_DEFAULT) == few]
        for family in families:
            sizes = SIZES.get(family, {"head_dim": 32})
            for name, seed in (("first", 17), ("other", 23)):
                make(root / family / name, family, tied=family in ("gemma2", "qwen3"), seed=seed, **sizes)
        run_torchrun(2, "tests/distributed/stream_worker.py", *(root / family for family in families))
        return root

    return lambda family: start(family in BY_DEFAULT) / family


def differences(model, answers) -> torch.Tensor:
    """The differences of vLLM's log-probabilities from those of transformers' model, of all tokens of the answers."""
    found = []
    for prompt, (completion, log_probs) in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[torch.arange(len(completion)), completion]
        found.append((expected - torch.tensor(log_probs)).abs())
    return torch.cat(found)


def of_transformers(directory) -> torch.nn.Module:
    return from_files(directory, attn_implementation="eager")


@pytest.mark.parametrize("family", slow_except(BY_DEFAULT, FAMILIES))
def test_streamed_weights_answer_like_those_from_files(family, answered):
    answers = json.loads((answered(family) / "answers.json").read_text())
    ids = {name: [completion for completion, _ in answers[name]] for name in ("files", "stream", "other")}
    assert ids["stream"] == ids["files"] != ids["other"]
    for name in ("files", "stream", "other"):
        weights = answered(family) / ("other" if name == "other" else "first")
        found = differences(of_transformers(weights), answers[name])
        if family in HYBRID:
            assert found.mean() < BFLOAT16[family], name
        else:
            assert found.max() < 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("linear_attn.A_log", lambda w: w.flip(0)),  # heads in another order
        ("linear_attn.conv1d.weight", lambda w: w.flip(-1)),
        ("linear_attn.norm.weight", lambda w: w.flip(0)),
        ("linear_attn.norm.weight", lambda w: 1 + w),  # as the other norms have it
        ("input_layernorm.weight", lambda w: w - 1),
    ],
)
def test_an_error_of_one_layer_exceeds_the_bound_of_bfloat16(name, wrong, answered, family):
    """In transformers' model, whose log-probabilities are the trainer's to 1e-5 (test_hybrid_models.py)."""
    directory = answered(family)
    answers = json.loads((directory / "answers.json").read_text())["stream"]
    model = of_transformers(directory / "first")
    assert differences(model, answers).mean() < BFLOAT16[family]
    weight = model.get_parameter(f"model.layers.0.{name}")
    weight.data = wrong(weight.data)
    assert differences(model, answers).mean() > 2 * BFLOAT16[family]


@pytest.mark.parametrize("family", slow_except(BY_DEFAULT, FAMILIES))
def test_what_differs_between_engine_and_stream_is_named(family, answered):
    """Nothing with the weights that vLLM read from files by itself, or was given; everything with others."""
    answers = json.loads((answered(family) / "answers.json").read_text())
    assert answers["files after"] == answers["other after"] == answers["stream after"] == []
    differing = {line.split(":")[0] for line in answers["other before"]}
    assert differing >= {name for name in answers["names"] if "norm" not in name and "bias" not in name}
    assert answers["stream before"] != []
