"""Flags and rules of the parallel configuration: tensor, pipeline, context and expert parallelism."""

import functools
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, product
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_grpo.utils.arguments import Step
from megatron_grpo.utils.batch_sizes import batch_arithmetic
from megatron_grpo.utils.core_flags import core_flags
from megatron_grpo.utils.core_names import NEED_TRANSFORMER_ENGINE
from megatron_grpo.utils.core_rules import changed, check_core_flags, check_core_flags_of_model
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, FlagRow, Number
from megatron_grpo.utils.rules import divides, excludes, flag, needs

PARALLELISM: tuple[FlagRow, ...] = (
    (
        "--num-layers-per-virtual-pipeline-stage",
        COUNT,
        None,
        "layers of each virtual pipeline stage; alternative to --num-virtual-stages-per-pipeline-rank",
    ),
    ("--use-tp-pp-dp-mapping", bool, False, "rank order TP-CP-EP-PP-DP instead of TP-CP-EP-DP-PP"),
    (
        "--hybrid-context-parallel",
        bool,
        False,
        "split a micro-batch over as many of the context-parallel ranks as its longest sequence needs; "
        "--max-tokens-per-microbatch is then the token budget of one rank",
    ),
)

TIMEOUT: FlagRow = (
    "--distributed-timeout-minutes",
    Number(float, 0, 1e6, above=True),
    10.0,
    "time-out of a collective of the model, minutes; waits for rollouts, rewards and files of other ranks have none",
)

BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
_EXPERT_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")  # 1 also fits a dense model


def check_heads(args: Namespace, size: int, what: str) -> None:
    """Refuse a number of ranks, ``size``, that cannot split the attention heads.

    Query heads are split evenly; key/value heads are split evenly, or each is replicated on several ranks.
    """
    divides(args, "num_attention_heads", size, what)
    groups = query_groups(args)
    if not args.multi_latent_attention and groups % size and size % groups:
        raise GrpoError(f"--num-query-groups ({groups}) must be a multiple or a divisor of {what} ({size})")


def has_packed_attention(args: Namespace) -> bool:
    """Return whether attention is computed by models/attention.py, which has sinks and soft caps."""
    special = args.softmax_type != "vanilla" or args.attn_logit_softcapping is not None
    return args.transformer_impl == "local" or special


def uses_flash_attention_4(args: Namespace) -> bool:
    """Return whether models/attention.py computes with the kernels of FlashAttention 4."""
    return args.attention_backend == "flash" and has_packed_attention(args)


def _check_flash_attention(args: Namespace) -> None:
    """Refuse --attention-backend flash with what the kernels of FlashAttention 4 do not compute here."""
    given, instead = "--attention-backend flash", "give --attention-backend local"
    if not (args.bf16 or args.fp16):
        raise GrpoError(f"{given} needs --bf16 or --fp16: its kernels take no float32; {instead}")
    if args.attn_logit_softcapping is not None:
        raise GrpoError(f"{given} with --attn-logit-softcapping: its backward pass has no soft caps here; {instead}")


def _attention_name(args: Namespace) -> str:
    """Return the name of the attention implementation for messages."""
    if has_packed_attention(args) and args.transformer_impl != "local":
        return "attention with sinks or soft caps"
    return f"--transformer-impl {args.transformer_impl}"


def generating_width(args: Namespace) -> int:
    """Return the number of ranks of one pipeline stage that run a forward pass together with --rollout-engine megatron.

    These ranks hold shards of the same attention weights (TP) or the same experts (ETP x EP).
    """
    experts = args.expert_tensor_parallel_size * args.expert_model_parallel_size if args.num_experts else 1
    return math.lcm(args.tensor_model_parallel_size, experts)


# Costs of each decoder layer, and of what the last stage has besides, in one unit.
StageCosts = Callable[[Namespace], tuple[Sequence[float], float]]


def resolve_recomputation(args: Namespace) -> dict[str, Any]:
    """Return what follows from --recompute-granularity, --no-recompute-activations and --moe-layer-recompute.

    GrpoError for the last two together: their order is not known here.
    """
    taken_back = "recompute_granularity" in args.explicit and args.recompute_granularity is None
    if args.recompute_granularity == "full":  # includes the experts
        return {
            "recompute_method": args.recompute_method or "uniform",
            "recompute_num_layers": args.recompute_num_layers or 1,
        }
    if args.moe_layer_recompute and taken_back:
        raise GrpoError(
            "--no-recompute-activations and --moe-layer-recompute cannot both be given: add --no-moe-layer-recompute "
            "to recompute nothing, or leave the first one out to recompute the experts"
        )
    if args.moe_layer_recompute:
        modules = sorted({*(args.recompute_modules or []), "moe"})
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    if taken_back:
        return dict.fromkeys(("recompute_method", "recompute_num_layers", "recompute_modules"))
    return {}


def check_parallel_flags(args: Namespace) -> None:
    """Refuse flags of parallelism and recomputation that cannot work with any model."""
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        raise GrpoError(
            "--sequence-parallel needs --tensor-model-parallel-size 2 or more: it splits the tokens over "
            "tensor-parallel ranks"
        )
    if args.transformer_impl == "local":
        for dest in NEED_TRANSFORMER_ENGINE:
            if getattr(args, dest):
                raise GrpoError(f"{flag(dest)} needs --transformer-impl transformer_engine")
        for module, instead in (("moe_act", "moe"), ("layernorm", "mlp or core_attn")):
            if module in (args.recompute_modules or []):
                raise GrpoError(
                    f"--recompute-modules {module} needs --transformer-impl transformer_engine: give that, or "
                    f"recompute {instead} instead"
                )
    _check_pipeline_flags(args)
    if args.hybrid_context_parallel:
        _check_hybrid_context_parallelism(args)
    if args.cp_comm_type is not None and args.context_parallel_size == 1:
        raise GrpoError("--cp-comm-type needs --context-parallel-size 2 or more")
    full = args.recompute_granularity == "full"
    if full and args.recompute_method == "uniform" and args.mtp_loss_scaling_factor:
        raise GrpoError(
            "--mtp-loss-scaling-factor with --recompute-granularity full: megatron-core recomputes "
            "multi-token-prediction layers for packs without their gradients: give --recompute-method block, which "
            "leaves these layers out, with --recompute-num-layers"
        )
    check_core_flags(args)


def resolve_experts(args: Namespace) -> dict[str, Any]:
    """Return the defaults of the experts' sizes: those of the dense layers."""
    if args.num_experts is None:
        return {}
    return {
        "moe_ffn_hidden_size": args.ffn_hidden_size if args.moe_ffn_hidden_size is None else args.moe_ffn_hidden_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    }


def check_layers(args: Namespace) -> None:
    """Refuse layers that cannot be computed, or split over tensor and expert parallel ranks, with these flags."""
    tp = args.tensor_model_parallel_size
    check_heads(args, tp, "tensor parallel size")
    divides(args, "ffn_hidden_size", tp, "tensor parallel size")
    if args.multi_latent_attention and tp > 1 and not args.sequence_parallel:
        raise GrpoError(
            f"--multi-latent-attention with --tensor-model-parallel-size {tp} needs --sequence-parallel: without it "
            "megatron-core loses gradients of the rotary channels of the keys"
        )
    if args.experimental_attention_variant:
        both = tp * args.context_parallel_size
        divides(args, "linear_num_key_heads", both, f"TP x CP ({tp} x {args.context_parallel_size})")
    if args.hybrid_layer_pattern:
        both = tp * args.context_parallel_size
        divides(args, "mamba_num_groups", both, f"TP x CP ({tp} x {args.context_parallel_size})")
    excludes(args, "use_te_activation_func", "quick_geglu", "Transformer Engine has no quick GELU")
    backends = ("auto", "local", "flash") if has_packed_attention(args) else ("auto", "flash", "fused", "unfused")
    if args.attention_backend not in backends:
        raise GrpoError(
            f"--attention-backend is {args.attention_backend}, but {_attention_name(args)} supports only "
            f"{', '.join(backends)}"
        )
    if uses_flash_attention_4(args):
        _check_flash_attention(args)
    _check_experts(args)


def check_parallelism(args: Namespace) -> None:
    """Refuse pipeline stages, context parallelism and flags of megatron-core that do not fit the model."""
    _check_pipeline(args)
    _check_context_parallelism(args)
    check_core_flags_of_model(args)


def recompute_note(args: Namespace) -> str | None:
    """Return the line about what --recompute-granularity selects without further flags; None if they are given."""
    if args.recompute_granularity == "full" and not {"recompute_method", "recompute_num_layers"} <= args.explicit:
        return (
            f"--recompute-granularity full recomputes with --recompute-method {args.recompute_method} "
            f"--recompute-num-layers {args.recompute_num_layers}: units of so many layers"
        )
    if args.recompute_granularity == "selective" and (args.recompute_modules or ["core_attn"]) == ["core_attn"]:
        return (
            "--recompute-granularity selective recomputes core_attn alone, and the flash kernels store no scores "
            "anyway: give --recompute-modules mlp (or moe), or --recompute-granularity full"
        )
    return None


def _check_pipeline_flags(args: Namespace) -> None:
    """Refuse flags of pipeline stages without stages, and two numbers of virtual stages."""
    per_stage, stages = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
    excludes(args, per_stage, stages, "each determines the number of virtual stages")
    if args.pipeline_model_parallel_size > 1:
        return
    uneven = "pipeline_model_parallel_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers".split()
    for dest in (per_stage, stages, *uneven):
        if getattr(args, dest) and (dest, getattr(args, dest)) != (stages, 1):
            raise GrpoError(f"{flag(dest)} needs --pipeline-model-parallel-size 2 or more")


def check_virtual_stages(args: Namespace) -> None:
    """Refuse layers that do not divide into virtual stages of --num-layers-per-virtual-pipeline-stage."""
    pp, per_stage = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    if per_stage is not None and args.num_layers % (pp * per_stage):
        raise GrpoError(
            f"--num-layers ({args.num_layers}) must be divisible by --pipeline-model-parallel-size ({pp}) x "
            f"--num-layers-per-virtual-pipeline-stage ({per_stage}); for uneven pipeline stages give "
            "--num-virtual-stages-per-pipeline-rank"
        )


def resolve_pipeline(args: Namespace, costs: StageCosts | None = None) -> dict[str, Any]:
    """Return the layout of --pipeline-model-parallel-layout auto, the number of virtual stages, and their overlap.

    ``costs``: for the layout. Raises GrpoError for layers that cannot be divided as the layout says.
    """
    pp, per_stage = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    virtual, layout = args.num_virtual_stages_per_pipeline_rank, args.pipeline_model_parallel_layout
    if per_stage is not None:
        virtual = args.num_layers // pp // per_stage
    if layout and pp > 1:
        if layout == "auto":
            layout = _balanced_layout(args, pp * (virtual or 1), costs)
        virtual = _virtual_stages_of(layout, pp, virtual)
    found = {
        "pipeline_model_parallel_layout": layout,
        "num_virtual_stages_per_pipeline_rank": None if virtual == 1 else virtual,
    }
    if found["num_virtual_stages_per_pipeline_rank"] and pp > 1 and "overlap_p2p_comm" not in args.explicit:
        found["overlap_p2p_comm"] = True  # as in Megatron-LM
    return found


def _check_pipeline(args: Namespace) -> None:
    pp = args.pipeline_model_parallel_size
    virtual = args.num_virtual_stages_per_pipeline_rank
    if virtual:
        _check_interleaved_schedule(args, pp)
    else:
        for dest in ("overlap_p2p_comm", "overlap_p2p_communication_warmup_flush", "align_param_gather"):
            needs(args, dest, "num_virtual_stages_per_pipeline_rank", "only the interleaved schedule uses it")
    if args.mtp_num_layers and pp > 1 and not args.untie_embeddings_and_output_weights:
        raise GrpoError(
            f"--mtp-num-layers with --pipeline-model-parallel-size {pp} does not work with a head that is tied to the "
            "embedding, of which the last stage would have two copies: leave one of them out"
        )
    if not args.pipeline_model_parallel_layout:
        _check_stages(args, pp, virtual or 1)


def _check_interleaved_schedule(args: Namespace, pp: int) -> None:
    """Refuse what the schedule of virtual stages cannot run."""
    if pp == 2 and not args.overlap_p2p_comm:
        raise GrpoError(
            "--no-overlap-p2p-communication with 2 pipeline stages and virtual stages would give wrong gradients "
            "without an error: both neighbours of a stage are one rank, and their messages are mixed up; leave "
            "it out"
        )
    if args.eval_only:  # there are no micro-batches of an update
        return
    accumulation = batch_arithmetic(args, args.world_size).gradient_accumulation_steps
    if accumulation is not None and accumulation % pp:
        raise GrpoError(
            f"an update has {accumulation} micro-batches on each data-parallel rank, but virtual stages need a "
            f"multiple of --pipeline-model-parallel-size ({pp}): change --global-batch-size or --micro-batch-size, "
            "or give --max-tokens-per-microbatch"
        )


def _check_stages(args: Namespace, pp: int, virtual: int) -> None:
    """Refuse layers that do not divide over the stages, as megatron-core divides them without a layout."""
    layers, ends = args.num_layers, (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    whole = "pipeline parallel size" + " x virtual stages" * (virtual > 1)
    counted = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    problem = None
    if any(end is not None for end in ends):
        for end, part in product(("first", "last"), ("embedding", "loss")):
            both = f"decoder_{end}_pipeline_num_layers", f"account_for_{part}_in_pipeline_split"
            excludes(args, *both, "each divides the layers over the stages")
        left, stages = layers - sum(end or 0 for end in ends), pp - sum(end is not None for end in ends)
        middle = left // stages if stages else 0
        sizes = [middle, *(end for end in ends if end is not None)]
        # With two stages, both given, and virtual stages megatron-core divides by zero.
        if left != middle * stages or any(size % virtual for size in sizes) or middle < (stages > 0 or virtual > 1):
            given = ", ".join(
                f"{flag(f'decoder_{name}_pipeline_num_layers')} {end}"
                for name, end in zip(("first", "last"), ends, strict=True)
                if end is not None
            )
            problem = f"--num-layers ({layers}) with {given} leaves {left} layers for {stages} of {pp} stages" + (
                f", each in {virtual} virtual stages" if virtual > 1 else ""
            )
    elif (layers + counted) % (pp * virtual):
        shown = f"--num-layers ({layers})" + (f" + {counted} for embedding and loss" if counted else "")
        problem = f"{shown} must be divisible by {whole} ({pp * virtual})"
    if problem:
        raise GrpoError(f"{problem}; {_divisions(args, pp, virtual)}")


def _divisions(args: Namespace, pp: int, virtual: int) -> str:
    """Return the flags that divide the layers over the stages, in each of the three ways that exist for this number."""
    layers, ways = args.num_layers, []
    units = layers // virtual  # megatron-core gives every stage a multiple of the number of virtual stages
    middle = -(-units // pp)
    short = middle * pp - units  # by which the first and the last stage together are smaller than the others
    if short > 2 * (middle - 1):
        middle -= 1
        short = middle * pp - units
    if layers % virtual == 0 and middle > 0:
        first, last = ((middle - half) * virtual for half in (short // 2, short - short // 2))
        way = f"--decoder-first-pipeline-num-layers {first}"
        ways.append(way if pp == 2 else f"{way} --decoder-last-pipeline-num-layers {last}")
    for counted in (("loss",), ("embedding", "loss")):
        if (layers + len(counted)) % (pp * virtual) == 0:
            ways.append(" ".join(f"--account-for-{name}-in-pipeline-split" for name in counted))
    if layers >= pp * virtual:
        ways.append(f"--pipeline-model-parallel-layout '{_layout(layers, pp * virtual, args.mtp_num_layers or 0)}'")
    return "give " + ", or ".join(ways) if ways else "lower --pipeline-model-parallel-size"


def _layout(layers: int, stages: int, mtp_layers: int) -> str:
    """Return a --pipeline-model-parallel-layout: equal stages in the middle, smaller ones at the ends."""
    middle = -(-layers // stages)
    smaller = middle * stages - layers  # stages with one layer less, alternately from the front and from the back
    front, back = smaller - smaller // 2, smaller // 2
    return _written([middle - 1] * front + [middle] * (stages - smaller) + [middle - 1] * back, mtp_layers)


def _written(sizes: Sequence[int], mtp_layers: int) -> str:
    """Return the --pipeline-model-parallel-layout of stages with these numbers of layers."""
    runs = [(f"t*{size}|", len(list(equal))) for size, equal in groupby(sizes[:-1])]
    text = "".join(f"({stage})*{count}" if count > 1 else stage for stage, count in runs)
    return f"E{text}t*{sizes[-1]}{'m' * mtp_layers}L"


def _balanced_layout(args: Namespace, stages: int, costs: StageCosts | None) -> str:
    """Return the --pipeline-model-parallel-layout of ``stages`` stages whose most expensive one is cheapest."""
    name = "--pipeline-model-parallel-layout auto"
    if costs is None:
        raise GrpoError(f"{name}: a reference model needs a layout in full, or none")
    for dest in (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):
        if getattr(args, dest):
            raise GrpoError(f"{name} and {flag(dest)} both divide the layers over the stages: leave one of them out")
    if args.num_layers < stages:
        raise GrpoError(f"{name}: {args.num_layers} layers are too few for {stages} stages of one or more")
    return _written(balanced(*costs(args), stages), args.mtp_num_layers or 0)


def balanced(layers: Sequence[float], last: float, stages: int) -> list[int]:
    """Return the number of layers of each stage, 1 or more, so that the largest sum of a stage's costs is least.

    ``layers``: the cost of each, in their order; ``last``: the cost of the last stage besides its layers. Among stages
    with the same largest sum, those with the smaller squares of sums are chosen, from the back.
    """
    before = [0.0, *accumulate(layers)]  # the cost of the first n layers

    @functools.cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """Return (largest sum, sum of squares, sizes) of the stages from ``stage`` with the layers from ``start``."""
        if stage == stages - 1:
            cost = before[-1] - before[start] + last
            return cost, cost**2, (len(layers) - start,)
        options = []
        for size in range(1, len(layers) - start - (stages - 1 - stage) + 1):
            largest, squares, sizes = best(stage + 1, start + size)
            cost = before[start + size] - before[start]
            options.append((max(cost, largest), cost**2 + squares, (size, *sizes)))
        return min(options)

    return list(best(0, 0)[2])


def _virtual_stages_of(text: str, pp: int, given: int | None) -> int:
    """Return the number of virtual stages of a --pipeline-model-parallel-layout; GrpoError if another one is given."""
    try:
        layout = PipelineParallelLayerLayout(text, pp)
    except (AssertionError, KeyError, ValueError) as error:
        raise GrpoError(f"--pipeline-model-parallel-layout {text}: {error}") from error
    virtual = layout.virtual_pipeline_model_parallel_size
    if given not in (None, virtual):
        raise GrpoError(
            f"--pipeline-model-parallel-layout {text} has {virtual} virtual stages on each of {pp} pipeline ranks, "
            f"but --num-virtual-stages-per-pipeline-rank is {given}: leave it out"
        )
    if any(LayerType.mtp in stage for rank in layout.layout for stage in rank if LayerType.loss not in stage):
        raise GrpoError(
            f"--pipeline-model-parallel-layout {text}: multi-token-prediction layers (m) must be on the stage of "
            "the head (L), which uses their outputs"
        )
    return virtual


def _check_context_parallelism(args: Namespace) -> None:
    cp, kinds = args.context_parallel_size, args.cp_comm_type
    if cp > 1 and args.window_size and not has_packed_attention(args) and kinds not in ("a2a", ["a2a"]):
        raise GrpoError(
            f"--context-parallel-size {cp} with --window-size needs --cp-comm-type a2a: Transformer Engine's p2p has "
            "no sliding windows"
        )
    if kinds is None:
        return
    kinds = set(kinds if isinstance(kinds, list) else [kinds])
    if has_packed_attention(args):
        allowed, reason = {"all_gather"}, "only all_gather exists, and it is the default: leave it out"
    elif args.multi_latent_attention:
        allowed, reason = {"p2p"}, "multi-latent attention has p2p only: give p2p"
    else:
        allowed, reason = (
            {"p2p", "a2a"},
            "Transformer Engine takes packed batches only with p2p and a2a: give p2p or a2a",
        )
    if wrong := sorted(kinds - allowed):
        raise GrpoError(f"--cp-comm-type {wrong[0]}: with {_attention_name(args)} {reason}")
    heads = cp * args.tensor_model_parallel_size
    if "a2a" in kinds and (args.num_attention_heads % heads or query_groups(args) % heads):
        raise GrpoError(
            f"--cp-comm-type a2a splits the heads: --num-attention-heads ({args.num_attention_heads}) and "
            f"--num-query-groups ({query_groups(args)}) must be divisible by TP x CP ({heads}); or give p2p"
        )


def _check_hybrid_context_parallelism(args: Namespace) -> None:
    cp, name = args.context_parallel_size, "--hybrid-context-parallel"
    if cp < 2 or cp & (cp - 1):
        raise GrpoError(
            f"{name} halves the context-parallel group, down to single ranks: --context-parallel-size ({cp}) must be "
            "2, 4, 8 or another power of two"
        )
    if args.transformer_impl != "local":
        raise GrpoError(
            f"{name} needs --transformer-impl local: only its attention takes another group of ranks in each "
            "micro-batch"
        )
    if not args.max_tokens_per_microbatch:
        raise GrpoError(
            f"{name} needs --max-tokens-per-microbatch, the token budget of a rank: it determines how many ranks a "
            "sequence needs"
        )


def _check_experts(args: Namespace) -> None:
    ep, experts = args.expert_model_parallel_size, args.num_experts
    if experts is None:
        needing = [d for d in core_flags() if d.startswith(("moe_", "expert_")) and changed(args, d)]
        needing = [d for d in needing if not (d in _EXPERT_SIZES and getattr(args, d) == 1)]
        if args.moe_layer_recompute:
            needing.append("moe_layer_recompute")
        if args.router_replay_mode != "disabled":
            needing.append("router_replay_mode")
        if needing:
            raise GrpoError(f"{flag(sorted(needing)[0])} needs --num-experts: the model has no experts")
        return
    tp, etp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    divides(args, "num_experts", ep, "expert parallel size")
    divides(args, "moe_ffn_hidden_size", etp, "expert tensor parallel size")
    if args.world_size % (ep * etp * args.pipeline_model_parallel_size):
        raise GrpoError(
            f"world_size ({args.world_size}) must be divisible by EP {ep} x ETP {etp} x PP "
            f"{args.pipeline_model_parallel_size} = {ep * etp * args.pipeline_model_parallel_size}"
        )
    cp = args.context_parallel_size
    if args.use_tp_pp_dp_mapping and args.pipeline_model_parallel_size > 1 and ep * etp != tp * cp:
        raise GrpoError(
            f"--use-tp-pp-dp-mapping with pipeline stages and experts needs EP x ETP ({ep} x {etp}) = TP x CP ({tp} x "
            f"{cp}): megatron-core builds no other process groups in this rank order"
        )
    if args.moe_router_topk > experts:
        raise GrpoError(f"--moe-router-topk ({args.moe_router_topk}) must be at most --num-experts ({experts})")
    if tp > 1 and not args.sequence_parallel:
        raise GrpoError(
            f"mixture of experts with --tensor-model-parallel-size {tp} needs --sequence-parallel: each rank routes "
            "its own shard of the tokens"
        )
    if args.add_bias_linear:
        _check_expert_biases(args)
    if args.router_replay_mode != "disabled":
        excludes(args, "router_replay_mode", "moe_router_fusion", "the fused router cannot replay a choice of experts")
        if experts > 2**15:
            raise GrpoError(
                f"--num-experts ({experts}) must be at most {2**15} with --router-replay-mode, which stores experts in "
                "16 bits"
            )
    kinds = args.moe_router_load_balancing_type
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in BALANCING:
            raise GrpoError(f"--moe-router-load-balancing-type {kind}: choose from {', '.join(BALANCING)}")


def _check_expert_biases(args: Namespace) -> None:
    """Refuse experts with biases where megatron-core fails or computes another result."""
    if args.expert_tensor_parallel_size > 1:
        raise GrpoError(
            f"experts with biases cannot be split over {args.expert_tensor_parallel_size} tensor-parallel ranks, "
            "because each rank would add the whole bias: give --expert-tensor-parallel-size 1"
        )
    if args.transformer_impl == "transformer_engine":
        excludes(args, "bias_dropout_fusion", "add_bias_linear", "grouped experts already add their biases")
    if args.moe_grouped_gemm:
        return
    if args.transformer_impl == "transformer_engine":
        raise GrpoError("experts with biases need --moe-grouped-gemm with --transformer-impl transformer_engine")
    if args.bias_activation_fusion and args.activation_func_clamp_value is not None:
        raise GrpoError(
            "--bias-activation-fusion with --activation-func-clamp-value would clamp before the bias is added: leave "
            "--bias-activation-fusion out, or give --moe-grouped-gemm"
        )


def query_groups(args: Namespace) -> int:
    """Return the number of key/value heads; without grouped-query attention, one for each query head."""
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def parallel_steps(costs: StageCosts | None = None) -> tuple[Step, ...]:
    """Return the rules of a model's parallel configuration, in order. They follow `check_parallel_flags`.

    ``costs``: see `resolve_pipeline`.
    """
    return (
        resolve_experts,
        check_layers,
        check_virtual_stages,
        functools.partial(resolve_pipeline, costs=costs),
        check_parallelism,
    )
