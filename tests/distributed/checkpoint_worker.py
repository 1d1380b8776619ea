"""What test_checkpoint_layouts.py runs under torchrun: real models and optimizers, saved, loaded and refused."""

import functools
import itertools
import os
import random
import shutil
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values

import pretrain_grpo
from megatron_grpo.checkpointing import checkpoint, checkpoint_directory, data_files, optimizer_state
from megatron_grpo.checkpointing.checksums import CHECKSUMS
from megatron_grpo.lora.attach import adapters, attach
from megatron_grpo.lora.stream import stream_adapter
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel.initialize import destroy_rank_groups, initialize_distributed, set_random_seed
from megatron_grpo.training import train_step
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.offload import optimizer_tensors
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.training.saves import Position, Saves
from megatron_grpo.training.update_flops import UpdateFlops
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.stream import stream_hf
from tools import check_parallel
from tools.made_up import fill as fill_with
from tools.made_up import off_policy, rollout

MODEL = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 8 --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm
    --untie-embeddings-and-output-weights --vocab-size 100 --max-position-embeddings 64 --transformer-impl local
    --attention-dropout 0 --hidden-dropout 0 --train-iters 10 --lr 1e-3 --lr-decay-style linear""".split()
TP2 = ["--tensor-model-parallel-size", "2"]
DISTRIBUTED = ["--use-distributed-optimizer"]
POSITION = {"sampler": {"epoch": 1}, "rollouts": 7}


def build(*flags, seed=1, padded_vocab_size=128):
    """Arguments and a freshly initialised model with optimizer and schedule, in the layout that the flags ask for."""
    args = replaced(parse_args([*MODEL, *flags]), padded_vocab_size=padded_vocab_size)
    if dist.is_initialized():
        destroy_rank_groups()
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
        )
    else:
        initialize_distributed(args)
    set_random_seed(seed)
    model = forward.build_model(args, model_provider)
    return args, *train_step.setup_optimizer(args, model)


def update(model, optimizer, scheduler, step):
    """An update with made-up gradients, equal where a parameter is replicated."""
    for chunk in model:
        chunk.zero_grad_buffer()
        for name, parameter in chunk.named_parameters():
            generator = torch.Generator().manual_seed(1000 * step + len(name))
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()
    scheduler.step(increment=1)


def say(text):
    """One write, which no other rank's can come between."""
    os.write(1, f"{text}\n".encode())


@functools.cache
def tensors(root):
    """All tensors of the only checkpoint under ``root``, whole."""
    _, directory = checkpoint_directory.find(root)
    stored = dist_checkpointing.load_plain_tensors(str(directory))
    return {key: value for key, value in stored.items() if torch.is_tensor(value)}


def check_equal(name, root, other, vocab_size=None):
    """Both checkpoints hold the same tensors bit for bit, padding of the vocabulary aside."""
    expected, actual = dict(tensors(root)), dict(tensors(other))
    assert expected.keys() == actual.keys(), expected.keys() ^ actual.keys()
    assert any("exp_avg_sq" in key for key in expected)
    for key in expected:
        if "embedding" in key or "output_layer" in key:
            expected[key], actual[key] = expected[key][:vocab_size], actual[key][:vocab_size]
    different = [key for key in expected if not torch.equal(expected[key], actual[key])]
    assert not different, different
    say(f"{name}: all tensors equal")


def draws():
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def load_and_save_again(name, source, target, *flags):
    """Load ``source`` in the layout of the flags and save it from there: both must hold the same."""
    args, model, optimizer, scheduler = build(*flags, "--load", str(source), "--save", str(target), seed=99)
    iteration, position = checkpoint.load_checkpoint(args, model, optimizer, scheduler)
    assert (iteration, position) == (2, POSITION)
    assert [group["step"] for group in optimizer.param_groups] == [2] * len(optimizer.param_groups)
    assert scheduler.num_steps == 2
    drawn = draws()
    checkpoint.save_checkpoint(args, iteration, model, optimizer, scheduler, position)
    check_equal(name, source, target)
    return drawn


def reshard(root):
    """Save under TP2, load there and elsewhere: position, step count and random states, and what flags change."""
    source = root / "distributed"
    args, model, optimizer, scheduler = build(*TP2, *DISTRIBUTED, "--save", str(source))
    for step in range(2):
        update(model, optimizer, scheduler, step)
    checkpoint.save_checkpoint(args, 2, model, optimizer, scheduler, POSITION)
    expected = draws()
    assert load_and_save_again("TP2 again", source, root / "a", *TP2, *DISTRIBUTED) == expected
    assert load_and_save_again("TP2 SP", source, root / "b", *TP2, "--sequence-parallel", *DISTRIBUTED) == expected
    assert load_and_save_again("DP2", source, root / "c", *DISTRIBUTED) != expected

    # New hyper-parameters are taken from the flags, and the schedule is at its place under them.
    args, model, optimizer, scheduler = build(*TP2, *DISTRIBUTED, "--load", str(source), "--lr", "5e-4")
    checkpoint.load_checkpoint(args, model, optimizer, scheduler)
    assert [group["max_lr"] for group in optimizer.param_groups] == [5e-4] * len(optimizer.param_groups)
    assert optimizer.param_groups[0]["lr"] == 5e-4 * 8 / 10  # linear to 0 in 10 updates, 2 of them done

    # --no-load-optim and --no-load-rng.
    flags = ["--no-load-optim", "--no-load-rng", "--load", str(source)]
    args, model, optimizer, scheduler = build(*TP2, *DISTRIBUTED, *flags, seed=5)
    set_random_seed(6)
    expected = draws()
    set_random_seed(6)
    checkpoint.load_checkpoint(args, model, optimizer, scheduler)
    assert draws() == expected
    assert not optimizer.optimizer.state
    update(model, optimizer, scheduler, 0)
    assert optimizer.param_groups[0]["step"] == 1


def one_rank(root):
    """What two ranks wrote is loaded by one, also into a larger padded vocabulary."""
    load_and_save_again("one rank", root / "distributed", root / "f", *DISTRIBUTED)
    _, model, _, _ = build(padded_vocab_size=256)
    checkpoint.load_weights(root / "distributed", [chunk.module for chunk in model])
    weight = model[0].module.embedding.word_embeddings.weight
    stored = tensors(root / "distributed")["embedding.word_embeddings.weight"]
    assert weight.shape[0] == 256 and stored.shape[0] == 128
    assert torch.equal(weight[:100], stored[:100])


# ---- every layout: weights and gradients that depend on the tensors' names alone, and plain torch as the truth

COMMON = """--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --normalization RMSNorm
    --swiglu --disable-bias-linear --qk-layernorm --vocab-size 250 --make-vocab-size-divisible-by 2
    --max-position-embeddings 64 --transformer-impl local --lr 1e-2 --adam-eps 1e-4 --clip-grad 0
    --train-iters 9 --global-batch-size 4 --num-generations 2 --max-tokens-per-microbatch 64 --max-prompt-length 8
    --max-completion-length 8 --reward-funcs exact_match --train-data-path unused --tokenizer-model unused
    --no-save-hf""".split()
DENSE = "--model-family qwen3 --group-query-attention --num-query-groups 2 --kv-channels 8"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --untie-embeddings-and-output-weights"
MOE = f"{DENSE.replace('qwen3', 'qwen3_moe')} {EXPERTS}"
LATENT = f"""--model-family deepseek_v3 --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 8
    --qk-pos-emb-head-dim 4 --v-head-dim 8 {EXPERTS} --moe-layer-freq [0,1,1,1]
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-shared-expert-intermediate-size 16 --mtp-num-layers 1"""
GEMMA = """--model-family gemma3_text --group-query-attention --num-query-groups 2 --kv-channels 8 --no-swiglu --geglu
    --sandwich-norm --apply-layernorm-1p --scale-embeddings --softmax-scale 0.25 --window-size 3,0
    --window-attn-skip-freq 2 --rotary-base-local 100"""
_OF_GEMMA4 = """{"global_head_dim":16,"num_global_key_value_heads":2,"attention_k_eq_v":true,"num_kv_shared_layers":2,
    "use_double_wide_mlp":true,"hidden_size_per_layer_input":4,"partial_rotary_factor":0.25}"""
GEMMA4 = f"""--model-family gemma4_text --group-query-attention --num-query-groups 4 --kv-channels 8 --no-swiglu --geglu
    --sandwich-norm --scale-embeddings --softmax-scale 1 --window-size 3,0 --window-attn-skip-freq 2
    --rotary-base-local 100 --gemma4-config {"".join(_OF_GEMMA4.split())}"""
PHI = "--model-family phi3 --group-query-attention --num-query-groups 2 --kv-channels 8 --no-qk-layernorm"
DELTA = f"""--model-family qwen3_next --group-query-attention --num-query-groups 2 --kv-channels 8 {EXPERTS}
    --apply-layernorm-1p --attention-output-gate --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate
    --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2
    --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 6"""
MAMBA = """--model-family nemotron_h --group-query-attention --num-query-groups 2 --kv-channels 8 --no-qk-layernorm
    --no-swiglu --squared-relu --position-embedding-type none --hybrid-layer-pattern M-*M --mamba-num-heads 4
    --mamba-head-dim 6 --mamba-num-groups 2 --mamba-state-dim 8 --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights"""
MAMBA_MOE = f"""{MAMBA} {EXPERTS} --hybrid-layer-pattern ME*E --moe-layer-freq [0,1,0,1]
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 16"""
LORA = "--lora-rank 4 --lora-target-modules all-linear"
SHARDED = "--use-distributed-optimizer"
BUCKETS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
GROUPED = "--moe-grouped-gemm"
# Files of deepseek_v3 hold these parameters twice.
COPIES = {
    "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.4.shared_head.head.weight": "lm_head.weight",
}
# Each chain is one checkpoint, carried from layout to layout and in the end into the one that it came from. By default
# the first layouts of one chain run: FEW has its number for each number of ranks.
FEW, FIRST = {2: 5}, 2
PARTS = ("model", "optimizer", "scheduler")
CHAINS = {
    2: {
        f"{DENSE} {SHARDED}": [
            f"DP2: {BUCKETS}",
            "TP2 SP",
            f"PP2 VPP2: {BUCKETS}",
            "CP2",
            "DP2: --use-tp-pp-dp-mapping",
        ],
        f"{GEMMA} {SHARDED}": ["TP2 SP", "PP2 VPP2", "TP2 SP"],
        f"{DENSE} --bf16": ["TP2", "PP2 VPP2", "TP2"],
        f"{MOE} {SHARDED}": [
            f"EP2: {BUCKETS}",
            f"DP2: {GROUPED}",
            "TP2 SP ETP1",
            "PP2 VPP2",
            f"TP2 SP EP2 ETP1: {GROUPED} {BUCKETS}",
            "EP2",
        ],
        MOE: [f"EP2: {GROUPED}", "DP2", "TP2 SP", f"CP2 EP2: {GROUPED}", "EP2"],
        f"{LATENT} {SHARDED} --bf16 --mtp-loss-scaling-factor 0.1": ["EP2", "PP2 VPP2", "TP2 SP", "EP2"],
        f"{PHI} {LORA} {SHARDED}": [f"DP2: {BUCKETS}", "TP2", "PP2 VPP2", "TP2 SP", "DP2"],
        f"{LATENT} {LORA}": ["TP2 SP", f"EP2: {GROUPED}", "PP2 VPP2", "TP2 SP"],
        f"{LATENT} --mtp-loss-scaling-factor 0": ["PP2", f"EP2: {GROUPED}", "PP2"],
    },
    4: {
        f"{LATENT} {SHARDED} --mtp-loss-scaling-factor 0.1": [
            "PP4",  # its first stage has no experts, so no optimizer for them
            f"TP2 SP PP2 EP2 ETP1: {GROUPED}",
            "CP2 EP4",
            f"TP2 SP DP2 EP2: {BUCKETS}",
            "PP4",
        ],
        f"{MOE} {LORA} {SHARDED}": ["TP2 SP EP2", f"PP2 VPP2 EP2: {GROUPED} {BUCKETS}", "CP2 DP2", "TP2 SP EP2"],
    },
}


def made_up(name, kind, shape):
    """A tensor that depends on its name in the whole model: a weight, or the gradient of update 0, 1, ..."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {kind}".encode()))
    values = 0.1 * torch.randn(shape, generator=generator)
    return values + 1 if kind == "weight" and "norm" in name else values


def fill(model, args, kind):
    """Give the model's parameters, or those of its adapters, what is made up; each rank takes its part."""
    for adapter in adapters(model):
        adapter.initialize(lambda name, shape: made_up(name, kind, shape))
    if not args.lora_rank or kind == "weight":
        fill_with(model, args, lambda name, shape: made_up(name, kind, shape))


def made_up_update(args, model, optimizer, scheduler, step):
    """An update by the made-up gradients, as if they had been reduced already."""
    with forward.parameters_complete(model):
        weights = [[t.clone() for t in forward.weight_tensors(chunk)] for chunk in model]
        fill(model, args, step)
        for chunk, before in zip(model, weights, strict=True):
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    parameter.main_grad.copy_(parameter.data)
            for tensor, old in zip(forward.weight_tensors(chunk), before, strict=True):
                tensor.data.copy_(old)
    optimizer.step()
    scheduler.step(increment=1)


@functools.cache
def truth(name, shape, steps, bf16):
    """A weight after so many updates by torch's AdamW, with the defaults of Megatron-LM's flags."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    weight = made_up(name, "weight", shape).to(dtype).float().requires_grad_()
    decay = 0.01 if len(shape) > 1 else 0
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.999), eps=1e-4, weight_decay=decay)
    for step in range(steps):
        weight.grad = made_up(name, step, shape).to(dtype).float()
        optimizer.step()
    return weight.detach()


def check_truth(args, model, steps):
    """The model holds what plain torch gives after so many updates."""
    tolerance = 2**-8 if args.bf16 else 1e-5
    with forward.parameters_complete(model):
        for name, got in stream_adapter(model, args) if args.lora_rank else ():
            want = truth(name, got.shape, steps, args.bf16)
            assert ((got.float() - want).abs() <= tolerance * want.abs().clamp(min=0.01)).all(), (name, steps)
        for name, got in stream_hf(model, args):
            name = COPIES.get(name, name)
            frozen = args.mtp_loss_scaling_factor == 0 and name.startswith("model.layers.4.")
            if (
                frozen or args.lora_rank or name.endswith(("correction_bias", "layer_scalar"))
            ):  # the experts' biases are moved by the load, not by gradients
                want = made_up(name, "weight", got.shape)
            else:
                want = truth(name, got.shape, steps, args.bf16)
            gap = (got.float() - want).abs()
            assert (gap <= tolerance * want.abs().clamp(min=0.01)).all(), (name, steps, gap.max())


def enter(flags, layout):
    """Arguments and an unwrapped model with made-up weights in a layout of tools/check_parallel.py's spelling."""
    args = parse_args([*COMMON, *flags.split(), *check_parallel.flags_of(layout)])
    args = resolve_args(args, dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]))
    if dist.is_initialized():
        destroy_rank_groups()
    initialize_distributed(args)
    set_random_seed(1)
    model = forward.build_model(args, model_provider)
    if args.lora_rank:
        attach(args, model)
    return args, model


def few_chains(root):
    world_size = int(os.environ["WORLD_SIZE"])
    flags, layouts = list(CHAINS[world_size].items())[FEW[world_size]]
    chains(root, {flags: layouts[:FIRST]})


def hybrid_chains(root):
    """Layers of different kinds, and A_log in float32 beside weights in 16 bits."""
    chains(root / "hybrid", {f"{DELTA} {SHARDED}": ["TP2 SP", "CP2 EP2", "PP2 VPP2", "TP2 SP"]})
    chains(root / "gemma4", {f"{GEMMA4} {SHARDED}": ["TP2 SP", f"PP2 VPP2: {BUCKETS}", "CP2", "TP2 SP"]})
    chains(root / "mamba", {f"{MAMBA} {SHARDED}": ["TP2 SP", "CP2", "PP2 VPP2", "TP2 SP"]})
    moe = ["EP2", "TP2 SP ETP1", f"TP2 SP EP2 ETP1: {GROUPED} {BUCKETS}", f"PP2 VPP2: {GROUPED}", "TP2 SP", "EP2"]
    chains(root / "mamba_moe", {f"{MAMBA_MOE} {SHARDED}": moe})
    chains(root / "mamba16", {f"{MAMBA} {SHARDED} --bf16": ["TP2 SP", "DP2", "PP2"]})
    chains(root / "hybrid16", {f"{DELTA} {SHARDED} --bf16": ["TP2 SP", f"EP2: {BUCKETS}", "PP2", "TP2 SP"]})


def resumed_hybrid(root):
    # The gradient norm is some hundreds here, and the two layouts differ in it by 1.3e-5 of it.
    resume_elsewhere(root, [(f"{DELTA} {SHARDED} --lr 1e-3", "TP2 SP", "CP2 EP2")], bound=5e-5)


def few_lora_chains(root):
    flags = f"{LATENT} {LORA}"
    chains(root / "lora", {flags: CHAINS[2][flags][:2]})


def all_chains(root):
    """Those of adapters, too."""
    wanted = CHAINS[int(os.environ["WORLD_SIZE"])]
    chains(root, wanted)
    for number, (flags, layouts) in enumerate(wanted.items()):
        args, model = enter(flags, layouts[1])
        if args.lora_rank:
            continue
        checkpoint.load_weights(root / f"{number}-0", model)
        check_truth(args, model, 2)


def chains(root, wanted):
    """Carry a checkpoint through each chain: what it holds stays the same bit for bit, and is what plain torch gives.

    A third update, which depends on all moments, gives plain torch's weights in each layout too.
    """
    for number, (flags, layouts) in enumerate(wanted.items()):
        for place, layout in enumerate(layouts):
            args, model = enter(flags, layout)
            first, last = (str(root / f"{number}-{i}") for i in (0, place - 1))
            args = replaced(args, save=str(root / f"{number}-{place}"), load=str(last))
            if place == 0:
                fill(model, args, "weight")
            elif args.lora_rank:  # the base is not in the checkpoint
                fill_with(model, args, lambda name, shape: made_up(name, "weight", shape))
            model, optimizer, scheduler = train_step.setup_optimizer(args, model)
            if place == 0:
                made_up_update(args, model, optimizer, scheduler, 0)
                made_up_update(args, model, optimizer, scheduler, 1)
                check_truth(args, model, 2)
            else:
                checkpoint.load_checkpoint(args, model, optimizer, scheduler)
            with forward.parameters_complete(model):
                checkpoint.save_checkpoint(args, 2, model, optimizer, scheduler, {})
            check_equal(f"{flags.split()[1]} {layout}", first, args.save, args.vocab_size)
            made_up_update(args, model, optimizer, scheduler, 2)
            check_truth(args, model, 3)


def resumed(root):
    resume_elsewhere(root, [(MOE, "TP2 SP", "CP2 EP2")])


def resumed_latent(root):
    flags = f"{LATENT} {SHARDED} --mtp-loss-scaling-factor 0.1"
    resume_elsewhere(root, [(flags, f"EP2: {BUCKETS}", f"PP2 VPP2: {GROUPED}")])


def resume_elsewhere(root, changes, bound=1e-5):
    """Real updates: one that follows a change of layout is the one that follows without an interruption."""
    for flags, layout, other in changes:
        rows, weights = [], []
        for place in (layout, other):
            args, model = enter(flags, place)
            args = replaced(args, **dict.fromkeys(("save", "load"), str(root / f"{zlib.crc32(flags.encode())}")))
            fill(model, args, "weight")
            parts = train_step.setup_optimizer(args, model)
            others = {"bad_updates": BadUpdates("stop", None, None), "flops": UpdateFlops(args, None)}
            trainer = SimpleNamespace(**dict(zip(PARTS, parts, strict=True)), **others, iteration=0)
            first, second = np.split(np.arange(8), 2)
            if place == layout:
                batch = rollout(args)
                batch = off_policy(args, trainer, batch)
                pretrain_grpo.update(args, trainer, batch, first)
                with forward.parameters_complete(trainer.model):
                    checkpoint.save_checkpoint(args, 1, *parts, {})
            else:
                checkpoint.load_checkpoint(args, *parts)
            rows.append(pretrain_grpo.update(args, trainer, batch, second))
            with forward.parameters_complete(trainer.model):
                weights.append({name: weight.clone() for name, weight in stream_hf(trainer.model, args)})
        for key in ("loss", "grad_norm", "kl", "entropy", "ratio/max"):
            assert abs(rows[0][key] - rows[1][key]) <= bound * abs(rows[0][key]), (layout, key, rows)
        for name, want in weights[0].items():
            assert (weights[1][name] - want).norm() <= bound * want.norm(), (layout, name)
        say(f"{layout}: resumed in {other}")


def random_states(root):
    find_random_states(
        root, [(DENSE, "PP2 DP2", "PP2 DP2: --use-tp-pp-dp-mapping"), (DENSE, "TP2 SP CP2", "TP2 SP CP2")]
    )


def random_states_of_experts(root):
    find_random_states(root, [(MOE, layout, layout) for layout in ("CP2 EP4", "TP2 SP CP2 EP2")])


def find_random_states(root, cases):
    """Each rank has random states of its own, and finds them again by its place in the layout, not by its number."""
    for flags, layout, again in cases:
        everywhere = [None] * 4
        for place in (layout, again):
            args, model = enter(flags, place)
            args = replaced(args, **dict.fromkeys(("save", "load"), str(root / layout)))
            parts = train_step.setup_optimizer(args, model)
            coordinates = (
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_data_parallel_rank(with_context_parallel=True),
            )
            if everywhere[0] is None:
                for _ in range(dist.get_rank()):
                    draws()
                checkpoint.save_checkpoint(args, 1, *parts, {})
                dist.all_gather_object(everywhere, (coordinates, draws()))
                assert len({tuple(drawn) for _, drawn in everywhere}) == 4
            else:
                checkpoint.load_checkpoint(args, *parts)
                assert draws() == dict(everywhere)[coordinates], layout
        say(f"{layout}: random states restored")


def own_shards(root):
    """The ranks of a distributed optimizer save disjoint shards of its state, which are views of it."""
    _, model, optimizer, scheduler = build(*DISTRIBUTED, "--bf16", "--save", str(root / "shards"))
    update(model, optimizer, scheduler, 1)
    model_state = checkpoint._model_state(model, metadata := checkpoint._with_group(checkpoint.CONTENT_METADATA))
    state = optimizer_state.state_to_save(optimizer, model_state, metadata)
    shards = [entry for entry in nested_values(state) if isinstance(entry, ShardedTensor)]
    held = {tensor.untyped_storage().data_ptr() for tensor in optimizer_tensors(optimizer)}
    assert {shard.data.untyped_storage().data_ptr() for shard in shards} <= held
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [(s.key, s.global_offset, s.local_shape, s.global_shape) for s in shards])
    written = {}
    for key, offset, shape, whole in itertools.chain(*everywhere):
        count = written.setdefault(key, torch.zeros(whole, dtype=torch.int))
        count[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] += 1
    assert all((count == 1).all() for count in written.values())
    elements = sum(parameter.numel() for parameter in model[0].parameters())
    assert sum(count.numel() for count in written.values()) == 3 * elements  # main parameters and two moments
    say("own shards, each position once")


def refuse(root):
    """Checkpoints that cannot be loaded: every rank must say why."""

    def refused(directory, *flags, weights_only=False):
        args, model, optimizer, scheduler = build(*TP2, *flags, "--load", str(directory))
        try:
            if weights_only:
                checkpoint.load_weights(directory, model)
            else:
                checkpoint.load_checkpoint(args, model, optimizer, scheduler)
        except GrpoError as error:
            say(f"refused on rank {dist.get_rank()}: {error}")
        else:
            raise AssertionError(f"{directory} was loaded with {flags}")

    def changed(name, change):
        """A copy of the good checkpoint, changed by rank 0."""
        if dist.get_rank() == 0:
            shutil.copytree(good, root / name)
            change(root / name / "iter_0000002")
        dist.barrier()
        return root / name

    def flip_second_half(directory):
        data = (directory / "__1_0.distcp").read_bytes()
        half = len(data) // 2
        (directory / "__1_0.distcp").write_bytes(data[:half] + bytes(byte ^ 1 for byte in data[half:]))

    good = root / "good"
    args, model, optimizer, scheduler = build(*TP2, *DISTRIBUTED, "--save", str(good))
    checkpoint.save_checkpoint(args, 2, model, optimizer, scheduler, POSITION)  # before the first update

    refused(good, *DISTRIBUTED, "--num-layers", "1", "--hidden-size", "64")
    refused(good, *DISTRIBUTED, "--vocab-size", "99", weights_only=True)
    refused(good)
    refused(changed("truncated", lambda d: os.truncate(d / "__1_0.distcp", 100)), *DISTRIBUTED)
    refused(changed("flipped", flip_second_half), *DISTRIBUTED)  # rank 1 alone reads it
    refused(changed("missing", lambda d: (d / "__1_0.distcp").unlink()), weights_only=True)

    # Without its own notes (as Megatron-LM writes it), a checkpoint is judged by the tensors that it has.
    def forget(directory):
        for name in (checkpoint_directory.ARGS, checkpoint_directory.MANIFEST, CHECKSUMS):
            (directory / name).unlink(missing_ok=True)
        # common.pt, which Megatron-LM wrote before megatron-core 0.19, takes precedence
        common = data_files.Reader(directory).common_state()
        torch.save({key: value for key, value in common.items() if key != "layout"}, directory / "common.pt")

    foreign = changed("foreign", forget)
    refused(foreign, *DISTRIBUTED, "--ffn-hidden-size", "64", weights_only=True)
    plain = root / "plain"
    args = replaced(parse_args([*MODEL, *TP2, "--save", str(plain)]), padded_vocab_size=128, qk_layernorm=False)
    model = forward.build_model(args, model_provider)
    checkpoint.save_checkpoint(args, 0, model, None, None, {})
    if dist.get_rank() == 0:
        forget(plain / "iter_0000000")
    dist.barrier()
    refused(plain, weights_only=True)
    refused(plain)

    # Its optimizer's state is in megatron-core's other format, which belongs to one layout.
    def other_format(directory):
        common = data_files.Reader(directory).common_state()
        common["content_metadata"]["distrib_optim_sharding_type"] = "dp_reshardable"
        torch.save(common, directory / "common.pt")
        forget(directory)

    refused(changed("other", other_format), *DISTRIBUTED)

    # A file lies where the directory of checkpoints should be.
    (root / "file").touch()
    args, model, optimizer, scheduler = build(*TP2, "--save", str(root / "file"))
    try:
        checkpoint.save_checkpoint(args, 2, model, optimizer, scheduler, POSITION)
    except GrpoError as error:
        say(f"refused on rank {dist.get_rank()}: {error}")

    # Another run has taken the directory over; rank 0 alone has its lock.
    lock = SimpleNamespace(taken_by=lambda: "the run of process 7 has taken it over")
    saves = SimpleNamespace(args=SimpleNamespace(save="shared"), lock=None if dist.get_rank() else lock)
    saves.check_directory = functools.partial(Saves.check_directory, saves)
    try:
        Saves.write(saves, Position(2, {}))
    except GrpoError as error:
        say(f"refused on rank {dist.get_rank()}: {error}")

    # Multi-token prediction was frozen, and is now to be trained.
    args, model = enter(f"{LATENT} --mtp-loss-scaling-factor 0", "EP2")
    args = replaced(args, save=str(root / "frozen"))
    checkpoint.save_checkpoint(args, 2, *train_step.setup_optimizer(args, model), {})
    now, model = enter(f"{LATENT} --mtp-loss-scaling-factor 0.1", "PP2")
    now = replaced(now, load=args.save)
    try:
        checkpoint.load_checkpoint(now, *train_step.setup_optimizer(now, model))
    except GrpoError as error:
        say(f"refused on rank {dist.get_rank()}: {error}")


if __name__ == "__main__":
    case, directory = sys.argv[1:]
    sys.argv[1:] = []
    cases = (reshard, one_rank, refuse, few_chains, all_chains, resumed, resumed_latent)
    cases += (hybrid_chains, resumed_hybrid, few_lora_chains, random_states, random_states_of_experts, own_shards)
    run(lambda: [function(Path(directory)) for function in cases if function.__name__ in case.split(",")])
