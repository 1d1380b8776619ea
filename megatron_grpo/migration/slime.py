"""slime's flags in ours. Flags of Megatron-LM have their names in both."""

from itertools import chain

from megatron_grpo.migration.rows import (
    DISPATCHER,
    ENGINE_RANKS,
    NO_DEEPEP,
    ON,
    REGISTER,
    SAME,
    SWITCH,
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
    more_fp8_rows,
    number,
    only_if,
    scaled,
    upper_bound,
)

PENALISED = "above 0, with the estimators of REINFORCE++, without --use-kl-loss"
ROLLOUTS = "rollouts there, updates here: x updates of a rollout"


def completions_per_rollout(settings: Settings) -> float:
    """Return the completions of a rollout."""
    return settings.number("--rollout-batch-size", 0) * settings.number("--n-samples-per-prompt", 1)


def updates_per_rollout(settings: Settings) -> float:
    """Return the updates of a rollout."""
    batch = settings.number("--global-batch-size", 0)
    return settings.number("--num-steps-per-rollout", completions_per_rollout(settings) // batch if batch else 1) or 1


def context_parallel(settings: Settings) -> float:
    """Return the ranks that share a sequence."""
    return settings.number("--context-parallel-size", 1)


def _dynamic(settings: Settings) -> bool:
    return settings.true("--use-dynamic-batch-size")


def _kl_loss(settings: Settings) -> bool:
    return settings.true("--use-kl-loss")


def _penalised(settings: Settings) -> bool:
    """Return whether the KL is taken off the advantages: by the estimators of REINFORCE++, not by GRPO's."""
    estimator = settings.text("--advantage-estimator")
    of_kl = estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline") and not _kl_loss(settings)
    return of_kl and settings.number("--kl-coef", 0) > 0


def _data(value: object, settings: Settings) -> Converted:
    """Return the files of --eval-prompt-data, which gives a name before each file."""
    items = WORDS.apply(value, settings)
    return items[1::2] if isinstance(items, list) else items


def _average(settings: Settings) -> str:
    estimator = settings.text("--advantage-estimator", "grpo")
    if estimator in ("gspo", "cispo"):
        return estimator
    return "dapo" if settings.true("--calculate-per-token-loss") else "grpo"


def _over_sampling(value: object, settings: Settings) -> Converted:
    prompts = settings.number("--over-sampling-batch-size", 0)
    return number(prompts / settings.number("--rollout-batch-size", 1)) if prompts else None


def _pattern(value: object, settings: Settings) -> Converted:
    return None if "$" in str(value) else SAME.apply(value, settings)


def _spec(value: object, settings: Settings) -> Converted:
    words = str(value)
    return None if any(name in words for name in SPECS) else OTHER_LAYER.apply(value, settings)


PATTERN = Conversion("left out if the script computes it: --load-hf reads config.json", _pattern)
# Functions that describe layers of families in docs/models.md.
SPECS = (
    "get_qwen3_next_spec",
    "get_qwen3_5_spec",
    "get_gemma4_spec",
    "get_glm_spec",
    "mamba_stack_spec",
    "hybrid_stack_spec",
)
OTHER_LAYER = ask("a layer of another model: docs/models.md lists the families")


ESTIMATORS = Conversion(
    "grpo, gspo, cispo → grpo; reinforce_plus_plus, reinforce_plus_plus_baseline → the same",
    lambda value, settings: choice(
        {
            "grpo": None,
            "gspo": None,
            "cispo": None,
            "reinforce_plus_plus": "reinforce_plus_plus",
            "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
        },
        "there is no critic",
    ).apply(value, settings),
)
LOSSES = Conversion(
    "gspo → gspo; cispo → cispo; else by --calculate-per-token-loss",
    lambda value, settings: _average(settings),
)

BATCH = (
    Row(
        "--rollout-batch-size",
        "--generation-batch-size",
        computed("prompts there, completions here: x --n-samples-per-prompt", completions_per_rollout),
    ),
    Row("--n-samples-per-prompt", "--num-generations"),
    Row("--num-steps-per-rollout", "--steps-per-generation"),
    Row("--num-rollout", "--train-iters", scaled(ROLLOUTS, updates_per_rollout)),
    Row("--num-epoch", "--num-epochs", only_if("without --num-rollout", lambda s: not s.given("--num-rollout"))),
    Row("--use-dynamic-batch-size", None, None, "--max-tokens-per-microbatch alone switches it on"),
    Row(
        "--max-tokens-per-gpu",
        "--max-tokens-per-microbatch",
        only_if(
            "with --use-dynamic-batch-size",
            _dynamic,
            scaled("tokens of one GPU there, of all context-parallel ranks here: x CP", context_parallel),
        ),
    ),
    Row(
        "--log-probs-max-tokens-per-gpu",
        "--logprobs-max-tokens-per-microbatch",
        scaled("tokens of one GPU there, of all context-parallel ranks here: x CP", context_parallel),
    ),
    Row("--balance-data", None, None, "ranks always get micro-batches of equal numbers of tokens"),
    Row("--balance-by-flops", None, None, "micro-batches are balanced by tokens"),
    Row("--save-interval", "--save-interval", scaled(ROLLOUTS, updates_per_rollout)),
    Row("--eval-interval", "--eval-interval", scaled(ROLLOUTS, updates_per_rollout)),
    Row(
        "--over-sampling-batch-size",
        "--over-sampling-ratio",
        Conversion("prompts there, a ratio here: / --rollout-batch-size", _over_sampling),
    ),
    Row(
        "--dynamic-sampling-filter-path",
        "--dynamic-sample",
        ON,
        "groups with equal rewards are replaced; there is no other filter",
    ),
    Row(
        "--partial-rollout",
        None,
        ask("--partial-rollouts --max-staleness 1 --rollout-importance-sampling-mode token_truncate continues them"),
    ),
)

EVALUATION = differs("sampled evaluation has the rollout's settings, in addition to the greedy completion")

DATA = (
    Row("--prompt-data", "--train-data-path", WORDS),
    Row("--input-key", "--prompt-key"),
    Row("--label-key", None, None, "the answer is the column answer, solution or ground_truth: docs/data.md"),
    Row("--metadata-key", None, None, "reward functions get the whole row"),
    Row("--tool-key", None, None, "the column is tools"),
    Row("--multimodal-keys", None, ask("images are read from the column images")),
    Row("--apply-chat-template", None, None, "a list of messages is always formatted by the chat template"),
    Row("--apply-chat-template-kwargs", "--chat-template-kwargs"),
    Row("--rollout-shuffle", None, None, "on by default; --no-shuffle switches it off"),
    Row("--rollout-seed", "--seed"),
    Row("--rollout-max-prompt-len", "--max-prompt-length"),
    Row("--rollout-max-response-len", "--max-completion-length"),
    Row("--rollout-max-context-len", "--vllm-max-model-len"),
    Row("--eval-prompt-data", "--valid-data-path", Conversion("NAME FILE pairs there, files here", _data)),
    Row("--eval-config", None, ask("give the files as --valid-data-path")),
    Row("--n-samples-per-eval-prompt", "--eval-num-generations", None, "in addition to the greedy completion"),
    Row(
        "--eval-max-response-len",
        None,
        differs("--max-completion-length holds for evaluation; a row's sampling_params can set its own"),
    ),
    Row("--eval-top-p", None, EVALUATION),
    Row("--eval-top-k", None, EVALUATION),
    Row("--eval-temperature", None, EVALUATION),
    Row("--eval-input-key", None, None, "--prompt-key holds for held-out prompts, too"),
    Row("--eval-label-key", None, None, "the answer is the column answer, solution or ground_truth"),
    Row("--skip-eval-before-train", None, None, "--val-before-train evaluates before the first update"),
    Row("--rollout-stop", "--stop-words", WORDS),
    Row("--rollout-stop-token-ids", "--stop-token-ids", WORDS),
    Row(
        "--rollout-skip-special-tokens",
        None,
        None,
        "the trainer trains on token ids; rewards get text without special tokens",
    ),
    Row("--data-source-path", None, ask("write the rows with your own script: docs/data.md has the columns")),
    Row("--loss-mask-type", None, None, "the tokens of the completion are in the loss"),
)

ENGINE = (
    Row("--rollout-temperature", "--temperature"),
    Row("--rollout-top-p", "--top-p"),
    Row("--rollout-top-k", "--top-k"),
    Row("--rollout-num-gpus-per-engine", "--vllm-tensor-parallel-size"),
    Row(
        "--rollout-num-gpus",
        None,
        ask(ENGINE_RANKS),
    ),
    Row("--num-gpus-per-node", None, None, "torchrun's --nproc-per-node"),
    Row("--actor-num-nodes", None, None, "torchrun's --nnodes"),
    Row("--actor-num-gpus-per-node", None, None, "torchrun's --nproc-per-node"),
    Row("--colocate", None, None, "--vllm-mode colocate is the default"),
    Row("--offload", "--offload-model", SWITCH, "with --offload-gradients and --offload-optimizer"),
    Row("--offload-train", "--offload-model", SWITCH, "with --offload-gradients and --offload-optimizer"),
    Row("--offload-rollout", "--sleep-level", fixed("2")),
    Row("--sglang-mem-fraction-static", "--vllm-gpu-memory-utilization", None, "a share of the GPU's memory, as there"),
    Row("--sglang-server-concurrency", "--vllm-max-num-seqs"),
    Row("--sglang-max-running-requests", "--vllm-max-num-seqs"),
    Row("--sglang-context-length", "--vllm-max-model-len"),
    Row(
        "--sglang-ep-size",
        "--vllm-enable-expert-parallel",
        only_if(
            "above 1",
            lambda s: s.number("--sglang-ep-size", 1) > 1,
            ON,
        ),
    ),
    Row("--sglang-enable-ep-moe", "--vllm-enable-expert-parallel", SWITCH),
    Row("--sglang-attention-backend", None, None, "vLLM chooses its attention backend"),
    Row("--sglang-cuda-graph-bs", None, None, "vLLM chooses the sizes of its CUDA graphs"),
    Row("--sglang-cuda-graph-max-bs", None, None, "vLLM chooses the sizes of its CUDA graphs"),
    Row("--sglang-disable-cuda-graph", "--vllm-enforce-eager", SWITCH),
    Row("--sglang-dp-size", None, None, "the replicas are all GPUs / --vllm-tensor-parallel-size"),
    Row("--sglang-enable-dp-attention", None, None, "vLLM's ranks have slices of the attention"),
    Row("--sglang-enable-dp-lm-head", None, None, "vLLM's ranks have slices of the head"),
    Row("--sglang-moe-dense-tp-size", None, None, "vLLM's dense layers have the replica's tensor parallelism"),
    Row("--sglang-moe-a2a-backend", None, None, "a setting of SGLang's servers"),
    Row("--sglang-deepep-mode", None, None, "a setting of SGLang's servers"),
    Row(
        "--sglang-speculative-algorithm",
        None,
        ask("speculative decoding: --vllm-speculative-config, or a server's own flags"),
    ),
    Row("--sglang-*", None, None, "a setting of SGLang's servers; --vllm-engine-kwargs has what has no flag"),
    Row("--sglang-speculative-num-steps", None, None, "with --sglang-speculative-algorithm"),
    Row("--sglang-speculative-eagle-topk", None, None, "with --sglang-speculative-algorithm"),
    Row("--sglang-speculative-num-draft-tokens", None, None, "with --sglang-speculative-algorithm"),
    Row("--update-weight-buffer-size", None, None, "weights go to the engine in bounded buckets"),
    Row("--update-weights-interval", None, differs("the engine gets the weights before every rollout", "1")),
    Row("--rollout-function-path", None, ask("a rollout of your own: docs/customise.md says what can be replaced")),
    Row("--custom-generate-function-path", None, ask(TURNS)),
    Row("--use-fault-tolerance", None, None, "lost servers are always excluded and probed again"),
    Row("--rollout-health-check-interval", None, None, "servers are probed"),
)

ALGORITHM = (
    Row("--advantage-estimator", "--advantage-estimator", ESTIMATORS),
    Row("--advantage-estimator", "--loss-type", LOSSES),
    Row("--loss-type", None, None, "policy_loss: --loss-type names the policy loss here"),
    Row(
        "--calculate-per-token-loss",
        "--loss-type",
        Conversion("dapo", lambda value, settings: _average(settings)),
        "an average over the tokens of the update",
    ),
    Row("--eps-clip", "--epsilon"),
    Row(
        "--eps-clip-high",
        "--epsilon-high",
        upper_bound("cispo", lambda s: _average(s) == "cispo"),
    ),
    Row("--eps-clip-c", "--dual-clip"),
    Row("--use-kl-loss", None, None, "--beta above 0 switches the KL term on"),
    Row("--kl-loss-coef", "--beta", only_if("with --use-kl-loss", _kl_loss)),
    Row(
        "--kl-loss-type",
        "--kl-estimator",
        only_if("with --use-kl-loss", _kl_loss, choice({"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"})),
    ),
    Row("--use-unbiased-kl", "--kl-estimator", fixed("unbiased")),
    Row("--kl-coef", "--beta", only_if(PENALISED, _penalised)),
    Row("--kl-coef", "--kl-in-reward", only_if(PENALISED, _penalised, ON)),
    Row("--disable-grpo-std-normalization", "--scale-rewards", fixed("none")),
    Row("--disable-rewards-normalization", None, ask("--advantage-estimator: every estimator here has a baseline")),
    Row("--normalize-advantages", "--scale-rewards", fixed("batch")),
    Row("--lambd", None, None, "there is no critic"),
    Row(
        "--use-tis",
        "--rollout-importance-sampling-mode",
        fixed("token_truncate"),
    ),
    Row(
        "--tis-clip",
        "--rollout-importance-sampling-threshold",
        only_if("with --use-tis", lambda s: s.true("--use-tis")),
    ),
    Row(
        "--tis-clip-low",
        None,
        differs(
            "--rollout-importance-sampling-mode icepop alone has a lower bound, below which tokens are masked", "0"
        ),
    ),
    Row(
        "--custom-tis-function-path",
        None,
        ask("--rollout-importance-sampling-mode token_mask, sequence_mask or icepop"),
    ),
    Row("--use-rollout-logprobs", None, differs("the ratio has the trainer's old log-probabilities")),
    Row("--use-routing-replay", "--router-replay-mode", fixed("R2")),
    Row("--use-rollout-routing-replay", "--router-replay-mode", fixed("R3")),
    Row("--use-opsm", None, None, "--off-policy-sequence-mask-delta switches it on"),
    Row("--opsm-delta", "--off-policy-sequence-mask-delta", only_if("with --use-opsm", lambda s: s.true("--use-opsm"))),
    Row(
        "--ref-update-interval",
        "--ref-model-sync-steps",
        scaled(ROLLOUTS, updates_per_rollout),
        "with --sync-ref-model --ref-model-mixup-alpha 1",
    ),
    Row("--get-mismatch-metrics", None, None, "--mismatch-sample-rate 1 is the default"),
    Row("--use-opd", None, None, "--teacher-kl-coef switches it on"),
    Row("--opd-kl-coef", "--teacher-kl-coef", only_if("with --use-opd", lambda s: s.true("--use-opd"))),
    Row("--opd-type", None, None, "--teacher-load-hf, or --teacher-server"),
    Row("--opd-teacher-load", None, ask("--teacher-load-hf takes a Hugging Face directory")),
    Row(
        "--custom-loss-function-path", "--external-plugins", None, "register it with @register_loss: docs/customise.md"
    ),
    Row("--custom-advantage-function-path", "--external-plugins", None, "register it with @register_advantage"),
    Row("--disable-compute-advantages-and-returns", None, ask("supervised training is not supported")),
    Row("--log-probs-chunk-size", None, None, "the head always computes log-probabilities in chunks"),
    Row("--recompute-loss-function", None, None, "the head computes in chunks, with its own backward"),
)

REWARDS = (
    Row(
        "--rm-type",
        "--reward-funcs",
        choice(
            {"math": "accuracy", "deepscaler": "accuracy", "dapo": "accuracy", "gsm8k": "gsm8k"},
            "docs/rewards.md lists the rewards",
        ),
    ),
    Row("--custom-rm-path", "--external-plugins", None, "register the function with @register_reward: docs/rewards.md"),
    Row("--group-rm", None, None, "register the reward with @register_group_reward"),
    Row("--rm-url", None, ask("--reward-model NAME=URL, with NAME in --reward-funcs")),
    Row("--reward-key", None, None, "a reward function returns a number"),
    Row(
        "--custom-reward-post-process-path",
        None,
        ask("--advantage-estimator and --scale-rewards turn rewards into advantages"),
    ),
)

CHECKPOINTS = (
    Row("--hf-checkpoint", "--load-hf", None, "weights, architecture and tokenizer"),
    Row("--ref-load", None, None, "the policy's initial weights are the reference; --ref-load-hf gives another one"),
    Row("--moe-token-dispatcher-type", "--moe-token-dispatcher-type", DISPATCHER),
    Row("--moe-enable-deepep", None, None, NO_DEEPEP),
    Row("--moe-token-drop-policy", None, None, "no token is dropped"),
    *fp8_rows("--fp8-format", "--fp8-recipe", "--fp8-param-gather"),
    *more_fp8_rows("--", "-"),
    Row(
        "--moe-layer-freq",
        "--moe-layer-freq",
        PATTERN,
    ),
    Row("--hybrid-override-pattern", "--hybrid-layer-pattern", PATTERN, "an earlier name of Megatron-LM's"),
    Row("--is-hybrid-model", None, None, "--load-hf names the family"),
    Row("--hybrid-attention-ratio", None, None, "--hybrid-layer-pattern; --load-hf reads it from config.json"),
    Row("--hybrid-mlp-ratio", None, None, "--hybrid-layer-pattern; --load-hf reads it from config.json"),
    Row(
        "--spec",
        None,
        Conversion("a family of docs/models.md: --load-hf names it; another layer is left to you", _spec),
    ),
    Row("--custom-model-provider-path", None, ask("--load-hf names the family; docs/customise.md for other models")),
    Row("--use-gated-attention", None, None, "--attention-output-gate; --load-hf reads it from config.json"),
    Row("--enable-mtp-training", None, None, "--mtp-loss-scaling-factor trains these layers"),
    Row("--data-pad-size-multiplier", None, None, "packs are padded as TP and CP need"),
    Row("--model-name", None, None, "--model-family; --load-hf names it"),
    Row("--enable-experimental", None, None, "a flag of Megatron-LM's own loop"),
    Row("--no-offload-train", None, None, "--offload-model switches it on"),
    Row("--no-offload-rollout", None, None, "--sleep-level switches it on"),
    Row("--load", None, None, "--load DIR resumes a run of this program"),
    Row("--no-save-optim", None, None, "a checkpoint always holds the optimizer"),
    Row("--save-hf", "--save-hf"),
    Row("--megatron-to-hf-mode", None, None, "--load-hf needs no bridge"),
    Row("--use-wandb", None, None, "--wandb-project switches it on"),
    Row("--wandb-group", "--wandb-exp-name"),
    Row("--wandb-key", None, None, "WANDB_API_KEY in the environment"),
    Row("--wandb-team", "--wandb-entity"),
    Row("--wandb-dir", "--wandb-save-dir"),
    Row("--wandb-host", None, None, "WANDB_BASE_URL in the environment"),
    Row("--use-tensorboard", None, None, "--tensorboard-dir switches it on"),
    Row("--tb-project-name", "--tensorboard-dir"),
    Row("--save-debug-rollout-data", "--ledger"),
    Row("--load-debug-rollout-data", "--train-only"),
    Row("--runtime-env-json", None, None, "there is no Ray"),
    Row("--debug-train-only", None, None, "--train-only DIR trains on the rollouts of a ledger"),
    Row("--debug-rollout-only", "--rollout-only"),
    Row("--custom-megatron-init-path", None, ask("docs/customise.md says what can be replaced")),
)


def _decide(settings: Settings) -> list[str]:
    points = [
        "the answers: slime reads --label-key; rewards here read answer, solution or ground_truth (docs/data.md)",
        "--load-hf: slime reads the weights from a Megatron checkpoint (--load, --ref-load); here from --hf-checkpoint",
    ]
    if settings.given("--custom-rm-path"):
        points.append(f"--custom-rm-path: {REGISTER}")
    return points


SYSTEM = System(
    name="slime",
    sources="THUDM/slime: scripts, examples, slime/utils/arguments.py",
    rows=tuple(chain(BATCH, DATA, ENGINE, ALGORITHM, REWARDS, CHECKPOINTS)),
    implied=(
        ("--bf16", constant(True), "slime trains in bfloat16"),
        ("--transformer-impl", constant("local"), "transformer_engine where it is installed"),
        ("--beta", constant("0"), "no KL term without --use-kl-loss"),
        ("--loss-type", _average, "slime averages over completions"),
        ("--num-generations", constant("1"), "slime's default"),
        ("--use-distributed-optimizer", constant(True), "on there"),
        ("--sleep-level", lambda s: "2" if s.true("--colocate") else None, "of --colocate"),
        ("--offload-model", lambda s: True if s.true("--colocate") else None, "of --colocate"),
        ("--offload-gradients", lambda s: True if s.true("--colocate") else None, "of --colocate"),
        (
            "--offload-optimizer",
            lambda s: True if s.true("--colocate") and not s.true("--optimizer-cpu-offload") else None,
            "of --colocate",
        ),
        ("--reward-funcs", constant("accuracy"), "not given there"),
        (
            "--answer-extraction",
            lambda s: "line" if s.text("--rm-type") == "dapo" else None,
            'of --rm-type dapo, which reads a last line "Answer: ..."',
        ),
    ),
    decide=_decide,
)
