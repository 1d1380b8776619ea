"""The frozen base in 8 bits: values, gradients, memory, what streams and files get.

The expected weights come from a loop over the blocks of the Hugging Face files' matrices.
"""

import re
import shutil

import pytest
from toy_checkpoints import VOCAB, build, make, packed, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
import torch.nn.functional as F
from good_args import validated
from safetensors.torch import load_file, save_file
from slow import slow_except

from megatron_grpo.estimate.memory import Plan
from megatron_grpo.lora import fp8_base
from megatron_grpo.lora.attach import adapters, attach, switched_off
from megatron_grpo.lora.stream import stream_merged
from megatron_grpo.models import fp8_weight
from megatron_grpo.models.fp8_weight import Fp8Weight
from megatron_grpo.training import train_step
from megatron_grpo.training.offload import Offloader
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import hf
from megatron_grpo.weights.stream import stream_hf

IDS = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))
LINEAR = re.compile(r"model\.layers\..*(_proj|_proj_with_mqa)\.weight")  # of the decoder, without routers
# family, its settings, of the model; matrices of several blocks, and such as do not end with a block
WIDE = {"hidden_size": 144, "intermediate_size": 272}
CASES = {
    "dense": ("qwen3", WIDE, {}),
    "one tensor for q, k and v": ("phi3", {"intermediate_size": 144}, {}),
    "experts": ("qwen3_moe", {"hidden_size": 144, "moe_intermediate_size": 136}, {}),
    "grouped experts": ("qwen3_moe", {"hidden_size": 144, "moe_intermediate_size": 136}, {"moe_grouped_gemm": True}),
    "latent attention": ("deepseek_v3", {"hidden_size": 144}, {}),
    "DoRA": ("qwen3", WIDE, {"lora_use_dora": True}),
}


def in_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """What 8 bits leave of a matrix."""
    out = torch.empty_like(matrix)
    for top in range(0, matrix.shape[0], 128):
        for left in range(0, matrix.shape[1], 128):
            place = slice(top, top + 128), slice(left, left + 128)
            scale = matrix[place].abs().max() / 448
            out[place] = (matrix[place] / scale).to(torch.float8_e4m3fn).float() * scale
    return out


def adapted(directory, base_dtype, **more):
    """The directory's model with adapters whose B is not zero."""
    settings = {"lora_rank": 4, "lora_target_modules": ["all-linear"], "lora_base_dtype": base_dtype, **more}
    args = toy_args(directory, **settings)
    chunks = build(args)
    hf.load_hf(chunks, args, directory)
    attach(args, chunks)
    for adapter in adapters(chunks):
        adapter.initialize(lambda name, shape: 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(7)))
        adapter.set_norms()
    return args, chunks


def logits(model) -> torch.Tensor:
    return model(IDS[None], torch.arange(len(IDS))[None], attention_mask=None, packed_seq_params=packed(IDS))[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-6 * expected.norm())


@pytest.fixture(params=slow_except(["dense", "grouped experts"], CASES))
def case(request, tmp_path):
    """(directory, the same with weights that 8 bits hold, settings of the model)."""
    family, config, more = CASES[request.param]
    make(tmp_path / "base", family, tied=False, **config)
    shutil.copytree(tmp_path / "base", tmp_path / "rounded")
    for file in (tmp_path / "rounded").glob("*.safetensors"):
        weights = load_file(file)
        linear = {name: in_blocks(weight) for name, weight in weights.items() if LINEAR.fullmatch(name)}
        assert all((linear[name] - weights[name]).norm() > 0.01 * weights[name].norm() for name in linear)
        save_file(weights | linear, file, metadata={"format": "pt"})
    return tmp_path / "base", tmp_path / "rounded", more


def test_outputs_and_gradients_are_those_of_the_dequantized_base(world, case):
    base, rounded, more = case
    (_, [model]), (_, [expected]) = adapted(base, "fp8", **more), adapted(rounded, "model", **more)
    outputs = [logits(model), logits(expected)]
    assert close(*outputs)
    for one in outputs:
        F.cross_entropy(one[:-1, :VOCAB], IDS[1:]).backward()
    pairs = [
        (name, mine.grad, parameter.grad)
        for (name, mine), parameter in zip(model.lora.named_parameters(), expected.lora.parameters(), strict=True)
    ]
    assert len(pairs) > 10 and all(close(mine, theirs) for _, mine, theirs in pairs if theirs is not None)
    with torch.no_grad(), switched_off([model]), switched_off([expected]):
        assert close(logits(model), logits(expected))


def test_every_stream_has_the_weights_that_the_trainer_computes_with(world, case):
    """Hugging Face tensors for an engine that starts, and W + s B A, whose W are bit for bit the dequantized ones."""
    base, rounded, more = case
    (args, chunks), (plain, expected) = adapted(base, "fp8", **more), adapted(rounded, "model", **more)
    for stream in (stream_hf, stream_merged):
        pairs = list(zip(stream(chunks, args), stream(expected, plain), strict=True))
        assert len(pairs) >= 15
        for (name, tensor), (other, wanted) in pairs:
            assert name == other and type(tensor) is torch.Tensor
            assert torch.equal(tensor, wanted) if stream is stream_hf else close(tensor, wanted), name


@pytest.mark.parametrize("grouped", [False, True])
def test_the_backward_pass_keeps_8_bits(world, tmp_path, grouped):
    """No copy of a linear weight in the model's dtype lives between the passes, or is a parameter."""
    make(tmp_path, "qwen3_moe", tied=False, hidden_size=144, moe_intermediate_size=136)
    _, [model] = adapted(tmp_path, "fp8", moe_grouped_gemm=grouped)
    linear = {name: p for name, p in model.named_parameters() if re.search(r"linear_\w+\.weight", name)}
    assert linear and all(isinstance(p, Fp8Weight) and p.values.element_size() == 1 for p in linear.values())
    assert not any(isinstance(p, Fp8Weight) for name, p in model.named_parameters() if name not in linear)
    shapes = {shape for p in linear.values() for shape in (p.shape, p.shape[-2:], p.mT.shape, p.shape[-2:][::-1])}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        logits(model)
    assert len(kept) > 50
    assert not [tensor.shape for tensor in kept if tensor.shape in shapes and not isinstance(tensor, Fp8Weight)]


def test_offloaded_weights_come_back(world, tmp_path):
    make(tmp_path, "qwen3", tied=False, **WIDE)
    args, chunks = adapted(tmp_path, "fp8", lr=1e-3, min_lr=1e-3, train_iters=1)
    [model], optimizer, _ = train_step.setup_optimizer(args, chunks)
    weights = [weight for weight in model.parameters() if isinstance(weight, Fp8Weight)]
    with torch.no_grad():
        before = logits(model)
        offloader = Offloader([model], optimizer, weights=True, gradients=True, optimizer_state=True)
        moved = offloader.to_host()
        assert moved.size > sum(weight.values.nbytes for weight in weights) > 0
        assert not any(weight.values.untyped_storage().nbytes() for weight in weights)
        offloader.to_device()
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("dtype", ["", "--bf16"])
def test_the_estimate_counts_the_bytes_of_the_built_model(world, dtype):
    sizes = "--hidden-size 256 --ffn-hidden-size 384 --kv-channels 32 --num-layers 2"
    args = validated(f"--lora-rank 4 --lora-base-dtype fp8 {sizes} {dtype}", world_size=1)
    chunks = build(args)
    attach(args, chunks)
    parts = [fp8_weight.stored(weight)[:2] for chunk in chunks for weight in chunk.parameters()]
    built = sum(part.nbytes for both in parts for part in both)
    memory, plain = Plan(args).memory(0), Plan(replaced(args, lora_base_dtype="model")).memory(0)
    assert memory.parameters == built < 0.7 * plain.parameters
    largest = 2 * 384 * 256 * (2 if dtype else 4)  # gate and up, dequantized
    assert memory.activations - plain.activations == largest
    assert memory.gradients == plain.gradients and memory.optimizer == plain.optimizer


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_tensor_parallel_size_has_the_same_blocks(size):
    """Shards that do not end with a block, of one matrix or several, sharded by rows or columns.

    The ranks' shards, quantized with the largest magnitudes of all, are the shards of the quantized files.
    """
    args = validated("--lora-rank 4 --lora-base-dtype fp8 --hidden-size 160 --ffn-hidden-size 328 --kv-channels 40")
    weights = [weight for name, weight in fp8_base.fp8_weights(args).items() if name.startswith("decoder.layers.1.")]
    assert [len(weight.hf) for weight in weights] == [3, 1, 2, 1]
    generator = torch.Generator().manual_seed(3)
    for weight in weights:
        files = {name: torch.randn(shape, generator=generator) for name, shape in weight.hf.items()}
        expected = {name: in_blocks(matrix) for name, matrix in files.items()}
        shards, places, maxima = [], [], []
        for rank in range(size):
            shards.append(torch.empty(weight.shard_shape(size)))
            weight.fill(shards[-1], rank, size, lambda name, index, files=files: files[name][index])
            *place, grid = fp8_base.blocks(weight, rank, size)
            places.append(place)
            maxima.append(fp8_weight.block_maxima(shards[-1], *place, grid))
        most = torch.stack(maxima).amax(0)
        for rank, (shard, place) in enumerate(zip(shards, places, strict=True)):
            wanted = torch.empty_like(shard)
            weight.fill(wanted, rank, size, lambda name, index, files=expected: files[name][index])
            assert torch.equal(fp8_weight.quantized(shard, most, *place).dequantized(), wanted), weight.name


def test_a_shard_has_the_blocks_of_the_whole_matrix():
    """Any rows and columns, in any order: the values are those of the whole matrix."""
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(300, 200, generator=generator) * torch.logspace(-3, 3, 300)[:, None]
    rows, columns = torch.randperm(300, generator=generator)[:170], torch.arange(90, 190)
    places = (rows // 128).int(), (columns // 128).int()
    both = [(torch.arange(300) // 128).int(), (torch.arange(200) // 128).int()]
    maxima = fp8_weight.block_maxima(whole, *both, (3, 2))
    shard = fp8_weight.quantized(whole[rows][:, columns], maxima, *places)
    assert torch.equal(shard.dequantized(), in_blocks(whole)[rows][:, columns])
    assert torch.equal(fp8_weight.rounded(whole), in_blocks(whole))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_with_the_scale_is_rounded_once(dtype):
    whole = torch.randn(128, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(fp8_weight.rounded(whole), in_blocks(whole.float()).to(dtype))


def test_values_of_a_checkpoint_in_blocks_stay():
    """e4m3 values and scales of a file, dequantized to bf16 and quantized again: the same values."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(256, 256, generator=generator).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    values.view(torch.uint8)[::128, ::128] = torch.tensor(448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(2, 2, generator=generator) / 100
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    read = (values.float() * whole).bfloat16()
    index = (torch.arange(256) // 128).int()
    again = fp8_weight.quantized(read, fp8_weight.block_maxima(read, index, index, (2, 2)), index, index)
    assert torch.equal(again.values.float(), values.float())
    assert ((again.scales - scales).abs() <= 2**-8 * scales).all()


def test_zeros_stay_zeros_and_weights_are_not_written():
    whole = torch.zeros(130, 4)
    assert torch.equal(fp8_weight.rounded(whole), whole)
    index = torch.zeros(130, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    stored = fp8_weight.quantized(whole, torch.zeros(1, 1), *index)
    with pytest.raises(TypeError, match="would write to a weight"):
        stored.fill_(1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-base-dtype fp8", "--lora-base-dtype needs --lora-rank"),
        ("--lora-rank 4 --lora-base-dtype fp8 --transformer-impl transformer_engine", "give --transformer-impl local"),
    ],
)
def test_refusals(flags, message):
    with pytest.raises(GrpoError, match=message):
        validated(flags)
