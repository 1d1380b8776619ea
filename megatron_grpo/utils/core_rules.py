"""Refusal of megatron-core's flags that nothing reads in a run, such as --hysteresis without --fp16."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_grpo.utils.core_flags import core_flags
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import flag

Condition = Callable[[Namespace], Any]


def _given(dest: str, value: Any = None) -> Condition:
    """Return the condition that an attribute is set, or has this value."""
    return lambda args: getattr(args, dest) if value is None else getattr(args, dest) == value


# (attributes, condition under which a run reads them, the flags that it stands for)
READ_WITH: tuple[tuple[str, Condition, str], ...] = (
    (
        "recompute_method recompute_num_layers distribute_saved_activations",
        _given("recompute_granularity", "full"),
        "--recompute-granularity full",
    ),
    ("recompute_modules", _given("recompute_granularity", "selective"), "--recompute-granularity selective"),
    (
        "cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering",
        _given("cpu_offloading"),
        "--cpu-offloading",
    ),
    (
        "offload_modules min_offloaded_tensor_size fine_grained_offloading_max_inflight_offloads",
        _given("fine_grained_activation_offloading"),
        "--fine-grained-activation-offloading",
    ),
    (
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d use_torch_optimizer_for_cpu_offload pin_cpu_grads "
        "pin_cpu_params",
        _given("optimizer_cpu_offload"),
        "--optimizer-cpu-offload",
    ),
    (
        "store_param_remainders main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        _given("use_precision_aware_optimizer"),
        "--use-precision-aware-optimizer",
    ),
    ("loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis", _given("fp16"), "--fp16"),
    ("disable_bf16_reduced_precision_matmul", _given("bf16"), "--bf16"),
    ("fp8_recipe first_last_layers_bf16", _given("fp8_format"), "--fp8-format"),
    (
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        _given("first_last_layers_bf16"),
        "--first-last-layers-bf16",
    ),
    ("adam_beta1 adam_beta2 adam_eps decoupled_weight_decay", _given("optimizer", "adam"), "--optimizer adam"),
    ("sgd_momentum", _given("optimizer", "sgd"), "--optimizer sgd"),
    ("decoupled_min_lr", _given("decoupled_lr"), "--decoupled-lr"),
    ("ddp_pad_buckets_for_high_nccl_busbw", _given("use_distributed_optimizer"), "--use-distributed-optimizer"),
    ("disable_symmetric_registration", _given("use_nccl_ub"), "--use-nccl-ub"),
    ("clone_scatter_output_in_embedding", _given("sequence_parallel"), "--sequence-parallel"),
    (
        "batch_p2p_sync account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        lambda args: args.pipeline_model_parallel_size > 1,
        "--pipeline-model-parallel-size 2 or more",
    ),
)
# The same for conditions on the model.
READ_WITH_MODEL: tuple[tuple[str, Condition, str], ...] = (
    (
        "microbatch_group_size_per_virtual_pipeline_stage",
        _given("num_virtual_stages_per_pipeline_rank"),
        "--num-virtual-stages-per-pipeline-rank",
    ),
    (
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type",
        _given("multi_latent_attention"),
        "--multi-latent-attention",
    ),
    (
        "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim",
        lambda args: args.multi_latent_attention and args.rope_type == "yarn",
        "--multi-latent-attention and --rope-type yarn",
    ),
    ("window_attn_skip_freq", _given("window_size"), "--window-size"),
    (
        "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
        "linear_num_value_heads",
        _given("experimental_attention_variant"),
        "--experimental-attention-variant gated_delta_net",
    ),
    (
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads",
        _given("hybrid_layer_pattern"),
        "--hybrid-layer-pattern",
    ),
    (
        "moe_shared_expert_gate moe_shared_expert_overlap",
        _given("moe_shared_expert_intermediate_size"),
        "--moe-shared-expert-intermediate-size",
    ),
    ("moe_router_group_topk", _given("moe_router_num_groups"), "--moe-router-num-groups"),
    ("moe_router_bias_update_rate", _given("moe_router_enable_expert_bias"), "--moe-router-enable-expert-bias"),
    ("mtp_loss_scaling_factor", _given("mtp_num_layers"), "--mtp-num-layers"),
)

# Modules that megatron-core's flags can name and no model of this program has: (attribute, module, reason and cure).
_ABSENT_MODULES = (
    (
        "recompute_modules",
        "gdn_norm_out",
        "only megatron-core's own delta net can recompute its norm alone: give --recompute-granularity full instead",
    ),
    (
        "offload_modules",
        "fused_group_mlp",
        "the program does not use Transformer Engine's fused experts: give expert_fc1 moe_act instead",
    ),
)


def check_core_flags(args: Namespace) -> None:
    """Raise GrpoError for a given flag of megatron-core, other than its default, that this run would not read.

    Also for a module in its list that no model has.
    """
    for dest, module, reason in _ABSENT_MODULES:
        if module in (getattr(args, dest) or ()):
            raise GrpoError(f"{flag(dest)} {module}: {reason}")
    _check_read(args, READ_WITH)


def check_core_flags_of_model(args: Namespace) -> None:
    """Raise GrpoError for a given flag of megatron-core, other than its default, that this model would not read."""
    _check_read(args, READ_WITH_MODEL)


def _check_read(args: Namespace, rows: tuple[tuple[str, Condition, str], ...]) -> None:
    for dests, condition, needed in rows:
        for dest in dests.split():
            if changed(args, dest) and not condition(args):
                raise GrpoError(f"{flag_given(args, dest)} has no effect without {needed}: add that, or leave it out")


def changed(args: Namespace, dest: str) -> bool:
    """Return whether a flag of megatron-core is given with another value than its default."""
    return dest in args.explicit and getattr(args, dest) != core_flags()[dest].default


def flag_given(args: Namespace, dest: str) -> str:
    """Return the flag as it was given: the one that switches off, if its value is False."""
    return core_flags()[dest].off_options[0] if getattr(args, dest) is False else flag(dest)
