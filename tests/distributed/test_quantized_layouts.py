"""Two ranks read FP8 and MXFP4 checkpoints in their layouts: every shard is that of the dequantized model."""

import json
import sys
from pathlib import Path

import pytest
from quantizers import FP8, MXFP4, quantize, quantize_fp8, quantize_mxfp4
from run_files import metrics_of
from sharp_model import make_sharp_model
from toy_checkpoints import build, make, same_bits, tensors_of, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
import torch.distributed as dist

from megatron_grpo.parallel import initialize
from megatron_grpo.training import entry_point
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.weights import hf, model_weights

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
GROUPED = {"moe_grouped_gemm": True}
CASES = {
    "few": [("deepseek_v3", {**TP2, **EP2}), ("gpt_oss", {**TP2, **EP2})],
    "the others": [
        *(("deepseek_v3", layout) for layout in ({**TP2, "expert_tensor_parallel_size": 2}, PP2, {**EP2, **GROUPED})),
        *(("gpt_oss", {**layout, "expert_tensor_parallel_size": 1}) for layout in (TP2, PP2, {**EP2, **GROUPED})),
    ],
}


@pytest.mark.distributed
@pytest.mark.parametrize("which", ["few", pytest.param("the others", marks=pytest.mark.slow)])
def test_shards_of_quantized_models(which, tmp_path, torchrun):
    for family, one, settings in (("deepseek_v3", quantize_fp8, FP8), ("gpt_oss", quantize_mxfp4, MXFP4)):
        make(tmp_path / family, family, tied=False, dtype=torch.bfloat16)
        quantize(tmp_path / family, tmp_path / f"{family} in bf16", one, settings)
    done = torchrun(2, __file__, tmp_path, which)
    assert done.stdout.count("same shards, same export") == len(CASES[which])


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.distributed
def test_a_run_from_a_quantized_model(tiny_models, tmp_path, torchrun):
    """The engine has the trainer's weights: neither of them takes the model for a quantized one."""
    make_sharp_model(tiny_models["qwen3"], tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "model in bf16", quantize_fp8, FP8)
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) + "\n" for n in range(8))
    )
    words = f"""--load-hf {tmp_path}/model --train-data-path {tmp_path}/train.jsonl --reward-funcs exact_match
        --train-iters 1 --tensor-model-parallel-size 2 --transformer-impl local --vllm-max-num-seqs 32
        --num-generations 4 --lr 1e-10 --global-batch-size 32 --max-prompt-length 160
        --max-completion-length 16 --save {tmp_path}/save --beta 0.1 --ref-load-hf {tmp_path}/model
        --teacher-load-hf {tmp_path}/model --teacher-kl-coef 1"""
    done = torchrun(2, "pretrain_grpo.py", *words.split())
    # The policy, its reference model and its teacher are the same.
    assert done.stdout.count("weights in fp8 in blocks of 24 x 20 are dequantized") == 3
    (row,) = metrics_of(tmp_path / "save")
    assert row["mismatch/mean_abs"] < 1e-5 and row["kl"] < 1e-9 and row["teacher/kl"] < 1e-9
    for directory in ("hf_assets", "hf_model"):
        assert "quantization_config" not in json.loads((tmp_path / "save" / directory / "config.json").read_text())
    after, before = (tensors_of(path) for path in (tmp_path / "save" / "hf_model", tmp_path / "model in bf16"))
    assert after.keys() == before.keys()
    # The run is in float32, and its update is nothing against the rounding to bf16.
    assert all(torch.allclose(after[name], before[name].float(), rtol=2**-8, atol=1e-8) for name in before)


def main(directory: Path, which: str) -> None:
    initialize.initialize_distributed(parse_args([]))
    ready = None
    for number, (family, layout) in enumerate(CASES[which]):
        args = toy_args(directory / family, bf16=True, **layout)
        if ready != layout:
            initialize.destroy_rank_groups()
            initialize.initialize_distributed(args)
            ready = layout
        initialize.set_random_seed(1)
        packed, whole = (build(args) for _ in range(2))
        hf.load_hf(packed, args, directory / family)
        hf.load_hf(whole, args, directory / f"{family} in bf16")
        expected = dict(model_weights.named_weights(whole))
        found = dict(model_weights.named_weights(packed))
        assert found.keys() == expected.keys()
        assert all(same_bits(found[name], expected[name]) for name in found)
        assert not any(tensor.isnan().any() for tensor in found.values())
        assert any(".experts." in name for name in found)
        hf.save_hf(packed, args, directory / f"out-{number}")
        written, stored = tensors_of(directory / f"out-{number}"), tensors_of(directory / f"{family} in bf16")
        assert written.keys() == stored.keys() and all(same_bits(written[name], stored[name]) for name in stored)
        if dist.get_rank() == 0:
            print(f"{family} {layout}: same shards, same export", flush=True)


if __name__ == "__main__":
    entry_point.run(lambda: main(Path(sys.argv[1]), sys.argv[2]))
