"""Loss, gradient norm and weights after two updates do not depend on the layout, the micro-batches or the packing."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

LAYOUTS = {
    1: {
        "micro batch 1": "--micro-batch-size 1",
        "micro batch 2": "--micro-batch-size 2",
        "micro batch 4": "--micro-batch-size 4",
        "token budget": "--max-tokens-per-microbatch 70",
        "recompute": "--micro-batch-size 4 --recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 1",
    },
    2: {
        "DP2": "--micro-batch-size 2",
        "DP2 distributed optimizer": "--micro-batch-size 2 --use-distributed-optimizer",
        "DP2 overlapped": "--micro-batch-size 2 --use-distributed-optimizer --overlap-grad-reduce"
        " --overlap-param-gather",
        "DP2 token budget": "--max-tokens-per-microbatch 70",
        "TP2": "--micro-batch-size 2 --tensor-model-parallel-size 2",
        "TP2 SP": "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "TP2 SP token budget": "--max-tokens-per-microbatch 70 --tensor-model-parallel-size 2 --sequence-parallel",
        "PP2": "--micro-batch-size 2 --pipeline-model-parallel-size 2",
        "PP2 token budget": "--max-tokens-per-microbatch 70 --pipeline-model-parallel-size 2",
    },
    4: {
        "TP2 DP2": "--micro-batch-size 1 --tensor-model-parallel-size 2",
        "PP2 DP2": "--micro-batch-size 2 --pipeline-model-parallel-size 2",
        "TP2 PP2": "--micro-batch-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "TP2 SP PP2": "--max-tokens-per-microbatch 70 --tensor-model-parallel-size 2 --sequence-parallel"
        " --pipeline-model-parallel-size 2",
    },
}
TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def reference(tmp_path_factory, tiny_models):
    """The one-process run, and the folder that all results go to."""
    from conftest import run_torchrun

    out = tmp_path_factory.mktemp("layouts")
    cases = [f"{name}:{flags}" for name, flags in LAYOUTS[1].items()]
    run_torchrun(1, "tests/parallel_layouts.py", tiny_models["qwen3"], out, *cases)
    return out


def compare(out, name: str, expected: str) -> None:
    rows, want_rows = (json.loads((out / f"{n}.json").read_text()) for n in (name, expected))
    for row, want in zip(rows, want_rows, strict=True):
        for key in ("loss", "grad_norm", "kl", "entropy", "clip/low", "clip/high", "ratio/max", "mismatch/mean_abs"):
            assert row[key] == pytest.approx(want[key], rel=TOLERANCE, abs=1e-7), f"{name}: {key}"
    weights, want_weights = (load_file(out / f"{n}.safetensors") for n in (name, expected))
    assert weights.keys() == want_weights.keys()
    for key, tensor in weights.items():
        gap = torch.linalg.norm(tensor - want_weights[key]) / torch.linalg.norm(want_weights[key])
        assert gap < TOLERANCE, f"{name}: {key} differs by {gap:.1e} of its norm"


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 4])
def test_layouts_agree(reference, tiny_models, world, torchrun):
    if world > 1:
        cases = [f"{name}:{flags}" for name, flags in LAYOUTS[world].items()]
        torchrun(world, "tests/parallel_layouts.py", tiny_models["qwen3"], reference, *cases, timeout=600)
    for name in LAYOUTS[world]:
        compare(reference, name, "micro batch 1")


@pytest.mark.distributed
def test_the_updates_moved_the_weights(reference, tiny_models):
    """So that agreement is not that of models that stood still."""
    before = load_file(f"{tiny_models['qwen3']}/model.safetensors")
    after = load_file(reference / "micro batch 1.safetensors")
    assert all(torch.linalg.norm(after[k] - before[k]) / torch.linalg.norm(before[k]) > 1e-4 for k in before)


@pytest.mark.distributed
def test_the_update_is_autograds(reference, tiny_models):
    """Loss and gradient norm of both updates, and the weights after them, from transformers' model, autograd and
    AdamW.
    """
    from parallel_layouts import perturbations, rollout

    model = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-4, weight_decay=0.01)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
    batch = rollout(model.config.vocab_size)
    noise = perturbations(len(batch.tokens))

    def log_probs(i):
        begin, end, prompt = batch.cu_seqlens[i], batch.cu_seqlens[i + 1], batch.prompt_lengths[i]
        ids = torch.tensor(batch.tokens[begin:end].astype(np.int64))
        log_p = torch.log_softmax(model(ids[None]).logits[0] / 0.8, -1)  # --temperature 0.8
        return log_p[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0]

    old = [log_probs(i).detach() for i in range(32)]
    rows = json.loads((reference / "micro batch 1.json").read_text())
    for update, row in enumerate(rows):
        total = 0.0
        for i in range(16 * update, 16 * update + 16):
            inside = slice(batch.cu_seqlens[i] + batch.prompt_lengths[i], batch.cu_seqlens[i + 1])
            new, advantage = log_probs(i), float(batch.advantages[i])
            ratio = torch.exp(new - (old[i] + noise[0, inside]))
            x = new - (old[i] + noise[1, inside])
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total += (loss + 0.1 * (torch.exp(-x) - 1 + x)).mean() / 16  # mean over tokens, then over completions
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert row["loss"] == pytest.approx(total.item(), rel=1e-4)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    ours = load_file(reference / "micro batch 1.safetensors")
    for name, parameter in model.named_parameters():
        if "norm" not in name:  # Megatron takes no weight decay on vectors
            gap = torch.linalg.norm(ours[name].double() - parameter) / torch.linalg.norm(parameter)
            assert gap < 1e-4, f"{name}: {gap:.1e}"
