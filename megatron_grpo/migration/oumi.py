"""Oumi's settings in ours. ``training.trainer_kwargs`` has TRL's names, ``training.verl_config_overrides`` verl's."""

from collections.abc import Callable

from megatron_grpo.migration.hf_trainer import completions_per_update, global_batch
from megatron_grpo.migration.rows import (
    LORA_PAGE,
    RESUME,
    SEQUENCE,
    SWITCH,
    SWITCH_IF_FALSE,
    Conversion,
    Converted,
    Row,
    Settings,
    System,
    ask,
    choice,
    constant,
    fixed,
    number,
    only_if,
    rewards,
    scaled,
    switch_for,
)
from megatron_grpo.migration.trl import DATA_FILES, DECAYS, FILES, sequence_ratios
from megatron_grpo.migration.verl import updates_per_rollout

T = "training."
G = "training.grpo."


def _verl(settings: Settings) -> bool:
    return settings.text(f"{T}trainer_type").upper() == "VERL_GRPO"


def _trl(settings: Settings) -> bool:
    return not _verl(settings)


def _steps_given(settings: Settings) -> bool:
    return settings.number(f"{T}max_steps", -1) > 0


INTERVAL = scaled(
    "updates, as there; with VERL_GRPO rollouts there: x updates of a rollout",
    lambda settings: updates_per_rollout(settings) if _verl(settings) else 1,
)
ROWS = (
    Row(
        f"{T}trainer_type",
        None,
        only_if(
            "other than TRL_GRPO and VERL_GRPO",
            lambda s: s.text(f"{T}trainer_type").upper() not in ("TRL_GRPO", "VERL_GRPO"),
            ask("only GRPO runs can be translated"),
        ),
        "GRPO is the only trainer",
    ),
    Row("model.model_name", "--load-hf", None, "a local directory"),
    Row("model.tokenizer_name", "--tokenizer-model"),
    Row("model.model_max_length", "--vllm-max-model-len", None, "prompt and completion, tokens"),
    Row(
        "model.torch_dtype_str",
        "--bf16",
        switch_for("bfloat16"),
    ),
    Row("model.attn_implementation", None, None, "packs always take a flash kernel on a GPU"),
    Row("model.trust_remote_code", "--trust-remote-code", SWITCH),
    Row(
        "model.chat_template", "--chat-template", None, "a Jinja file or text; Oumi's names of templates are not known"
    ),
    Row("model.load_pretrained_weights", None, None, "--load-hf loads the weights"),
    Row("model.enable_liger_kernel", None, None, "the head always computes log-probabilities in chunks"),
    Row("data.train.datasets.*", None, None, f"--train-data-path: {FILES}"),
    Row("data.train.datasets.0.dataset_name", "--train-data-path", DATA_FILES),
    Row("data.train.datasets.0.dataset_path", "--train-data-path"),
    Row("data.validation.datasets.0.dataset_name", "--valid-data-path", DATA_FILES),
    Row("data.validation.datasets.0.dataset_path", "--valid-data-path"),
    Row("data.validation.datasets.*", None, None, f"--valid-data-path: {FILES}"),
    Row("data.train.*", None, None, "docs/data.md has the columns of a row"),
    Row(
        f"{T}per_device_train_batch_size",
        "--global-batch-size",
        only_if("with TRL_GRPO", _trl, global_batch(T)),
        "completions, as there",
    ),
    Row(
        f"{T}per_device_train_batch_size",
        "--micro-batch-size",
        only_if("with TRL_GRPO", _trl),
        "completions of one data-parallel rank, as there",
    ),
    Row(f"{T}gradient_accumulation_steps", None, None, "follows from --global-batch-size"),
    Row(f"{T}per_device_eval_batch_size", None, None, "all held-out prompts are generated at once"),
    Row(f"{T}max_steps", "--train-iters", SEQUENCE, "updates, as there"),
    Row(f"{T}num_train_epochs", "--num-epochs", only_if("without max_steps", lambda s: not _steps_given(s))),
    Row(f"{T}save_steps", "--save-interval", INTERVAL),
    Row(f"{T}save_epoch", None, None, "--save-interval counts updates"),
    Row(
        f"{T}save_final_model",
        "--no-save-hf",
        SWITCH_IF_FALSE,
    ),
    Row(f"{T}eval_strategy", None, None, "--eval-interval and --valid-data-path switch it on"),
    Row(
        f"{T}eval_steps",
        "--eval-interval",
        only_if("with eval_strategy steps", lambda s: s.text(f"{T}eval_strategy") == "steps", INTERVAL),
    ),
    Row(f"{T}learning_rate", "--lr"),
    Row(f"{T}lr_scheduler_type", "--lr-decay-style", choice(DECAYS), "linear by default there"),
    Row(f"{T}warmup_steps", "--lr-warmup-iters"),
    Row(f"{T}warmup_ratio", "--lr-warmup-fraction"),
    Row(f"{T}weight_decay", "--weight-decay"),
    Row(f"{T}max_grad_norm", "--clip-grad"),
    Row(f"{T}adam_beta1", "--adam-beta1"),
    Row(f"{T}adam_beta2", "--adam-beta2"),
    Row(f"{T}adam_epsilon", "--adam-eps"),
    Row(
        f"{T}optimizer",
        "--optimizer",
        choice(
            {"adamw_torch": "adam", "adamw_torch_fused": "adam", "adam": "adam", "sgd": "sgd"},
            "--optimizer adam or sgd",
        ),
    ),
    Row(f"{T}seed", "--seed"),
    Row(f"{T}data_seed", None, None, "--seed orders the prompts, too"),
    Row(
        f"{T}mixed_precision_dtype",
        "--bf16",
        Conversion("bf16 → the switch", lambda v, s: True if str(v).lower() == "bf16" else None),
    ),
    Row(
        f"{T}enable_gradient_checkpointing",
        "--recompute-granularity",
        fixed("full"),
        "with --recompute-method uniform --recompute-num-layers 1",
    ),
    Row(f"{T}gradient_checkpointing_kwargs.*", None, None, "--recompute-granularity has its own flags"),
    Row(f"{T}compile", None, None, "the trainer is not compiled"),
    Row(f"{T}empty_device_cache_steps", None, None, "the cache is emptied when trainer and engine take turns"),
    Row(f"{T}ddp_find_unused_parameters", None, None, "every parameter has a gradient"),
    Row(f"{T}dataloader_num_workers", None, None, "prompts need no workers"),
    Row(f"{T}dataloader_prefetch_factor", None, None, "prompts need no workers"),
    Row(f"{T}dataloader_main_process_only", None, None, "every rank reads the same rows"),
    Row(f"{T}use_peft", None, only_if("if true", lambda s: s.true(f"{T}use_peft"), ask(LORA_PAGE))),
    Row("peft.*", None, None, LORA_PAGE),
    Row("fsdp.*", None, ask("--use-distributed-optimizer, with TP and PP for large models: docs/model_sizes.md")),
    Row("deepspeed.*", None, ask("--use-distributed-optimizer, with TP and PP for large models: docs/model_sizes.md")),
    Row(
        f"{T}reward_functions",
        "--reward-funcs",
        rewards({"gsm8k": "gsm8k", "countdown": "countdown"}),
        "register other functions with @register_reward: docs/rewards.md",
    ),
    Row(f"{T}reward_function_kwargs.*", None, None, "a reward function of your own has its own values"),
    Row(f"{G}num_generations", "--num-generations"),
    Row(f"{G}max_prompt_length", "--max-prompt-length"),
    Row(f"{G}max_completion_length", "--max-completion-length"),
    Row(f"{G}temperature", "--temperature", None, "0.9 by default there, 1 here"),
    Row(f"{G}repetition_penalty", "--repetition-penalty"),
    Row(f"{G}epsilon", "--epsilon"),
    Row(f"{G}use_vllm", None, None, "vLLM is the default: --rollout-engine vllm"),
    Row(f"{G}vllm_mode", "--vllm-mode"),
    Row(f"{G}vllm_gpu_memory_utilization", "--vllm-gpu-memory-utilization", None, "0.9 by default there, 0.3 here"),
    Row(f"{G}log_completions", "--log-completions", SWITCH),
    Row(f"{G}remove_unused_columns", None, None, "reward functions get the whole row"),
    Row(f"{G}rollout_function", None, ask("docs/customise.md says what can be replaced")),
    Row(f"{G}model_init_kwargs.*", None, None, "--load-hf reads config.json"),
    Row(f"{T}output_dir", "--save"),
    Row(f"{T}resume_from_checkpoint", None, RESUME, "--load DIR resumes if DIR holds a checkpoint"),
    Row(f"{T}try_resume_from_last_checkpoint", None, None, "--load DIR resumes if DIR holds a checkpoint"),
    Row(f"{T}logging_steps", "--log-interval"),
    Row(f"{T}logging_strategy", None, None, "--log-interval counts updates"),
    Row(f"{T}logging_dir", "--tensorboard-dir"),
    Row(f"{T}log_model_summary", None, None, "the start of a run prints its sizes"),
    Row(
        f"{T}enable_wandb",
        "--wandb-project",
        fixed("huggingface"),
        "the project, which WANDB_PROJECT names there",
    ),
    Row(
        f"{T}enable_tensorboard",
        "--tensorboard-dir",
        fixed("$SAVE/tensorboard"),
    ),
    Row(f"{T}run_name", "--wandb-exp-name", only_if("with enable_wandb", lambda s: s.true(f"{T}enable_wandb"))),
    Row(f"{T}include_performance_metrics", "--include-performance-metrics", SWITCH),
    Row(f"{T}nccl_default_timeout_minutes", "--distributed-timeout-minutes"),
    Row(f"{T}profiler.*", None, None, "--profile, with --use-pytorch-profiler"),
    Row(f"{T}telemetry.*", None, None, "--include-performance-metrics"),
)


def _default(value: Converted, verl: Converted = None) -> Callable[[Settings], Converted]:
    return lambda settings: verl if _verl(settings) else value


def _global_batch(settings: Settings) -> Converted:
    return None if _verl(settings) else number(completions_per_update(settings, T))


def _recompute(value: str) -> Callable[[Settings], Converted]:
    return lambda settings: value if settings.true(f"{T}enable_gradient_checkpointing") else None


def _decide(settings: Settings) -> list[str]:
    return []


SYSTEM = System(
    name="Oumi",
    sources="oumi-ai/oumi: configs, src/oumi/core/configs",
    rows=ROWS,
    implied=(
        ("--bf16", constant(True), "the dtype of most models there"),
        ("--transformer-impl", constant("local"), "transformer_engine where it is installed"),
        ("--global-batch-size", _global_batch, "8 completions of a GPU by default there"),
        ("--micro-batch-size", _default("8"), "Oumi's default"),
        ("--num-epochs", lambda s: None if _steps_given(s) else "3", "Oumi's default"),
        ("--lr", constant("5e-5"), "Oumi's default"),
        ("--lr-decay-style", _default("linear"), "Oumi's default"),
        ("--weight-decay", _default("0"), "Oumi's default"),
        ("--temperature", constant("0.9"), "Oumi's default"),
        ("--beta", constant("0"), "no KL term by default in TRL and verl"),
        ("--loss-type", constant("dapo"), "the default of TRL and verl"),
        ("--vllm-gpu-memory-utilization", constant("0.9"), "Oumi's default"),
        ("--vllm-tensor-parallel-size", _default(None, "2"), "verl's default"),
        ("--dual-clip", _default(None, "3"), "verl's default"),
        (
            "--tensorboard-dir",
            lambda s: "$SAVE/tensorboard" if s.true(f"{T}enable_tensorboard", True) else None,
            "Oumi's default",
        ),
        ("--use-distributed-optimizer", constant(True), "the closest to DDP and FSDP"),
        ("--recompute-method", _recompute("uniform"), "of gradient checkpointing"),
        ("--recompute-num-layers", _recompute("1"), "of gradient checkpointing"),
        ("--reward-funcs", constant("accuracy"), "not given there"),
    ),
    decide=_decide,
    hands_on=("TRL", "verl"),
    differences=lambda settings: sequence_ratios(settings) if _trl(settings) else [],
)
