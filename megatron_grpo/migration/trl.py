"""TRL's settings in ours: GRPOConfig, and the arguments of transformers that it inherits."""

from collections.abc import Callable
from itertools import chain

from megatron_grpo.migration.hf_trainer import STEPS, completions_per_update, global_batch, updates_per_rollout
from megatron_grpo.migration.rows import (
    ADAPT,
    RESUME,
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
    multiple_of,
    number,
    only_if,
    parse_number,
    rank,
    rewards,
    switch_for,
    truth,
    unless,
    words,
)

TARGETS = ["q_proj", "v_proj"]  # of Llama, Mistral, Qwen2, Qwen3, Gemma and their mixtures


def _lora(settings: Settings) -> bool:
    return settings.true("use_peft")


INTERVAL = multiple_of(updates_per_rollout)
FILES = "a JSON-lines or Parquet file with the columns prompt and answer: tools/data/ and docs/data.md"
LOSSES = {"grpo": "grpo", "bnpo": "bnpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "cispo": "cispo", "sapo": "sapo"}
IMPORTANCE = {
    "token_truncate": "token_truncate",
    "token_mask": "token_mask",
    "sequence_truncate": "sequence_truncate",
    "sequence_mask": "sequence_mask",
}
DECAYS = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_sqrt": "inverse-square-root",
}


def local_files(value: object, settings: Settings) -> Converted:
    """Return names of files as they are; names of datasets on the Hub are for a person."""
    names = words(value) or []
    if not names or any(not name.endswith((".jsonl", ".json", ".parquet")) for name in names):
        raise Undecided(f"{FILES} (there: {' '.join(names)})")
    return names


DATA_FILES = Conversion(f"decide: {FILES}", local_files)


def server_urls(value: object, settings: Settings) -> Converted:
    """Return the URLs of servers given by host and port."""
    ports = words(settings.values.get("vllm_server_port", "8000")) or ["8000"]
    hosts = words(value) or []
    return [f"http://{host}:{ports[min(place, len(ports) - 1)]}" for place, host in enumerate(hosts)]


def reported(name: str, value: str) -> Conversion:
    """Return the conversion of report_to: ``value`` where it names this tracker."""
    return Conversion(
        f"{name} → {value}", lambda text, settings: value if name in (words(text) or []) or text == "all" else None
    )


def tracked(settings: Settings) -> bool:
    """Return whether a tracker is named."""
    return settings.text("report_to", "none") != "none"


def scaled_rewards(value: object, settings: Settings) -> Converted:
    """Return our --scale-rewards: true and false are older forms of group and none."""
    if str(value).lower() == "gdpo":  # of ms-swift
        raise Undecided("give --advantage-estimator gdpo, an estimator of its own here")
    if settings.text("multi_objective_aggregation") == "normalize_then_sum":  # GDPO, which has a scale of its own
        return None
    names = {"true": "group", "false": "none", "group": "group", "batch": "batch", "none": "none"}
    return names.get(str(value).lower())


def _correction(settings: Settings) -> bool:
    used = settings.true("use_vllm") or settings.true("training.grpo.use_vllm")
    return used and settings.true("vllm_importance_sampling_correction", True)


def sequence_ratios(settings: Settings, default: str = "") -> list[str]:
    """Return how the weights of a sequence mode, given or by ``default``, differ from those here."""
    mode = settings.text("vllm_importance_sampling_mode", default)
    if not _correction(settings) or not mode.startswith("sequence_"):
        return []
    there = "" if settings.given("vllm_importance_sampling_mode") else ", the default there"
    weight = "each token's own ratio" if mode == "sequence_mask" else "that mean"
    return [
        f"vllm_importance_sampling_mode={mode}{there}: the product of a completion's ratios is compared with the "
        f"threshold and is its weight there; here their geometric mean is compared, and the weight is {weight}"
    ]


def _multiple(value: object, settings: Settings) -> Converted:
    """Return warm-up of 1 or more as updates; TRL reads a smaller value as a share."""
    size = parse_number(str(value))
    return number(size) if size >= 1 else None


def _share(value: object, settings: Settings) -> Converted:
    size = parse_number(str(value))
    return str(size) if 0 < size < 1 else None


BATCH = (
    Row("per_device_train_batch_size", "--global-batch-size", global_batch(), "completions, as there"),
    Row("per_device_train_batch_size", "--micro-batch-size", None, "completions of one data-parallel rank, as there"),
    Row("gradient_accumulation_steps", None, None, "follows from --global-batch-size"),
    Row("num_generations", "--num-generations"),
    Row("generation_batch_size", "--generation-batch-size", None, "completions of all processes, as there"),
    Row("steps_per_generation", "--steps-per-generation", unless("generation_batch_size", STEPS)),
    Row("num_iterations", "--num-iterations"),
    Row("max_steps", "--train-iters", SEQUENCE, "updates, as there"),
    Row("num_train_epochs", "--num-epochs", only_if("without max_steps", lambda s: s.number("max_steps", -1) <= 0)),
    Row("save_steps", "--save-interval", INTERVAL),
    Row("save_strategy", None, None, "--save-interval counts updates"),
    Row("eval_steps", "--eval-interval", INTERVAL),
    Row("eval_strategy", None, None, "--eval-interval and --valid-data-path switch it on"),
    Row("eval_on_start", "--val-before-train", SWITCH),
    Row("per_device_eval_batch_size", None, None, "all held-out prompts are generated at once"),
    Row("num_generations_eval", "--eval-num-generations", None, "in addition to the greedy completion"),
    Row("logging_steps", "--log-interval", None, "updates, as there"),
    Row("seed", "--seed"),
    Row("data_seed", "--seed"),
)

DATA = (
    Row("dataset_name", "--train-data-path", DATA_FILES),
    Row("dataset_config", None, None, "tools/data/ reads the files that a dataset's authors publish"),
    Row("dataset_train_split", None, None, "--train-data-path names the file"),
    Row("dataset_test_split", None, None, "--valid-data-path names the file"),
    Row("dataset_num_proc", None, None, "small files are tokenised at the start, large ones when read"),
    Row("dataset_streaming", None, None, "files above 64 MiB are streamed"),
    Row("shuffle_dataset", "--no-shuffle", SWITCH_IF_FALSE),
    Row("max_prompt_length", "--max-prompt-length"),
    Row("max_completion_length", "--max-completion-length"),
    Row("chat_template_kwargs", "--chat-template-kwargs"),
    Row("remove_unused_columns", None, None, "reward functions get the whole row"),
    Row("dataloader_num_workers", None, None, "prompts need no workers"),
    Row("dataloader_prefetch_factor", None, None, "prompts need no workers"),
    Row("pad_to_multiple_of", None, None, "micro-batches are packed without padding"),
)

MODEL = (
    Row("model_name_or_path", "--load-hf", None, "a local directory"),
    Row("model_revision", None, None, "download the revision: a run reads a local directory"),
    Row("dtype", "--bf16", switch_for("bfloat16")),
    Row("torch_dtype", "--bf16", switch_for("bfloat16")),
    Row("bf16", "--bf16", SWITCH),
    Row("fp16", "--fp16", SWITCH),
    Row("trust_remote_code", "--trust-remote-code", SWITCH),
    Row("attn_implementation", None, None, "packs always take a flash kernel on a GPU"),
    Row("model_init_kwargs", None, None, "--load-hf reads config.json"),
    Row("use_peft", "--lora-rank", rank("lora_r", "16", _lora)),
    Row("lora_r", None, None, "see use_peft"),
    Row("lora_alpha", "--lora-alpha", only_if("with use_peft", _lora)),
    Row("lora_dropout", "--lora-dropout", only_if("with use_peft", _lora)),
    Row("lora_target_modules", "--lora-target-modules", only_if("with use_peft", _lora, WORDS)),
    Row("lora_modules_to_save", "--lora-modules-to-save", only_if("with use_peft", _lora, WORDS)),
    Row("use_rslora", "--lora-use-rslora", only_if("with use_peft", _lora, SWITCH)),
    Row("use_dora", "--lora-use-dora", only_if("with use_peft", _lora, SWITCH)),
    Row(
        "load_in_4bit",
        None,
        differs("the base is not stored in 4 bits; --lora-base-dtype fp8 stores it in 8"),
    ),
    Row(
        "gradient_checkpointing",
        "--recompute-granularity",
        fixed("full"),
        "with --recompute-method uniform --recompute-num-layers 1",
    ),
    Row("gradient_checkpointing_kwargs", None, None, "--recompute-granularity has its own flags"),
    Row("gradient_checkpointing_kwargs.use_reentrant", None, None, "--recompute-granularity has its own flags"),
    Row("disable_dropout", None, None, "dropout is 0 by default: --hidden-dropout, --attention-dropout"),
    Row("router_aux_loss_coef", "--moe-aux-loss-coeff"),
    Row("cast_lm_head_to_fp32", None, None, "the head computes log-probabilities in float32"),
    Row("deepspeed", None, ask("--use-distributed-optimizer, with TP and PP for large models: docs/model_sizes.md")),
    Row("fsdp", None, ask("--use-distributed-optimizer, with TP and PP for large models: docs/model_sizes.md")),
    Row("ddp_find_unused_parameters", None, None, "every parameter has a gradient"),
    Row("use_liger_kernel", None, None, "the head always computes log-probabilities in chunks"),
    Row("ds3_gather_for_generation", None, None, "weights go to the engine in bounded buckets"),
)

LEARNING = (
    Row("learning_rate", "--lr"),
    Row("lr_scheduler_type", "--lr-decay-style", choice(DECAYS), "linear by default there"),
    Row("lr_scheduler_kwargs.min_lr", "--min-lr"),
    Row("warmup_steps", "--lr-warmup-iters", Conversion("updates; below 1 it is a share", _multiple)),
    Row("warmup_steps", "--lr-warmup-fraction", Conversion("only below 1: a share", _share)),
    Row("warmup_ratio", "--lr-warmup-fraction", Conversion("a share of the decay, which is the whole run", _share)),
    Row("weight_decay", "--weight-decay"),
    Row("adam_beta1", "--adam-beta1"),
    Row("adam_beta2", "--adam-beta2"),
    Row("adam_epsilon", "--adam-eps"),
    Row("max_grad_norm", "--clip-grad"),
    Row(
        "optim",
        "--optimizer",
        choice({"adamw_torch": "adam", "adamw_torch_fused": "adam", "sgd": "sgd"}, "--optimizer adam, or sgd"),
    ),
)

ENGINE = (
    Row("use_vllm", None, None, "vLLM is the default: --rollout-engine vllm"),
    Row("vllm_mode", "--vllm-mode"),
    Row("vllm_server_base_url", "--vllm-server-base-url", WORDS),
    Row(
        "vllm_server_host",
        "--vllm-server-base-url",
        Conversion("http://HOST:vllm_server_port", server_urls),
        "stock vLLM servers: docs/choose_engine.md",
    ),
    Row("vllm_server_port", None, None, "part of --vllm-server-base-url"),
    Row("vllm_server_timeout", "--vllm-server-timeout"),
    Row("vllm_group_port", None, None, "the ports of the weight sync are chosen"),
    Row("vllm_gpu_memory_utilization", "--vllm-gpu-memory-utilization"),
    Row("vllm_tensor_parallel_size", "--vllm-tensor-parallel-size"),
    Row("vllm_max_model_length", "--vllm-max-model-len"),
    Row(
        "vllm_enable_sleep_mode",
        "--sleep-level",
        Conversion("true → 2; false → 0", lambda value, settings: "2" if truth(value) else "0"),
    ),
    Row("vllm_structured_outputs_regex", "--structured-outputs-regex"),
    Row("vllm_guided_decoding_regex", "--structured-outputs-regex"),
    Row("vllm_model_impl", None, None, "vLLM's own models"),
    Row("temperature", "--temperature"),
    Row("top_p", "--top-p"),
    Row("top_k", "--top-k", Conversion("0 and null → -1", lambda v, s: "-1" if str(v) in ("0", "null", "None") else v)),
    Row("min_p", "--min-p"),
    Row("repetition_penalty", "--repetition-penalty"),
    Row("generation_kwargs", None, ask("--presence-penalty, --frequency-penalty, --stop-words and others are flags")),
    Row("cache_implementation", None, None, "the engine has its own cache"),
    Row("use_transformers_paged", None, None, "--rollout-engine vllm or megatron"),
    Row("use_transformers_continuous_batching", None, None, "--rollout-engine vllm or megatron"),
    Row(
        "max_tool_calling_iterations",
        None,
        ask(TURNS),
    ),
)

ALGORITHM = (
    Row("beta", "--beta", None, "0 by default there"),
    Row("loss_type", "--loss-type", choice(LOSSES, "docs/algorithms.md lists the losses"), "dapo by default there"),
    Row("epsilon", "--epsilon"),
    Row("epsilon_high", "--epsilon-high", None, "with cispo the bound of the ratio itself, as there"),
    Row("delta", "--dual-clip"),
    Row("sapo_temperature_pos", "--tau-pos"),
    Row("sapo_temperature_neg", "--tau-neg"),
    Row("importance_sampling_level", "--importance-sampling-level"),
    Row(
        "scale_rewards",
        "--scale-rewards",
        Conversion("true → group; false → none; group, batch, none → the same", scaled_rewards),
    ),
    Row(
        "multi_objective_aggregation",
        "--advantage-estimator",
        choice({"sum_then_normalize": None, "normalize_then_sum": "gdpo"}),
    ),
    Row("mask_truncated_completions", "--overlong-filter", SWITCH),
    Row("top_entropy_quantile", "--top-entropy-quantile"),
    Row("entropy_coef", "--entropy-coef"),
    Row(
        "use_adaptive_entropy",
        None,
        differs("--entropy-coef is constant"),
    ),
    Row(
        "use_bias_correction_kl",
        "--kl-estimator",
        fixed("unbiased"),
    ),
    Row("sync_ref_model", "--sync-ref-model", SWITCH),
    Row("ref_model_mixup_alpha", "--ref-model-mixup-alpha"),
    Row("ref_model_sync_steps", "--ref-model-sync-steps", INTERVAL),
    Row("disable_adapter_ref", None, None, "the reference of a policy with adapters is the model without them"),
    Row("vllm_importance_sampling_correction", None, None, "--rollout-importance-sampling-mode switches it on"),
    Row(
        "vllm_importance_sampling_mode",
        "--rollout-importance-sampling-mode",
        only_if("with vllm_importance_sampling_correction", _correction, choice(IMPORTANCE)),
    ),
    Row(
        "vllm_importance_sampling_cap",
        "--rollout-importance-sampling-threshold",
        only_if("with vllm_importance_sampling_correction", _correction),
    ),
    Row(
        "vllm_importance_sampling_clip_max",
        "--rollout-importance-sampling-threshold",
        only_if("with vllm_importance_sampling_correction", _correction),
    ),
    Row("off_policy_mask_threshold", "--off-policy-sequence-mask-delta"),
)

REWARDS = (
    Row(
        "reward_funcs",
        "--reward-funcs",
        rewards({"accuracy_reward": "accuracy", "get_soft_overlong_punishment": "soft_overlong"}, ADAPT),
        "other functions run unchanged: --reward-adapter, docs/rewards.md",
    ),
    Row("reward_weights", "--reward-weights", WORDS),
    Row("reward_model_name_or_path", None, ask("--reward-model NAME=DIR, with NAME in --reward-funcs")),
)

RUN = (
    Row("output_dir", "--save"),
    Row("overwrite_output_dir", None, None, "a run resumes from --load; name another directory for a new one"),
    Row("resume_from_checkpoint", None, RESUME, "--load DIR resumes if DIR holds a checkpoint"),
    Row("save_total_limit", "--max-checkpoints-to-keep"),
    Row("save_only_model", None, None, "--save-hf exports the model alone at the end"),
    Row("load_best_model_at_end", None, None, "--keep-best keeps the best checkpoint; nothing is loaded at the end"),
    Row(
        "report_to", "--wandb-project", reported("wandb", "huggingface"), "the project, which WANDB_PROJECT names there"
    ),
    Row("report_to", "--swanlab-project", reported("swanlab", "huggingface")),
    Row("report_to", "--tensorboard-dir", reported("tensorboard", "$SAVE/tensorboard")),
    Row("run_name", "--wandb-exp-name", only_if("with wandb", lambda s: "wandb" in s.text("report_to"))),
    Row("logging_dir", "--tensorboard-dir"),
    Row("log_completions", "--log-completions", only_if("with report_to", tracked, SWITCH)),
    Row("num_completions_to_print", "--num-completions-to-log"),
    Row("log_unique_prompts", None, None, "completions.jsonl has the prompt of each completion"),
    Row(
        "log_level",
        "--log-level",
        choice({name: name for name in ("debug", "info", "warning", "error")} | {"critical": "error", "passive": None}),
        "of libraries; metrics and errors are always printed",
    ),
    Row("push_to_hub", None, None, "upload {save}/hf_model yourself: hf upload"),
    Row("hub_model_id", None, None, "upload {save}/hf_model yourself: hf upload"),
    Row(
        "ddp_timeout",
        "--distributed-timeout-minutes",
        Conversion(
            "seconds there, minutes here: / 60", lambda value, settings: number(max(1, parse_number(str(value)) // 60))
        ),
    ),
)


def _recompute(value: str) -> Callable[[Settings], Converted]:
    return lambda settings: value if settings.true("gradient_checkpointing", True) else None


def _decide(settings: Settings) -> list[str]:
    return [f"--reward-funcs: reward functions are arguments of GRPOTrainer there; {ADAPT}"]


SYSTEM = System(
    name="TRL",
    sources="huggingface/trl: GRPOConfig, docs/source/grpo_trainer.md, examples/scripts",
    rows=tuple(chain(BATCH, DATA, MODEL, LEARNING, ENGINE, ALGORITHM, REWARDS, RUN)),
    implied=(
        ("--bf16", lambda s: None if s.true("fp16") else True, "TRL's default"),
        ("--transformer-impl", constant("local"), "transformer_engine where it is installed"),
        ("--global-batch-size", lambda s: number(completions_per_update(s)), "8 completions of a GPU by default there"),
        ("--micro-batch-size", constant("8"), "TRL's default"),
        ("--num-epochs", lambda s: "3" if s.number("max_steps", -1) <= 0 else None, "TRL's default"),
        ("--lr", constant("1e-6"), "TRL's default"),
        ("--lr-decay-style", constant("linear"), "TRL's default"),
        ("--weight-decay", constant("0"), "TRL's default"),
        ("--max-completion-length", constant("256"), "TRL's default"),
        ("--lora-dropout", lambda s: "0.05" if _lora(s) else None, "TRL's default"),
        ("--lora-target-modules", lambda s: TARGETS if _lora(s) else None, "PEFT's default of most families"),
        ("--beta", constant("0"), "TRL's default"),
        ("--loss-type", constant("dapo"), "TRL's default"),
        (
            "--rollout-engine",
            lambda s: None if s.true("use_vllm") else "vllm",
            "generation by transformers is not there",
        ),
        (
            "--rollout-importance-sampling-mode",
            lambda s: "sequence_mask" if _correction(s) else None,
            "TRL's default with vLLM",
        ),
        (
            "--rollout-importance-sampling-threshold",
            lambda s: "3" if _correction(s) else None,
            "TRL's default with vLLM",
        ),
        ("--use-distributed-optimizer", constant(True), "the closest to DeepSpeed and FSDP"),
        ("--recompute-granularity", _recompute("full"), "gradient checkpointing is on by default there"),
        ("--recompute-method", _recompute("uniform"), "of gradient checkpointing"),
        ("--recompute-num-layers", _recompute("1"), "of gradient checkpointing"),
        ("--reward-funcs", constant("accuracy"), "not in a configuration of TRL"),
    ),
    decide=_decide,
    differences=lambda settings: sequence_ratios(settings, "sequence_mask"),
)
