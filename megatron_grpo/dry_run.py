"""What ``--dry-run`` prints: the batch arithmetic, what each rank holds, and how much memory that takes."""

from argparse import Namespace
from dataclasses import dataclass

from megatron_grpo.batch_arithmetic import batch_arithmetic
from megatron_grpo.weights.families.common import query_groups

GIB = 2**30
MOST_RANKS = 64  # of a larger world only the first and the last ranks are listed


@dataclass(frozen=True)
class Rank:
    """Where a rank stands: megatron-core's order tp-cp-ep-dp-pp, tensor-parallel neighbours next to each other."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    replica: int
    replica_tp: int


def ranks(args: Namespace, world_size: int) -> list[Rank]:
    """Coordinates of every rank; engine replicas are consecutive blocks of --vllm-tensor-parallel-size ranks."""
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    dp = world_size // (tp * cp * args.pipeline_model_parallel_size)
    width = args.vllm_tensor_parallel_size
    return [
        Rank(r, r % tp, r // tp % cp, r // (tp * cp) % dp, r // (tp * cp * dp), r // width, r % width)
        for r in range(world_size)
    ]


def layers(args: Namespace, stage: int) -> tuple[int, int]:
    """First and last transformer layer of a pipeline stage, counted from 0."""
    count = args.num_layers // args.pipeline_model_parallel_size
    return stage * count, (stage + 1) * count - 1


def parameters(args: Namespace, stage: int) -> int:
    """Parameters that one tensor-parallel rank of a pipeline stage holds; norms are whole on each rank."""
    width, ffn, tp = args.hidden_size, args.ffn_hidden_size, args.tensor_model_parallel_size
    queries, keys = _attention_widths(args)
    attention = width * (queries + 2 * keys) + queries * width + (queries + 2 * keys) * args.add_qkv_bias
    split = (attention + 3 * width * ffn) // tp
    whole = 2 * width + 2 * args.kv_channels * args.qk_layernorm
    first, last = layers(args, stage)
    total = (last - first + 1) * (split + whole)
    vocabulary = args.padded_vocab_size * width // tp
    is_first, is_last = stage == 0, stage == args.pipeline_model_parallel_size - 1
    if is_first:
        total += vocabulary
    if is_last:
        total += width
        if args.untie_embeddings_and_output_weights or not is_first:  # tied weights lie on both of these stages
            total += vocabulary
    return total


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory(args: Namespace, world_size: int, stage: int) -> Memory:
    """Estimated bytes on a rank of a pipeline stage while it trains, the engine not counted."""
    sizes = batch_arithmetic(args, world_size)
    count = parameters(args, stage)
    half = args.bf16 or args.fp16
    # Adam: two moments in float32, and with 16-bit parameters a float32 copy of them.
    state: float = count * ((12 if half else 8) if args.optimizer == "adam" else (8 if half else 4))
    if args.use_distributed_optimizer:
        state /= sizes.dp_size
    gradient_bytes = 2 if half and not args.accumulate_allreduce_grads_in_fp32 else 4
    return Memory(count * (2 if half else 4), count * gradient_bytes, state, _activations(args, stage, sizes))


def _activations(args: Namespace, stage: int, sizes) -> float:
    """What the layers of a stage keep for their backward pass, at the longest micro-batch.

    For each token a layer keeps the inputs and outputs of its two norms (4 hidden), queries, keys and values before and
    after rotation, the attention's output, gate, up and their product (3 ffn); with full recomputation, its input only.
    Pipeline stage s has up to PP - s micro-batches on their way.
    """
    pp, tp = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    longest = args.max_prompt_length + args.max_completion_length
    tokens = sizes.max_tokens_per_microbatch or sizes.micro_batch_size * longest
    in_flight = min(pp - stage, sizes.gradient_accumulation_steps or pp)
    queries, keys = _attention_widths(args)
    split_over = tp if args.sequence_parallel else 1
    if args.recompute_granularity == "full":
        numbers = args.hidden_size / split_over
    else:
        numbers = 4 * args.hidden_size / split_over + (3 * queries + 4 * keys + 3 * args.ffn_hidden_size) / tp
    first, last = layers(args, stage)
    return in_flight * tokens * (last - first + 1) * numbers * (2 if args.bf16 or args.fp16 else 4)


def _attention_widths(args: Namespace) -> tuple[int, int]:
    """Numbers that a token has in all its queries, and in all its keys."""
    return args.num_attention_heads * args.kv_channels, query_groups(args) * args.kv_channels


def dry_run_report(args: Namespace, world_size: int) -> str:
    """The whole report, for validated arguments."""
    sections = [
        "batch arithmetic",
        *batch_arithmetic(args, world_size).lines(),
        "",
        "ranks",
        *_rank_lines(args, world_size),
        "",
        "memory of a rank while training, GiB (estimated)",
        *_memory_lines(args, world_size),
    ]
    return "\n".join(sections)


def _rank_lines(args: Namespace, world_size: int) -> list[str]:
    pp = args.pipeline_model_parallel_size
    lines = [f"{'rank':>6} {'TP':>4} {'CP':>4} {'DP':>4} {'PP':>4}  {'engine replica':16} holds"]
    everyone = ranks(args, world_size)
    cut = world_size > MOST_RANKS
    for rank in everyone[: MOST_RANKS // 2] + everyone[-MOST_RANKS // 2 :] if cut else everyone:
        if cut and rank.rank == world_size - MOST_RANKS // 2:
            lines.append(f"{'...':>6} {world_size - MOST_RANKS} more ranks, in the same order")
        first, last = layers(args, rank.pp)
        embedding = "embedding, " if rank.pp == 0 else ""
        head = ", final norm, output layer" if rank.pp == pp - 1 else ""
        engine = f"{rank.replica}" + (f", its rank {rank.replica_tp}" if args.vllm_tensor_parallel_size > 1 else "")
        coordinates = f"{rank.rank:>6} {rank.tp:>4} {rank.cp:>4} {rank.dp:>4} {rank.pp:>4}"
        lines.append(f"{coordinates}  {engine:16} {embedding}layers {first}-{last}{head}")
    return lines


def _memory_lines(args: Namespace, world_size: int) -> list[str]:
    columns = ("parameters", "gradients", "optimizer", "activations", "total")
    lines = [f"{'PP':>6} " + " ".join(f"{name:>12}" for name in (*columns, "10^6 params"))]
    for stage in range(args.pipeline_model_parallel_size):
        stage_memory = memory(args, world_size, stage)
        cells = [f"{getattr(stage_memory, name) / GIB:>12.2f}" for name in columns]
        lines.append(f"{stage:>6} {' '.join(cells)} {parameters(args, stage) / 1e6:>12.1f}")
    longest = args.max_prompt_length + args.max_completion_length
    tokens = args.max_tokens_per_microbatch or args.micro_batch_size * longest
    recomputing = ", every layer recomputed" if args.recompute_granularity == "full" else ""
    layout = {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": args.vllm_tensor_parallel_size}
    engine = parameters(Namespace(**{**vars(args), **layout}), 0) * (2 if args.bf16 or args.fp16 else 4) / GIB
    lines += [
        f"activations: what the layers keep of micro-batches of {tokens} tokens{recomputing}",
        f"engine: {engine:.2f} of weights; with its cache {args.vllm_gpu_memory_utilization:g} of a GPU's memory",
    ]
    if args.beta > 0:
        lines.append("reference policy: the parameters a second time, in host memory")
    lines.append("not counted: the head's chunks, communication buffers, libraries, fragmentation")
    return lines
