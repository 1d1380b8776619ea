"""Batch arithmetic, and every rule about which flags go together: all of them are here, each with the numbers in its message.

Call ``merge_architecture`` for each source of the model's shape, then ``validate_args``. Nothing here touches a process group.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_grpo.errors import GrpoError

# The six numbers of the batch, as they are documented and printed.
FORMULAS = {
    "dp_size": "world_size / (TP x PP x CP)",
    "global_batch_size": "micro_batch_size x dp_size x gradient_accumulation_steps",
    "generation_batch_size": "global_batch_size x steps_per_generation",
    "num_rollout_prompts": "generation_batch_size / num_generations",
    "num_train_prompts": "global_batch_size / num_generations",
    "num_prompts_per_dp_group": "num_train_prompts / dp_size",
}


@dataclass(frozen=True)
class BatchArithmetic:
    """The sizes of a run: batches count completions, ``num_*_prompts`` prompts, accumulation steps micro-batches.

    ``gradient_accumulation_steps`` is None with a token budget: each update then has as many micro-batches as its tokens need.
    """

    world_size: int
    model_parallel: tuple[int, int, int]
    dp_size: int
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    global_batch_size: int
    generation_batch_size: int
    steps_per_generation: int
    num_iterations: int
    num_generations: int
    max_tokens_per_microbatch: int | None

    @property
    def num_rollout_prompts(self) -> int:
        """Prompts of one rollout."""
        return self.generation_batch_size // self.num_generations

    @property
    def num_train_prompts(self) -> int:
        """Prompts of one update."""
        return self.global_batch_size // self.num_generations

    @property
    def num_prompts_per_dp_group(self) -> float:
        """Prompts of one update that fall to a data-parallel rank, on average."""
        return self.num_train_prompts / self.dp_size

    @property
    def updates_per_rollout(self) -> int:
        """Iterations from one rollout to the next."""
        return self.steps_per_generation * self.num_iterations

    def lines(self) -> list[str]:
        """The arithmetic for people, one line a number."""
        tp, pp, cp = self.model_parallel
        if self.max_tokens_per_microbatch:
            budget = f"micro-batches of at most {self.max_tokens_per_microbatch} tokens, as many as an update needs"
        else:
            budget = f"{self.micro_batch_size} x {self.dp_size} x {self.gradient_accumulation_steps}"
        values = {
            "dp_size": (self.dp_size, f"{self.world_size} / ({tp} x {pp} x {cp})"),
            "global_batch_size": (self.global_batch_size, budget),
            "generation_batch_size": (
                self.generation_batch_size,
                f"{self.global_batch_size} x {self.steps_per_generation}",
            ),
            "num_rollout_prompts": (self.num_rollout_prompts, f"{self.generation_batch_size} / {self.num_generations}"),
            "num_train_prompts": (self.num_train_prompts, f"{self.global_batch_size} / {self.num_generations}"),
            "num_prompts_per_dp_group": (self.num_prompts_per_dp_group, f"{self.num_train_prompts} / {self.dp_size}"),
        }
        rows = [f"{name:24} = {value:<6g} = {worked:18} {FORMULAS[name]}" for name, (value, worked) in values.items()]
        if self.max_tokens_per_microbatch:
            rows[1] = f"{'global_batch_size':24} = {self.global_batch_size:<6g} in {budget}"
        updates = f"{self.steps_per_generation} x {self.num_iterations}"
        return [
            *rows,
            f"{'updates per rollout':24} = {self.updates_per_rollout:<6g} = {updates:18} steps_per_generation x num_iterations",
        ]


def batch_arithmetic(args: Namespace, world_size: int) -> BatchArithmetic:
    """The sizes that ``args`` mean on ``world_size`` ranks; GrpoError, with the numbers, when they do not fit together."""
    positive(
        args,
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size micro_batch_size global_batch_size "
        "num_generations steps_per_generation generation_batch_size num_iterations max_tokens_per_microbatch",
    )
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if world_size % (tp * pp * cp):
        raise GrpoError(
            f"world_size ({world_size}) must be divisible by the product of all model parallel sizes ({tp * pp * cp}): "
            f"TP {tp} x PP {pp} x CP {cp}"
        )
    dp = world_size // (tp * pp * cp)
    micro, budget, group = args.micro_batch_size, args.max_tokens_per_microbatch, args.num_generations
    if budget and ("micro_batch_size" in args.explicit) != (args.loss_type == "bnpo"):
        raise GrpoError(
            f"--max-tokens-per-microbatch ({budget}) goes with --micro-batch-size ({micro}) for --loss-type bnpo alone, which "
            "averages over blocks of so many completions: otherwise both say how micro-batches are made, give one of them"
        )
    if group < 2:
        raise GrpoError(
            f"--num-generations ({group}) must be at least 2: advantages compare the completions of a prompt"
        )
    global_batch, steps, generation = _batch_sizes(args, micro * dp)
    if budget and global_batch < dp:
        raise GrpoError(
            f"global_batch_size ({global_batch}) must be at least dp_size ({dp}): a completion for each rank"
        )
    if not budget and global_batch % (micro * dp):
        raise GrpoError(
            f"global_batch_size ({global_batch}) must be divisible by micro_batch_size ({micro}) x dp_size ({dp}) "
            f"= {micro * dp}"
        )
    for name, size in (("global_batch_size", global_batch), ("generation_batch_size", generation)):
        if size % group:
            raise GrpoError(
                f"{name} ({size}) must be divisible by num_generations ({group}), so that it holds whole groups: "
                f"{size // group * group or group} or {(size // group + 1) * group} would"
            )
    accumulation = None if budget else global_batch // (micro * dp)
    return BatchArithmetic(
        world_size,
        (tp, pp, cp),
        dp,
        None if budget else micro,
        accumulation,
        global_batch,
        generation,
        steps,
        args.num_iterations,
        group,
        budget,
    )


def _batch_sizes(args: Namespace, smallest: int) -> tuple[int, int, int]:
    """(global batch, steps per generation, generation batch), each from the other two where it is not given."""
    global_batch, steps, generation = args.global_batch_size, args.steps_per_generation, args.generation_batch_size
    if generation is None:
        global_batch = global_batch or smallest
        return global_batch, steps, global_batch * steps
    if global_batch is None:
        if generation % steps:
            raise GrpoError(
                f"generation_batch_size ({generation}) must be divisible by steps_per_generation ({steps}): each step is an "
                "update on an equal share"
            )
        return generation // steps, steps, generation
    if "steps_per_generation" not in args.explicit:
        if generation % global_batch:
            raise GrpoError(
                f"generation_batch_size ({generation}) must be divisible by global_batch_size ({global_batch}): "
                "steps_per_generation is their quotient"
            )
        return global_batch, generation // global_batch, generation
    if generation != global_batch * steps:
        raise GrpoError(
            f"generation_batch_size ({generation}) must be global_batch_size ({global_batch}) x steps_per_generation "
            f"({steps}) = {global_batch * steps}: leave one of the three out, it follows from the others"
        )
    return global_batch, steps, generation


_FAMILIES = "the supported model families (qwen3, qwen2, llama)"

# What must keep one of these values, and why.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    dest: (values, reason)
    for reason, values, dests in (
        ("context parallelism is not supported yet", (1,), "context_parallel_size"),
        ("context parallelism is not supported yet", (False,), "hybrid_context_parallel"),
        ("virtual pipeline stages are not supported yet", (None, 1), "num_virtual_stages_per_pipeline_rank"),
        (
            "virtual pipeline stages are not supported yet",
            (False,),
            "overlap_p2p_communication_warmup_flush overlap_param_gather_with_optimizer_step align_param_gather",
        ),
        (
            "uneven pipeline stages are not supported yet",
            (None,),
            "pipeline_model_parallel_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
        ),
        (
            "uneven pipeline stages are not supported yet",
            (False,),
            "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        ),
        ("mixture of experts is not supported yet", (None,), "num_experts"),
        ("mixture of experts is not supported yet", (1,), "expert_model_parallel_size"),
        ("mixture of experts is not supported yet", (None, 1), "expert_tensor_parallel_size"),
        ("multi-token prediction is not supported yet", (None, 0), "mtp_num_layers"),
        ("training in 8 or 4 bits is not supported yet", (None,), "fp8_format fp4_format"),
        ("multimodal models are not supported yet", (None,), "mrope_section"),
        ("the engine drops nothing, and both must give one probability", (0.0,), "hidden_dropout attention_dropout"),
        (f"{_FAMILIES} have RMSNorm", ("RMSNorm",), "normalization"),
        (f"{_FAMILIES} have SwiGLU", (True,), "swiglu"),
        (f"{_FAMILIES} have no such biases", (False,), "add_bias_linear"),
        (f"{_FAMILIES} rotate whole heads", (1.0,), "rotary_percent"),
        (f"{_FAMILIES} have a plain softmax", ("vanilla",), "softmax_type"),
        (
            f"{_FAMILIES} have no such thing",
            (None,),
            "softmax_scale window_size window_attn_skip_freq no_rope_freq activation_func_clamp_value",
        ),
        (
            f"{_FAMILIES} have no such thing",
            (False, 0.0),
            "rotary_interleaved qk_l2_norm attention_output_gate apply_layernorm_1p glu_linear_offset "
            "apply_residual_connection_post_layernorm",
        ),
    )
    for dest in dests.split()
}

# What describes a model; a checkpoint's stored arguments and a config.json have these in common.
ARCHITECTURE = (
    "model_family num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups "
    "kv_channels qk_layernorm add_qkv_bias add_bias_linear normalization norm_epsilon swiglu position_embedding_type "
    "rotary_base rotary_percent use_rope_scaling rope_scaling_factor max_position_embeddings vocab_size "
    "untie_embeddings_and_output_weights"
).split()


def merge_architecture(args: Namespace, source: Mapping[str, Any], source_name: str) -> None:
    """Take the model's shape from ``source`` (a checkpoint's stored arguments, or a config.json translated to arguments).

    A flag that was given must agree with it: GrpoError names the flag, both values and the source.
    """
    for dest in ARCHITECTURE:
        value = source.get(dest)
        if value is None:
            continue
        if dest in args.explicit and getattr(args, dest) != value:
            raise GrpoError(
                f"{flag(dest)} is {getattr(args, dest)}, but {source_name} has {value}: leave the flag out, or name the "
                "weights that it belongs to"
            )
        setattr(args, dest, value)


def validate_args(args: Namespace, world_size: int) -> None:
    """Refuse what cannot work with a GrpoError that says why, and fill in what follows from the given arguments.

    With ``--dry-run`` only the model's shape must be there, and the machine need not have what the run needs.
    """
    sizes = batch_arithmetic(args, world_size)
    args.world_size, args.data_parallel_size = world_size, sizes.dp_size
    args.global_batch_size, args.generation_batch_size = sizes.global_batch_size, sizes.generation_batch_size
    args.steps_per_generation, args.updates_per_rollout = sizes.steps_per_generation, sizes.updates_per_rollout
    _check_model(args)
    _check_parallelism(args)
    _check_lengths(args)
    _check_sampling(args, world_size)
    _check_algorithm(args)
    _check_duration(args)
    _check_optimizer(args)
    _check_checkpoints(args)
    _check_evaluation(args)


def flag(dest: str) -> str:
    """The flag of an attribute."""
    return "--" + dest.replace("_", "-")


def positive(args: Namespace, dests: str) -> None:
    """Refuse zero and negative values of these attributes (None is fine)."""
    for dest in dests.split():
        value = getattr(args, dest)
        if value is not None and value <= 0:
            raise GrpoError(f"{flag(dest)} ({value}) must be greater than 0")


def _within(args: Namespace, dest: str, low: float, high: float) -> None:
    value = getattr(args, dest)
    if value is not None and not low <= value <= high:
        raise GrpoError(f"{flag(dest)} ({value}) must lie between {low:g} and {high:g}")


def _need(args: Namespace, dest: str, cure: str = "give it") -> None:
    """Refuse the absence of a value; a dry run can do without."""
    if not args.dry_run and getattr(args, dest) in (None, []):
        raise GrpoError(f"{flag(dest)} is missing: {cure}")


def _goes_with(args: Namespace, dest: str, other: str, reason: str) -> None:
    """Refuse ``dest`` where it was given without ``other``, since it would be ignored."""
    if dest in args.explicit and getattr(args, dest) and not getattr(args, other):
        raise GrpoError(f"{flag(dest)} needs {flag(other)}: {reason}")


def _one_of(args: Namespace, first: str, second: str, reason: str) -> None:
    if getattr(args, first) and getattr(args, second):
        raise GrpoError(f"{flag(first)} and {flag(second)} cannot both be given: {reason}")


def _check_model(args: Namespace) -> None:
    for dest in "num_layers hidden_size num_attention_heads vocab_size max_position_embeddings model_family".split():
        if getattr(args, dest) is None:
            raise GrpoError(
                f"{flag(dest)} is missing: give it, or --load-hf DIR, or a checkpoint with --use-checkpoint-args"
            )
    positive(args, "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups vocab_size")
    positive(args, "max_position_embeddings seq_length make_vocab_size_divisible_by rotary_base norm_epsilon")
    for dest, (values, reason) in ONLY.items():
        value = getattr(args, dest)
        if value not in values:
            cure = " or ".join(str(v) for v in values if v is not None) or "leave it out"
            raise GrpoError(f"{flag(dest)} is {value}: {reason}; {'set it to ' * (cure != 'leave it out')}{cure}")
    _goes_with(args, "num_query_groups", "group_query_attention", "without it every head has its own keys and values")
    heads, width = args.num_attention_heads, args.hidden_size
    if args.group_query_attention:
        if args.num_query_groups is None:
            raise GrpoError("--group-query-attention needs --num-query-groups: the number of key/value heads")
        if heads % args.num_query_groups:
            raise GrpoError(
                f"--num-attention-heads ({heads}) must be divisible by --num-query-groups ({args.num_query_groups})"
            )
    if args.kv_channels is None:
        if width % heads:
            raise GrpoError(
                f"--hidden-size ({width}) must be divisible by --num-attention-heads ({heads}), or give --kv-channels"
            )
        args.kv_channels = width // heads
    if args.ffn_hidden_size is None:  # as Megatron-LM: 8/3 of the width, so that SwiGLU has the size of a plain MLP
        args.ffn_hidden_size = int(4 * width * 2 / 3) // 64 * 64
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple


def _check_parallelism(args: Namespace) -> None:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if args.sequence_parallel and tp == 1:
        raise GrpoError(
            "--sequence-parallel needs --tensor-model-parallel-size of at least 2: it splits over the tensor-parallel ranks"
        )
    for dest in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(args, dest) % tp:
            raise GrpoError(f"{flag(dest)} ({getattr(args, dest)}) must be divisible by tensor parallel size ({tp})")
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if groups % tp and tp % groups:
        raise GrpoError(f"--num-query-groups ({groups}) must be a multiple or a divisor of tensor parallel size ({tp})")
    if args.num_layers % pp:
        raise GrpoError(
            f"--num-layers ({args.num_layers}) must be divisible by pipeline parallel size ({pp}): uneven stages are not "
            "supported yet"
        )
    backends = ("auto", "local") if args.transformer_impl == "local" else ("auto", "flash", "fused", "unfused")
    if args.attention_backend not in backends:
        raise GrpoError(
            f"--attention-backend is {args.attention_backend}, but --transformer-impl {args.transformer_impl} knows only "
            f"{', '.join(backends)}"
        )


def _check_lengths(args: Namespace) -> None:
    positive(args, "max_prompt_length max_completion_length vllm_max_model_len")
    longest = args.max_prompt_length + args.max_completion_length
    parts = f"--max-prompt-length ({args.max_prompt_length}) + --max-completion-length ({args.max_completion_length})"
    if args.vllm_max_model_len is None:
        args.vllm_max_model_len = longest
    for dest in ("max_position_embeddings", "seq_length", "vllm_max_model_len", "max_tokens_per_microbatch"):
        limit = getattr(args, dest)
        if limit is not None and longest > limit:
            raise GrpoError(f"{parts} = {longest} is more than {flag(dest)} ({limit})")
    if args.vllm_max_model_len > args.max_position_embeddings:
        raise GrpoError(
            f"--vllm-max-model-len ({args.vllm_max_model_len}) is more than --max-position-embeddings "
            f"({args.max_position_embeddings})"
        )


def _check_sampling(args: Namespace, world_size: int) -> None:
    positive(args, "vllm_tensor_parallel_size vllm_max_num_seqs vllm_gpu_memory_utilization temperature top_p")
    _within(args, "vllm_gpu_memory_utilization", 0, 1)
    _within(args, "top_p", 0, 1)
    _within(args, "min_p", 0, 1)
    _within(args, "mismatch_sample_rate", 0, 1)
    width = args.vllm_tensor_parallel_size
    if world_size % width:
        raise GrpoError(f"world_size ({world_size}) must be divisible by --vllm-tensor-parallel-size ({width})")
    if args.num_attention_heads % width:
        raise GrpoError(
            f"--num-attention-heads ({args.num_attention_heads}) must be divisible by --vllm-tensor-parallel-size ({width})"
        )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if groups % width and width % groups:
        raise GrpoError(
            f"--num-query-groups ({groups}) must be a multiple or a divisor of --vllm-tensor-parallel-size ({width})"
        )
    if args.top_k != -1 and args.top_k < 1:
        raise GrpoError(f"--top-k ({args.top_k}) must be at least 1, or -1 for all tokens")
    truncated = args.top_p < 1 or args.top_k != -1 or args.min_p > 0
    if truncated and args.mismatch_sample_rate > 0:
        raise GrpoError(
            f"--top-p {args.top_p} --top-k {args.top_k} --min-p {args.min_p} change the engine's probabilities, which "
            "cannot be compared with the trainer's then: add --mismatch-sample-rate 0"
        )
    if args.stop_words and args.tokenizer_type == "SentencePieceTokenizer":
        raise GrpoError("--stop-words needs a HuggingFaceTokenizer: the engine looks for them in the text it decodes")


def _check_algorithm(args: Namespace) -> None:
    positive(args, "epsilon epsilon_high reward_timeout reward_workers")
    _within(args, "epsilon", 0, 1)
    if args.epsilon_high is None:
        args.epsilon_high = args.epsilon
    if args.beta < 0:
        raise GrpoError(f"--beta ({args.beta}) must not be negative")
    if args.ref_load and args.beta == 0:
        raise GrpoError("--ref-load needs --beta greater than 0: without KL there is no reference policy")
    _need(args, "reward_funcs", "name at least one reward function")
    functions = args.reward_funcs or []
    if len(set(functions)) != len(functions):
        raise GrpoError(f"--reward-funcs {' '.join(functions)}: each may be named once; --reward-weights weighs them")
    if args.reward_weights is None:
        args.reward_weights = [1.0] * len(functions)
    if len(args.reward_weights) != len(functions):
        raise GrpoError(
            f"--reward-weights has {len(args.reward_weights)} values for {len(functions)} --reward-funcs: give one for each"
        )


def _check_duration(args: Namespace) -> None:
    positive(args, "train_iters num_epochs exit_interval eval_interval save_interval log_interval")
    _one_of(args, "train_iters", "num_epochs", "each says how long to train")
    if args.num_epochs is None:
        _need(args, "train_iters", "give it, or --num-epochs")
    per_rollout = args.updates_per_rollout
    for dest in ("train_iters", "exit_interval", "eval_interval", "save_interval"):
        value = getattr(args, dest)
        if value and value % per_rollout:
            raise GrpoError(
                f"{flag(dest)} ({value}) must be a multiple of the updates per rollout ({per_rollout} = steps_per_generation "
                f"{args.steps_per_generation} x num_iterations {args.num_iterations}): {value // per_rollout * per_rollout} "
                f"or {(value // per_rollout + 1) * per_rollout}"
            )


def _check_optimizer(args: Namespace) -> None:
    _need(args, "lr", "give the learning rate, such as 1e-6")
    positive(args, "lr lr_decay_iters lr_warmup_fraction")
    _one_of(args, "bf16", "fp16", "parameters have one dtype")
    if args.lr is not None and not 0 <= args.min_lr <= args.lr:
        raise GrpoError(f"--min-lr ({args.min_lr}) must lie between 0 and --lr ({args.lr})")
    _one_of(args, "lr_warmup_iters", "lr_warmup_fraction", "both say how long to warm up")
    if args.lr_warmup_iters < 0:
        raise GrpoError(f"--lr-warmup-iters ({args.lr_warmup_iters}) must not be negative")
    decay = args.lr_decay_iters or args.train_iters
    if decay and args.lr_warmup_iters >= decay:
        raise GrpoError(
            f"--lr-warmup-iters ({args.lr_warmup_iters}) must be less than the updates of the decay ({decay})"
        )
    if args.lr_warmup_fraction is not None and args.lr_warmup_fraction >= 1:
        raise GrpoError(f"--lr-warmup-fraction ({args.lr_warmup_fraction}) must be less than 1")
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise GrpoError("--use-distributed-optimizer needs --optimizer adam")
    _goes_with(args, "overlap_param_gather", "use_distributed_optimizer", "it gathers what that optimizer has spread")
    _goes_with(args, "overlap_param_gather", "overlap_grad_reduce", "megatron-core overlaps both or neither")


def _check_checkpoints(args: Namespace) -> None:
    positive(args, "max_checkpoints_to_keep")
    _goes_with(args, "save_interval", "save", "there is no directory to save in")
    _goes_with(args, "max_checkpoints_to_keep", "save", "there is no directory to save in")
    _goes_with(args, "num_completions_to_log", "save", "they are written there")
    for dest in ("finetune", "no_load_optim", "no_load_rng"):
        _goes_with(args, dest, "load", "it says what to take from there")
    _one_of(args, "load_hf", "pretrained_checkpoint", "the first weights come from one place")
    _one_of(args, "finetune", "load_hf", "the first weights come from one place")
    _one_of(args, "finetune", "pretrained_checkpoint", "the first weights come from one place")
    _one_of(args, "save_hf", "no_save_hf", "they say opposite things")
    if args.use_checkpoint_args and not (args.load or args.pretrained_checkpoint):
        raise GrpoError("--use-checkpoint-args needs --load or --pretrained-checkpoint: a checkpoint to take them from")
    if args.save and not args.no_save_hf and not args.save_hf:
        args.save_hf = f"{args.save}/hf_model"
    if args.tokenizer_model is None:
        args.tokenizer_model = args.load_hf
    _need(args, "tokenizer_model", "give the tokenizer's directory or file, or --load-hf")


def _check_evaluation(args: Namespace) -> None:
    _need(args, "train_data_path", "name the files of training prompts")
    positive(args, "eval_max_prompts distributed_timeout_minutes")
    for dest in ("eval_interval", "val_before_train", "eval_num_generations", "eval_max_prompts"):
        _goes_with(args, dest, "valid_data_path", "there are no held-out prompts to evaluate on")
    if args.valid_data_path and not args.eval_interval and not args.val_before_train:
        raise GrpoError("--valid-data-path needs --eval-interval or --val-before-train: nothing would be evaluated")
    for dest in ("eval_num_generations", "num_completions_to_log"):
        if getattr(args, dest) < 0:
            raise GrpoError(f"{flag(dest)} ({getattr(args, dest)}) must not be negative")
    _goes_with(args, "wandb_exp_name", "wandb_project", "a run belongs to a project")
