"""verl's settings in ours. siiRL has the same keys."""

import math
from itertools import chain

from megatron_grpo.migration.rows import (
    DISPATCHER,
    NO_DEEPEP,
    ON,
    REGISTER,
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
    Undecided,
    ask,
    choice,
    constant,
    fixed,
    fp8_rows,
    key_of,
    more_fp8_rows,
    number,
    only_if,
    scaled,
    truth,
    unless,
)

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
REF = "actor_rollout_ref.ref."
ROLLOUT = "actor_rollout_ref.rollout."
TRANSFORMER = f"{ACTOR}megatron.override_transformer_config."
OPTIMIZER = f"{ACTOR}optim.override_optimizer_config."
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg."
CORRECTION = "algorithm.rollout_correction."

ROLLOUTS = "rollouts there, updates here: x data.train_batch_size / ppo_mini_batch_size x ppo_epochs"


def group_size(settings: Settings) -> float:
    """Return the completions of a prompt."""
    return settings.number(f"{ROLLOUT}n", 1)


def updates_per_rollout(settings: Settings) -> float:
    """Return the updates of one of verl's steps, which is a rollout with all its updates."""
    shares = settings.number("data.train_batch_size", 1024) / settings.number(f"{ACTOR}ppo_mini_batch_size", 256)
    return max(1, math.ceil(shares)) * settings.number(f"{ACTOR}ppo_epochs", 1)


def context_parallel(settings: Settings) -> float:
    """Return the ranks that share a sequence."""
    return settings.largest(f"{ACTOR}megatron.context_parallel_size", f"{ACTOR}ulysses_sequence_parallel_size")


def _lora(settings: Settings) -> bool:
    return max(settings.number(f"{MODEL}lora_rank", 0), settings.number(f"{MODEL}lora.rank", 0)) > 0


def _dynamic(settings: Settings) -> bool:
    return settings.true(f"{ACTOR}use_dynamic_bsz")


def _kl_loss(settings: Settings) -> bool:
    return settings.true(f"{ACTOR}use_kl_loss")


def _kl_in_reward(settings: Settings) -> bool:
    return settings.true("algorithm.use_kl_in_reward")


def _mode(settings: Settings) -> str:
    return settings.text(f"{ACTOR}policy_loss.loss_mode", "vanilla")


def _megatron(settings: Settings) -> bool:
    """Return whether the trainer is verl's Megatron worker, not FSDP."""
    return any(key.startswith(key_of(f"{ACTOR}megatron.")) for key in settings.values) or "megatron" in (
        settings.text(f"{ACTOR}strategy") + settings.text("--config-name")
    )


LOSS_MODES = {"gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo", "clip_cov": "dapo"} | {
    "kl_cov": "dapo",
    "gpg": "reinforce",
}
AVERAGES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}


def _loss_mode(value: object, settings: Settings) -> Converted:
    """Return our loss: of the mode, or, where the mode leaves the average open, of the average."""
    if str(value) in LOSS_MODES and LOSS_MODES[str(value)] != "dapo":
        return LOSS_MODES[str(value)]
    if str(value) not in ("vanilla", *LOSS_MODES):
        raise Undecided(f"there is no loss {value!r} here: docs/algorithms.md lists the losses")
    return _average(settings.text(f"{ACTOR}loss_agg_mode", "token-mean"), settings)


def _average(value: object, settings: Settings) -> Converted:
    if str(value) not in AVERAGES:
        raise Undecided(f"no loss here has the average {value!r}: docs/algorithms.md lists the averages")
    return AVERAGES[str(value)]


def _high(value: object, settings: Settings) -> Converted:
    high = Settings({"high": value}).number("high", 0.2)
    return number(round(1 + high, 10)) if _mode(settings) == "cispo" else str(value)


def _overlong(settings: Settings) -> bool:
    return settings.true(f"{OVERLONG}enable") and not settings.given("custom_reward_function.name")


PPO = only_if("with the plain loss", lambda settings: _mode(settings) == "vanilla")


def _tracker(name: str) -> Conversion:
    return only_if(f"with {name} in trainer.logger", lambda settings: name in settings.text("trainer.logger"))


BATCH = (
    Row(
        "data.train_batch_size",
        "--generation-batch-size",
        scaled("prompts there, completions here: x rollout.n", group_size),
    ),
    Row(
        f"{ACTOR}ppo_mini_batch_size",
        "--global-batch-size",
        scaled("prompts there, completions here: x rollout.n", group_size),
        "completions of all GPUs, as there",
    ),
    Row(
        f"{ACTOR}ppo_micro_batch_size_per_gpu",
        "--micro-batch-size",
        only_if("without use_dynamic_bsz", lambda settings: not _dynamic(settings)),
        "completions of one data-parallel rank, as there",
    ),
    Row(f"{ACTOR}ppo_micro_batch_size", None, None, "a total of all ranks, deprecated there: give --micro-batch-size"),
    Row(
        f"{ACTOR}ppo_max_token_len_per_gpu",
        "--max-tokens-per-microbatch",
        only_if(
            "with use_dynamic_bsz",
            _dynamic,
            scaled("tokens of one GPU there, of all context-parallel ranks here: x CP", context_parallel),
        ),
    ),
    Row(f"{ACTOR}use_dynamic_bsz", None, None, "--max-tokens-per-microbatch alone switches it on"),
    Row(f"{ACTOR}ppo_epochs", "--num-iterations"),
    Row(f"{ACTOR}shuffle", "--no-shuffle-completions", SWITCH_IF_FALSE, "the default here, off by default there"),
    Row(f"{ROLLOUT}n", "--num-generations"),
    Row("trainer.total_training_steps", "--train-iters", scaled(ROLLOUTS, updates_per_rollout)),
    Row("trainer.total_epochs", "--num-epochs", unless("trainer.total_training_steps")),
    Row("trainer.save_freq", "--save-interval", scaled(ROLLOUTS, updates_per_rollout), "-1: only at the end"),
    Row("trainer.test_freq", "--eval-interval", scaled(ROLLOUTS, updates_per_rollout), "-1: never"),
    Row("trainer.val_before_train", "--val-before-train", SWITCH, "on by default there, off here"),
    Row("trainer.balance_batch", None, None, "ranks always get micro-batches of equal numbers of tokens"),
    Row("trainer.critic_warmup", None, None, "there is no critic"),
)

DATA = (
    Row("data.train_files", "--train-data-path", WORDS),
    Row("data.val_files", "--valid-data-path", WORDS),
    Row("data.prompt_key", "--prompt-key"),
    Row("data.max_prompt_length", "--max-prompt-length"),
    Row("data.max_response_length", "--max-completion-length"),
    Row(
        "data.truncation",
        "--truncation-strategy",
        only_if(
            "without data.filter_overlong_prompts",
            lambda settings: not settings.true("data.filter_overlong_prompts"),
            choice({"error": "raise", "left": "left"}, "prompts are only cut on the left: left, raise or delete"),
        ),
    ),
    Row(
        "data.filter_overlong_prompts",
        "--truncation-strategy",
        fixed("delete"),
    ),
    Row("data.shuffle", "--no-shuffle", SWITCH_IF_FALSE),
    Row("data.seed", "--seed"),
    Row("data.trust_remote_code", "--trust-remote-code", SWITCH),
    Row("data.val_batch_size", None, None, "all held-out prompts are generated at once"),
    Row("data.val_max_samples", "--eval-max-prompts", SEQUENCE),
    Row("data.train_max_samples", None, ask("write a shorter file: all rows of --train-data-path are used")),
    Row("data.return_raw_chat", None, None, "a list of messages is always formatted by the chat template"),
    Row("data.return_raw_input_ids", None, None, "the trainer trains on the token ids of the engine"),
    Row("data.reward_fn_key", None, None, "the column is data_source: --reward-routing selects rewards by it"),
    Row("data.image_key", None, ask("images are read from the column images")),
    Row(
        "data.filter_overlong_prompts_workers",
        None,
        None,
        "small files are tokenised at the start, large ones when read",
    ),
    Row("data.dataloader_num_workers", None, None, "prompts need no workers"),
    Row("data.gen_batch_size", None, None, "--dynamic-sample replaces single groups: there is no second batch size"),
    Row("data.custom_cls.path", None, ask("write the rows with your own script: docs/data.md has the columns")),
    Row(
        "data.apply_chat_template_kwargs.enable_thinking",
        "--chat-template-kwargs",
        Conversion("JSON", lambda value, settings: f'{{"enable_thinking": {str(truth(value)).lower()}}}'),
    ),
)

MODELS = (
    Row(f"{MODEL}path", "--load-hf", None, "a local directory"),
    Row(f"{MODEL}tokenizer_path", "--tokenizer-model"),
    Row(f"{MODEL}trust_remote_code", "--trust-remote-code", SWITCH),
    Row(f"{MODEL}custom_chat_template", "--chat-template"),
    Row(f"{MODEL}use_remove_padding", None, None, "micro-batches are always packed without padding"),
    Row(
        f"{MODEL}enable_gradient_checkpointing",
        "--recompute-granularity",
        only_if(
            "without Megatron",
            lambda settings: (
                not settings.given(f"{ACTOR}megatron.tensor_model_parallel_size")
                and "megatron" not in settings.text(f"{ACTOR}strategy")
            ),
            fixed("full"),
        ),
        "with --recompute-method uniform --recompute-num-layers 1",
    ),
    Row(
        f"{MODEL}enable_activation_offload", None, ask("--cpu-offloading or --recompute-granularity saves this memory")
    ),
    Row(f"{MODEL}use_fused_kernels", None, None, "the head always computes log-probabilities in chunks"),
    Row(f"{MODEL}use_liger", None, None, "megatron-core has its own fused kernels"),
    Row(f"{MODEL}use_shm", None, None, "copy the model to a local disk yourself"),
    Row(f"{MODEL}lora_rank", "--lora-rank", SEQUENCE),
    Row(f"{MODEL}lora_alpha", "--lora-alpha", only_if("with lora_rank", _lora)),
    Row(f"{MODEL}lora_adapter_path", "--load-adapter"),
    Row(f"{MODEL}target_modules", "--lora-target-modules", only_if("with lora_rank", _lora, WORDS)),
    Row(f"{MODEL}lora.rank", "--lora-rank", SEQUENCE),
    Row(f"{MODEL}lora.alpha", "--lora-alpha", only_if("with lora.rank", _lora)),
    Row(f"{MODEL}lora.dropout", "--lora-dropout", only_if("with lora.rank", _lora)),
    Row(f"{MODEL}lora.adapter_path", "--load-adapter"),
    Row(
        f"{MODEL}lora.target_modules",
        "--lora-target-modules",
        only_if("with lora.rank", _lora, ask("give Hugging Face's names (q_proj), or all-linear: docs/lora.md")),
    ),
    Row(f"{MODEL}override_config.*", None, ask("edit config.json of the model: a run takes the architecture from it")),
    Row(f"{MODEL}external_lib", None, ask("--external-plugins loads Python files")),
    Row("actor_rollout_ref.hybrid_engine", None, None, "--vllm-mode colocate is the default"),
    Row(
        "actor_rollout_ref.nccl_timeout",
        "--distributed-timeout-minutes",
        scaled("seconds there, minutes here: / 60", lambda s: 1 / 60, True),
    ),
)

LEARNING = (
    Row(f"{ACTOR}optim.lr", "--lr"),
    Row(f"{ACTOR}optim.min_lr", "--min-lr"),
    Row(f"{ACTOR}optim.weight_decay", "--weight-decay"),
    Row(f"{ACTOR}optim.lr_warmup_steps", "--lr-warmup-iters", scaled(ROLLOUTS, updates_per_rollout, True)),
    Row(
        f"{ACTOR}optim.lr_warmup_steps_ratio",
        "--lr-warmup-fraction",
        only_if("above 0", lambda settings: settings.number(f"{ACTOR}optim.lr_warmup_steps_ratio", 0) > 0),
    ),
    Row(f"{ACTOR}optim.lr_decay_steps", "--lr-decay-iters", scaled(ROLLOUTS, updates_per_rollout, True)),
    Row(
        f"{ACTOR}optim.lr_decay_style",
        "--lr-decay-style",
        choice(
            {
                "constant": "constant",
                "linear": "linear",
                "cosine": "cosine",
                "inverse_square_root": "inverse-square-root",
            }
        ),
    ),
    Row(f"{ACTOR}optim.warmup_style", "--lr-decay-style", choice({"constant": "constant", "cosine": "cosine"})),
    Row(f"{ACTOR}optim.lr_scheduler_type", "--lr-decay-style", choice({"constant": "constant", "cosine": "cosine"})),
    Row(f"{ACTOR}optim.total_training_steps", None, None, "follows from --train-iters or --num-epochs"),
    Row(f"{ACTOR}optim.clip_grad", "--clip-grad"),
    Row(f"{ACTOR}grad_clip", "--clip-grad"),
    Row(f"{ACTOR}optim.optimizer", "--optimizer", choice({"adam": "adam", "adamw": "adam", "sgd": "sgd"})),
    Row(f"{OPTIMIZER}optimizer_cpu_offload", "--optimizer-cpu-offload", SWITCH),
    Row(f"{OPTIMIZER}optimizer_offload_fraction", "--optimizer-offload-fraction"),
    Row(f"{OPTIMIZER}overlap_cpu_optimizer_d2h_h2d", "--overlap-cpu-optimizer-d2h-h2d", SWITCH),
    Row(f"{OPTIMIZER}use_precision_aware_optimizer", "--use-precision-aware-optimizer", SWITCH),
    Row("critic.optim.lr", None, None, "there is no critic"),
)

PARALLEL = (
    Row(f"{ACTOR}megatron.tensor_model_parallel_size", "--tensor-model-parallel-size"),
    Row(f"{ACTOR}megatron.pipeline_model_parallel_size", "--pipeline-model-parallel-size"),
    Row(
        f"{ACTOR}megatron.virtual_pipeline_model_parallel_size",
        "--num-virtual-stages-per-pipeline-rank",
        None,
        "virtual stages of one pipeline rank, as there",
    ),
    Row(f"{ACTOR}megatron.context_parallel_size", "--context-parallel-size"),
    Row(f"{ACTOR}ulysses_sequence_parallel_size", "--context-parallel-size"),
    Row(f"{ACTOR}megatron.expert_model_parallel_size", "--expert-model-parallel-size"),
    Row(f"{ACTOR}megatron.expert_tensor_parallel_size", "--expert-tensor-parallel-size"),
    Row(
        f"{ACTOR}megatron.sequence_parallel",
        "--sequence-parallel",
        only_if("with TP above 1", lambda s: s.number(f"{ACTOR}megatron.tensor_model_parallel_size", 1) > 1, SWITCH),
        "on by default there",
    ),
    Row(f"{ACTOR}megatron.use_distributed_optimizer", "--use-distributed-optimizer", SWITCH, "on by default there"),
    Row(f"{ACTOR}megatron.param_offload", "--offload-model", SWITCH, "to the host while the engine generates"),
    Row(f"{ACTOR}megatron.grad_offload", "--offload-gradients", SWITCH),
    Row(f"{ACTOR}megatron.optimizer_offload", "--offload-optimizer", SWITCH),
    Row(f"{ACTOR}fsdp_config.param_offload", "--offload-model", SWITCH, "to the host while the engine generates"),
    Row(f"{ACTOR}fsdp_config.optimizer_offload", "--offload-optimizer", SWITCH),
    Row(
        f"{ACTOR}fsdp_config.fsdp_size",
        None,
        None,
        "FSDP is not supported: --use-distributed-optimizer and TP or PP take its place",
    ),
    Row(f"{ACTOR}fsdp_config.forward_prefetch", None, None, "FSDP is not supported"),
    Row(
        f"{ACTOR}fsdp_config.model_dtype",
        "--bf16",
        Conversion("bfloat16 → the switch", lambda value, settings: True if str(value).startswith("bf") else None),
    ),
    Row(f"{ACTOR}strategy", None, None, "the trainer is Megatron-Core"),
    Row(f"{ACTOR}use_torch_compile", None, None, "the trainer is not compiled"),
    Row(f"{ACTOR}entropy_checkpointing", None, None, "the head computes the entropy in chunks"),
    Row(f"{ACTOR}entropy_from_logits_with_chunking", None, None, "the head always computes the entropy in chunks"),
    Row(f"{ACTOR}megatron.use_mbridge", None, None, "--load-hf loads and --save-hf writes Hugging Face directories"),
    Row(f"{ACTOR}megatron.vanilla_mbridge", None, None, "--load-hf needs no bridge"),
    Row(f"{ACTOR}megatron.use_dist_checkpointing", None, None, "--pretrained-checkpoint loads a Megatron checkpoint"),
    Row(
        f"{ACTOR}megatron.dist_checkpointing_path",
        "--pretrained-checkpoint",
        only_if("with use_dist_checkpointing", lambda s: s.true(f"{ACTOR}megatron.use_dist_checkpointing")),
    ),
    Row(f"{ACTOR}megatron.override_ddp_config.grad_reduce_in_fp32", "--accumulate-allreduce-grads-in-fp32", SWITCH),
    Row(f"{ACTOR}megatron.override_ddp_config.overlap_grad_reduce", "--overlap-grad-reduce", SWITCH),
    Row(f"{TRANSFORMER}recompute_granularity", "--recompute-granularity"),
    Row(f"{TRANSFORMER}recompute_method", "--recompute-method"),
    Row(f"{TRANSFORMER}recompute_num_layers", "--recompute-num-layers"),
    Row(f"{TRANSFORMER}recompute_modules", "--recompute-modules", WORDS),
    Row(f"{TRANSFORMER}num_layers_in_first_pipeline_stage", "--decoder-first-pipeline-num-layers"),
    Row(f"{TRANSFORMER}num_layers_in_last_pipeline_stage", "--decoder-last-pipeline-num-layers"),
    Row(f"{TRANSFORMER}pipeline_model_parallel_layout", "--pipeline-model-parallel-layout"),
    Row(f"{TRANSFORMER}account_for_embedding_in_pipeline_split", "--account-for-embedding-in-pipeline-split", SWITCH),
    Row(f"{TRANSFORMER}account_for_loss_in_pipeline_split", "--account-for-loss-in-pipeline-split", SWITCH),
    Row(f"{TRANSFORMER}moe_router_dtype", "--moe-router-dtype"),
    Row(f"{TRANSFORMER}moe_grouped_gemm", "--moe-grouped-gemm", SWITCH),
    Row(f"{TRANSFORMER}moe_permute_fusion", "--moe-permute-fusion", SWITCH),
    Row(f"{TRANSFORMER}moe_enable_deepep", None, None, NO_DEEPEP),
    Row(f"{TRANSFORMER}moe_token_dispatcher_type", "--moe-token-dispatcher-type", DISPATCHER),
    Row(f"{TRANSFORMER}moe_aux_loss_coeff", "--moe-aux-loss-coeff"),
    Row(f"{TRANSFORMER}moe_z_loss_coeff", "--moe-z-loss-coeff"),
    Row(f"{TRANSFORMER}moe_shared_expert_overlap", "--moe-shared-expert-overlap", SWITCH),
    Row(f"{TRANSFORMER}apply_rope_fusion", "--apply-rope-fusion", SWITCH, "needs Transformer Engine"),
    Row(f"{TRANSFORMER}gradient_accumulation_fusion", "--gradient-accumulation-fusion", SWITCH),
    Row(f"{TRANSFORMER}bias_activation_fusion", "--bias-activation-fusion", SWITCH),
    Row(f"{TRANSFORMER}bias_dropout_fusion", "--bias-dropout-fusion", SWITCH),
    Row(f"{TRANSFORMER}masked_softmax_fusion", None, None, "the attention kernels compute the softmax themselves"),
    Row(f"{TRANSFORMER}persist_layer_norm", None, None, "apex's persistent kernel is not used"),
    Row(f"{TRANSFORMER}deallocate_pipeline_outputs", None, None, "sent tensors are always freed"),
    Row(f"{TRANSFORMER}attention_backend", "--attention-backend"),
    *fp8_rows(f"{TRANSFORMER}fp8", f"{TRANSFORMER}fp8_recipe", f"{TRANSFORMER}fp8_param"),
    *more_fp8_rows(TRANSFORMER, "_"),
    Row(f"{OPTIMIZER}fp8_recipe", None, None, "the optimizer's parameters are in float32"),
)

ENGINE = (
    Row(
        f"{ROLLOUT}name",
        "--rollout-engine",
        choice(
            {"vllm": "vllm"},
            "SGLang works as servers: --rollout-engine sglang --sglang-server-base-url, docs/choose_engine.md",
        ),
    ),
    Row(f"{ROLLOUT}mode", None, None, "--vllm-mode colocate is the default: vLLM in the training processes"),
    Row(f"{ROLLOUT}tensor_model_parallel_size", "--vllm-tensor-parallel-size", None, "2 by default there"),
    Row(f"{ROLLOUT}gpu_memory_utilization", "--vllm-gpu-memory-utilization"),
    Row(f"{ROLLOUT}max_model_len", "--vllm-max-model-len"),
    Row(f"{ROLLOUT}max_num_seqs", "--vllm-max-num-seqs"),
    Row(
        f"{ROLLOUT}dtype", "--vllm-dtype", choice({"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"})
    ),
    Row(f"{ROLLOUT}quantization", "--vllm-quantization", choice({"fp8": "fp8", "null": None, "none": None})),
    Row(f"{ROLLOUT}enforce_eager", "--vllm-enforce-eager", SWITCH),
    Row(f"{ROLLOUT}enable_prefix_caching", "--vllm-enable-prefix-caching", SWITCH, "on by default there"),
    Row(
        f"{ROLLOUT}expert_parallel_size",
        "--vllm-enable-expert-parallel",
        only_if(
            "above 1",
            lambda s: s.number(f"{ROLLOUT}expert_parallel_size", 1) > 1,
            ON,
        ),
    ),
    Row(
        f"{ROLLOUT}free_cache_engine",
        "--sleep-level",
        Conversion("true → 2; false → 0", lambda value, settings: "2" if truth(value) else "0"),
    ),
    Row(f"{ROLLOUT}enable_chunked_prefill", None, None, "vLLM's default"),
    Row(
        f"{ROLLOUT}max_num_batched_tokens",
        "--vllm-engine-kwargs",
        Conversion("JSON", lambda value, settings: f'{{"max_num_batched_tokens": {value}}}'),
    ),
    Row(f"{ROLLOUT}temperature", "--temperature"),
    Row(f"{ROLLOUT}top_p", "--top-p"),
    Row(f"{ROLLOUT}top_k", "--top-k"),
    Row(f"{ROLLOUT}ignore_eos", "--ignore-eos", SWITCH),
    Row(f"{ROLLOUT}do_sample", None, None, "rollouts are always sampled"),
    Row(f"{ROLLOUT}load_format", None, None, "the engine gets its weights from the trainer"),
    Row(f"{ROLLOUT}layered_summon", None, None, "weights go to the engine in bounded buckets"),
    Row(
        f"{ROLLOUT}calculate_log_probs",
        "--mismatch-sample-rate",
        Conversion("true → 1; false → 0", lambda value, settings: "1" if truth(value) else "0"),
    ),
    Row(
        f"{ROLLOUT}log_prob_micro_batch_size_per_gpu",
        None,
        None,
        "the forward passes take --micro-batch-size or --logprobs-max-tokens-per-microbatch",
    ),
    Row(f"{ROLLOUT}log_prob_use_dynamic_bsz", None, None, "as --max-tokens-per-microbatch"),
    Row(
        f"{ROLLOUT}log_prob_max_token_len_per_gpu",
        "--logprobs-max-tokens-per-microbatch",
        only_if(
            "with use_dynamic_bsz",
            _dynamic,
            scaled("tokens of one GPU there, of all context-parallel ranks here: x CP", context_parallel),
        ),
    ),
    Row(
        f"{ROLLOUT}val_kwargs.n",
        "--eval-num-generations",
        only_if("with val_kwargs.do_sample", lambda s: s.true(f"{ROLLOUT}val_kwargs.do_sample")),
        "in addition to the greedy completion",
    ),
    Row(f"{ROLLOUT}val_kwargs.do_sample", None, None, "evaluation is greedy, and sampled with --eval-num-generations"),
    Row(f"{ROLLOUT}val_kwargs.temperature", None, None, "sampled evaluation has the rollout's temperature"),
    Row(f"{ROLLOUT}val_kwargs.top_p", None, None, "sampled evaluation has the rollout's --top-p"),
    Row(f"{ROLLOUT}val_kwargs.top_k", None, None, "sampled evaluation has the rollout's --top-k"),
    Row(
        f"{ROLLOUT}multi_turn.enable",
        None,
        only_if(
            "if true",
            lambda s: s.true(f"{ROLLOUT}multi_turn.enable"),
            ask(TURNS),
        ),
    ),
    Row(
        f"{ROLLOUT}enable_rollout_routing_replay",
        "--router-replay-mode",
        fixed("R3"),
    ),
    Row(f"{ROLLOUT}data_parallel_size", None, None, "the replicas are all GPUs / --vllm-tensor-parallel-size"),
    Row(
        f"{ROLLOUT}engine_kwargs.vllm.disable_mm_preprocessor_cache",
        None,
        None,
        "the cache holds no weights, and stays on",
    ),
    Row(f"{ROLLOUT}engine_kwargs.sglang.attention_backend", None, None, "a setting of the SGLang server"),
    Row(f"{ROLLOUT}multi_stage_wake_up", None, None, "--sleep-level wakes weights and cache one after the other"),
    Row(f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes", None, None, "buckets have a fixed bound"),
)

ALGORITHM = (
    Row(
        "algorithm.adv_estimator",
        "--advantage-estimator",
        choice(
            {
                "grpo": "grpo",
                "rloo": "rloo",
                "reinforce_plus_plus": "reinforce_plus_plus",
                "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
                "grpo_passk": "pass_at_k",
            },
            "docs/algorithms.md lists the estimators; there is no critic",
        ),
    ),
    Row(
        "algorithm.norm_adv_by_std_in_grpo",
        "--scale-rewards",
        Conversion("true → group; false → none", lambda value, settings: "group" if truth(value) else "none"),
    ),
    Row(
        f"{ACTOR}policy_loss.loss_mode",
        "--loss-type",
        Conversion(
            "; ".join(f"{theirs} → {ours}" for theirs, ours in LOSS_MODES.items()) + "; vanilla → by loss_agg_mode",
            _loss_mode,
        ),
    ),
    Row(
        f"{ACTOR}loss_agg_mode",
        "--loss-type",
        unless(
            f"{ACTOR}policy_loss.loss_mode",
            Conversion("; ".join(f"{theirs} → {ours}" for theirs, ours in AVERAGES.items()), _average),
        ),
        "token-mean by default there",
    ),
    Row(f"{ACTOR}clip_ratio", "--epsilon", unless(f"{ACTOR}clip_ratio_low")),
    Row(f"{ACTOR}clip_ratio_low", "--epsilon"),
    Row(
        f"{ACTOR}clip_ratio_high",
        "--epsilon-high",
        Conversion("with cispo: 1 + value, the bound of the ratio itself", _high),
    ),
    Row(f"{ACTOR}clip_ratio_c", "--dual-clip", PPO, "3 by default there, off here"),
    Row(f"{ACTOR}tau_pos", "--tau-pos"),
    Row(f"{ACTOR}tau_neg", "--tau-neg"),
    Row(f"{ACTOR}policy_loss.clip_cov_ratio", "--clip-cov-ratio"),
    Row(f"{ACTOR}policy_loss.clip_cov_lb", "--clip-cov-lb"),
    Row(f"{ACTOR}policy_loss.clip_cov_ub", "--clip-cov-ub"),
    Row(f"{ACTOR}policy_loss.kl_cov_ratio", "--kl-cov-ratio"),
    Row(f"{ACTOR}policy_loss.ppo_kl_coef", "--kl-cov-coef"),
    Row(f"{ACTOR}entropy_coeff", "--entropy-coef"),
    Row(f"{ACTOR}use_kl_loss", None, None, "--beta above 0 switches the KL term on"),
    Row(f"{ACTOR}kl_loss_coef", "--beta", only_if("with use_kl_loss", _kl_loss)),
    Row(
        f"{ACTOR}kl_loss_type",
        "--kl-estimator",
        only_if(
            "with use_kl_loss",
            _kl_loss,
            choice({"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}),
        ),
    ),
    Row("algorithm.use_kl_in_reward", "--kl-in-reward", SWITCH),
    Row("algorithm.kl_ctrl.kl_coef", "--beta", only_if("with use_kl_in_reward", _kl_in_reward)),
    Row("algorithm.kl_ctrl.type", None, None, "--beta is constant"),
    Row("algorithm.kl_penalty", None, None, "with --kl-in-reward the estimator is k1"),
    Row(
        "algorithm.gamma",
        "--gamma",
        only_if("with reinforce_plus_plus", lambda s: s.text("algorithm.adv_estimator") == "reinforce_plus_plus"),
    ),
    Row("algorithm.lam", None, None, "there is no critic"),
    Row("algorithm.filter_groups.enable", "--dynamic-sample", SWITCH),
    Row(
        "algorithm.filter_groups.max_num_gen_batches",
        "--max-resample-times",
        SEQUENCE,
        "batches there; successive replacements of a group here",
    ),
    Row("algorithm.filter_groups.metric", None, None, "groups with equal rewards are replaced"),
    Row(
        f"{CORRECTION}rollout_is",
        "--rollout-importance-sampling-mode",
        choice({"token": "token_truncate", "sequence": "sequence_truncate", "null": None, "none": None}),
    ),
    Row(
        f"{CORRECTION}rollout_is_threshold",
        "--rollout-importance-sampling-threshold",
        only_if("with rollout_is", lambda s: s.given(f"{CORRECTION}rollout_is")),
    ),
    Row(
        f"{CORRECTION}rollout_rs",
        "--rollout-importance-sampling-mode",
        unless(
            f"{CORRECTION}rollout_is",
            choice({"token": "token_mask", "sequence": "sequence_mask", "null": None, "none": None}),
        ),
    ),
    Row(
        f"{ACTOR}tis_imp_ratio_cap",
        "--rollout-importance-sampling-mode",
        only_if(
            "above 0",
            lambda s: s.number(f"{ACTOR}tis_imp_ratio_cap", -1) > 0,
            Conversion("token_truncate", lambda v, s: "token_truncate"),
        ),
    ),
    Row(f"{ACTOR}tis_imp_ratio_cap", "--rollout-importance-sampling-threshold", SEQUENCE),
    Row(f"{ACTOR}router_replay.mode", "--router-replay-mode", choice({"disabled": "disabled", "r2": "R2", "r3": "R3"})),
)

REFERENCE = (
    Row(
        f"{REF}log_prob_micro_batch_size_per_gpu",
        "--ref-micro-batch-size",
        only_if(
            "with a KL term and without use_dynamic_bsz",
            lambda s: not _dynamic(s) and (_kl_loss(s) or _kl_in_reward(s)),
        ),
    ),
    Row(f"{REF}log_prob_use_dynamic_bsz", None, None, "as --max-tokens-per-microbatch"),
    Row(
        f"{REF}log_prob_max_token_len_per_gpu",
        None,
        None,
        "--logprobs-max-tokens-per-microbatch holds for the reference, too",
    ),
    *(
        Row(
            f"{REF}megatron.{size}",
            f"--ref-{size.replace('_', '-')}",
            only_if("with a KL term", lambda s: _kl_loss(s) or _kl_in_reward(s)),
        )
        for size in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        )
    ),
    Row(f"{REF}megatron.param_offload", None, None, "the reference is on the host between its passes"),
    Row(f"{REF}fsdp_config.param_offload", None, None, "the reference is on the host between its passes"),
    Row(f"{REF}ulysses_sequence_parallel_size", None, None, "--ref-context-parallel-size; the policy's by default"),
    Row(f"{REF}use_torch_compile", None, None, "the reference is not compiled"),
    Row(f"{REF}entropy_from_logits_with_chunking", None, None, "the head always computes in chunks"),
    Row(f"{REF}megatron.use_dist_checkpointing", None, None, "--ref-load loads a Megatron checkpoint"),
    Row(
        f"{REF}megatron.dist_checkpointing_path",
        "--ref-load",
        only_if("with use_dist_checkpointing", lambda s: s.true(f"{REF}megatron.use_dist_checkpointing")),
    ),
    Row(f"{REF}strategy", None, None, "the reference is a Megatron-Core model"),
)

REWARDS = (
    Row(
        "custom_reward_function.path",
        "--external-plugins",
        None,
        "register the function with @register_reward: docs/rewards.md",
    ),
    Row("custom_reward_function.name", "--reward-funcs", None, "the name of @register_reward"),
    Row("reward_model.reward_manager", None, None, "--reward-funcs names the rewards"),
    Row(
        "reward_model.enable",
        None,
        only_if(
            "if true",
            lambda s: s.true("reward_model.enable"),
            ask("--reward-model NAME=DIR or NAME=URL, with NAME in --reward-funcs: docs/rewards.md"),
        ),
    ),
    Row(f"{OVERLONG}enable", None, None, "soft_overlong in --reward-funcs"),
    Row(f"{OVERLONG}len", "--soft-cache-length", only_if("if enabled", _overlong)),
    Row(f"{OVERLONG}penalty_factor", None, None, "the --reward-weights of soft_overlong"),
    Row(f"{OVERLONG}log", None, None, "every reward function has its own metric"),
    Row("reward_model.reward_kwargs.max_resp_len", None, None, "soft_overlong takes --max-completion-length"),
    Row("reward_model.sandbox_fusion.url", None, ask("--reward-funcs code runs the tests in a sandbox of its own")),
    Row("reward_model.launch_reward_fn_async", None, None, "completions are always scored as they finish"),
)

RUN = (
    Row("trainer.default_local_dir", "--save"),
    Row("trainer.default_local_dir", "--load", None, "a second start resumes"),
    Row("trainer.resume_mode", None, None, "--load DIR resumes if DIR holds a checkpoint"),
    Row("trainer.resume_from_path", "--load"),
    Row("trainer.max_actor_ckpt_to_keep", "--max-checkpoints-to-keep"),
    Row("trainer.default_hdfs_dir", None, None, "only local paths"),
    Row("trainer.logger", None, None, "--wandb-project, --swanlab-project and --tensorboard-dir switch trackers on"),
    Row("trainer.project_name", "--wandb-project", _tracker("wandb")),
    Row("trainer.experiment_name", "--wandb-exp-name", _tracker("wandb")),
    Row("trainer.project_name", "--swanlab-project", _tracker("swanlab")),
    Row("trainer.experiment_name", "--swanlab-exp-name", _tracker("swanlab")),
    Row("trainer.log_val_generations", None, None, "--save has eval_completions.jsonl: --eval-completions-to-log"),
    Row("trainer.rollout_data_dir", None, None, "--save has completions.jsonl: --num-completions-to-log"),
    Row("trainer.validation_data_dir", None, None, "--save has eval_completions.jsonl: --eval-completions-to-log"),
    Row("trainer.nnodes", None, None, "torchrun's --nnodes"),
    Row("trainer.n_gpus_per_node", None, None, "torchrun's --nproc-per-node"),
    Row("trainer.device", None, None, "GPUs, or a CPU where there is none"),
    Row("trainer.use_legacy_worker_impl", None, None, "there are no workers"),
    Row("trainer.del_local_ckpt_after_load", None, None, "checkpoints stay"),
    Row(
        f"{ACTOR}checkpoint.save_contents",
        None,
        None,
        "a checkpoint holds weights, optimizer and position; --save-hf exports",
    ),
    Row("global_profiler.tool", None, None, "--profile, with --use-pytorch-profiler"),
    Row("--config-path", None, None, "hydra's own: pretrain_grpo.py has flags only"),
    Row("--config-name", None, None, "hydra's own: pretrain_grpo.py has flags only"),
    Row("ray_kwargs.*", None, None, "there is no Ray"),
    Row("global_profiler.*", None, None, "--profile, with --use-pytorch-profiler"),
    Row(f"{ACTOR}profiler.*", None, None, "--profile, with --use-pytorch-profiler"),
    Row(f"{REF}profiler.*", None, None, "--profile, with --use-pytorch-profiler"),
    Row(f"{ROLLOUT}profiler.*", None, None, "--profile, with --use-pytorch-profiler"),
    Row(f"{ROLLOUT}engine_kwargs.*", None, None, "--vllm-engine-kwargs has what has no flag"),
    Row(f"{ROLLOUT}multi_turn.*", None, None, TURNS),
    Row(f"{ROLLOUT}agent.*", None, None, TURNS),
    Row(f"{ACTOR}fsdp_config.*", None, None, "FSDP is not supported"),
    Row(f"{REF}fsdp_config.*", None, None, "FSDP is not supported"),
    Row(f"{MODEL}lora*", None, None, "docs/lora.md has what there is"),
    Row("reward_model.*", None, None, "--reward-model NAME=DIR or NAME=URL: docs/rewards.md"),
    Row("critic.*", None, None, "there is no critic"),
    Row("dag.workflow_path", None, None, "siiRL's graph of workers: pretrain_grpo.py is the algorithm"),
    Row("dag.enable_perf", None, None, "--include-performance-metrics"),
)


def _sequence_parallel(settings: Settings) -> Converted:
    return True if settings.number(f"{ACTOR}megatron.tensor_model_parallel_size", 1) > 1 else None


def _dual_clip(settings: Settings) -> Converted:
    return "3" if _mode(settings) == "vanilla" and "reinforce" not in settings.text("algorithm.adv_estimator") else None


def _recompute(settings: Settings, value: str) -> Converted:
    full = settings.true(f"{MODEL}enable_gradient_checkpointing") and not _megatron(settings)
    return value if full else None


def _rewards(settings: Settings) -> Converted:
    return ["accuracy", "soft_overlong"] if _overlong(settings) else "accuracy"


def _weights(settings: Settings) -> Converted:
    return ["1", settings.text(f"{OVERLONG}penalty_factor", "1")] if _overlong(settings) else None


def _decide(settings: Settings) -> list[str]:
    points = [
        "--reward-funcs: verl chooses a reward by the column data_source; here --reward-routing does",
    ]
    if settings.given("custom_reward_function.path"):
        points.append(f"custom_reward_function: {REGISTER}")
    if not _megatron(settings):
        points.append(
            "--tensor-model-parallel-size, --pipeline-model-parallel-size: FSDP shards the weights over all GPUs; "
            "docs/model_sizes.md has sizes for Megatron"
        )
    return points


SYSTEM = System(
    name="verl",
    sources="volcengine/verl: examples/*_trainer, verl/trainer/config; siiRL has the same keys",
    rows=tuple(chain(BATCH, DATA, MODELS, LEARNING, PARALLEL, ENGINE, ALGORITHM, REFERENCE, REWARDS, RUN)),
    implied=(
        ("--bf16", constant(True), "verl trains in bfloat16"),
        ("--transformer-impl", constant("local"), "transformer_engine where it is installed"),
        ("--lora-alpha", lambda s: "16" if _lora(s) else None, "verl's default"),
        ("--beta", constant("0"), "no KL term without use_kl_loss"),
        ("--loss-type", constant("dapo"), "verl averages over tokens (token-mean)"),
        ("--dual-clip", _dual_clip, "clip_ratio_c is 3 by default there"),
        ("--lr", constant("1e-6"), "verl's default"),
        ("--num-epochs", lambda s: None if s.given("trainer.total_training_steps") else "30", "verl's default"),
        ("--num-generations", constant("1"), "verl's default"),
        ("--sequence-parallel", _sequence_parallel, "on by default there"),
        ("--use-distributed-optimizer", constant(True), "on by default there, and the closest to FSDP"),
        ("--vllm-tensor-parallel-size", constant("2"), "verl's default"),
        ("--vllm-gpu-memory-utilization", constant("0.5"), "verl's default"),
        ("--sleep-level", constant("2"), "free_cache_engine is on by default there"),
        ("--recompute-method", lambda s: _recompute(s, "uniform"), "of gradient checkpointing"),
        ("--recompute-num-layers", lambda s: _recompute(s, "1"), "of gradient checkpointing"),
        ("--reward-weights", _weights, "1, and the penalty factor of the overlong buffer"),
        ("--reward-funcs", _rewards, "verl chooses the reward by data_source"),
    ),
    decide=_decide,
)
