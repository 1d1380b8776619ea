"""ROLL's settings in ours: the RLVR pipelines."""

from collections.abc import Callable
from itertools import chain

from megatron_grpo.migration.rows import (
    DISPATCHER,
    ENGINE_RANKS,
    LORA_PAGE,
    RESUME,
    SEQUENCE,
    SWITCH,
    SWITCH_IF_FALSE,
    WORDS,
    Conversion,
    Converted,
    Row,
    Settings,
    System,
    Undecided,
    ask,
    choice,
    computed,
    constant,
    differs,
    fp8_rows,
    number,
    only_if,
    scaled,
    switch_for,
    truth,
)

TRAIN = "actor_train."
STRATEGY = "actor_train.strategy_args.strategy_config."
INFER = "actor_infer."
SAMPLING = "actor_infer.generating_args."
ENGINE_CONFIG = "actor_infer.strategy_args.strategy_config."
REFERENCE = "reference.strategy_args.strategy_config."
AVERAGES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
ROLLOUTS = "rollouts there, updates here: x rollout_batch_size x group / --global-batch-size x ppo_epochs"


def data_parallel(settings: Settings) -> float:
    """Return the data-parallel size: the GPUs of actor_train without those of its model parallelism."""
    shards = settings.number("actor_train.strategy_args.strategy_config.ulysses_size", 1)
    for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        shards *= settings.number(STRATEGY + size, 1)
    return settings.gpus / shards


def completions_per_update(settings: Settings) -> float:
    """Return the completions of an update."""
    device = settings.number(f"{TRAIN}training_args.per_device_train_batch_size", 1)
    return device * settings.number(f"{TRAIN}training_args.gradient_accumulation_steps", 1) * data_parallel(settings)


def completions_per_rollout(settings: Settings) -> float:
    """Return the completions of a rollout."""
    return settings.number("rollout_batch_size", 128) * settings.number("num_return_sequences_in_group", 1)


def updates_per_rollout(settings: Settings) -> float:
    """Return the updates of one of ROLL's steps, which is a rollout with all its updates."""
    return max(1, completions_per_rollout(settings) // completions_per_update(settings)) * settings.number(
        "ppo_epochs", 1
    )


def _kl_loss(settings: Settings) -> bool:
    return settings.true("use_kl_loss")


def _average(value: object, settings: Settings) -> Converted:
    if settings.text("importance_sampling") == "seq":
        return "gspo"
    if str(value) not in AVERAGES:
        raise Undecided(f"no loss here has the average {value!r}: docs/algorithms.md lists the averages")
    return AVERAGES[str(value)]


def _normalised(value: object, settings: Settings) -> Converted:
    names = {"group": "group", "batch": "batch"}
    if str(value) == "running":
        raise Undecided("running statistics of rewards are not there: --scale-rewards group, batch or none")
    return None if _whitened(settings) else names.get(str(value))


def _of_groups(settings: Settings) -> bool:
    """Return whether REINFORCE's rewards are centred in their group, which its namesake here does not do."""
    return settings.text("adv_estimator") == "reinforce" and settings.text("norm_mean_type") == "group"


def _whitened(settings: Settings) -> bool:
    """Return whether the differences to the group's mean are divided by their std over the batch alone."""
    whitened = _of_groups(settings) and settings.true("whiten_advantages")
    return whitened and settings.text("norm_std_type") != "group"


def _estimator(value: object, settings: Settings) -> Converted:
    if not _of_groups(settings):
        return ESTIMATORS.apply(value, settings)
    if settings.number("gamma", 1) != 1:
        raise Undecided("no estimator has both gamma and norm_mean_type group: docs/algorithms.md")
    return "reinforce_plus_plus_baseline" if _whitened(settings) else "grpo"


ESTIMATORS = choice(
    {"grpo": "grpo", "reinforce": "reinforce_plus_plus"},
    "docs/algorithms.md lists the estimators; there is no critic",
)

BATCH = (
    Row(
        "rollout_batch_size",
        "--generation-batch-size",
        computed("prompts there, completions here: x num_return_sequences_in_group", completions_per_rollout),
    ),
    Row("num_return_sequences_in_group", "--num-generations"),
    Row(
        f"{TRAIN}training_args.per_device_train_batch_size",
        "--global-batch-size",
        computed("of one rank there, of all here: x gradient_accumulation_steps x DP", completions_per_update),
    ),
    Row(
        f"{TRAIN}training_args.per_device_train_batch_size",
        "--micro-batch-size",
        only_if(
            "without dynamic batching and sequence packing",
            lambda s: not (s.true(f"{TRAIN}use_dynamic_batching_in_train") or s.true(f"{TRAIN}use_sequence_packing")),
        ),
    ),
    Row(f"{TRAIN}training_args.gradient_accumulation_steps", None, None, "follows from --global-batch-size"),
    Row(f"{TRAIN}use_dynamic_batching_in_train", None, None, "--max-tokens-per-microbatch alone switches it on"),
    Row(f"{TRAIN}max_tokens_per_microbatch_in_train", "--max-tokens-per-microbatch"),
    Row(
        f"{TRAIN}use_sequence_packing",
        "--max-tokens-per-microbatch",
        Conversion(
            "true → per_device_train_batch_size x (prompt_length + response_length)",
            lambda value, s: (
                number(
                    s.number(f"{TRAIN}training_args.per_device_train_batch_size", 1)
                    * (s.number("prompt_length", 1024) + s.number("response_length", 1024))
                )
                if truth(value)
                else None
            ),
        ),
    ),
    Row(f"{TRAIN}sequence_packing_args.*", None, None, "micro-batches are packed by first fit of sorted lengths"),
    Row(
        f"{TRAIN}infer_batch_size",
        None,
        None,
        "the forward passes take --micro-batch-size or --logprobs-max-tokens-per-microbatch",
    ),
    Row(f"{TRAIN}max_tokens_per_microbatch_in_infer", "--logprobs-max-tokens-per-microbatch"),
    Row(
        f"{TRAIN}use_dynamic_batching_in_infer", None, None, "--logprobs-max-tokens-per-microbatch alone switches it on"
    ),
    Row("ppo_epochs", "--num-iterations"),
    Row("max_steps", "--train-iters", scaled(ROLLOUTS, updates_per_rollout)),
    Row(f"{TRAIN}training_args.num_train_epochs", None, None, "max_steps bounds the run"),
    Row("save_steps", "--save-interval", scaled(ROLLOUTS, updates_per_rollout)),
    Row(
        "eval_steps",
        "--eval-interval",
        only_if(
            "with validation",
            lambda s: s.given("validation.data_args.file_name"),
            scaled(ROLLOUTS, updates_per_rollout),
        ),
    ),
    Row("logging_steps", "--log-interval", scaled(ROLLOUTS, updates_per_rollout)),
    Row(f"{TRAIN}*", None, None, "the trainer has its own packing and data"),
    Row("seed", "--seed"),
    Row("val_batch_size", None, None, "all held-out prompts are generated at once"),
    Row(
        "async_generation_ratio",
        None,
        only_if("above 0", lambda s: s.number("async_generation_ratio", 0) > 0, ask(ENGINE_RANKS)),
    ),
)

DATA = (
    Row(f"{TRAIN}data_args.file_name", "--train-data-path", WORDS),
    Row("validation.data_args.file_name", "--valid-data-path", WORDS),
    Row(f"{TRAIN}data_args.messages", "--prompt-key", None, "a list of messages, not JSON text"),
    Row(f"{TRAIN}data_args.template", None, None, "the chat template is the tokenizer's: --chat-template replaces it"),
    Row(
        f"{TRAIN}data_args.domain_interleave_probs.*",
        None,
        None,
        "weights before the files of --train-data-path: docs/data.md",
    ),
    Row(
        f"{TRAIN}data_args.interleave_probs", None, None, "weights before the files of --train-data-path: docs/data.md"
    ),
    Row(f"{TRAIN}data_args.dataset_dir", None, None, "--train-data-path names the files with their directory"),
    Row(
        f"{TRAIN}data_args.preprocessing_num_workers",
        None,
        None,
        "small files are tokenised at the start, large ones when read",
    ),
    Row("prompt_length", "--max-prompt-length"),
    Row("response_length", "--max-completion-length"),
    Row("sequence_length", "--seq-length"),
    Row("global_template", None, None, "the chat template is the tokenizer's: --chat-template replaces it"),
    Row("tag_to_template.*", None, None, "the chat template is the tokenizer's: --chat-template replaces it"),
    Row(
        "validation.generating_args.num_return_sequences",
        "--eval-num-generations",
        None,
        "in addition to the greedy completion",
    ),
    Row("validation.*", None, None, "evaluation is greedy, and sampled as the rollout is"),
)

MODEL = (
    Row("pretrain", "--load-hf", None, "a local directory"),
    Row("reward_pretrain", None, None, "--reward-model NAME=DIR"),
    Row(
        f"{TRAIN}model_args.dtype",
        "--bf16",
        switch_for("bf16"),
    ),
    Row(f"{TRAIN}model_args.attn_implementation", None, None, "packs always take a flash kernel on a GPU"),
    Row(f"{TRAIN}model_args.flash_attn", None, None, "packs always take a flash kernel on a GPU"),
    Row(f"{TRAIN}model_args.disable_gradient_checkpointing", None, None, "--recompute-granularity switches it on"),
    Row(f"{TRAIN}model_args.model_type", None, None, "--model-family; --load-hf names it"),
    Row(f"{TRAIN}model_args.lora_rank", None, ask(LORA_PAGE)),
    Row(f"{TRAIN}model_args.freeze_module_prefix", None, differs("every parameter is trained")),
    Row(f"{TRAIN}model_args.*", None, None, "--load-hf reads config.json"),
    Row(f"{TRAIN}strategy_args.strategy_name", None, None, "the trainer is Megatron-Core"),
    *(
        Row(f"{STRATEGY}{name}", "--" + name.replace("_", "-"))
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "moe_router_dtype",
        )
    ),
    Row(f"{STRATEGY}moe_token_dispatcher_type", "--moe-token-dispatcher-type", DISPATCHER),
    Row(f"{STRATEGY}recompute_modules", "--recompute-modules", WORDS),
    Row(
        f"{STRATEGY}virtual_pipeline_model_parallel_size",
        "--num-virtual-stages-per-pipeline-rank",
        SEQUENCE,
        "virtual stages of one pipeline rank, as there",
    ),
    Row(
        f"{STRATEGY}sequence_parallel",
        "--sequence-parallel",
        only_if("with TP above 1", lambda s: s.number(f"{STRATEGY}tensor_model_parallel_size", 1) > 1, SWITCH),
    ),
    *(
        Row(f"{STRATEGY}{name}", "--" + name.replace("_", "-"), SWITCH)
        for name in (
            "use_distributed_optimizer",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "moe_grouped_gemm",
            "moe_layer_recompute",
            "moe_permute_fusion",
            "moe_shared_expert_overlap",
            "bias_activation_fusion",
            "apply_rope_fusion",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
    ),
    *fp8_rows(f"{STRATEGY}fp8", f"{STRATEGY}fp8_recipe", f"{STRATEGY}fp8_param"),
    Row(f"{STRATEGY}ulysses_size", "--context-parallel-size", None, "ranks that share a sequence"),
    Row(f"{STRATEGY}fsdp_size", None, None, "FSDP is not supported: --use-distributed-optimizer, TP and PP"),
    Row(f"{STRATEGY}*", None, None, "FSDP and DeepSpeed are not supported: docs/model_sizes.md has sizes for Megatron"),
    Row(f"{TRAIN}device_mapping", None, None, "torchrun's --nproc-per-node and --nnodes"),
    Row("num_gpus_per_node", None, None, "torchrun's --nproc-per-node"),
    Row("is_offload_states", "--offload-optimizer", SWITCH, "on by default there, with --offload-model"),
    Row(f"{TRAIN}offload_nccl", None, None, "communicators stay"),
)

LEARNING = (
    Row(f"{TRAIN}training_args.learning_rate", "--lr"),
    Row(f"{TRAIN}training_args.weight_decay", "--weight-decay"),
    Row(f"{TRAIN}training_args.warmup_steps", "--lr-warmup-iters", None, "updates, as there"),
    Row(f"{TRAIN}training_args.warmup_ratio", "--lr-warmup-fraction"),
    Row(
        f"{TRAIN}training_args.lr_scheduler_type",
        "--lr-decay-style",
        choice({"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}),
    ),
    Row("max_grad_norm", "--clip-grad"),
    Row("critic_warmup", None, None, "there is no critic"),
    Row("critic.*", None, None, "there is no critic"),
)

ENGINE = (
    Row(
        f"{INFER}strategy_args.strategy_name",
        "--rollout-engine",
        choice({"vllm": "vllm"}, "SGLang works as servers: docs/choose_engine.md"),
    ),
    Row(f"{ENGINE_CONFIG}gpu_memory_utilization", "--vllm-gpu-memory-utilization"),
    Row(f"{ENGINE_CONFIG}mem_fraction_static", "--vllm-gpu-memory-utilization"),
    Row(f"{ENGINE_CONFIG}tensor_parallel_size", "--vllm-tensor-parallel-size"),
    Row(f"{INFER}num_gpus_per_worker", "--vllm-tensor-parallel-size"),
    Row(
        f"{ENGINE_CONFIG}max_model_len",
        "--vllm-max-model-len",
        None,
        "at least --max-prompt-length + --max-completion-length",
    ),
    Row(f"{ENGINE_CONFIG}max_num_seqs", "--vllm-max-num-seqs"),
    Row(f"{ENGINE_CONFIG}sleep_level", "--sleep-level"),
    Row(f"{ENGINE_CONFIG}enforce_eager", "--vllm-enforce-eager", SWITCH),
    Row(f"{ENGINE_CONFIG}enable_prefix_caching", "--no-vllm-enable-prefix-caching", SWITCH_IF_FALSE),
    Row(f"{ENGINE_CONFIG}block_size", None, None, "vLLM chooses the size of its cache's pages"),
    Row(f"{ENGINE_CONFIG}load_format", None, None, "the engine gets its weights from the trainer"),
    Row(f"{ENGINE_CONFIG}*", None, ask("--vllm-engine-kwargs has what has no flag")),
    Row(f"{SAMPLING}temperature", "--temperature"),
    Row(f"{SAMPLING}top_p", "--top-p"),
    Row(f"{SAMPLING}top_k", "--top-k"),
    Row(f"{SAMPLING}max_new_tokens", None, None, "response_length is --max-completion-length"),
    Row(f"{SAMPLING}num_beams", None, None, "completions are sampled"),
    Row(f"{SAMPLING}num_return_sequences", None, None, "num_return_sequences_in_group is --num-generations"),
    Row(
        f"{INFER}device_mapping",
        None,
        None,
        "the engine has the GPUs of the trainer; other GPUs are servers: docs/choose_engine.md",
    ),
    Row(f"{INFER}*", None, None, "the engine has the trainer's model and tokenizer"),
    Row("max_running_requests", "--vllm-max-num-seqs"),
    Row("is_num_return_sequences_expand", None, None, "every completion is a request"),
    Row("use_additional_prompts", "--dynamic-sample", SWITCH, "with a query_filter_config"),
    Row("generate_opt_level", None, None, "--rollout-balancing dynamic gives free replicas the next prompt"),
)

ALGORITHM = (
    Row(
        "adv_estimator",
        "--advantage-estimator",
        Conversion(
            f"{ESTIMATORS.words}, with norm_mean_type group grpo, or reinforce_plus_plus_baseline with "
            "whiten_advantages",
            _estimator,
        ),
    ),
    Row("use_kl_loss", None, None, "--beta above 0 switches the KL term on"),
    Row("kl_loss_coef", "--beta", only_if("with use_kl_loss", _kl_loss)),
    Row("add_token_level_kl", "--kl-in-reward", SWITCH),
    Row("init_kl_coef", "--beta", only_if("with add_token_level_kl", lambda s: s.true("add_token_level_kl"))),
    Row("kl_penalty", None, None, "with --kl-in-reward the estimator is k1"),
    Row("target_kl", None, differs("--beta is constant")),
    Row(
        "loss_agg_mode",
        "--loss-type",
        Conversion(
            "; ".join(f"{theirs} → {ours}" for theirs, ours in AVERAGES.items())
            + "; gspo with importance_sampling seq",
            _average,
        ),
    ),
    Row(
        "importance_sampling",
        "--loss-type",
        Conversion("seq → gspo", lambda value, settings: "gspo" if str(value) == "seq" else None),
    ),
    Row("pg_clip", "--epsilon", only_if("without use_pg_clip_range", lambda s: not s.true("use_pg_clip_range"))),
    Row("pg_clip_low", "--epsilon", only_if("with use_pg_clip_range", lambda s: s.true("use_pg_clip_range"))),
    Row("pg_clip_high", "--epsilon-high", only_if("with use_pg_clip_range", lambda s: s.true("use_pg_clip_range"))),
    Row("use_pg_clip_range", None, None, "--epsilon-high alone switches it on"),
    Row(
        "dual_clip_loss",
        "--dual-clip",
        Conversion(
            "a switch there, the bound here: 1 + 2 x pg_clip",
            lambda value, s: number(1 + 2 * s.number("pg_clip", 0.2)) if truth(value) else None,
        ),
    ),
    Row("value_clip", None, None, "there is no critic"),
    Row("lambd", None, None, "there is no critic"),
    Row(
        "gamma",
        "--gamma",
        only_if("with reinforce_plus_plus", lambda s: s.text("adv_estimator") == "reinforce" and not _of_groups(s)),
    ),
    Row("entropy_loss_coef", "--entropy-coef"),
    Row("reward_clip", "--reward-clip"),
    Row("advantage_clip", None, differs("advantages are not clipped: --reward-clip bounds the rewards")),
    Row("norm_std_type", "--scale-rewards", Conversion("group → group; batch → batch", _normalised)),
    Row("norm_mean_type", None, None, "the estimator has the baseline"),
    Row("reward_norm", "--scale-rewards", Conversion("group → group; batch → batch", _normalised)),
    Row("reward_shift", None, None, "the estimator has the baseline"),
    Row("reward_scale", None, differs("--scale-rewards divides by a standard deviation", "1")),
    Row(
        "whiten_advantages",
        None,
        only_if(
            "with grpo, if true",
            lambda s: (
                s.true("whiten_advantages")
                and (s.text("adv_estimator") == "grpo" or (_of_groups(s) and not _whitened(s)))
            ),
            differs("advantages of groups are not whitened once more; --scale-rewards batch is the closest"),
        ),
    ),
    Row("max_len_mask", "--overlong-filter", SWITCH),
    Row(
        "difficulty_mask",
        "--dynamic-sample",
        only_if("with grpo", lambda s: s.text("adv_estimator") == "grpo", SWITCH),
        "groups with equal rewards are replaced, not masked",
    ),
    Row("difficulty_low_threshold", None, None, "--min-pass-rate is for the column pass_rate of the rows"),
    Row("difficulty_high_threshold", None, None, "--max-pass-rate is for the column pass_rate of the rows"),
    Row("difficulty_loss_weight", None, differs("tokens have the weights of --loss-type")),
    Row("length_loss_weight", None, differs("tokens have the weights of --loss-type")),
    Row("error_max_len_clip", None, differs("--overlong-filter masks completions that were cut")),
    Row("rewards.*", None, None, "--reward-funcs, with --reward-routing by data_source: docs/rewards.md"),
)

RUN = (
    Row("checkpoint_config.output_dir", "--save"),
    Row(
        "output_dir",
        "--save",
        only_if("without checkpoint_config", lambda s: not s.given("checkpoint_config.output_dir")),
    ),
    Row("checkpoint_config.type", None, None, "checkpoints are files of the cluster's file system"),
    Row("max_ckpt_to_keep", "--max-checkpoints-to-keep", SEQUENCE),
    Row("resume_from_checkpoint", None, RESUME, "--load DIR resumes if DIR holds a checkpoint"),
    Row("exp_name", None, None, "--save names the run's directory"),
    Row("logging_dir", None, None, "a run prints its metrics; --save has metrics.jsonl"),
    Row("track_with", None, None, "--tensorboard-dir, --wandb-project and --swanlab-project switch trackers on"),
    Row(
        "tracker_kwargs.log_dir",
        "--tensorboard-dir",
        only_if("with tensorboard", lambda s: s.text("track_with") == "tensorboard"),
    ),
    Row("tracker_kwargs.project", "--wandb-project", only_if("with wandb", lambda s: s.text("track_with") == "wandb")),
    Row("tracker_kwargs.*", None, None, "names of trackers are flags, keys are in the environment"),
    Row("reference.strategy_args.strategy_name", None, None, "the reference is a Megatron-Core model"),
    *(
        Row(
            f"{REFERENCE}{size}",
            f"--ref-{size.replace('_', '-')}",
            only_if("with a KL term", lambda s: _kl_loss(s) or s.true("add_token_level_kl")),
        )
        for size in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        )
    ),
    Row("reference.*", None, None, "the reference has the policy's model and GPUs"),
    Row("reward_model.*", None, None, "--reward-model NAME=DIR, with NAME in --reward-funcs"),
    Row("rollout_mock.*", None, None, "there is no replay of rollouts"),
    Row("profiler_*", None, None, "--profile, with --use-pytorch-profiler"),
    Row("lora_*", None, None, LORA_PAGE),
    Row("kl_horizon", None, None, "--beta is constant"),
    Row("system_envs.*", None, None, "export variables in the launch script"),
    Row("hydra.*", None, None, "hydra's own: pretrain_grpo.py has flags only"),
    Row("rpc_timeout", None, None, "there is no Ray"),
)


def _recompute(value: str) -> Callable[[Settings], Converted]:
    return lambda settings: value if settings.text(f"{STRATEGY}recompute_granularity") == "full" else None


def _decide(settings: Settings) -> list[str]:
    return [
        "the rows: ROLL's have messages as JSON text, ground_truth and tag; here prompt (or messages) is a list, with "
        "answer, and data_source for --reward-routing (docs/data.md)",
        "--reward-funcs: ROLL has a reward worker of each domain; --reward-routing SOURCE=NAME selects rewards here",
    ]


SYSTEM = System(
    name="ROLL",
    sources="alibaba/ROLL: examples, roll/configs",
    rows=tuple(chain(BATCH, DATA, MODEL, LEARNING, ENGINE, ALGORITHM, RUN)),
    implied=(
        ("--bf16", constant(True), "the dtype of its examples"),
        ("--transformer-impl", constant("local"), "transformer_engine where it is installed"),
        ("--beta", constant("0"), "no KL term without use_kl_loss"),
        (
            "--loss-type",
            lambda s: "gspo" if s.text("importance_sampling") == "seq" else "grpo",
            "ROLL's default (seq-mean-token-mean)",
        ),
        (
            "--scale-rewards",
            lambda s: "none" if _of_groups(s) and not _whitened(s) else None,
            "norm_mean_type group without norm_std_type",
        ),
        ("--recompute-method", _recompute("uniform"), "of recompute_granularity full"),
        ("--recompute-num-layers", _recompute("1"), "of recompute_granularity full"),
        ("--use-distributed-optimizer", constant(True), "the closest to its strategies"),
        ("--sleep-level", constant("2"), "the engine's memory is freed there"),
        ("--offload-model", constant(True), "states are moved to the host there"),
        ("--offload-gradients", constant(True), "states are moved to the host there"),
        ("--offload-optimizer", constant(True), "states are moved to the host there"),
        ("--vllm-gpu-memory-utilization", constant("0.8"), "the value of its examples"),
        ("--truncation-strategy", constant("delete"), "longer prompts are left out there"),
        ("--reward-funcs", constant("accuracy"), "of math_rule"),
    ),
    decide=_decide,
)
