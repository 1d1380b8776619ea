"""Every rule about which values and flags go together, each with the numbers in its message.

Call ``merge_architecture`` with the source of the model's shape, if there is one, then ``validate_args``.
"""

import importlib.util
import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megatron_grpo.algorithm.advantage_rules import check_advantages
from megatron_grpo.algorithm.loss_rules import check_loss
from megatron_grpo.data.sampler import read_blend
from megatron_grpo.models.config import transformer_config_from_args
from megatron_grpo.models.rope import check_rope
from megatron_grpo.observability.profiling import check_profiling
from megatron_grpo.observability.trackers import check_trackers
from megatron_grpo.parallel.arguments import check_parallelism
from megatron_grpo.parallel.zigzag import padded_lengths
from megatron_grpo.reference.arguments import check_frozen
from megatron_grpo.rewards.reward_models.arguments import check_reward_models
from megatron_grpo.rewards.reward_rules import check_rewards
from megatron_grpo.rollout.rollout_rules import check_rollout
from megatron_grpo.rollout.sampling_rules import check_sampling
from megatron_grpo.training.arguments import ddp_config_from_args, optimizer_config_from_args
from megatron_grpo.utils.batch_sizes import batch_arithmetic
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import divides, excludes, flag, needs, positive, required, within
from megatron_grpo.weights import families
from megatron_grpo.weights.families.common import ABSENT

# What describes a model; a checkpoint's stored arguments and a translated config.json both have these.
ARCHITECTURE = (
    "model_family num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups "
    "kv_channels qk_layernorm add_qkv_bias add_bias_linear normalization norm_epsilon swiglu position_embedding_type "
    "rotary_base max_position_embeddings vocab_size "
    "untie_embeddings_and_output_weights num_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk "
    "moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups "
    "moe_router_group_topk moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
    "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim mtp_num_layers"
).split() + [*ABSENT]

_FAMILIES = "the model families here (" + ", ".join(families.FAMILIES) + ")"
_ENGINE = "the engine does not, and its log-probabilities must be the trainer's: leave it out"

# What must have one of a few values: (attributes, values, reason and cure).
ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "hybrid_context_parallel hierarchical_context_parallel_sizes",
        (None, False),
        "Transformer Engine refuses packed batches in it: use --context-parallel-size with p2p or a2a",
    ),
    (
        "overlap_moe_expert_parallel_comm delay_wgrad_compute",
        (False,),
        "megatron-core's combined schedule computes its own loss, not GRPO's: leave it out",
    ),
    (
        "overlap_param_gather_with_optimizer_step",
        (False,),
        "gathering overlaps with the forward pass: leave it out",
    ),
    ("moe_expert_capacity_factor moe_pad_expert_input_to_capacity", (None, False), "it drops tokens; " + _ENGINE),
    ("moe_input_jitter_eps", (None,), "it adds noise to the router; " + _ENGINE),
    ("moe_router_force_load_balancing", (False,), "it routes at random; " + _ENGINE),
    ("moe_apply_probs_on_input", (False,), "it weighs before the experts; " + _ENGINE),
    ("moe_use_legacy_grouped_gemm", (False,), "it needs a package of its own: --moe-grouped-gemm alone does not"),
    ("moe_enable_deepep", (False,), "the dispatchers here are allgather and alltoall: leave it out"),
    (
        "moe_router_padding_for_fp8 moe_router_padding_for_quantization",
        (False,),
        "training in 8 bits is not supported yet",
    ),
    ("fp8_format fp4_format", (None,), "training in 8 or 4 bits is not supported yet: leave it out"),
    ("mrope_section", (None,), "multimodal models are not supported yet: leave it out"),
    (
        "hidden_dropout attention_dropout",
        (0.0,),
        "the engine drops nothing, and its log-probabilities must be the trainer's: set it to 0",
    ),
    ("normalization", ("RMSNorm",), f"{_FAMILIES} have RMSNorm: give --normalization RMSNorm"),
    (
        "no_rope_freq qk_l2_norm attention_output_gate moe_latent_size apply_residual_connection_post_layernorm",
        (None, False),
        f"{_FAMILIES} have no such thing, so the engine could not run the model: leave it out",
    ),
)


def merge_architecture(args: Namespace, source: Mapping[str, Any], source_name: str) -> None:
    """Take the model's shape from a checkpoint's stored arguments or from a config.json translated to arguments.

    A flag that was given must agree: else GrpoError names the flag, both values and the source.
    """
    for dest in ARCHITECTURE:
        if dest not in source:
            continue
        value = source[dest]
        given = getattr(args, dest) if dest in args.explicit else None
        if value is None and not given:
            continue
        if given is not None and given != value:
            raise GrpoError(
                f"{flag(dest)} is {given}, but {source_name} says {value}: leave the flag out, or load "
                "the weights that it describes"
            )
        setattr(args, dest, value)


def validate_args(args: Namespace, world_size: int) -> None:
    """Refuse with a GrpoError what cannot work, and fill in what follows from the arguments that were given.

    ``--dry-run`` does without data, rewards and a learning rate, and without the libraries that the run will need.
    """
    _check_finite(args)
    sizes = batch_arithmetic(args, world_size)
    args.world_size, args.data_parallel_size = world_size, sizes.dp_size
    args.global_batch_size, args.generation_batch_size = sizes.global_batch_size, sizes.generation_batch_size
    args.steps_per_generation, args.updates_per_rollout = sizes.steps_per_generation, sizes.updates_per_rollout
    check_model(args)
    check_parallelism(args)
    families.for_args(args).hf_from_args(args)  # refuses what no member of the family has
    _check_lengths(args)
    check_rope(args)
    _check_data(args)
    check_rollout(args, world_size)
    check_rewards(args)
    check_reward_models(args)
    _check_algorithm(args)
    check_sampling(args)
    _check_duration(args)
    _check_optimizer(args)
    _check_checkpoints(args)
    _check_logging(args)
    _check_libraries(args)


def _check_finite(args: Namespace) -> None:
    """Refuse nan and inf, which pass most comparisons and spoil the weights in the end."""
    for dest, value in vars(args).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise GrpoError(f"{flag(dest)} is {number}: give a finite number")


def check_model(args: Namespace) -> None:
    """Refuse a shape that no model here has, and fill in the sizes that follow from others."""
    for dest in "num_layers hidden_size num_attention_heads vocab_size max_position_embeddings model_family".split():
        if getattr(args, dest) is None:
            raise GrpoError(f"{flag(dest)} is missing: give it, --load-hf, or a checkpoint with --use-checkpoint-args")
    positive(args, "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups vocab_size")
    positive(args, "max_position_embeddings seq_length make_vocab_size_divisible_by rotary_base rotary_base_local")
    positive(args, "norm_epsilon softmax_scale attn_logit_softcapping final_logit_softcapping")
    for dests, values, reason in ONLY:
        for dest in dests.split():
            if getattr(args, dest) not in values:
                raise GrpoError(f"{flag(dest)} is {getattr(args, dest)}: {reason}")
    needs(args, "num_query_groups", "group_query_attention", "without it each head has its own keys and values")
    if args.group_query_attention:
        if args.num_query_groups is None:
            raise GrpoError("--group-query-attention needs --num-query-groups: how many heads keys and values have")
        divides(args, "num_attention_heads", args.num_query_groups, "--num-query-groups")
    if args.kv_channels is None:
        divides(args, "hidden_size", args.num_attention_heads, "--num-attention-heads, or --kv-channels be given")
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.ffn_hidden_size is None:
        # Megatron-LM's: SwiGLU with as many weights as a plain MLP of four times the width
        args.ffn_hidden_size = int(4 * args.hidden_size * 2 / 3) // 64 * 64
    args.padded_vocab_size = padded_vocab_size(args)


def padded_vocab_size(args: Namespace) -> int:
    """Rows of the embedding: the vocabulary, padded so that each tensor-parallel rank has as many."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-args.vocab_size // multiple) * multiple


def _check_lengths(args: Namespace) -> None:
    positive(args, "max_prompt_length max_completion_length vllm_max_model_len")
    longest = args.max_prompt_length + args.max_completion_length
    if args.vllm_max_model_len is None:
        args.vllm_max_model_len = longest
    check_budgets(args)
    for dest in ("max_position_embeddings", "seq_length", "vllm_max_model_len"):
        limit = getattr(args, dest)
        if limit is not None and longest > limit:
            raise GrpoError(
                f"--max-prompt-length ({args.max_prompt_length}) + --max-completion-length "
                f"({args.max_completion_length}) = {longest} must be at most {flag(dest)} ({limit})"
            )
    if args.vllm_max_model_len > args.max_position_embeddings:
        raise GrpoError(
            f"--vllm-max-model-len ({args.vllm_max_model_len}) must be at most --max-position-embeddings "
            f"({args.max_position_embeddings})"
        )


def check_budgets(args: Namespace) -> None:
    """Refuse a token budget that does not hold the longest sequence."""
    longest = args.max_prompt_length + args.max_completion_length
    padded = int(padded_lengths(np.array([longest]), args.context_parallel_size)[0])
    for dest in ("max_tokens_per_microbatch", "logprobs_max_tokens_per_microbatch"):
        budget = getattr(args, dest)
        if budget is not None and padded > budget:
            raise GrpoError(
                f"--max-prompt-length ({args.max_prompt_length}) + --max-completion-length "
                f"({args.max_completion_length}), as a context-parallel pack holds them, are {padded} tokens: "
                f"{flag(dest)} ({budget}) must be at least that"
            )


def _check_data(args: Namespace) -> None:
    required(args, "train_data_path", "name the files of training prompts")
    weights = read_blend(args.train_data_path or [])[1]
    if weights and args.num_epochs is not None:
        raise GrpoError(
            "--num-epochs and weights in --train-data-path cannot both be given: each file is gone through at "
            "a speed of its own; give --train-iters"
        )
    if read_blend(args.valid_data_path or [])[1]:
        raise GrpoError("--valid-data-path has weights: every held-out prompt counts the same; leave them out")
    if args.tokenizer_model is None:
        args.tokenizer_model = args.load_hf
    for dest in ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens"):
        if dest in args.explicit and args.tokenizer_type != "TikTokenizer":
            raise GrpoError(f"{flag(dest)} needs --tokenizer-type TikTokenizer")
    positive(args, "tiktoken_num_special_tokens")
    required(args, "tokenizer_model", "give the tokenizer's directory or file, or --load-hf")
    positive(args, "eval_interval eval_max_prompts")
    for dest in ("eval_interval", "val_before_train", "eval_num_generations", "eval_max_prompts"):
        needs(args, dest, "valid_data_path", "there are no held-out prompts to evaluate on")
    if args.valid_data_path and not args.eval_interval and not args.val_before_train:
        raise GrpoError("--valid-data-path needs --eval-interval or --val-before-train: it would not be used")
    if args.eval_num_generations < 0:
        raise GrpoError(f"--eval-num-generations ({args.eval_num_generations}) must not be negative")


def _check_algorithm(args: Namespace) -> None:
    check_loss(args)
    _check_correction(args)
    check_advantages(args)
    check_frozen(args)


def _check_correction(args: Namespace) -> None:
    mode = args.rollout_importance_sampling_mode
    needs(args, "rollout_importance_sampling_threshold", "rollout_importance_sampling_mode", "it bounds its weights")
    positive(args, "rollout_importance_sampling_threshold")
    if mode and args.rollout_importance_sampling_threshold is None:
        args.rollout_importance_sampling_threshold = 5.0 if mode == "icepop" else 2.0
    if mode != "icepop":
        if args.rollout_importance_sampling_lower_bound is not None:
            raise GrpoError(
                "--rollout-importance-sampling-lower-bound needs --rollout-importance-sampling-mode icepop: the other "
                "modes have no lower bound"
            )
        return
    if args.rollout_importance_sampling_lower_bound is None:
        args.rollout_importance_sampling_lower_bound = 0.5
    within(args, "rollout_importance_sampling_lower_bound", 0, args.rollout_importance_sampling_threshold)


def _check_duration(args: Namespace) -> None:
    positive(args, "train_iters num_epochs exit_interval save_interval log_interval distributed_timeout_minutes")
    within(args, "seed", 0, 2**31)  # numpy's limit is 2**32 - 1, and stages add to it
    excludes(args, "train_iters", "num_epochs", "each says how long to train")
    if args.num_epochs is None:
        required(args, "train_iters", "give it, or --num-epochs")
    per_rollout = args.updates_per_rollout
    for dest in ("train_iters", "exit_interval", "eval_interval", "save_interval"):
        value = getattr(args, dest)
        if value is not None and value % per_rollout:
            raise GrpoError(
                f"{flag(dest)} ({value}) must be divisible by the updates per rollout ({per_rollout} = "
                f"--steps-per-generation {args.steps_per_generation} x --num-iterations {args.num_iterations})"
            )


def _check_optimizer(args: Namespace) -> None:
    excludes(args, "bf16", "fp16", "parameters have one dtype")
    required(args, "lr", "give the learning rate, such as 1e-6")
    positive(args, "lr lr_decay_iters")
    if args.lr is not None and not 0 <= args.min_lr <= args.lr:
        raise GrpoError(f"--min-lr ({args.min_lr}) must lie between 0 and --lr ({args.lr})")
    if args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction < 1:
        raise GrpoError(f"--lr-warmup-fraction ({args.lr_warmup_fraction}) must be at least 0 and less than 1")
    excludes(args, "lr_warmup_iters", "lr_warmup_fraction", "each says how long to warm up")
    check_warmup(args)
    for dest in ("adam_beta1", "adam_beta2", "sgd_momentum"):
        if not 0 <= getattr(args, dest) < 1:
            raise GrpoError(f"{flag(dest)} ({getattr(args, dest)}) must be at least 0 and less than 1")
    positive(args, "adam_eps")
    for dest in ("weight_decay", "clip_grad"):
        if getattr(args, dest) < 0:
            raise GrpoError(f"{flag(dest)} ({getattr(args, dest)}) must not be negative")
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise GrpoError("--use-distributed-optimizer needs --optimizer adam")
    for dest in ("offload_model", "offload_gradients"):
        excludes(args, dest, "use_nccl_ub", "the network card has registered where the buffers lie")
    if args.optimizer_cpu_offload and not args.dry_run and not torch.cuda.is_available():
        raise GrpoError("--optimizer-cpu-offload needs a GPU: here the optimizer is on the CPU anyway")
    needs(args, "overlap_param_gather", "use_distributed_optimizer", "only then are parameters gathered")
    needs(args, "overlap_param_gather", "overlap_grad_reduce", "megatron-core overlaps both or neither")


def check_warmup(args: Namespace) -> None:
    """Refuse a warm-up longer than the schedule; to be called again when --num-epochs has become --train-iters."""
    decay = args.lr_decay_iters or args.train_iters or math.inf
    if not 0 <= args.lr_warmup_iters < decay:
        raise GrpoError(
            f"--lr-warmup-iters ({args.lr_warmup_iters}) must be at least 0 and less than the updates in all ({decay})"
        )


def _check_checkpoints(args: Namespace) -> None:
    positive(args, "max_checkpoints_to_keep")
    nowhere = "there is no directory to write to"
    for dest in ("save_interval", "max_checkpoints_to_keep"):
        needs(args, dest, "save", nowhere)
    if not args.log_completions:
        needs(args, "num_completions_to_log", "save", nowhere)
    for dest in ("finetune", "no_load_optim", "no_load_rng"):
        needs(args, dest, "load", "it says what to take from there")
    one_place = "the first weights come from one place"
    excludes(args, "load_hf", "pretrained_checkpoint", one_place)
    excludes(args, "load_hf", "finetune", one_place)
    excludes(args, "pretrained_checkpoint", "finetune", one_place)
    if args.use_checkpoint_args and not (args.load or args.pretrained_checkpoint):
        raise GrpoError("--use-checkpoint-args needs --load or --pretrained-checkpoint: a checkpoint that has them")
    excludes(args, "save_hf", "no_save_hf", "one asks for the export, the other for none")
    if args.save and not args.save_hf and not args.no_save_hf:
        args.save_hf = f"{args.save}/hf_model"


def _check_logging(args: Namespace) -> None:
    if args.num_completions_to_log < 0:
        raise GrpoError(f"--num-completions-to-log ({args.num_completions_to_log}) must not be negative")
    positive(args, "device_peak_tflops")
    check_trackers(args)
    check_profiling(args)


def _check_libraries(args: Namespace) -> None:
    """Refuse what this machine, or megatron-core itself, cannot do."""
    have_te = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    have_apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    if args.transformer_impl == "transformer_engine" and not have_te:
        if args.dry_run:
            return
        raise GrpoError(
            "--transformer-impl transformer_engine needs a GPU and Transformer Engine, and one of them is absent: "
            "install it (requirements-gpu.txt), or give --transformer-impl local"
        )
    if args.transformer_impl == "local" and torch.cuda.is_available() and not (args.bf16 or args.fp16):
        raise GrpoError("on a GPU --transformer-impl local needs --bf16 or --fp16: its attention kernel has no float32")
    if args.gradient_accumulation_fusion and not have_apex and not args.dry_run:
        raise GrpoError("--gradient-accumulation-fusion needs apex built with --cuda_ext: install it, or leave it out")
    transformer_config_from_args(args)
    optimizer_config_from_args(args)
    ddp_config_from_args(args)
