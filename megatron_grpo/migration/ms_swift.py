"""ms-swift's flags in ours: ``megatron rlhf`` and ``swift rlhf``. Flags of Megatron-LM have their names in both."""

from collections.abc import Callable
from itertools import chain

from megatron_grpo.migration.hf_trainer import (
    STEPS,
    accumulation,
    completions_per_update,
    global_batch,
    updates_per_rollout,
)
from megatron_grpo.migration.rows import (
    ENGINE_RANKS,
    OF_DELAYED,
    RESUME,
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
    Undecided,
    ask,
    choice,
    constant,
    differs,
    fixed,
    fp8_rows,
    is_off,
    multiple_of,
    number,
    only_if,
    rank,
    scaled,
    switch_for,
    truth,
    unless,
    words,
)
from megatron_grpo.migration.trl import DATA_FILES, DECAYS, reported, scaled_rewards, server_urls

REWARDS_OF_BOTH = ("accuracy", "format", "react_format", "cosine", "repetition", "soft_overlong")
TEACHER = "teacher_model"
OWN_COMPLETIONS = "all completions are the policy's; --train-only learns recorded ones"
BOTH_SIDES = "weights are clipped on both sides"
SERVERS = "stock vLLM servers take the place of swift rollout: docs/choose_engine.md"


def _megatron(settings: Settings) -> bool:
    """Return whether the command is ``megatron rlhf``, whose batches have Megatron-LM's names."""
    names = ("lr", "global_batch_size", "micro_batch_size", "tensor_model_parallel_size")
    return any(settings.given(name) for name in names)


def _mu_decays(settings: Settings) -> bool:
    return settings.number("chord_mu_decay_steps", 0) > 0


def _mu_peak(value: object, settings: Settings) -> Converted:
    """Return the peak of CHORD's mu; without decay steps mu is the valley after its warm-up."""
    if _mu_decays(settings) or not settings.given("chord_mu_valley"):
        return SAME.apply(value, settings)
    if settings.number("chord_mu_warmup_steps", 0) > 0 and settings.number("chord_mu_valley", 0) != settings.number(
        "chord_mu_peak", 0
    ):
        raise Undecided(
            "without decay steps mu falls from its peak to its valley at once: give --chord-mu-decay-steps 1"
        )
    return settings.text("chord_mu_valley")


def _updates_per_rollout(settings: Settings) -> float:
    if not _megatron(settings):
        return updates_per_rollout(settings)
    steps = settings.number("steps_per_generation", 1)
    if settings.given("generation_batch_size") and settings.given("global_batch_size"):
        steps = settings.number("generation_batch_size", 1) / settings.number("global_batch_size", 1)
    return max(1, steps)


def _names_tuner(settings: Settings) -> bool:
    return settings.given("tuner_type") or settings.given("train_type")


def _lora(settings: Settings) -> bool:
    """Return whether adapters are trained: the default of ``swift rlhf``, not of ``megatron rlhf``."""
    default = "full" if _megatron(settings) else "lora"
    kind = settings.text("tuner_type") or settings.text("train_type") or default
    if kind not in ("full", "lora"):
        raise Undecided(f"there is no tuner {kind!r} here: full and lora")
    return kind == "lora"


_TUNER = rank("--lora_rank", "8", _lora)
_WITH_LORA = only_if("with lora", _lora)


def _steps(value: object, settings: Settings) -> Converted:
    return SAME.apply(value, settings) if _megatron(settings) else STEPS.apply(value, settings)


def _rewards(value: object, settings: Settings) -> Converted:
    names = words(value) or []
    own = [name for name in names if name not in REWARDS_OF_BOTH]
    if own and not settings.given("external_plugins"):
        raise Undecided(f"{' '.join(own)}: register it with @register_reward in --external-plugins, docs/rewards.md")
    return names or None


def _system(value: object, settings: Settings) -> Converted:
    if str(value).endswith((".txt", ".md")):
        raise Undecided(f'--system-prompt takes the text: --system-prompt "$(cat {value})"')
    return SAME.apply(value, settings)


def _thinking(value: object, settings: Settings) -> Converted:
    return f'{{"enable_thinking": {str(truth(value)).lower()}}}'


def _bounds_prompts(settings: Settings) -> bool:
    return settings.given("max_length")


INTERVAL = multiple_of(_updates_per_rollout)

BATCH = (
    Row("--micro_batch_size", "--micro-batch-size"),
    Row("--global_batch_size", "--global-batch-size", None, "completions, as there"),
    Row("--per_device_train_batch_size", "--global-batch-size", global_batch(), "completions, as there"),
    Row("--per_device_train_batch_size", "--micro-batch-size", None, "completions of one data-parallel rank, as there"),
    Row("--gradient_accumulation_steps", None, None, "follows from --global-batch-size"),
    Row("--per_device_eval_batch_size", None, None, "all held-out prompts are generated at once"),
    Row("--generation_batch_size", "--generation-batch-size", None, "completions, as there"),
    Row(
        "--steps_per_generation",
        "--steps-per-generation",
        unless(
            "generation_batch_size",
            Conversion(
                "megatron rlhf: updates, as here; swift rlhf: micro-batches, / gradient_accumulation_steps", _steps
            ),
        ),
    ),
    Row("--num_generations", "--num-generations"),
    Row("--num_generations_eval", "--eval-num-generations", None, "in addition to the greedy completion"),
    Row("--num_iterations", "--num-iterations"),
    Row("--train_iters", "--train-iters", None, "updates, as there"),
    Row("--max_steps", "--train-iters", SEQUENCE, "updates, as there"),
    Row(
        "--num_train_epochs",
        "--num-epochs",
        only_if(
            "without --train_iters and --max_steps",
            lambda s: not s.given("train_iters") and s.number("max_steps", -1) <= 0,
        ),
    ),
    Row("--save_steps", "--save-interval", INTERVAL),
    Row("--eval_steps", "--eval-interval", only_if("with --val_dataset", lambda s: s.given("val_dataset"), INTERVAL)),
    Row("--eval_strategy", None, None, "--eval-interval and --valid-data-path switch it on"),
    Row("--eval_iters", None, None, "--eval-max-prompts limits the held-out prompts"),
    Row("--save_strategy", None, None, "--save-interval counts updates"),
    Row("--logging_steps", "--log-interval", None, "updates, as there"),
)

DATA = (
    Row("--dataset", "--train-data-path", DATA_FILES),
    Row("--val_dataset", "--valid-data-path", DATA_FILES),
    Row(
        "--split_dataset_ratio",
        None,
        only_if(
            "above 0",
            lambda s: s.number("split_dataset_ratio", 0) > 0,
            ask("write the held-out prompts to a file of their own: --valid-data-path"),
        ),
    ),
    Row("--dataset_shuffle", "--no-shuffle", SWITCH_IF_FALSE),
    Row("--load_from_cache_file", None, None, "prompts are read from the files"),
    Row("--dataset_num_proc", None, None, "small files are tokenised at the start, large ones when read"),
    Row("--dataloader_num_workers", None, None, "prompts need no workers"),
    Row("--streaming", None, None, "files above 64 MiB are streamed"),
    Row("--columns", None, ask("name the columns prompt and answer in the file; --prompt-key names the first")),
    Row("--max_length", "--max-prompt-length", None, "in GRPO it bounds the prompt there, too"),
    Row("--max_completion_length", "--max-completion-length"),
    Row(
        "--truncation_strategy",
        "--truncation-strategy",
        only_if(
            "with max_length, which is the model's maximum by default there",
            _bounds_prompts,
            choice({"left": "left", "delete": "delete", "raise": "raise", "none": None}, "left, delete or raise"),
        ),
    ),
    Row("--system", "--system-prompt", Conversion("the text; a file: its text", _system)),
    Row("--template", None, ask("--chat-template gives a Jinja template; the tokenizer's is the default")),
    Row("--agent_template", None, None, "the chat template formats tools"),
    Row("--enable_thinking", "--chat-template-kwargs", Conversion("JSON", _thinking)),
    Row("--loss_scale", None, None, "the tokens of the completion are in the loss"),
    Row("--padding_free", None, None, "micro-batches are always packed without padding"),
    Row("--remove_unused_columns", None, None, "reward functions get the whole row"),
)


def _distils(settings: Settings) -> bool:
    return settings.text("rlhf_type", "grpo") == "gkd"


def _over_batch(settings: Settings) -> bool:
    """Return whether REINFORCE++ divides by the std over the batch; by that of a group it is GRPO."""
    if settings.text("advantage_estimator") != "reinforce_plus_plus":
        return False
    return scaled_rewards(settings.text("scale_rewards", "batch"), settings) in (None, "batch")


def _estimator(value: object, settings: Settings) -> Converted:
    if value != "reinforce_plus_plus":
        return SAME.apply(value, settings)
    return "reinforce_plus_plus_baseline" if _over_batch(settings) else "grpo"


def _scale(value: object, settings: Settings) -> Converted:
    return None if _over_batch(settings) else scaled_rewards(value, settings)


def _teacher_server(value: object, settings: Settings) -> Converted:
    if str(value).lstrip().startswith("["):
        raise Undecided("of several servers give SOURCE=URL of each, where SOURCE is a row's data_source")
    return None if is_off(value) else str(value)


MODEL = (
    Row("--rlhf_type", "--loss-type", choice({"grpo": None, "gkd": "gkd"}, "grpo, and gkd with a teacher")),
    Row("--model", "--load-hf", None, "a local directory"),
    Row("--load", "--pretrained-checkpoint", None, "a Megatron checkpoint"),
    Row("--mcore_model", "--pretrained-checkpoint"),
    Row("--ref_model", "--ref-load-hf"),
    Row("--mcore_ref_model", "--ref-load"),
    Row("--ref_load", "--ref-load"),
    Row("--model_type", None, None, "--model-family; --load-hf names it"),
    Row("--use_hf", None, None, "a run downloads nothing"),
    Row("--torch_dtype", "--bf16", switch_for("bfloat16")),
    Row("--bf16", "--bf16", SWITCH),
    Row("--fp16", "--fp16", SWITCH),
    *fp8_rows("--fp8_format", "--fp8_recipe", "--fp8_param_gather"),
    Row("--fp8_amax_history_len", None, None, OF_DELAYED),
    Row("--fp8_amax_compute_algo", None, None, OF_DELAYED),
    Row("--load_safetensors", None, None, "--load-hf loads safetensors"),
    Row("--save_safetensors", None, None, "--save-hf writes safetensors at the end of the run"),
    Row("--bridge_backend", None, None, "--load-hf needs no bridge"),
    Row("--tuner_type", "--lora-rank", _TUNER, "full trains all weights"),
    Row("--train_type", "--lora-rank", _TUNER, "full trains all weights"),
    Row("--lora_rank", "--lora-rank", only_if("without a tuner type", lambda s: not _names_tuner(s) and _lora(s))),
    Row("--lora_alpha", "--lora-alpha", _WITH_LORA),
    Row("--lora_dropout", "--lora-dropout", _WITH_LORA),
    Row("--target_modules", "--lora-target-modules", only_if("with lora", _lora, WORDS)),
    Row("--modules_to_save", "--lora-modules-to-save", only_if("with lora", _lora, WORDS)),
    Row("--use_rslora", "--lora-use-rslora", only_if("with lora", _lora, SWITCH)),
    Row("--use_dora", "--lora-use-dora", only_if("with lora", _lora, SWITCH)),
    Row(
        "--init_weights",
        "--lora-init",
        only_if("with lora", _lora, choice({"true": None, "gaussian": "gaussian"}, "default and gaussian")),
    ),
    Row("--adapters", "--load-adapter"),
    Row("--adapter_load", "--load-adapter"),
    Row("--ref_adapters", "--reference-adapter"),
    Row("--ref_adapter_load", "--reference-adapter"),
    Row(
        "--merge_lora", None, None, "--save-hf writes merged weights at the end of the run, --save-adapter the adapter"
    ),
    Row("--freeze_llm", None, differs("every parameter of the language model is trained")),
    Row("--freeze_vit", "--freeze-vision-tower", SWITCH, "true there unless given, for models with images"),
    Row("--freeze_aligner", "--freeze-projector", SWITCH, "true there unless given, for models with images"),
    Row("--vit_lr", "--vision-tower-lr"),
    Row("--aligner_lr", "--projector-lr"),
    Row(
        "--quant_bits",
        None,
        ask("there is no training in 4 bits; with adapters --lora-base-dtype fp8 stores the base in 8"),
    ),
    Row("--attn_impl", None, None, "packs always take a flash kernel on a GPU"),
    Row("--finetune", None, None, "--load-hf and --pretrained-checkpoint start a new run; --load resumes"),
    Row(
        "--gradient_checkpointing",
        "--recompute-granularity",
        only_if(
            "with swift rlhf",
            lambda s: not _megatron(s),
            fixed("full"),
        ),
        "with --recompute-method uniform --recompute-num-layers 1",
    ),
    Row(
        "--recompute_granularity",
        "--recompute-granularity",
        choice({"selective": "selective", "full": "full", "none": None}),
    ),
    Row("--gradient_checkpointing_kwargs", None, None, "--recompute-granularity has its own flags"),
    Row("--deepspeed", None, ask("--use-distributed-optimizer, with TP and PP for large models: docs/model_sizes.md")),
    Row("--fsdp", None, ask("--use-distributed-optimizer, with TP and PP for large models: docs/model_sizes.md")),
    Row("--sequence_parallel_size", "--context-parallel-size", None, "ranks that share a sequence"),
    Row(
        "--virtual_pipeline_model_parallel_size",
        "--num-virtual-stages-per-pipeline-rank",
        None,
        "virtual stages of one pipeline rank, as there",
    ),
    Row(
        "--sequence_parallel",
        "--sequence-parallel",
        only_if("with TP above 1", lambda s: s.number("tensor_model_parallel_size", 1) > 1, SWITCH),
    ),
    Row("--use_precision_aware_optimizer", "--use-precision-aware-optimizer", SWITCH),
    Row("--cross_entropy_loss_fusion", None, None, "the head computes log-probabilities in chunks"),
    Row("--calculate_per_token_loss", None, None, "--loss-type dapo averages over tokens"),
)

LEARNING = (
    Row("--lr", "--lr"),
    Row("--learning_rate", "--lr"),
    Row("--lr_scheduler_type", "--lr-decay-style", choice(DECAYS), "cosine by default there"),
    Row(
        "--warmup_ratio",
        "--lr-warmup-fraction",
        only_if("above 0", lambda s: s.number("warmup_ratio", 0) > 0),
        "a share of the decay, which is the whole run",
    ),
    Row("--warmup_steps", "--lr-warmup-iters"),
    Row("--max_grad_norm", "--clip-grad"),
    Row("--optim", "--optimizer", choice({"adamw_torch": "adam", "adamw_torch_fused": "adam"}, "adam or sgd")),
    Row("--adam_epsilon", "--adam-eps"),
)

ENGINE = (
    Row("--use_vllm", None, None, "vLLM is the default: --rollout-engine vllm"),
    Row("--vllm_mode", "--vllm-mode"),
    Row("--vllm_server_base_url", "--vllm-server-base-url", WORDS, SERVERS),
    Row(
        "--vllm_server_host", "--vllm-server-base-url", Conversion("http://HOST:vllm_server_port", server_urls), SERVERS
    ),
    Row("--vllm_server_port", None, None, "part of --vllm-server-base-url"),
    Row("--vllm_server_group_port", None, None, "the ports of the weight sync are chosen"),
    Row("--vllm_server_timeout", "--vllm-server-timeout"),
    Row("--vllm_server_pass_dataset", None, None, "reward functions get the whole row; servers get prompts only"),
    Row("--vllm_gpu_memory_utilization", "--vllm-gpu-memory-utilization", None, "0.9 by default there, 0.3 here"),
    Row("--vllm_tensor_parallel_size", "--vllm-tensor-parallel-size"),
    Row("--vllm_data_parallel_size", None, None, "the replicas are all GPUs / --vllm-tensor-parallel-size"),
    Row("--vllm_max_model_len", "--vllm-max-model-len"),
    Row("--vllm_max_num_seqs", "--vllm-max-num-seqs"),
    Row("--vllm_enforce_eager", "--vllm-enforce-eager", SWITCH),
    Row("--vllm_enable_prefix_caching", "--no-vllm-enable-prefix-caching", SWITCH_IF_FALSE),
    Row("--vllm_enable_expert_parallel", "--vllm-enable-expert-parallel", SWITCH),
    Row("--vllm_quantization", "--vllm-quantization"),
    Row("--vllm_engine_kwargs", "--vllm-engine-kwargs"),
    Row("--vllm_enable_lora", None, None, "docs/lora.md says what the engine gets"),
    Row("--vllm_max_lora_rank", None, None, "docs/lora.md says what the engine gets"),
    Row("--vllm_use_async_engine", None, None, "--rollout-balancing dynamic gives free replicas the next prompt"),
    Row("--vllm_limit_mm_per_prompt", None, None, "a prompt may have any number of images"),
    Row(
        "--vllm_disable_cascade_attn",
        "--vllm-engine-kwargs",
        Conversion("JSON", lambda v, s: f'{{"disable_cascade_attn": {str(truth(v)).lower()}}}'),
    ),
    Row("--sleep_level", "--sleep-level"),
    Row("--offload_model", "--offload-model", SWITCH),
    Row("--offload_optimizer", "--offload-optimizer", SWITCH),
    Row("--offload_bridge", None, None, "there is no bridge to move"),
    Row("--move_model_batches", None, None, "weights go to the engine in bounded buckets"),
    Row("--temperature", "--temperature", None, "0.9 by default there, 1 here"),
    Row("--stop_words", "--stop-words", WORDS),
    Row("--structured_outputs_regex", "--structured-outputs-regex"),
    Row(
        "--async_generate",
        None,
        ask(ENGINE_RANKS),
    ),
    Row("--multi_turn_scheduler", None, ask(TURNS)),
    Row("--max_turns", None, None, TURNS),
    Row("--use_gym_env", None, only_if("if true", lambda s: s.true("use_gym_env"), ask(TURNS))),
    Row("--gym_env", None, None, TURNS),
)

ALGORITHM = (
    Row("--beta", "--beta", only_if("with rlhf_type grpo", lambda s: not _distils(s))),
    Row("--beta", "--gkd-beta", only_if("with rlhf_type gkd", _distils)),
    Row("--gkd_logits_topk", "--gkd-logits-topk", None, "the tokens outside are one class here, and left out there"),
    Row(
        "--lmbda",
        None,
        only_if(
            "with rlhf_type gkd",
            _distils,
            differs(OWN_COMPLETIONS, "1", "1.0"),
        ),
    ),
    Row("--sft_alpha", None, differs("there is no supervised term next to the teacher's: --sft-iters come before")),
    Row("--seq_kd", None, differs("the teacher samples no completions")),
    Row("--teacher_tag_key", None, ask("the column is data_source: rename it", "dataset")),
    Row("--loss_type", "--loss-type"),
    Row("--epsilon", "--epsilon"),
    Row("--epsilon_high", "--epsilon-high"),
    Row("--delta", "--dual-clip"),
    Row("--importance_sampling_level", "--importance-sampling-level"),
    Row(
        "--advantage_estimator",
        "--advantage-estimator",
        Conversion(
            "reinforce_plus_plus → reinforce_plus_plus_baseline, with scale_rewards group or none grpo; others → the "
            "same",
            _estimator,
        ),
    ),
    Row(
        "--scale_rewards",
        "--scale-rewards",
        Conversion(
            "true → group; false → none; group, batch, none → the same; nothing with reinforce_plus_plus of a batch",
            _scale,
        ),
    ),
    Row("--kl_in_reward", "--kl-in-reward", SWITCH),
    Row("--dynamic_sample", "--dynamic-sample", SWITCH),
    Row(
        "--max_resample_times",
        "--max-resample-times",
        None,
        "resamplings of the batch there; successive replacements of a group here",
    ),
    Row("--overlong_filter", "--overlong-filter", SWITCH),
    Row("--tau_pos", "--tau-pos"),
    Row("--tau_neg", "--tau-neg"),
    Row("--real_tau", "--real-tau"),
    Row("--fipo_decay_rate", "--fipo-decay-rate"),
    Row("--fipo_clip_range", "--fipo-clip-range"),
    Row("--fipo_clip_high_only", None, differs(BOTH_SIDES)),
    Row("--fipo_safety_threshold", "--fipo-safety-threshold"),
    Row("--top_entropy_quantile", "--top-entropy-quantile"),
    Row("--log_entropy", None, None, "the entropy is always a metric"),
    Row("--rollout_importance_sampling_mode", "--rollout-importance-sampling-mode"),
    Row("--rollout_importance_sampling_threshold", "--rollout-importance-sampling-threshold"),
    Row("--off_policy_sequence_mask_delta", "--off-policy-sequence-mask-delta"),
    Row("--log_rollout_offpolicy_metrics", None, None, "--mismatch-sample-rate 1 is the default"),
    Row("--router_replay_mode", "--router-replay-mode"),
    Row("--sync_ref_model", "--sync-ref-model", SWITCH),
    Row("--ref_model_sync_steps", "--ref-model-sync-steps", INTERVAL),
    Row("--ref_model_mixup_alpha", "--ref-model-mixup-alpha"),
    Row("--teacher_model", "--teacher-load-hf"),
    Row(
        "--teacher_model_server",
        "--teacher-server",
        Conversion("URL; of several a list in JSON: decide", _teacher_server),
    ),
    Row("--teacher_kl_coef", "--teacher-kl-coef"),
    Row("--offload_teacher_model", None, None, "the teacher is on the host between its passes"),
    Row("--chord_sft_dataset", "--sft-data-path", DATA_FILES),
    Row(
        "--chord_sft_per_device_train_batch_size",
        "--sft-batch-size",
        scaled(
            "of one GPU there, of all here: x gradient_accumulation_steps x GPUs", lambda s: accumulation(s) * s.gpus
        ),
    ),
    Row(
        "--chord_enable_phi_function",
        "--sft-loss-type",
        Conversion("true → chord; false → sft", lambda value, settings: "chord" if truth(value) else "sft"),
    ),
    Row("--chord_mu_peak", "--chord-mu-peak", Conversion("the valley without decay steps", _mu_peak)),
    Row("--chord_mu_valley", "--chord-mu-valley", only_if("with decay steps", _mu_decays)),
    Row("--chord_mu_warmup_steps", "--chord-mu-warmup-steps", SEQUENCE),
    Row("--chord_mu_decay_steps", "--chord-mu-decay-steps", SEQUENCE),
)

REWARDS = (
    Row("--reward_funcs", "--reward-funcs", Conversion("the same names; others in --external-plugins", _rewards)),
    Row("--reward_weights", "--reward-weights", WORDS),
    Row(
        "--external_plugins",
        "--external-plugins",
        WORDS,
        "reward classes become functions: @register_reward, docs/rewards.md",
    ),
    Row(
        "--reward_model",
        "--reward-model",
        Conversion("NAME=DIR", lambda v, s: [f"rm{place}={name}" for place, name in enumerate(words(v) or [])]),
        "with the name in --reward-funcs",
    ),
    Row("--reward_model_plugin", None, ask("--reward-model-template or --reward-model-plugin NAME=JUDGE")),
    Row("--cosine_min_len_value_wrong", "--cosine-min-len-value-wrong"),
    Row("--cosine_max_len_value_wrong", "--cosine-max-len-value-wrong"),
    Row("--cosine_min_len_value_correct", "--cosine-min-len-value-correct"),
    Row("--cosine_max_len_value_correct", "--cosine-max-len-value-correct"),
    Row("--cosine_max_len", None, None, "cosine takes --max-completion-length"),
    Row("--repetition_n_grams", "--repetition-n-grams"),
    Row("--soft_cache_length", "--soft-cache-length"),
    Row("--soft_max_length", None, None, "soft_overlong takes --max-completion-length"),
)

RUN = (
    Row("--output_dir", "--save"),
    Row("--save", "--save"),
    Row("--resume_from_checkpoint", None, RESUME, "--load DIR resumes if DIR holds a checkpoint"),
    Row("--save_total_limit", "--max-checkpoints-to-keep"),
    Row("--save_only_model", None, None, "a checkpoint always holds the optimizer"),
    Row("--no_save_optim", None, None, "a checkpoint always holds the optimizer"),
    Row("--no_save_rng", None, None, "a checkpoint always holds the random states"),
    Row("--async_save", "--async-save"),
    Row("--report_to", "--wandb-project", reported("wandb", "megatron-swift")),
    Row("--report_to", "--swanlab-project", reported("swanlab", "megatron-swift")),
    Row("--report_to", "--tensorboard-dir", reported("tensorboard", "$SAVE/tensorboard")),
    Row("--run_name", "--wandb-exp-name", only_if("with wandb", lambda s: "wandb" in s.text("report_to"))),
    Row("--log_completions", "--log-completions", SWITCH),
    Row("--wandb_log_unique_prompts", None, None, "completions.jsonl has the prompt of each completion"),
    Row(
        "--ddp_timeout",
        "--distributed-timeout-minutes",
        scaled("seconds there, minutes here: / 60", lambda s: 1 / 60, True),
    ),
    Row("--use_ray", None, None, "there is no Ray"),
    Row("--train.gpus", None, None, "torchrun's --nproc-per-node"),
    Row("--rollout.gpus", None, unless("colocate_groups", ask(ENGINE_RANKS))),
    Row("--colocate_groups", None, None, "vLLM runs in the ranks of the trainer"),
    Row("--callbacks", None, ask("docs/customise.md says what can be replaced")),
)


def _default(megatron: str | None, swift: str | None) -> Callable[[Settings], Converted]:
    return lambda settings: megatron if _megatron(settings) else swift


def _checkpointing(value: str) -> Callable[[Settings], Converted]:
    return lambda s: value if not _megatron(s) and s.true("gradient_checkpointing", True) else None


def _epochs(settings: Settings) -> Converted:
    return None if settings.given("train_iters") or settings.number("max_steps", -1) > 0 else "3"


def _global_batch(settings: Settings) -> Converted:
    return "16" if _megatron(settings) else number(completions_per_update(settings, batch=1))


def _decide(settings: Settings) -> list[str]:
    points = [f"--vllm-server-base-url: {SERVERS}"] if settings.text("vllm_mode") == "server" else []
    if settings.given("external_plugins"):
        points.append("--external-plugins: reward classes become functions with @register_reward, docs/rewards.md")
    return points


def _kl_in_reward(settings: Settings) -> Converted:
    """Return the switch where --kl_in_reward is not given: its default follows from the estimator."""
    estimators = ("rloo", "reinforce_plus_plus")
    default = settings.text("advantage_estimator") in estimators and not settings.given("kl_in_reward")
    return True if default and not _distils(settings) else None


def _differences(settings: Settings) -> list[str]:
    points = []
    if _distils(settings) and not settings.given("lmbda"):
        points.append(f"--lmbda is 0.5, the default there: {OWN_COMPLETIONS}")
    if settings.text("loss_type") == "fipo" and not settings.given("fipo_clip_high_only"):
        points.append(f"--fipo_clip_high_only is true, the default there: {BOTH_SIDES}")
    return points


SYSTEM = System(
    name="ms-swift",
    sources="modelscope/ms-swift: examples/megatron/grpo, examples/train/grpo, swift/megatron/arguments",
    rows=tuple(chain(BATCH, DATA, MODEL, LEARNING, ENGINE, ALGORITHM, REWARDS, RUN)),
    implied=(
        ("--bf16", lambda s: None if s.true("fp16") else True, "the dtype of most models there"),
        ("--transformer-impl", constant("local"), "transformer_engine where it is installed"),
        ("--lora-rank", lambda s: None if _names_tuner(s) or not _lora(s) else "8", "ms-swift's default"),
        ("--lora-dropout", lambda s: "0.05" if _lora(s) else None, "ms-swift's default"),
        ("--global-batch-size", _global_batch, "ms-swift's default"),
        ("--num-epochs", _epochs, "ms-swift's default"),
        ("--lr", lambda s: "1e-4" if _lora(s) else "1e-5", "ms-swift's default, with adapters or all weights"),
        ("--lr-decay-style", constant("cosine"), "ms-swift's default"),
        ("--weight-decay", constant("0.1"), "ms-swift's default"),
        ("--adam-beta2", constant("0.95"), "ms-swift's default"),
        ("--temperature", constant("0.9"), "ms-swift's default"),
        (
            "--truncation-strategy",
            lambda s: "left" if _bounds_prompts(s) else "raise",
            "left by default in GRPO there; without max_length no prompt is cut: set --max-prompt-length",
        ),
        ("--vllm-gpu-memory-utilization", constant("0.9"), "ms-swift's default"),
        ("--use-distributed-optimizer", constant(True), "on by default there, and the closest to DeepSpeed"),
        ("--recompute-granularity", _default("selective", None), "ms-swift's default"),
        ("--recompute-granularity", _checkpointing("full"), "gradient checkpointing is on by default there"),
        ("--recompute-method", _checkpointing("uniform"), "of gradient checkpointing"),
        ("--recompute-num-layers", _checkpointing("1"), "of gradient checkpointing"),
        ("--tensorboard-dir", lambda s: None if s.given("report_to") else "$SAVE/tensorboard", "ms-swift's default"),
        (
            "--expert-tensor-parallel-size",
            lambda s: "1" if s.number("expert_model_parallel_size", 1) > 1 else None,
            "ms-swift's default",
        ),
        ("--beta", lambda s: "0" if _distils(s) else None, "GKD has no reference model"),
        (
            "--teacher-kl-coef",
            lambda s: "1" if not _distils(s) and (s.given(TEACHER) or s.given(f"{TEACHER}_server")) else None,
            "ms-swift's default in GRPO with a teacher",
        ),
        ("--kl-in-reward", _kl_in_reward, "ms-swift's default of rloo and reinforce_plus_plus"),
        ("--sft-loss-type", lambda s: "sft" if s.given("chord_sft_dataset") else None, "CHORD without phi"),
        ("--reward-funcs", constant("accuracy"), "decide: docs/rewards.md lists the rewards"),
    ),
    decide=_decide,
    differences=_differences,
)
