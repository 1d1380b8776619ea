"""NeMo-RL's settings in ours: GRPO configurations."""

import re
from collections.abc import Callable
from itertools import chain

from megatron_grpo.migration.rows import (
    DISPATCHER,
    ENGINE_RANKS,
    LORA_PAGE,
    NO_DEEPEP,
    ON,
    SAME,
    SEQUENCE,
    SWITCH,
    SWITCH_IF_FALSE,
    TURNS,
    WORDS,
    Conversion,
    Converted,
    Row,
    Settings,
    System,
    ask,
    choice,
    computed,
    constant,
    differs,
    fixed,
    fp8_rows,
    only_if,
    scaled,
    switch_for,
    truth,
    upper_bound,
)
from megatron_grpo.migration.trl import DATA_FILES

POLICY = "policy."
MEGATRON = "policy.megatron_cfg."
FP8 = "policy.megatron_cfg.fp8_cfg."
OPTIMIZER = "policy.megatron_cfg.optimizer."
SCHEDULER = "policy.megatron_cfg.scheduler."
DTENSOR = "policy.dtensor_cfg."
GENERATION = "policy.generation."
VLLM = "policy.generation.vllm_cfg."
LOSS = "loss_fn."
ESTIMATOR = "grpo.adv_estimator."
ROLLOUTS = "rollouts there, updates here: x num_prompts_per_step x num_generations_per_prompt / train_global_batch_size"


def completions_per_rollout(settings: Settings) -> float:
    """Return the completions of a rollout."""
    return settings.number("grpo.num_prompts_per_step", 0) * settings.number("grpo.num_generations_per_prompt", 1)


def updates_per_rollout(settings: Settings) -> float:
    """Return the updates of one of NeMo-RL's steps, which is a rollout with all its updates."""
    batch = settings.number(f"{POLICY}train_global_batch_size", 0)
    return max(1, completions_per_rollout(settings) // batch) if batch else 1


IN_ROLLOUTS = scaled(ROLLOUTS, updates_per_rollout, True)  # a step of its schedule is a rollout


def megatron(settings: Settings) -> bool:
    """Return whether the policy is trained by Megatron-Core, not by DTensor."""
    return settings.true(f"{MEGATRON}enabled")


def _dtensor(settings: Settings) -> bool:
    return not megatron(settings)


def _validated(settings: Settings) -> bool:
    return any(key.startswith("data.validation") and settings.given(key) for key in settings.values)


def _packed(settings: Settings) -> bool:
    return settings.true(f"{POLICY}sequence_packing.enabled") or settings.true(f"{POLICY}dynamic_batching.enabled")


def _top_level(settings: Settings) -> bool:
    """Return whether the keys outside grpo.adv_estimator count: only without that block."""
    return not any(key.startswith(ESTIMATOR) for key in settings.values)


def _centred(settings: Settings) -> bool:
    """Return whether the advantages are GRPO's or RLOO's: the other estimators have a scale of their own."""
    return settings.text(f"{ESTIMATOR}name", "grpo") == "grpo"


def _reinforce(settings: Settings) -> str:
    return f"reinforce_plus_plus{'_baseline' * settings.true(f'{ESTIMATOR}minus_baseline', True)}"


def _rloo_scale(settings: Settings) -> Converted:
    prefix = "grpo." if _top_level(settings) else ESTIMATOR
    return "group" if settings.true(f"{prefix}use_leave_one_out_baseline") and _centred(settings) else None


RLOO = Conversion("true → rloo; false → grpo, the default", lambda v, s: "rloo" if truth(v) else None)
SCALE = Conversion("true → group; false → none", lambda v, s: "group" if truth(v) else "none")


def _loss(settings: Settings) -> str:
    if settings.true(f"{LOSS}use_cispo"):
        return "cispo"
    if settings.true(f"{LOSS}sequence_level_importance_ratios"):
        return "gspo"
    return "dapo" if settings.true(f"{LOSS}token_level_loss", True) else "grpo"


LOSSES = Conversion(
    "token_level_loss → dapo, else grpo; use_cispo → cispo; sequence_level_importance_ratios → gspo",
    lambda value, settings: _loss(settings),
)


def experts(settings: Settings) -> bool:
    """Return whether the policy is a mixture of experts: by its expert parallelism, or by its name."""
    name = settings.text(f"{POLICY}model_name").lower()
    of_name = re.search(r"moe|-a\d+b|mixtral|deepseek-v|gpt-oss|glm-?\d", name)
    return megatron(settings) and (settings.number(f"{MEGATRON}expert_model_parallel_size", 1) > 1 or bool(of_name))


def of_experts(conversion: Conversion = SAME) -> Conversion:
    """Return the conversion for mixtures of experts; dense models' configurations have these settings, too."""
    return only_if("for mixtures of experts", experts, conversion)


MEGATRON_ONLY = only_if("with megatron_cfg.enabled", megatron)
MEGATRON_SWITCH = only_if("with megatron_cfg.enabled", megatron, SWITCH)
TIS = f"{LOSS}truncated_importance_sampling_"

BATCH = (
    Row(
        "grpo.num_prompts_per_step",
        "--generation-batch-size",
        computed("prompts there, completions here: x num_generations_per_prompt", completions_per_rollout),
    ),
    Row("grpo.num_generations_per_prompt", "--num-generations"),
    Row(f"{POLICY}train_global_batch_size", "--global-batch-size", None, "completions, as there"),
    Row(
        f"{POLICY}train_micro_batch_size",
        "--micro-batch-size",
        only_if("without sequence packing and dynamic batching", lambda s: not _packed(s)),
    ),
    Row(f"{POLICY}sequence_packing.enabled", None, None, "--max-tokens-per-microbatch alone switches it on"),
    Row(
        f"{POLICY}sequence_packing.train_mb_tokens",
        "--max-tokens-per-microbatch",
        only_if("with sequence packing", lambda s: s.true(f"{POLICY}sequence_packing.enabled")),
    ),
    Row(
        f"{POLICY}sequence_packing.logprob_mb_tokens",
        "--logprobs-max-tokens-per-microbatch",
        only_if("with sequence packing", lambda s: s.true(f"{POLICY}sequence_packing.enabled")),
    ),
    Row(f"{POLICY}sequence_packing.*", None, None, "micro-batches are packed by length, balanced over the ranks"),
    Row(f"{POLICY}dynamic_batching.enabled", None, None, "--max-tokens-per-microbatch alone switches it on"),
    Row(
        f"{POLICY}dynamic_batching.train_mb_tokens",
        "--max-tokens-per-microbatch",
        only_if("with dynamic batching", lambda s: s.true(f"{POLICY}dynamic_batching.enabled")),
    ),
    Row(f"{POLICY}dynamic_batching.*", None, None, "micro-batches are packed by length, balanced over the ranks"),
    Row(
        f"{POLICY}logprob_batch_size",
        None,
        None,
        "the forward passes take --micro-batch-size or --logprobs-max-tokens-per-microbatch",
    ),
    Row(f"{POLICY}generation_batch_size", None, None, "--vllm-max-num-seqs bounds concurrent completions"),
    Row(
        "grpo.max_num_steps",
        "--train-iters",
        only_if(
            "below 1000000, which stands for no limit",
            lambda s: s.number("grpo.max_num_steps", 0) < 1e6,
            scaled(ROLLOUTS, updates_per_rollout),
        ),
    ),
    Row(
        "grpo.max_num_epochs",
        "--num-epochs",
        only_if("without a limit of max_num_steps", lambda s: s.number("grpo.max_num_steps", 1e6) >= 1e6),
    ),
    Row(
        "grpo.val_period",
        "--eval-interval",
        only_if(
            "with data.validation",
            _validated,
            scaled(ROLLOUTS, updates_per_rollout),
        ),
    ),
    Row("grpo.val_at_start", "--val-before-train", SWITCH),
    Row("grpo.val_at_end", None, None, "the last multiple of --eval-interval evaluates"),
    Row("grpo.max_val_samples", "--eval-max-prompts", only_if("with data.validation", _validated)),
    Row(
        "grpo.val_num_generations_per_prompt",
        "--eval-num-generations",
        only_if("above 1", lambda s: s.number("grpo.val_num_generations_per_prompt", 1) > 1),
        "in addition to the greedy completion",
    ),
    Row("grpo.val_batch_size", None, None, "all held-out prompts are generated at once"),
    Row("grpo.val_start_at", None, differs("--eval-interval has no delay", "0", "-1")),
    Row("grpo.seed", "--seed"),
    Row(
        "grpo.max_rollout_turns",
        None,
        only_if(
            "above 1",
            lambda s: s.number("grpo.max_rollout_turns", 1) > 1,
            ask(TURNS),
        ),
        "one turn",
    ),
    Row(
        "checkpointing.save_period",
        "--save-interval",
        only_if(
            "with checkpointing.enabled",
            lambda s: s.true("checkpointing.enabled", True),
            scaled(ROLLOUTS, updates_per_rollout),
        ),
    ),
)

DATA = (
    Row("data.max_input_seq_length", None, None, "--max-prompt-length and --max-completion-length bound a sequence"),
    Row(f"{POLICY}max_total_sequence_length", "--seq-length", None, "prompt and completion, tokens"),
    Row(f"{POLICY}max_total_sequence_length", "--vllm-max-model-len", None, "prompt and completion, tokens"),
    Row("data.shuffle", "--no-shuffle", SWITCH_IF_FALSE),
    Row("data.num_workers", None, None, "prompts need no workers"),
    Row("data.dataset_name", "--train-data-path", DATA_FILES),
    Row("data.train.dataset_name", "--train-data-path", DATA_FILES),
    Row("data.train.data_path", "--train-data-path"),
    Row("data.train.input_key", "--prompt-key"),
    Row("data.validation.dataset_name", "--valid-data-path", DATA_FILES),
    Row("data.validation.data_path", "--valid-data-path"),
    Row("data.train.*", None, None, "--train-data-path names the file"),
    Row("data.validation.*", None, None, "--valid-data-path names the file"),
    Row(
        "data.default.prompt_file",
        None,
        ask("write the prompt with its instruction into the rows, or give --system-prompt"),
    ),
    Row("data.prompt_file", None, ask("write the prompt with its instruction into the rows, or give --system-prompt")),
    Row(
        "data.default.system_prompt_file",
        None,
        only_if("if given", lambda s: s.given("data.default.system_prompt_file"), ask('--system-prompt "$(cat FILE)"')),
    ),
    Row("data.*", None, None, "docs/data.md has the columns of a row"),
)

MODEL = (
    Row(f"{POLICY}model_name", "--load-hf", None, "a local directory"),
    Row(
        f"{POLICY}tokenizer.name",
        "--tokenizer-model",
        only_if("other than model_name", lambda s: s.text(f"{POLICY}tokenizer.name") != s.text(f"{POLICY}model_name")),
    ),
    Row(f"{POLICY}tokenizer.chat_template", "--chat-template"),
    Row(f"{POLICY}tokenizer.*", None, None, "--chat-template-kwargs has the template's variables"),
    Row(
        f"{POLICY}precision",
        "--bf16",
        switch_for("bfloat16"),
    ),
    Row(f"{POLICY}hf_config_overrides.*", None, None, "--load-hf reads config.json: edit it there"),
    Row(f"{POLICY}make_sequence_length_divisible_by", None, None, "packs are padded as TP and CP need"),
    Row(f"{POLICY}logprob_chunk_size", None, None, "the head always computes log-probabilities in chunks"),
    Row(f"{POLICY}offload_optimizer_for_logprob", "--offload-optimizer", SWITCH),
    Row(f"{MEGATRON}enabled", None, None, "the trainer is Megatron-Core"),
    *(
        Row(f"{MEGATRON}{name}", "--" + name.replace("_", "-"), MEGATRON_ONLY)
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        )
    ),
    *(
        Row(f"{MEGATRON}{name}", "--" + name.replace("_", "-"), MEGATRON_SWITCH)
        for name in (
            "bias_activation_fusion",
            "gradient_accumulation_fusion",
            "apply_rope_fusion",
        )
    ),
    Row(
        f"{MEGATRON}sequence_parallel",
        "--sequence-parallel",
        only_if(
            "with TP above 1",
            lambda s: megatron(s) and s.number(f"{MEGATRON}tensor_model_parallel_size", 1) > 1,
            SWITCH,
        ),
    ),
    Row(f"{MEGATRON}moe_token_dispatcher_type", "--moe-token-dispatcher-type", of_experts(DISPATCHER)),
    Row(f"{MEGATRON}moe_router_load_balancing_type", "--moe-router-load-balancing-type", of_experts()),
    Row(f"{MEGATRON}moe_router_bias_update_rate", "--moe-router-bias-update-rate", of_experts()),
    Row(f"{MEGATRON}moe_router_dtype", "--moe-router-dtype", of_experts()),
    Row(f"{MEGATRON}moe_permute_fusion", "--moe-permute-fusion", of_experts(SWITCH)),
    Row(f"{MEGATRON}moe_shared_expert_overlap", "--moe-shared-expert-overlap", of_experts(SWITCH)),
    Row(f"{MEGATRON}moe_per_layer_logging", None, None, "no metric of single layers"),
    Row(f"{MEGATRON}moe_enable_deepep", None, None, NO_DEEPEP),
    Row(f"{MEGATRON}num_layers_in_first_pipeline_stage", "--decoder-first-pipeline-num-layers", MEGATRON_ONLY),
    Row(f"{MEGATRON}num_layers_in_last_pipeline_stage", "--decoder-last-pipeline-num-layers", MEGATRON_ONLY),
    Row(f"{FP8}enabled", None, None, "--fp8-format switches it on"),
    *fp8_rows(
        f"{FP8}fp8",
        f"{FP8}fp8_recipe",
        f"{FP8}fp8_param",
        "with fp8_cfg.enabled",
        lambda s: megatron(s) and s.true(f"{FP8}enabled"),
    ),
    Row(
        f"{MEGATRON}activation_checkpointing",
        "--recompute-granularity",
        only_if(
            "with megatron_cfg.enabled",
            megatron,
            Conversion(
                "true → recompute_granularity",
                lambda v, s: s.text(f"{MEGATRON}recompute_granularity", "full") if truth(v) else None,
            ),
        ),
        "full: with --recompute-method uniform --recompute-num-layers 1",
    ),
    Row(f"{MEGATRON}recompute_granularity", None, None, "with activation_checkpointing"),
    Row(
        f"{MEGATRON}freeze_moe_router",
        None,
        only_if(
            "with megatron_cfg.enabled and experts parallel, if true",
            lambda s: (
                megatron(s)
                and s.true(f"{MEGATRON}freeze_moe_router")
                and s.number(f"{MEGATRON}expert_model_parallel_size", 1) > 1
            ),
            differs("routers are trained here: --router-replay-mode R3 keeps the engine's choice of experts"),
        ),
        "for mixtures of experts",
    ),
    Row(
        f"{MEGATRON}peft.enabled",
        None,
        only_if("if true", lambda s: s.true(f"{MEGATRON}peft.enabled"), ask(LORA_PAGE)),
    ),
    Row(f"{MEGATRON}*", None, None, "has megatron-core's default"),
    Row(f"{DTENSOR}enabled", None, None, "the trainer is Megatron-Core"),
    Row(f"{DTENSOR}tensor_parallel_size", "--tensor-model-parallel-size", only_if("with DTensor", _dtensor)),
    Row(f"{DTENSOR}context_parallel_size", "--context-parallel-size", only_if("with DTensor", _dtensor)),
    Row(
        f"{DTENSOR}sequence_parallel",
        "--sequence-parallel",
        only_if("with TP above 1", lambda s: _dtensor(s) and s.number(f"{DTENSOR}tensor_parallel_size", 1) > 1, SWITCH),
    ),
    Row(
        f"{DTENSOR}activation_checkpointing",
        "--recompute-granularity",
        only_if("with DTensor", _dtensor, fixed("full")),
        "with --recompute-method uniform --recompute-num-layers 1",
    ),
    Row(f"{DTENSOR}cpu_offload", "--optimizer-cpu-offload", only_if("with DTensor", _dtensor, SWITCH)),
    Row(
        f"{DTENSOR}lora_cfg.enabled",
        None,
        only_if("if true", lambda s: s.true(f"{DTENSOR}lora_cfg.enabled"), ask(LORA_PAGE)),
    ),
    Row(f"{DTENSOR}*", None, None, "the trainer is Megatron-Core"),
    Row(f"{POLICY}router_replay.enabled", "--router-replay-mode", fixed("R3")),
    Row(f"{POLICY}quant_*", None, None, "training in 8 or 4 bits is not supported"),
    Row(f"{POLICY}refit_*", None, None, "weights go to the engine in bounded buckets"),
    Row(f"{POLICY}draft.*", None, None, "draft models are not trained"),
)

LEARNING = (
    *(
        Row(f"{OPTIMIZER}{name}", flag, MEGATRON_ONLY)
        for name, flag in (
            ("optimizer", "--optimizer"),
            ("lr", "--lr"),
            ("min_lr", "--min-lr"),
            ("weight_decay", "--weight-decay"),
            ("adam_beta1", "--adam-beta1"),
            ("adam_beta2", "--adam-beta2"),
            ("adam_eps", "--adam-eps"),
        )
    ),
    *(
        Row(f"{OPTIMIZER}{name}", "--" + name.replace("_", "-"), MEGATRON_SWITCH)
        for name in ("use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload")
    ),
    Row(
        f"{OPTIMIZER}optimizer_offload_fraction",
        "--optimizer-offload-fraction",
        only_if("with optimizer_cpu_offload", lambda s: megatron(s) and s.true(f"{OPTIMIZER}optimizer_cpu_offload")),
    ),
    Row(f"{OPTIMIZER}clip_grad", "--clip-grad", MEGATRON_ONLY),
    Row(f"{OPTIMIZER}*", None, None, "has megatron-core's default"),
    Row(f"{SCHEDULER}lr_decay_style", "--lr-decay-style", MEGATRON_ONLY),
    Row(f"{SCHEDULER}lr_decay_iters", "--lr-decay-iters", only_if("with megatron_cfg.enabled", megatron, IN_ROLLOUTS)),
    Row(
        f"{SCHEDULER}lr_warmup_iters", "--lr-warmup-iters", only_if("with megatron_cfg.enabled", megatron, IN_ROLLOUTS)
    ),
    Row(f"{SCHEDULER}lr_warmup_init", None, None, "the warm-up starts from 0"),
    Row(f"{SCHEDULER}*", None, None, "the weight decay is constant: --weight-decay-incr-style changes it"),
    Row(
        f"{MEGATRON}distributed_data_parallel_config.grad_reduce_in_fp32",
        "--grad-reduce-in-bf16",
        only_if("with megatron_cfg.enabled", megatron, SWITCH_IF_FALSE),
    ),
    Row(f"{MEGATRON}distributed_data_parallel_config.overlap_grad_reduce", "--overlap-grad-reduce", MEGATRON_SWITCH),
    Row(f"{MEGATRON}distributed_data_parallel_config.overlap_param_gather", "--overlap-param-gather", MEGATRON_SWITCH),
    Row(f"{POLICY}max_grad_norm", "--clip-grad"),
    Row(f"{POLICY}optimizer.kwargs.lr", "--lr", only_if("with DTensor", _dtensor)),
    Row(f"{POLICY}optimizer.kwargs.weight_decay", "--weight-decay", only_if("with DTensor", _dtensor)),
    Row(f"{POLICY}optimizer.kwargs.eps", "--adam-eps", only_if("with DTensor", _dtensor)),
    Row(f"{POLICY}optimizer.*", None, None, "--optimizer adam is AdamW"),
    Row(
        f"{POLICY}scheduler.0.kwargs.total_iters",
        "--lr-warmup-iters",
        only_if("with DTensor", _dtensor, IN_ROLLOUTS),
        "of LinearLR, from start_factor; here the warm-up starts from 0",
    ),
    Row(f"{POLICY}scheduler.*", None, None, "--lr-decay-style and --lr-warmup-iters"),
)

ENGINE = (
    Row(
        f"{GENERATION}backend",
        "--rollout-engine",
        choice({"vllm": "vllm", "megatron": "megatron"}, "vllm, megatron, or SGLang servers"),
    ),
    Row(
        f"{GENERATION}max_new_tokens",
        None,
        None,
        "--max-completion-length; max_total_sequence_length bounds the sequence",
    ),
    Row(f"{GENERATION}temperature", "--temperature"),
    Row(f"{GENERATION}top_p", "--top-p"),
    Row(f"{GENERATION}top_k", "--top-k"),
    Row(f"{GENERATION}stop_token_ids", "--stop-token-ids", WORDS),
    Row(f"{GENERATION}stop_strings", "--stop-words", WORDS),
    Row(f"{VLLM}tensor_parallel_size", "--vllm-tensor-parallel-size"),
    Row(f"{VLLM}gpu_memory_utilization", "--vllm-gpu-memory-utilization"),
    Row(f"{VLLM}max_model_len", "--vllm-max-model-len"),
    Row(f"{VLLM}enforce_eager", "--vllm-enforce-eager", SWITCH),
    Row(
        f"{VLLM}precision",
        "--vllm-dtype",
        choice({"bfloat16": "bfloat16", "float32": "float32", "float16": "float16", "fp8": None}),
    ),
    Row(f"{VLLM}precision", "--vllm-quantization", only_if("for fp8", lambda s: s.text(f"{VLLM}precision") == "fp8")),
    Row(
        f"{VLLM}expert_parallel_size",
        "--vllm-enable-expert-parallel",
        only_if(
            "above 1",
            lambda s: s.number(f"{VLLM}expert_parallel_size", 1) > 1,
            ON,
        ),
    ),
    Row(f"{VLLM}async_engine", None, None, "--rollout-balancing dynamic gives free replicas the next prompt"),
    Row(f"{VLLM}*", None, None, "has vLLM's default: --vllm-engine-kwargs"),
    Row(
        f"{GENERATION}colocated.enabled",
        None,
        only_if(
            "if false",
            lambda s: not s.true(f"{GENERATION}colocated.enabled", True),
            ask(ENGINE_RANKS, off=False),
        ),
        "--vllm-mode colocate is the default",
    ),
    Row(f"{GENERATION}*", None, None, "--vllm-engine-kwargs has what has no flag"),
    Row(
        "grpo.async_grpo.enabled",
        None,
        ask(ENGINE_RANKS),
    ),
    Row("grpo.async_grpo.*", None, None, "with grpo.async_grpo.enabled"),
)

ALGORITHM = (
    Row(f"{LOSS}reference_policy_kl_penalty", "--beta"),
    Row(f"{LOSS}reference_policy_kl_type", "--kl-estimator"),
    Row(f"{LOSS}ratio_clip_min", "--epsilon"),
    Row(
        f"{LOSS}ratio_clip_max",
        "--epsilon-high",
        upper_bound("use_cispo", lambda s: s.true(f"{LOSS}use_cispo")),
    ),
    Row(f"{LOSS}ratio_clip_c", "--dual-clip"),
    Row(f"{LOSS}token_level_loss", "--loss-type", LOSSES),
    Row(f"{LOSS}use_cispo", None, None, "--loss-type cispo"),
    Row(f"{LOSS}sequence_level_importance_ratios", None, None, "--loss-type gspo"),
    Row(f"{LOSS}use_kl_in_reward", "--kl-in-reward", SWITCH),
    Row(
        f"{LOSS}use_on_policy_kl_approximation",
        "--kl-estimator",
        fixed("unbiased"),
    ),
    Row(
        f"{LOSS}use_importance_sampling_correction",
        "--rollout-importance-sampling-mode",
        Conversion(
            "true → by truncated_importance_sampling_type, else token_truncate",
            lambda v, s: (
                {"icepop": "icepop", "seq-mask-tis": "sequence_mask"}.get(s.text(f"{TIS}type"), "token_truncate")
                if truth(v)
                else None
            ),
        ),
    ),
    Row(f"{TIS}type", None, None, "with use_importance_sampling_correction"),
    Row(
        f"{TIS}ratio",
        "--rollout-importance-sampling-threshold",
        only_if(
            "with use_importance_sampling_correction", lambda s: s.true(f"{LOSS}use_importance_sampling_correction")
        ),
    ),
    Row(
        f"{TIS}ratio_min",
        "--rollout-importance-sampling-lower-bound",
        only_if(
            "with icepop",
            lambda s: s.text(f"{TIS}type") == "icepop" and s.true(f"{LOSS}use_importance_sampling_correction"),
        ),
    ),
    Row(
        f"{TIS}ratio_min",
        None,
        only_if(
            "with seq-mask-tis",
            lambda s: s.text(f"{TIS}type") == "seq-mask-tis" and s.true(f"{LOSS}use_importance_sampling_correction"),
            differs("--rollout-importance-sampling-mode sequence_mask has no lower bound: such completions are kept"),
        ),
    ),
    Row(
        f"{LOSS}positive_example_nll_weight",
        None,
        only_if(
            "above 0",
            lambda s: s.number(f"{LOSS}positive_example_nll_weight", 0) > 0,
            ask("--external-plugins: a loss of your own with @register_loss"),
        ),
        "off",
    ),
    Row(
        f"{LOSS}disable_ppo_ratio",
        "--loss-type",
        fixed("reinforce"),
    ),
    Row(f"{LOSS}force_on_policy_ratio", None, None, "with one update per rollout the ratio is 1"),
    Row(f"{LOSS}*", None, None, "KL terms are not clamped"),
    Row(
        "grpo.use_leave_one_out_baseline",
        "--advantage-estimator",
        only_if("without grpo.adv_estimator", _top_level, RLOO),
    ),
    Row("grpo.normalize_rewards", "--scale-rewards", only_if("without grpo.adv_estimator", _top_level, SCALE)),
    Row(
        f"{ESTIMATOR}name",
        "--advantage-estimator",
        Conversion(
            "grpo → nothing; gdpo → gdpo; reinforce_plus_plus → reinforce_plus_plus_baseline, with minus_baseline "
            "false the same",
            lambda value, settings: choice(
                {"grpo": None, "gdpo": "gdpo", "reinforce_plus_plus": _reinforce(settings)},
                "docs/algorithms.md lists the estimators",
            ).apply(value, settings),
        ),
    ),
    Row(
        f"{ESTIMATOR}use_leave_one_out_baseline",
        "--advantage-estimator",
        only_if("with the name grpo", _centred, RLOO),
    ),
    Row(f"{ESTIMATOR}normalize_rewards", "--scale-rewards", only_if("with the name grpo", _centred, SCALE)),
    Row(f"{ESTIMATOR}minus_baseline", None, None, "with the name reinforce_plus_plus"),
    Row("grpo.overlong_filtering", "--overlong-filter", SWITCH),
    Row("grpo.use_dynamic_sampling", "--dynamic-sample", SWITCH),
    Row(
        "grpo.dynamic_sampling_max_gen_batches",
        "--max-resample-times",
        only_if("with use_dynamic_sampling", lambda s: s.true("grpo.use_dynamic_sampling")),
        "batches there; successive replacements of a group here",
    ),
    Row(
        "grpo.batch_multiplier",
        "--over-sampling-ratio",
        only_if("above 1", lambda s: s.number("grpo.batch_multiplier", 1) > 1),
    ),
    Row(
        "grpo.reward_shaping.enabled",
        None,
        only_if(
            "if true",
            lambda s: s.true("grpo.reward_shaping.enabled"),
            ask("add soft_overlong to --reward-funcs, with its --reward-weights"),
        ),
        "soft_overlong is a reward",
    ),
    Row(
        "grpo.reward_shaping.overlong_buffer_length",
        "--soft-cache-length",
        only_if("if enabled", lambda s: s.true("grpo.reward_shaping.enabled")),
    ),
    Row("grpo.reward_shaping.*", None, None, "soft_overlong is a reward: --reward-weights"),
    Row("grpo.reward_scaling.*", None, None, "a reward function of your own has its own range"),
    Row("env.*", None, None, "--reward-funcs names the rewards: docs/rewards.md"),
    Row("reward_penalties.*", None, None, "--reward-funcs names the rewards: docs/rewards.md"),
)

RUN = (
    Row("checkpointing.checkpoint_dir", "--save"),
    Row("checkpointing.keep_top_k", "--max-checkpoints-to-keep", SEQUENCE, "the best there, the newest here"),
    Row("checkpointing.*", None, None, "--save-interval and --save-hf; a checkpoint holds the optimizer"),
    Row(
        "logger.wandb.project",
        "--wandb-project",
        only_if("with wandb_enabled", lambda s: s.true("logger.wandb_enabled")),
    ),
    Row(
        "logger.wandb.name", "--wandb-exp-name", only_if("with wandb_enabled", lambda s: s.true("logger.wandb_enabled"))
    ),
    Row(
        "logger.swanlab.project",
        "--swanlab-project",
        only_if("with swanlab_enabled", lambda s: s.true("logger.swanlab_enabled")),
    ),
    Row(
        "logger.swanlab.name",
        "--swanlab-exp-name",
        only_if("with swanlab_enabled", lambda s: s.true("logger.swanlab_enabled")),
    ),
    Row(
        "logger.log_dir",
        "--tensorboard-dir",
        only_if("with tensorboard_enabled", lambda s: s.true("logger.tensorboard_enabled")),
    ),
    Row("logger.*", None, None, "--wandb-project, --swanlab-project and --tensorboard-dir switch trackers on"),
    Row("cluster.gpus_per_node", None, None, "torchrun's --nproc-per-node"),
    Row("cluster.num_nodes", None, None, "torchrun's --nnodes"),
    Row("data_plane.*", None, None, "rollouts stay in the training processes"),
    Row("async_rl.*", None, None, "--max-staleness, with --rollout-ranks"),
    Row("cluster.*", None, None, "there is no Ray"),
    Row("grpo.*", None, None, "docs/algorithms.md has what can be set"),
)


def _recompute(value: str) -> Callable[[Settings], Converted]:
    def implied(settings: Settings) -> Converted:
        prefix = MEGATRON if megatron(settings) else DTENSOR
        full = settings.text(f"{MEGATRON}recompute_granularity", "full") == "full" or not megatron(settings)
        return value if settings.true(f"{prefix}activation_checkpointing") and full else None

    return implied


def _lengths(settings: Settings) -> Converted:
    total = settings.number(f"{POLICY}max_total_sequence_length", 0)
    return str(int(total // 2)) if total else None


def _decide(settings: Settings) -> list[str]:
    return [
        "--max-prompt-length, --max-completion-length: NeMo-RL bounds their sum (max_total_sequence_length); here half "
        "each is assumed",
        "--reward-funcs: NeMo-RL's environments score; accuracy is the closest to env.math (docs/rewards.md)",
    ]


SYSTEM = System(
    name="NeMo-RL",
    sources="NVIDIA-NeMo/RL: examples/configs",
    rows=tuple(chain(BATCH, DATA, MODEL, LEARNING, ENGINE, ALGORITHM, RUN)),
    implied=(
        ("--transformer-impl", constant("local"), "transformer_engine where it is installed"),
        ("--max-prompt-length", _lengths, "half of max_total_sequence_length"),
        ("--max-completion-length", _lengths, "half of max_total_sequence_length"),
        ("--truncation-strategy", constant("delete"), "longer prompts are left out there"),
        ("--loss-type", _loss, "NeMo-RL's default"),
        ("--scale-rewards", _rloo_scale, "NeMo-RL's default"),
        ("--use-distributed-optimizer", constant(True), "the closest to DTensor's sharding"),
        ("--sleep-level", constant("2"), "colocated engines free their memory there"),
        ("--offload-model", constant(True), "the trainer moves to the host there"),
        ("--offload-gradients", constant(True), "the trainer moves to the host there"),
        ("--offload-optimizer", constant(True), "the trainer moves to the host there"),
        ("--recompute-method", _recompute("uniform"), "of activation checkpointing"),
        ("--recompute-num-layers", _recompute("1"), "of activation checkpointing"),
        ("--reward-funcs", constant("accuracy"), "of env.math"),
    ),
    decide=_decide,
)
