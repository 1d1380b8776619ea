"""verl's settings in ours. siiRL has the same keys."""

import math
import re
from collections.abc import Callable
from itertools import chain

from megatron_grpo.migration.rows import (
    DISPATCHER,
    ENGINE_RANKS,
    NO_DEEPEP,
    ON,
    OTHER_CHECKPOINTS,
    SEQUENCE,
    SWITCH,
    SWITCH_IF_FALSE,
    TURNS,
    WORDS,
    Conversion,
    Converted,
    Different,
    Row,
    Settings,
    System,
    Undecided,
    ask,
    choice,
    computed,
    constant,
    differs,
    fixed,
    fp8_rows,
    is_off,
    key_of,
    more_fp8_rows,
    number,
    only_if,
    parse_number,
    scaled,
    switch_for,
    truth,
    unless,
    words,
)

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
REF = "actor_rollout_ref.ref."
ROLLOUT = "actor_rollout_ref.rollout."
TRANSFORMER = f"{ACTOR}megatron.override_transformer_config."
OPTIMIZER = f"{ACTOR}optim.override_optimizer_config."
# Older scripts have the settings of rewards at the top and in reward_model, newer ones in reward.
REWARD = ("reward_model.", "reward.")
CUSTOM = ("custom_reward_function.", "reward.custom_reward_function.")
OVERLONG = "reward_kwargs.overlong_buffer_cfg."
SCORE = "score"  # name of the custom reward here
# Data of verl's examples, by a word in the path of a file: its data_source, and the reward that reads the form of
# answer for which its prompts ask ("#### 72", \boxed{72}, "Answer: 72"), as verl's default_compute_score does.
SOURCES = {
    "gsm8k": ("openai/gsm8k", "gsm8k"),
    "geo3k": ("hiyouga/geometry3k", "accuracy"),
    "dapo": ("math_dapo", "accuracy"),
    "aime": ("aime", "accuracy"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", "accuracy"),
}
REWARDS_OF_SOURCES = "docs/rewards.md#rewards-of-verls-data"
LAST_LINE = ("math_dapo", "aime")  # prompts of these sources ask for a last line "Answer: 72"
VALIDATION = f"{ROLLOUT}val_kwargs."
CORRECTION = "algorithm.rollout_correction."
DISTILLATION = "distillation.distillation_loss."

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
    return settings.largest(
        f"{ACTOR}megatron.context_parallel_size",
        f"{ACTOR}ulysses_sequence_parallel_size",
        f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size",
    )


def _lora(settings: Settings) -> bool:
    return max(settings.number(f"{MODEL}lora_rank", 0), settings.number(f"{MODEL}lora.rank", 0)) > 0


def _dynamic(settings: Settings) -> bool:
    return settings.true(f"{ACTOR}use_dynamic_bsz")


def _distils(settings: Settings) -> bool:
    return settings.true("distillation.enabled")


def _distils_top_k(settings: Settings) -> bool:
    return _distils(settings) and settings.text(f"{DISTILLATION}loss_mode", "k3") == "forward_kl_topk"


def _kl_loss(settings: Settings) -> bool:
    return settings.true(f"{ACTOR}use_kl_loss")


def _kl_in_reward(settings: Settings) -> bool:
    return settings.true("algorithm.use_kl_in_reward")


def _mode(settings: Settings) -> str:
    return settings.text(f"{ACTOR}policy_loss.loss_mode", "vanilla")


def _megatron(settings: Settings) -> bool:
    """Return whether the trainer is verl's Megatron worker, not FSDP."""
    return any(key.startswith(key_of(f"{ACTOR}megatron.")) for key in settings.values) or "megatron" in (
        settings.text(f"{ACTOR}strategy") + settings.text("--config-name") + settings.text("model_engine")
    )


def _estimator(settings: Settings) -> str:
    return settings.text("algorithm.adv_estimator", "grpo")


def reward_text(settings: Settings, name: str, default: str = "") -> str:
    """Return a setting of the rewards, by its new or its old name."""
    return next((settings.text(old + name) for old in reversed(REWARD) if settings.given(old + name)), default)


def _custom(settings: Settings) -> str:
    """Return FILE.py:FUNCTION of the custom reward function, or nothing."""
    prefix = next((prefix for prefix in reversed(CUSTOM) if settings.given(f"{prefix}path")), None)
    if prefix is None:
        return ""
    path = settings.text(f"{prefix}path").strip("'\"")
    return f"{path}:{settings.text(f'{prefix}name') if settings.given(f'{prefix}name') else 'compute_score'}"


def _adapter(value: object, settings: Settings) -> Converted:
    if not Settings({"value": value}).given("value"):
        return None
    if ".py:" not in _custom(settings):
        raise Undecided(f"{_custom(settings)} is no file .py: copy the function into one, for --reward-adapter")
    return f"{SCORE}={_custom(settings)}"


def _sources(settings: Settings) -> dict[str, str]:
    """Return the reward of each data_source of the data files; nothing with a reward of its own or an unknown file."""
    names = ["data.train_files", *["data.val_files"] * _evaluates(settings)]
    files = ["/".join(file.lower().split("/")[-3:]) for name in names for file in words(settings.text(name)) or []]
    found = [
        next((SOURCES[word] for word in SOURCES if re.search(rf"(?<![a-z]){word}(?![a-z])", file)), None)
        for file in files
    ]
    if _custom(settings) or None in found:
        return {}
    sources = dict(filter(None, found))
    last = [source in LAST_LINE for source in sources]
    return sources if all(last) or not any(last) else {}


def _routing(settings: Settings) -> Converted:
    sources = _sources(settings)
    if len(set(sources.values())) < 2:
        return None
    overlong = ",soft_overlong" if _overlong(settings) else ""
    return [f"{source}={reward}{overlong}" for source, reward in sources.items()]


def _extraction(settings: Settings) -> Converted:
    sources = _sources(settings)
    return "line" if sources and set(sources) <= set(LAST_LINE) else None


def _manager(settings: Settings) -> str:
    name = reward_text(settings, "reward_manager.name") or reward_text(settings, "reward_manager", "naive")
    return name.strip("'\"").lower()


def _buffer(settings: Settings) -> bool:
    return truth(reward_text(settings, f"{OVERLONG}enable", "false"))


def _overlong(settings: Settings) -> bool:
    """Return whether verl lowers the reward of long completions: only its DAPO manager reads the buffer."""
    return _buffer(settings) and _manager(settings) == "dapo"


LOSS_MODES = {"gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo", "clip_cov": "dapo"} | {
    "kl_cov": "dapo",
    "gpg": "reinforce",
}
CLIPPED = ("vanilla", "gspo", "geo_mean", "clip_cov")  # modes that clip the ratio on both sides of 1
AVERAGES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}


def _loss_mode(value: object, settings: Settings) -> Converted:
    """Return our loss: of the mode, or, where the mode leaves the average open, of the average."""
    if _distils_top_k(settings):
        return None
    if str(value) in LOSS_MODES and LOSS_MODES[str(value)] != "dapo":
        return LOSS_MODES[str(value)]
    if str(value) not in ("vanilla", *LOSS_MODES):
        raise Undecided(f"there is no loss {value!r} here: docs/algorithms.md lists the losses")
    return _average(settings.text(f"{ACTOR}loss_agg_mode", "token-mean"), settings)


def _average(value: object, settings: Settings) -> Converted:
    if _distils_top_k(settings):
        return None
    if str(value) not in AVERAGES:
        raise Undecided(f"no loss here has the average {value!r}: docs/algorithms.md lists the averages")
    return AVERAGES[str(value)]


def _bound(settings: Settings, side: str) -> str:
    """Return clip_ratio_low or clip_ratio_high: 0.2 by default, and clip_ratio where it is null."""
    name = f"{ACTOR}clip_ratio_{side}"
    if settings.given(name) or key_of(name) not in settings.values:
        return settings.text(name, "0.2")
    return settings.text(f"{ACTOR}clip_ratio", "0.2")


def _reads_clip_ratio(settings: Settings) -> bool:
    """Return whether verl reads clip_ratio: only in place of a bound that is null."""
    names = (f"{ACTOR}clip_ratio_low", f"{ACTOR}clip_ratio_high")
    return any(key_of(name) in settings.values and not settings.given(name) for name in names)


def _never_clips(settings: Settings) -> bool:
    """Return whether verl's bound of 0.2 is that of a sequence's ratio, which is always nearer to 1."""
    return _mode(settings) == "gspo" and parse_number(_bound(settings, "low")) == 0.2


def _clipped(bound: str, settings: Settings) -> Converted:
    return bound if _mode(settings) in CLIPPED and not _never_clips(settings) else None


def _low(value: object, settings: Settings) -> Converted:
    return _clipped(_bound(settings, "low"), settings)


def _high(value: object, settings: Settings) -> Converted:
    if _mode(settings) == "cispo":
        return number(round(1 + parse_number(_bound(settings, "high")), 10))
    return _clipped(_bound(settings, "high"), settings)


def _default_low(settings: Settings) -> Converted:
    return {"kl_cov": "0.99999", "geo_mean": "0.2"}.get(_mode(settings))


def _default_high(settings: Settings) -> Converted:
    if _mode(settings) in ("kl_cov", "cispo"):
        return {"kl_cov": "1e6", "cispo": "1.2"}[_mode(settings)]
    return _clipped("0.2", settings) if key_of(f"{ACTOR}clip_ratio_low") in settings.values else None


def _covariance(mode: str, default: str) -> Callable[[Settings], Converted]:
    return lambda settings: default if _mode(settings) == mode else None


def _with_mode(mode: str) -> Conversion:
    return only_if(f"with loss_mode {mode}", lambda settings: _mode(settings) == mode)


# The name ends in + where the gradient is that of k2, whatever the value is.
KL: dict[str, str | None] = {"mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL |= {f"{name}+": "k2" for name in (*KL, "kl", "k1", "abs")}


def _beta(settings: Settings) -> Converted:
    return "0.001" if _kl_loss(settings) or _kl_in_reward(settings) else "0"


def _importance_mode(value: object, settings: Settings) -> Converted:
    name = str(value).strip("'\"").lower()
    if name in ("null", "none", "") or settings.true(f"{CORRECTION}bypass_mode"):
        return None
    if name == "token":
        return "icepop" if "_" in settings.text(f"{CORRECTION}rollout_is_threshold") else "token_truncate"
    if name == "sequence":
        raise Different(
            "no weights: there the weight of a completion is the product of its tokens' ratios, here "
            "--rollout-importance-sampling-mode sequence_truncate takes their geometric mean"
        )
    raise Undecided(f"there is no {name!r} here: docs/log_probabilities.md")


def _threshold(place: int) -> Callable[[object, Settings], Converted]:
    """Return the conversion of the bounds, "UPPER" or "LOWER_UPPER", to the bound at ``place`` of them."""

    def apply(value: object, settings: Settings) -> Converted:
        mode, bounds = settings.text(f"{CORRECTION}rollout_is"), str(value).strip("'\"").split("_")
        if mode.strip("'\"").lower() != "token" or settings.true(f"{CORRECTION}bypass_mode"):
            return None
        return bounds[place] if place == -1 or len(bounds) == 2 else None

    return apply


def _min_lr(value: object, settings: Settings) -> Converted:
    ratio = parse_number(str(value))
    return repr(ratio * settings.number(f"{ACTOR}optim.lr", 1e-6)) if ratio > 0 else None


def _beta_of_adam(place: int) -> Conversion:
    def apply(value: object, settings: Settings) -> Converted:
        found = words(value) or []
        return found[place] if len(found) == 2 else None

    return Conversion("the first value" if place == 0 else "the second value", apply)


def _sampled_evaluation(settings: Settings) -> bool:
    return settings.number(f"{VALIDATION}temperature", 0) > 0


def _sampling_of_evaluation(name: str, default: float) -> Conversion:
    """Return the conversion of a setting of sampled evaluation, which here is that of the rollout."""
    behaviour = f"sampled evaluation has the rollout's --{name.replace('_', '-')}"

    def apply(value: object, settings: Settings) -> Converted:
        if (
            _evaluates(settings)
            and _sampled_evaluation(settings)
            and parse_number(str(value)) != settings.number(f"{ROLLOUT}{name}", default)
        ):
            raise Different(behaviour)
        return None

    return Conversion(behaviour, apply, "differs")


def _filtered(settings: Settings) -> bool:
    return settings.true("algorithm.filter_groups.enable")


def _metric(value: object, settings: Settings) -> Converted:
    name = str(value).strip("'\"")
    if name in ("acc", "score"):
        return None
    if name in ("seq_reward", "seq_final_reward"):
        return _reward_names(settings)
    raise Undecided(f"--dynamic-sample-reward names rewards, and {name!r} is none")


def _reward_names(settings: Settings) -> list[str]:
    own = [SCORE] if _custom(settings) else list(dict.fromkeys(_sources(settings).values())) or ["accuracy"]
    return [*own, "soft_overlong"] if _overlong(settings) else own


def _longest(value: object, settings: Settings) -> Converted:
    length = settings.number("data.max_response_length", 512)
    if parse_number(str(value)) != length:
        raise Different(f"soft_overlong ends at --max-completion-length ({length:g})")
    return None


def _scale_factor(value: object, settings: Settings) -> Converted:
    length = settings.number("data.max_response_length", 512)
    if Settings({"value": value}).given("value") and parse_number(str(value)) != length:
        raise Different(f"sums of tokens are divided by --max-completion-length ({length:g}): scale --lr with it")
    return None


def _always_sampled(value: object, settings: Settings) -> Converted:
    raise Different("rollouts are always sampled")


def _first_evaluation(settings: Settings) -> Converted:
    return True if settings.given("data.val_files") and settings.true("trainer.val_before_train", True) else None


def _evaluates(settings: Settings) -> bool:
    return settings.number("trainer.test_freq", -1) > 0 or _first_evaluation(settings) is True


def _evaluates_only(settings: Settings) -> bool:
    return settings.true("trainer.val_only") and _first_evaluation(settings) is True


def _resumes(settings: Settings) -> bool:
    return settings.text("trainer.resume_mode").strip("'\"") != "disable" and not _evaluates_only(settings)


PPO = only_if("with the plain loss", lambda settings: _mode(settings) == "vanilla")


def nothing(prefix: str, reason: str, names: str) -> tuple[Row, ...]:
    """Return rows of settings that need nothing, for one reason; ``names`` are separated by blanks."""
    return tuple(Row(f"{prefix}{name}", None, None, reason) for name in names.split())


def _tracker(name: str) -> Conversion:
    return only_if(
        f"with {name} in trainer.logger", lambda settings: name in settings.text("trainer.logger", "console wandb")
    )


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
    Row(f"{ACTOR}use_prefix_grouper", None, None, "on by default here, with --max-tokens-per-microbatch"),
    Row(f"{ACTOR}shuffle", None, None, "on by default here; --no-shuffle-completions if it is off there"),
    Row(f"{ROLLOUT}n", "--num-generations"),
    Row("trainer.total_training_steps", "--train-iters", scaled(ROLLOUTS, updates_per_rollout)),
    Row("trainer.total_epochs", "--num-epochs", unless("trainer.total_training_steps")),
    Row("trainer.save_freq", "--save-interval", scaled(ROLLOUTS, updates_per_rollout), "-1: only at the end"),
    Row("trainer.test_freq", "--eval-interval", scaled(ROLLOUTS, updates_per_rollout), "-1: never"),
    Row("trainer.val_before_train", "--val-before-train", SWITCH, "on by default there, off here"),
    Row(
        "trainer.val_only",
        "--eval-only",
        only_if("with data.val_files and val_before_train", lambda s: _first_evaluation(s) is True, SWITCH),
        "evaluates HF_MODEL; give --load DIR for a checkpoint",
    ),
    Row("trainer.balance_batch", None, None, "ranks always get micro-batches of equal numbers of tokens"),
    Row("trainer.critic_warmup", None, None, "there is no critic"),
)

DATA = (
    Row("data.train_files", "--train-data-path", WORDS),
    Row("data.val_files", "--valid-data-path", only_if("with test_freq or val_before_train", _evaluates, WORDS)),
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
    Row("data.val_max_samples", "--eval-max-prompts", only_if("with an evaluation", _evaluates, SEQUENCE)),
    Row("data.train_max_samples", None, ask("write a shorter file: all rows of --train-data-path are used")),
    Row("data.tokenizer", "--tokenizer-model"),
    Row("data.return_raw_chat", None, None, "a list of messages is always formatted by the chat template"),
    Row("data.return_raw_input_ids", None, None, "the trainer trains on the token ids of the engine"),
    Row("data.validation_shuffle", None, None, "the order of held-out prompts has no effect"),
    Row(
        "data.reward_fn_key",
        None,
        ask("the column is data_source: rename it; --reward-routing selects rewards by it", "data_source"),
    ),
    Row("data.image_key", None, ask("images are read from the column images", "images")),
    Row("data.video_key", None, ask("videos are read from the column videos", "videos")),
    Row("data.mm_processor_kwargs.*", None, ask("--max-image-pixels and --min-image-pixels bound images")),
    Row("data.tool_config_path", None, ask(TURNS)),
    Row("data.function_tool_path", None, ask(TURNS)),
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
    Row("data.apply_chat_template_kwargs.*", None, ask("add it to --chat-template-kwargs, which is JSON")),
    *nothing(
        "data.",
        "docs/data.md has the columns and formats of rows",
        "audio_key custom_cls.name image_patch_size return_full_prompt return_multi_modal_inputs use_shm",
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
    Row(f"{MODEL}hf_config_path", None, ask("config.json is that of --load-hf: copy it there")),
    Row(
        f"{MODEL}mtp.enable",
        None,
        ask(
            "--mtp-loss-scaling-factor trains the layers of multi-token prediction, --vllm-speculative-config drafts "
            "with them: docs/configure_engines.md"
        ),
    ),
    Row(f"{MODEL}mtp.*", None, None, "with mtp.enable"),
    Row(
        f"{MODEL}tiled_mlp.*", None, None, "--recompute-granularity selective --recompute-modules mlp saves this memory"
    ),
    Row(f"{MODEL}fused_kernel_options.*", None, None, "the head always computes log-probabilities in chunks"),
    Row(f"{MODEL}exclude_modules", None, ask("adapters are on the layers of --lora-target-modules: list those")),
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
    Row(f"{MODEL}override_config*", None, ask("edit config.json of the model: a run takes the architecture from it")),
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
    Row(f"{ACTOR}optim.min_lr_ratio", "--min-lr", Conversion("x optim.lr", _min_lr)),
    Row(f"{ACTOR}optim.betas", "--adam-beta1", _beta_of_adam(0)),
    Row(f"{ACTOR}optim.betas", "--adam-beta2", _beta_of_adam(1)),
    Row(f"{ACTOR}optim.lr_warmup_steps", "--lr-warmup-iters", scaled(ROLLOUTS, updates_per_rollout, True)),
    Row(
        f"{ACTOR}optim.lr_warmup_steps_ratio",
        "--lr-warmup-fraction",
        only_if(
            "above 0, without lr_warmup_steps",
            lambda settings: (
                settings.number(f"{ACTOR}optim.lr_warmup_steps_ratio", 0) > 0
                and settings.number(f"{ACTOR}optim.lr_warmup_steps", -1) <= 0
            ),
        ),
    ),
    Row(f"{ACTOR}optim.lr_warmup_init", None, differs("the warm-up starts from 0", "0")),
    Row(f"{ACTOR}optim.num_cycles", None, differs("a cosine falls once, from --lr to --min-lr", "0.5")),
    Row(
        f"{ACTOR}optim.weight_decay_incr_style",
        None,
        ask("--weight-decay-incr-style, with --start-weight-decay and --end-weight-decay", "constant"),
    ),
    Row(f"{ACTOR}optim.optimizer_impl", None, differs("Adam has states in float32", "torch.optim")),
    Row(f"{ACTOR}optim.use_precision_aware_optimizer", "--use-precision-aware-optimizer", SWITCH),
    *(
        Row(
            f"{ACTOR}optim.{name}",
            f"--{name.replace('_', '-')}",
            only_if(
                "with use_precision_aware_optimizer",
                lambda settings: settings.true(f"{ACTOR}optim.use_precision_aware_optimizer"),
            ),
        )
        for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
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
    Row(
        f"{OPTIMIZER}overlap_cpu_optimizer_d2h_h2d",
        "--overlap-cpu-optimizer-d2h-h2d",
        only_if("with optimizer_cpu_offload", lambda s: s.true(f"{OPTIMIZER}optimizer_cpu_offload"), SWITCH),
    ),
    Row(f"{OPTIMIZER}use_precision_aware_optimizer", "--use-precision-aware-optimizer", SWITCH),
    Row("critic.optim.lr", None, None, "there is no critic"),
    *nothing(
        f"{ACTOR}optim.",
        "--optimizer adam or sgd, with --lr-decay-style",
        "muon_* lr_wsd_* zero_indexed_step use_checkpoint_opt_param_scheduler use_layer_wise_distributed_optimizer",
    ),
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
    Row(f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size", "--context-parallel-size"),
    Row(
        f"{ACTOR}megatron.dynamic_context_parallel",
        None,
        ask(
            "--hybrid-context-parallel, with --max-tokens-per-microbatch of one rank (max_seqlen_per_dp_cp_rank there)"
        ),
    ),
    Row(f"{ACTOR}megatron.use_megatron_fsdp", None, ask("Megatron FSDP is not supported: --use-distributed-optimizer")),
    Row(f"{ACTOR}megatron.dtype", "--fp16", switch_for("float16")),
    Row(f"{ACTOR}fsdp_config.dtype", "--fp16", switch_for("float16")),
    Row(f"{ACTOR}freeze_vision_tower", "--freeze-vision-tower", SWITCH),
    Row(f"{ACTOR}freeze_vision_tower", "--freeze-projector", SWITCH, "the projector belongs to the tower there"),
    Row("model_engine", None, None, "the trainer is Megatron-Core"),
    *(
        Row(f"{ACTOR}{place}qat.enable", None, differs("training does not imitate the engine's 4 bits"))
        for place in ("", "megatron.", "fsdp_config.")
    ),
    *(Row(f"{ACTOR}{place}qat.*", None, None, "with qat.enable") for place in ("", "megatron.", "fsdp_config.")),
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
    *nothing(
        ACTOR, "--load-hf loads the same weights", "megatron.use_dist_checkpointing megatron.dist_checkpointing_path"
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
    Row(f"{ROLLOUT}nnodes", None, ask(ENGINE_RANKS, "0")),
    Row(f"{ROLLOUT}n_gpus_per_node", None, None, "with rollout.nnodes"),
    Row(f"{ROLLOUT}prompt_length", "--max-prompt-length"),
    Row(f"{ROLLOUT}response_length", "--max-completion-length"),
    Row(
        f"{ROLLOUT}pipeline_model_parallel_size",
        None,
        ask("an engine has tensor parallelism: raise --vllm-tensor-parallel-size", "1"),
    ),
    Row(
        f"{ROLLOUT}over_sample_rate",
        None,
        differs(
            "every completion is finished; --over-sampling-ratio starts more prompts, and keeps those done first", "0"
        ),
    ),
    Row(f"{ROLLOUT}disaggregation.enabled", None, differs("one engine computes prompts and completions")),
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
    Row(f"{ROLLOUT}enable_prefix_caching", "--no-vllm-enable-prefix-caching", SWITCH_IF_FALSE),
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
    Row(
        f"{ROLLOUT}do_sample",
        None,
        only_if(
            "if false",
            lambda s: not s.true(f"{ROLLOUT}do_sample", True),
            Conversion("rollouts are always sampled", _always_sampled, "differs"),
        ),
    ),
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
        f"{VALIDATION}n",
        "--eval-num-generations",
        only_if("with a val_kwargs.temperature above 0", lambda s: _evaluates(s) and _sampled_evaluation(s)),
        "in addition to the greedy completion",
    ),
    Row(f"{VALIDATION}do_sample", None, None, "val_kwargs.temperature above 0 samples: --eval-num-generations"),
    Row(f"{VALIDATION}temperature", None, _sampling_of_evaluation("temperature", 1.0)),
    Row(f"{VALIDATION}top_p", None, _sampling_of_evaluation("top_p", 1.0)),
    Row(f"{VALIDATION}top_k", None, _sampling_of_evaluation("top_k", -1)),
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
                "grpo_vectorized": "grpo",
                "rloo": "rloo",
                "rloo_vectorized": "rloo",
                "gdpo": "gdpo",
                "reinforce_plus_plus": "reinforce_plus_plus",
                "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
                "grpo_passk": "pass_at_k",
            },
            "docs/algorithms.md lists the estimators; there is no critic",
        ),
    ),
    Row(
        "algorithm.adv_estimator",
        "--pass-at-k",
        only_if("with grpo_passk", lambda s: _estimator(s) == "grpo_passk", computed("rollout.n", group_size)),
    ),
    Row(
        "algorithm.norm_adv_by_std_in_grpo",
        "--scale-rewards",
        only_if(
            "with grpo and grpo_passk, which read it",
            lambda s: _estimator(s).startswith("grpo"),
            Conversion("true → group; false → none", lambda value, settings: "group" if truth(value) else "none"),
        ),
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
    Row(
        f"{ACTOR}clip_ratio",
        None,
        None,
        "verl reads it where clip_ratio_low or clip_ratio_high is null; both are 0.2 by default there",
    ),
    Row(
        f"{ACTOR}clip_ratio_low",
        "--epsilon",
        Conversion("null → clip_ratio; only with a loss that clips on both sides", _low),
    ),
    Row(
        f"{ACTOR}clip_ratio_high",
        "--epsilon-high",
        Conversion("null → clip_ratio; with cispo: 1 + value, the bound of the ratio itself", _high),
    ),
    Row(f"{ACTOR}clip_ratio_c", "--dual-clip", PPO, "3 by default there, off here"),
    Row(f"{ACTOR}tau_pos", "--tau-pos", _with_mode("sapo")),
    Row(f"{ACTOR}tau_neg", "--tau-neg", _with_mode("sapo")),
    *nothing(f"{ACTOR}policy_loss.", "verl reads actor.tau_pos and actor.tau_neg", "tau_pos tau_neg"),
    Row(f"{ACTOR}policy_loss.clip_cov_ratio", "--clip-cov-ratio", _with_mode("clip_cov")),
    Row(f"{ACTOR}policy_loss.clip_cov_lb", "--clip-cov-lb", _with_mode("clip_cov")),
    Row(f"{ACTOR}policy_loss.clip_cov_ub", "--clip-cov-ub", _with_mode("clip_cov")),
    Row(f"{ACTOR}policy_loss.kl_cov_ratio", "--kl-cov-ratio", _with_mode("kl_cov")),
    Row(f"{ACTOR}policy_loss.ppo_kl_coef", "--kl-cov-coef", _with_mode("kl_cov")),
    Row(f"{ACTOR}policy_loss.dro_beta", None, None, "with loss_mode dro, which is not there"),
    Row(
        f"{ACTOR}loss_scale_factor",
        None,
        only_if(
            "with loss_agg_mode seq-mean-token-sum-norm",
            lambda s: s.text(f"{ACTOR}loss_agg_mode") == "seq-mean-token-sum-norm",
            Conversion("sums of tokens are divided by --max-completion-length", _scale_factor, "differs"),
        ),
    ),
    Row(f"{ACTOR}entropy_coeff", "--entropy-coef"),
    Row(f"{ACTOR}use_kl_loss", None, None, "--beta above 0 switches the KL term on"),
    Row(f"{ACTOR}kl_loss_coef", "--beta", only_if("with use_kl_loss", _kl_loss)),
    Row(
        f"{ACTOR}kl_loss_type",
        "--kl-estimator",
        only_if(
            "with use_kl_loss",
            _kl_loss,
            choice(KL, "the gradient of kl is 0 on average: --kl-estimator k2 or k3"),
        ),
    ),
    Row("algorithm.use_kl_in_reward", "--kl-in-reward", SWITCH),
    Row("algorithm.kl_ctrl.kl_coef", "--beta", only_if("with use_kl_in_reward", _kl_in_reward)),
    Row(
        "algorithm.kl_ctrl.type",
        None,
        only_if("with use_kl_in_reward", _kl_in_reward, differs("--beta is constant", "fixed")),
    ),
    Row("algorithm.kl_ctrl.*", None, None, "with kl_ctrl.type"),
    Row(
        "algorithm.kl_penalty",
        None,
        only_if("with use_kl_in_reward", _kl_in_reward, differs("with --kl-in-reward the estimator is k1", "kl", "k1")),
    ),
    Row(
        "algorithm.gdpo_reward_keys",
        None,
        ask("each key is a reward: --reward-adapter KEY=FILE.py:FUNCTION:KEY ..., with each KEY in --reward-funcs"),
    ),
    Row("algorithm.use_pf_ppo", None, differs("completions are not drawn again by their reward")),
    Row("algorithm.pf_ppo.*", None, None, "with use_pf_ppo"),
    Row(
        "algorithm.gamma",
        "--gamma",
        only_if("with reinforce_plus_plus", lambda s: _estimator(s) == "reinforce_plus_plus"),
    ),
    Row("algorithm.lam", None, None, "there is no critic"),
    Row("algorithm.filter_groups.enable", "--dynamic-sample", SWITCH),
    Row(
        "algorithm.filter_groups.max_num_gen_batches",
        None,
        only_if(
            "with filter_groups.enable",
            _filtered,
            differs(
                "a group is replaced at most --max-resample-times times (3), then kept; there at most so many "
                "batches are generated until enough groups differ"
            ),
        ),
    ),
    Row("algorithm.filter_groups.max_inflight_gen_batches", None, None, "single groups are replaced at once"),
    Row(
        "algorithm.filter_groups.metric",
        "--dynamic-sample-reward",
        only_if(
            "with filter_groups.enable and an overlong penalty",
            lambda s: _filtered(s) and _overlong(s),
            Conversion("seq_reward and seq_final_reward → all rewards; acc and score → the default", _metric),
        ),
    ),
    Row(
        f"{CORRECTION}rollout_is",
        "--rollout-importance-sampling-mode",
        Conversion("token → token_truncate, or icepop with two bounds; null → nothing", _importance_mode),
    ),
    Row(
        f"{CORRECTION}rollout_is_threshold",
        "--rollout-importance-sampling-threshold",
        Conversion("the upper bound; only with rollout_is token", _threshold(-1)),
    ),
    Row(
        f"{CORRECTION}rollout_is_threshold",
        "--rollout-importance-sampling-lower-bound",
        Conversion("the first of two bounds", _threshold(0)),
    ),
    Row(
        f"{CORRECTION}rollout_rs",
        None,
        differs(
            "no tokens are left out by their divergence alone: the masks of --rollout-importance-sampling-mode also "
            "multiply by the ratio"
        ),
    ),
    Row(f"{CORRECTION}rollout_rs_threshold", None, None, "with rollout_rs"),
    Row(
        f"{CORRECTION}bypass_mode",
        None,
        differs("the ratio has the trainer's old log-probabilities, not those of the engine"),
    ),
    Row(f"{CORRECTION}loss_type", None, None, "with bypass_mode"),
    Row(f"{CORRECTION}rollout_is_batch_normalize", None, differs("the mean of the weights is not set to 1")),
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
    *(
        Row(
            f"{ACTOR}{place}router_replay.mode",
            "--router-replay-mode",
            choice({"disabled": None, "r2": "R2", "r3": "R3"}, "--router-replay-mode R2 or R3"),
        )
        for place in ("", "megatron.")
    ),
    Row("distillation.enabled", None, None, "a teacher switches it on"),
    Row(
        "distillation.teacher_models.teacher_model.model_path",
        "--teacher-load-hf",
        only_if("with distillation.enabled", _distils),
        "on the trainer's ranks",
    ),
    Row(
        f"{DISTILLATION}loss_mode",
        "--loss-type",
        only_if(
            "with distillation.enabled",
            _distils,
            choice(
                {"forward_kl_topk": "gkd"},
                "k1 with use_policy_gradient is --teacher-kl-coef 1, the others are near --loss-type gkd --gkd-beta 1",
            ),
        ),
    ),
    Row(
        f"{DISTILLATION}loss_mode",
        "--gkd-beta",
        only_if("with forward_kl_topk", _distils_top_k, Conversion("0", lambda value, s: "0")),
    ),
    Row(
        f"{DISTILLATION}topk",
        "--gkd-logits-topk",
        only_if("with forward_kl_topk", _distils_top_k),
        "the tokens outside are one class here, and no term there",
    ),
    Row("distillation.*", None, None, "with distillation.enabled"),
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
    Row(f"{REF}strategy", None, None, "the reference is a Megatron-Core model"),
    Row(f"{REF}model.path", "--ref-load-hf"),
    Row(f"{REF}*", None, None, "the reference has the policy's settings"),
)

REWARDS = (
    *chain.from_iterable(
        (
            Row(f"{prefix}path", "--reward-adapter", Conversion(f"{SCORE}=PATH:NAME, unchanged", _adapter)),
            Row(f"{prefix}name", None, None, "part of --reward-adapter; compute_score by default"),
            Row(f"{prefix}reward_kwargs.*", None, ask("make it the default of the function's parameter")),
        )
        for prefix in CUSTOM
    ),
    *chain.from_iterable(
        (
            Row(
                f"{prefix}reward_manager{name}",
                None,
                ask("--reward-funcs names the rewards: docs/rewards.md", "naive", "dapo", "prime", "limited", "gdpo"),
            )
            for name in ("", ".name")
        )
        for prefix in REWARD
    ),
    Row("reward.reward_manager.source", None, ask("a manager of your own: docs/rewards.md", "register")),
    Row("reward.reward_manager.*", None, None, "with reward_manager.source"),
    *(
        Row(
            name,
            None,
            ask("--reward-model NAME=DIR or NAME=URL, with NAME in --reward-funcs: docs/rewards.md"),
        )
        for name in ("reward_model.enable", "reward.reward_model.enable")
    ),
    *chain.from_iterable(
        (
            Row(
                f"{prefix}{OVERLONG}enable", None, None, "soft_overlong in --reward-funcs, with the reward manager dapo"
            ),
            Row(f"{prefix}{OVERLONG}len", "--soft-cache-length", only_if("if enabled, with dapo", _overlong)),
            Row(f"{prefix}{OVERLONG}penalty_factor", None, None, "the --reward-weights of soft_overlong"),
            Row(f"{prefix}{OVERLONG}log", None, None, "every reward function has its own metric"),
            Row(
                f"{prefix}reward_kwargs.max_resp_len",
                None,
                only_if(
                    "with an overlong penalty",
                    _overlong,
                    Conversion("soft_overlong takes --max-completion-length", _longest, "differs"),
                ),
            ),
            Row(f"{prefix}num_workers", None, None, "--reward-workers processes on each rank"),
            Row(f"{prefix}reward_kwargs.*", None, ask("--reward-funcs names the rewards: docs/rewards.md")),
        )
        for prefix in REWARD
    ),
    *(
        Row(name, None, ask("--reward-funcs code runs the tests in a sandbox of its own"))
        for name in ("reward_model.sandbox_fusion.url", "reward.sandbox_fusion.url", "sandbox_fusion.url")
    ),
    Row("sandbox_fusion.*", None, None, "--reward-funcs code has its own limits"),
    *nothing("reward.", "with reward_model.enable", "reward_model.*"),
    *nothing("reward.", "--reward-funcs code has its own limits", "sandbox_fusion.*"),
    Row("reward_model.launch_reward_fn_async", None, None, "completions are always scored as they finish"),
)

RUN = (
    Row("trainer.default_local_dir", "--save"),
    Row(
        "trainer.default_local_dir",
        "--load",
        only_if("unless resume_mode is disable", _resumes),
        "a second start resumes",
    ),
    Row("trainer.resume_mode", None, None, "auto: --load DIR resumes if DIR holds a checkpoint; disable: no --load"),
    Row(
        "trainer.resume_from_path",
        None,
        only_if(
            "with resume_mode resume_path",
            lambda settings: settings.text("trainer.resume_mode").strip("'\"") == "resume_path",
            ask(OTHER_CHECKPOINTS),
        ),
    ),
    Row("trainer.max_actor_ckpt_to_keep", "--max-checkpoints-to-keep"),
    Row("trainer.default_hdfs_dir", None, None, "only local paths"),
    Row("trainer.logger", None, None, "--wandb-project, --swanlab-project and --tensorboard-dir switch trackers on"),
    Row("trainer.project_name", "--wandb-project", _tracker("wandb")),
    Row("trainer.experiment_name", "--wandb-exp-name", _tracker("wandb")),
    Row("trainer.project_name", "--swanlab-project", _tracker("swanlab")),
    Row("trainer.experiment_name", "--swanlab-exp-name", _tracker("swanlab")),
    Row("trainer.log_val_generations", None, None, "--save has eval_completions.jsonl: --eval-completions-to-log"),
    Row("trainer.rollout_data_dir", None, None, "--save has completions.jsonl: --num-completions-to-log"),
    Row(f"{ACTOR}checkpoint.async_save", "--async-save", SWITCH),
    Row(f"{ACTOR}checkpoint.*", None, None, "checkpoints load in any parallel configuration"),
    Row("trainer.validation_data_dir", None, None, "--save has eval_completions.jsonl: --eval-completions-to-log"),
    Row("trainer.nnodes", None, None, "torchrun's --nnodes"),
    Row("trainer.n_gpus_per_node", None, None, "torchrun's --nproc-per-node"),
    Row("trainer.device", None, None, "GPUs, or a CPU where there is none"),
    Row("trainer.use_legacy_worker_impl", None, None, "there are no workers"),
    Row("trainer.use_v1", None, None, "there is one trainer"),
    Row(
        "trainer.v1.trainer_mode",
        None,
        ask(f"{ENGINE_RANKS}; or --partial-rollouts on the trainer's GPUs: docs/sampling.md", "sync"),
    ),
    Row("trainer.v1.*", None, None, "with trainer.v1.trainer_mode"),
    Row("trainer.esi_redundant_time", None, None, "--exit-signal-handler saves before a host goes"),
    Row("trainer.ray_wait_register_center_timeout", None, None, "there is no Ray"),
    Row("trainer.max_critic_ckpt_to_keep", None, None, "there is no critic"),
    Row("transfer_queue.*", None, None, "rollouts stay in the training processes"),
    Row("skip.*", None, None, "--replay-rollouts repeats a run's rollouts"),
    Row("rollout.nnodes", None, ask(ENGINE_RANKS, "0")),
    *nothing("", "with rollout.nnodes", "rollout.n_gpus_per_node async_training.*"),
    Row("rollout.total_rollout_steps", None, ask("prompts in all there: --train-iters counts updates")),
    *nothing(ACTOR, "the trainer is Megatron-Core", "veomni.* torchtitan.*"),
    *nothing("", "hydra's own: pretrain_grpo.py has flags only", "hydra.*"),
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
    Row(f"{ROLLOUT}multi_turn.*", None, None, "with multi_turn.enable"),
    Row(f"{ROLLOUT}agent.default_agent_loop", None, ask(TURNS, "single_turn_agent")),
    Row(f"{ROLLOUT}agent.agent_loop_config_path", None, ask(TURNS)),
    *nothing(
        ROLLOUT,
        "the engine's own: --vllm-engine-kwargs has what has no flag",
        "agent.* checkpoint_engine.* cudagraph_capture_sizes disable_log_stats disaggregation.* "
        "full_determinism log_prob_micro_batch_size logprobs_mode moe_load_balance_metrics_interval "
        "mtp* prometheus.* qat* trace.* quantization_config_file scheduling_policy seed "
        "skip_tokenizer_init limit_images",
    ),
    Row(f"{ACTOR}fsdp_config.*", None, None, "FSDP is not supported"),
    Row(f"{REF}fsdp_config.*", None, None, "FSDP is not supported"),
    Row(f"{MODEL}lora*", None, None, "docs/lora.md has what there is"),
    *nothing(
        ACTOR,
        "the trainer's own: the entropy is always measured, micro-batches are packed without padding",
        "calculate_entropy calculate_sum_pi_squared entropy_from_logits_chunk_size pad_to_length "
        "use_fused_kernels use_remove_padding megatron.use_remove_padding megatron.pad_* "
        "megatron.entropy_* megatron.forward_only megatron.override_mcore_model_config* "
        "router_replay.* megatron.router_replay.*",
    ),
    *nothing(ACTOR, "--seed", "data_loader_seed megatron.seed"),
    *nothing(ACTOR, "the trainer is Megatron-Core", "model_engine"),
    *nothing(ROLLOUT, "verl does not read it", "single_turn_response_length"),
    *nothing(ROLLOUT, "of TensorRT-LLM", "moe_tensor_parallel_size"),
    *nothing(ACTOR, "rollout.n is --num-generations", "rollout_n"),
    *nothing(ACTOR, "with dynamic_context_parallel", "megatron.max_seqlen_per_dp_cp_rank"),
    *nothing(
        ACTOR,
        "checkpoints load in any parallel configuration",
        "megatron.dist_checkpointing_prefix megatron.dist_ckpt_optim_fully_reshardable "
        "megatron.distrib_optim_fully_reshardable_mem_efficient",
    ),
    Row("reward_model.*", None, None, "--reward-model NAME=DIR or NAME=URL: docs/rewards.md"),
    Row("critic.*", None, None, "there is no critic"),
    Row("dag.workflow_path", None, None, "siiRL's graph of workers: pretrain_grpo.py is the algorithm"),
    Row("dag.enable_perf", None, None, "--include-performance-metrics"),
)


def _sequence_parallel(settings: Settings) -> Converted:
    return True if settings.number(f"{ACTOR}megatron.tensor_model_parallel_size", 1) > 1 else None


def _dual_clip(settings: Settings) -> Converted:
    return "3" if _mode(settings) == "vanilla" else None


def _recompute(settings: Settings, value: str) -> Converted:
    full = settings.true(f"{MODEL}enable_gradient_checkpointing") and not _megatron(settings)
    return value if full else None


def _weights(settings: Settings) -> Converted:
    """Return the weights of a run with an overlong penalty: verl's math_dapo gives 1 or -1, accuracy 1 or 0."""
    own = ["2" if _extraction(settings) else "1"] * (len(_reward_names(settings)) - 1)
    return [*own, reward_text(settings, f"{OVERLONG}penalty_factor", "1")] if _overlong(settings) else None


def _half(settings: Settings) -> bool:
    return "float16" in (settings.text(f"{ACTOR}megatron.dtype"), settings.text(f"{ACTOR}fsdp_config.dtype"))


def _in_order(settings: Settings) -> Converted:
    several = updates_per_rollout(settings) > 1
    return True if several and not settings.true(f"{ACTOR}shuffle") else None


def _budget(settings: Settings) -> Converted:
    longest = settings.number("data.max_prompt_length", 512) + settings.number("data.max_response_length", 512)
    return number(max(16384 * context_parallel(settings), longest)) if _dynamic(settings) else None


def _completions(name: str, default: float) -> Callable[[Settings], Converted]:
    def implied(settings: Settings) -> Converted:
        prompts = settings.number(name, default)
        return number(prompts * group_size(settings)) if prompts > 0 else None

    return implied


def _decide(settings: Settings) -> list[str]:
    points = []
    if not _custom(settings):
        by = "here by the names of the files: check it" if _sources(settings) else "the files do not tell it"
        points.append(f"--reward-funcs: verl chooses a reward by the column data_source, {by} ({REWARDS_OF_SOURCES})")
    if _buffer(settings) and not _overlong(settings):
        points.append(
            f"overlong_buffer_cfg: verl's reward manager {_manager(settings)} ignores it, so it is left out; "
            "soft_overlong in --reward-funcs, with --soft-cache-length, is the penalty"
        )
    clip = settings.text(f"{ACTOR}clip_ratio")
    without_low = not settings.given(f"{ACTOR}clip_ratio_low") and not _reads_clip_ratio(settings)
    if _mode(settings) in CLIPPED and not is_off(clip, "0.2") and without_low:
        points.append(
            f"clip_ratio={clip} has no effect in verl, which clips at clip_ratio_low and clip_ratio_high, 0.2: give "
            f"--epsilon {clip} if you meant it"
        )
    if _estimator(settings) == "gdpo":
        points.append(
            "--advantage-estimator gdpo compares several --reward-funcs: --reward-adapter NAME=FILE.py:FUNCTION:KEY "
            "makes each key of the function's dict one"
        )
    if not _megatron(settings):
        points.append(
            "--tensor-model-parallel-size, --pipeline-model-parallel-size: FSDP shards the weights over all GPUs; "
            "docs/model_sizes.md has sizes for Megatron"
        )
    return points


def _differences(settings: Settings) -> list[str]:
    points = []
    if not settings.given("algorithm.adv_estimator"):
        points.append(
            "algorithm.adv_estimator is not given: the advantages are GRPO's, verl's default is PPO with a critic"
        )
    if _estimator(settings) == "grpo_passk":
        points.append(
            "algorithm.adv_estimator=grpo_passk: --pass-at-k gives advantages that are rollout.n times larger; Adam "
            "divides the factor out, --entropy-coef and --beta count less"
        )
    if _never_clips(settings):
        points.append(
            f"{ACTOR}policy_loss.loss_mode=gspo: the ratio is clipped at 3e-4 and 4e-4, the paper's bounds; verl's 0.2 "
            "never clips it"
        )
    mode, average = _mode(settings), settings.text(f"{ACTOR}loss_agg_mode", "token-mean")
    if mode in ("cispo", "gpg") and average != "token-mean":
        points.append(f"{ACTOR}loss_agg_mode={average}: --loss-type {LOSS_MODES[mode]} averages over all tokens")
    if mode == "cispo" and parse_number(_bound(settings, "low")) < 1:
        points.append(
            f"{ACTOR}clip_ratio_low: --loss-type cispo has no lower bound of the ratio; verl raises smaller ratios to "
            "1 - clip_ratio_low"
        )
    if "hiyouga/geometry3k" in _sources(settings):
        points.append(
            "hiyouga/geometry3k: verl's score is 0.9 for the answer and 0.1 for <think>...</think> before a box; here "
            "the answer counts alone"
        )
    if settings.text("trainer.resume_mode").strip("'\"") == "disable":
        points.append("trainer.resume_mode=disable: there is no --load; a start is refused if --save holds checkpoints")
    if settings.true("trainer.val_only") and not _evaluates_only(settings):
        points.append("trainer.val_only: verl evaluates nothing and trains without val_files or val_before_train")
    return points


SYSTEM = System(
    name="verl",
    sources="verl-project/verl: examples/*_trainer, verl/trainer/config (August 2026); siiRL has the same keys",
    rows=tuple(chain(BATCH, DATA, MODELS, LEARNING, PARALLEL, ENGINE, ALGORITHM, REFERENCE, REWARDS, RUN)),
    implied=(
        ("--bf16", lambda s: None if _half(s) else True, "verl trains in bfloat16"),
        ("--transformer-impl", constant("local"), "transformer_engine where it is installed"),
        ("--lora-alpha", lambda s: "16" if _lora(s) else None, "verl's default"),
        ("--beta", _beta, "0.001 with a KL term there, none without use_kl_loss"),
        ("--loss-type", constant("dapo"), "verl averages over tokens (token-mean)"),
        ("--epsilon", _default_low, "clip_ratio_low is 0.2 by default there; kl_cov does not clip"),
        ("--epsilon-high", _default_high, "clip_ratio_high is 0.2 by default there; kl_cov does not clip"),
        ("--dual-clip", _dual_clip, "clip_ratio_c is 3 by default there"),
        ("--clip-cov-ratio", _covariance("clip_cov", "0.0002"), "verl's default"),
        ("--kl-cov-ratio", _covariance("kl_cov", "0.0002"), "verl's default"),
        ("--kl-cov-coef", _covariance("kl_cov", "0.1"), "verl's default"),
        ("--scale-rewards", lambda s: "group" if _estimator(s) == "grpo_passk" else None, "verl's default"),
        ("--generation-batch-size", _completions("data.train_batch_size", 1024), "1024 prompts by default there"),
        ("--global-batch-size", _completions(f"{ACTOR}ppo_mini_batch_size", 256), "256 prompts by default there"),
        ("--no-shuffle-completions", _in_order, "actor.shuffle is off by default there"),
        ("--max-tokens-per-microbatch", _budget, "16384 tokens of one GPU by default there, or the longest sequence"),
        ("--val-before-train", _first_evaluation, "on by default there"),
        (
            "--eval-num-generations",
            lambda s: "1" if _evaluates(s) and _sampled_evaluation(s) else None,
            "verl's default",
        ),
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
        (
            "--reward-weights",
            _weights,
            "1, or 2 where verl gives 1 and -1; the penalty factor",
        ),
        ("--reward-funcs", _reward_names, "of custom_reward_function, else of the data_source: see the top"),
        ("--reward-routing", _routing, "verl chooses by data_source"),
        ("--answer-extraction", _extraction, 'the prompts of this data ask for a last line "Answer: ..."'),
    ),
    decide=_decide,
    differences=_differences,
    fields=(TRANSFORMER, OPTIMIZER, f"{ACTOR}megatron.override_ddp_config."),
    resumes=_resumes,
)
