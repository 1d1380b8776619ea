"""Conflicting flags and words of their error message; test_flag_combinations.py combines them.

One row per rule: add new rules here, or to REFUSED of test_validation.py, which the test also uses. The flags of a row
are added to those of a valid run (good_args.MODEL and RUN, 8 ranks).
"""

PLACED = "--rollout-ranks 2"
OVER_SERVERS = f"{PLACED} --vllm-mode server --vllm-server-base-url http://localhost:1 http://localhost:2"
STALE = f"{PLACED} --max-staleness 2 --rollout-importance-sampling-mode token_truncate"
PARTIAL = "--partial-rollouts --max-staleness 2 --rollout-importance-sampling-mode token_truncate"

CONFLICTS = {
    # reuse and sampling
    "--max-resample-times 2": "--dynamic-sample",
    "--dynamic-sample --max-resample-times 0": "--max-resample-times (0) must be greater than 0",
    "--dynamic-sample --rollout-balancing dynamic": "--rollout-balancing dynamic cannot both be given",
    "--over-sampling-ratio 2 --rollout-balancing dynamic": "--rollout-balancing dynamic cannot both be given",
    "--dynamic-sample --advantage-estimator reinforce_plus_plus --beta 0": "learns from them too",
    "--max-staleness 1": "--max-staleness 1 needs --partial-rollouts",
    "--partial-rollouts": "--partial-rollouts needs --max-staleness of at least 1",
    "--partial-rollouts --max-staleness 1": "--rollout-importance-sampling-mode is missing: --partial-rollouts trains",
    f"{PARTIAL} --vllm-mode server --vllm-server-base-url http://localhost:1": "needs an engine in the training",
    f"{PARTIAL} --dynamic-sample": "--dynamic-sample and --partial-rollouts cannot both",
    f"{PARTIAL} --over-sampling-ratio 2": "it throws away what partial rollouts continue",
    f"{PARTIAL} --rollout-balancing dynamic": "each replica continues its own completions",
    f"{PARTIAL} --weight-update drain": "--weight-update drain and --partial-rollouts cannot both",
    f"{PARTIAL} --weight-update keep --rollout-engine megatron": "--weight-update keep with --partial-rollouts needs",
    f"{PARTIAL} --presence-penalty 1": "--presence-penalty and --partial-rollouts",
    f"{PARTIAL} --frequency-penalty 1": "--frequency-penalty and --partial-rollouts",
    f"{PARTIAL} --structured-outputs-regex a": "cannot be used with --partial-rollouts: a continued completion",
    "--weight-update keep": "--weight-update needs --rollout-ranks",
    "--rollout-ranks 3 --vllm-tensor-parallel-size 2": "--rollout-ranks (3) must be divisible by --vllm-tensor",
    f"{PLACED} --max-staleness 2": "--max-staleness 2 trains on tokens of older weights",
    f"{PLACED} --rollout-engine megatron": "--rollout-ranks runs vLLM on these ranks",
    f"{OVER_SERVERS} --stop-words a": "which sees no stop word across its begin",
    f"{OVER_SERVERS} --structured-outputs-regex a": "whose constraint begins again",
    f"{OVER_SERVERS} --top-k 4": "--top-k and --rollout-ranks with servers cannot both",
    f"{OVER_SERVERS} --rollout-ranks 4": "--rollout-ranks 4 is more than the 2 servers",
    f"{STALE} --partial-rollouts": "--partial-rollouts and --rollout-ranks cannot both",
    f"{PLACED} --offload-model": "--offload-model and --rollout-ranks cannot both",
    f"{PLACED} --offload-gradients": "--offload-gradients and --rollout-ranks cannot both",
    f"{PLACED} --offload-optimizer": "--offload-optimizer and --rollout-ranks cannot both",
    f"{PLACED} --check-weight-sync": "the engines are probed at all new weights",
    f"{PLACED} --over-sampling-ratio 2": "the engines finish every group",
    f"{PLACED} --rollout-balancing dynamic": "they always balance",
    f"{OVER_SERVERS} --lora-rank 4 --lora-weight-sync adapter --weight-sync-method checkpoint": (
        "servers of --rollout-ranks receive whole weights"
    ),
    f"{STALE} --presence-penalty 1": "--presence-penalty and --rollout-ranks with --max-staleness cannot both",
    f"{STALE} --weight-update drain --frequency-penalty 1": "--frequency-penalty and --rollout-ranks with --max-stale",
    f"{OVER_SERVERS} --weight-sync-method checkpoint --presence-penalty 1": (
        "--presence-penalty and --rollout-ranks with servers cannot both"
    ),
    f"{STALE} --structured-outputs-regex a": "whose constraint begins again",
    "--loss-type dpo --partial-rollouts --max-staleness 2 --structured-outputs-regex a": "constraint begins again",
    f"{STALE} --model-family qwen3_moe --num-experts 8 --router-replay-mode R3": "R3 needs --weight-update drain",
    "--over-sampling-ratio 0.5": "--over-sampling-ratio (0.5) must lie between 1",
    "--over-sampling-ratio nan": "finite",
    "--min-pass-rate -0.1": "--min-pass-rate (-0.1) must lie between 0 and 1",
    "--max-pass-rate 1.1": "--max-pass-rate (1.1) must lie between 0 and 1",
    "--min-pass-rate 0.8 --max-pass-rate 0.2": "no prompt would be left",
    "--structured-outputs-regex (a": "unterminated",
    "--structured-outputs-regex a --rollout-engine megatron": "needs --rollout-engine vllm",
    "--structured-outputs-regex a --rollout-engine sglang --sglang-server-base-url http://localhost:1": "engine vllm",
    "--structured-outputs-regex a --ignore-eos": "--ignore-eos",
    "--structured-outputs-regex a --tokenizer-type SentencePieceTokenizer": "HuggingFaceTokenizer",
    "--structured-outputs-regex a --m2po-threshold 0.04": "cannot be used with --m2po-threshold",
    "--structured-outputs-regex a --off-policy-sequence-mask-delta 1": "cannot be used with --off-policy-sequence-mask",
    "--structured-outputs-regex a --rollout-importance-sampling-mode icepop": "--rollout-importance-sampling-mode",
    "--truncation-strategy right": "invalid choice",
    # reward models
    "--reward-model a": "--reward-model a: expected NAME=VALUE",
    "--reward-model a=http://h:1 a=http://h:2": "expected NAME=VALUE, with a different NAME for each value",
    "--reward-model a=http://h:1": "--reward-model a: --reward-funcs does not name it: add a there",
    "--reward-funcs a --reward-model a=ftp://h": "not a server's address",
    "--reward-funcs a --reward-model a=http://me:key@h:1": "must not contain a key",
    "--reward-funcs a --reward-model a=absent": "not a Hugging Face model directory",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-timeout 0": "--reward-model-timeout (0.0) must be gr",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-concurrency 0": "must be greater than 0",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-max-tokens 9": "needs --reward-model-template",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-pattern a=(.)": "needs --reward-model-template",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-pattern b=(.)": "there is no --reward-model b",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-template a=absent.txt": "cannot be read",
    "--reward-funcs a --reward-model a=model --reward-model-plugin a=mine": "a judge must be a server",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-plugin a=b --reward-model-pattern a=(.)": (
        "remove --reward-model-template"
    ),
    "--reward-model-template a=judge.txt": "--reward-model-template needs --reward-model",
    "--reward-model-timeout 5": "--reward-model-timeout needs --reward-model",
    # ends and schedules
    "--exit-duration-in-mins 5": "--save",
    "--exit-signal-handler": "--save",
    "--exit-grace-seconds 5": "--exit-grace-seconds needs --exit-signal-handler",
    "--on-bad-update restore": "needs --save and --save-interval",
    "--bad-update-factor 1": "--bad-update-factor (1.0) must be greater than 1",
    '--watchdog-phase-timeouts {"saves":1}': "no phase 'saves'",
    "--save out --exit-duration-in-mins 0": "--exit-duration-in-mins (0) must be greater than 0",
    "--start-weight-decay 0.1": "--weight-decay-incr-style linear or cosine",
    "--end-weight-decay 0.1": "--weight-decay-incr-style linear or cosine",
    "--weight-decay-incr-style linear": "--start-weight-decay is missing",
    "--weight-decay-incr-style cosine --start-weight-decay 0.1": "--end-weight-decay is missing",
    "--weight-decay-incr-style linear --start-weight-decay -1 --end-weight-decay 0.1": (
        "--start-weight-decay (-1.0) must lie between 0 and 1e+09"
    ),
    "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1 --weight-decay 1": "each sets",
    "--clip-grad -1": "--clip-grad (-1.0) must lie between 0 and 1e+09",
    "--lr-decay-iters 0": "--lr-decay-iters (0) must be greater than 0",
    "--lr-decay-iters 5 --lr-warmup-iters 5": "--lr-warmup-iters (5) must be at least 0 and less than",
    # errors of argparse
    "--lr fast": "invalid float value",
    "--num-iterations 1.5": "invalid int value",
    "--loss-type ppo": "invalid choice",
    "--dynamic-sample yes": "unexpected argument",
    "--dynamic-sampling": "did you mean",
}

# Flags without effect on any rule, inserted between the others.
HARMLESS = (
    "--seed 7",
    "--log-interval 2",
    "--reward-workers 2",
    "--adam-beta2 0.95",
    "--distributed-timeout-minutes 20",
    "--system-prompt brief",
    "--min-p 0.0",
    "--no-shuffle",
    "--no-shuffle-completions",
    "--curriculum",
    "--scale-rewards batch",
    "--lr-decay-style cosine",
)

# Rules of advantages and KL, for test_advantage_rules.py.
PLUS_PLUS = "--advantage-estimator reinforce_plus_plus"
ADVANTAGES = {
    f"{PLUS_PLUS} --scale-rewards group": "divides by the standard deviation over the batch, so --scale-rewards group",
    f"{PLUS_PLUS}_baseline --scale-rewards none": "so --scale-rewards none has no effect",
    "--advantage-estimator gdpo --scale-rewards none --reward-funcs a b": "so --scale-rewards none has no effect",
    "--advantage-estimator gdpo --reward-funcs a": "--reward-funcs names only one: give --advantage-estimator grpo",
    "--advantage-estimator gdpo --reward-funcs a b --kl-in-reward": "gdpo normalises each reward function separately",
    "--pass-at-k 2": "--pass-at-k has no effect with --advantage-estimator grpo: leave it out",
    "--advantage-estimator pass_at_k": "--advantage-estimator pass_at_k needs --pass-at-k",
    "--advantage-estimator pass_at_k --pass-at-k 9": "(9) must lie between 2 and --num-generations (8)",
    "--advantage-estimator pass_at_k --pass-at-k 1": "for k = 1 use --advantage-estimator rloo",
    "--advantage-estimator pass_at_k --pass-at-k 4 --kl-in-reward": "the KL penalty would not apply to the others",
    f"{PLUS_PLUS} --gamma 0": "--gamma (0.0) must be greater than 0",
    f"{PLUS_PLUS} --gamma 1.5": "--gamma (1.5) must be greater than 0 and at most 1",
    "--gamma 0.9": "--gamma has no effect with --advantage-estimator grpo",
    "--beta -1": "--beta (-1.0) must lie between 0 and 1e+09",
    "--beta 0 --kl-in-reward": "--kl-in-reward needs --beta",
    "--beta 0 --kl-estimator k2": "--kl-estimator needs --beta",
    "--kl-estimator k1": "its gradient has mean zero: give k2, k3 or unbiased",
    "--kl-in-reward --kl-estimator k3": "--kl-estimator k3 in the reward does not",
    f"{PLUS_PLUS} --gamma 0.9 --loss-type real": "--loss-type real needs the sign of a completion's advantage",
    f"{PLUS_PLUS} --kl-in-reward --loss-type gmpo": "with --kl-in-reward each token has its own",
    f"{PLUS_PLUS} --gamma 0.9 --off-policy-sequence-mask-delta 1": "--off-policy-sequence-mask-delta needs the sign",
    f"{PLUS_PLUS} --num-generations 1 --loss-type real": "--num-generations (1) must be at least 2",
    "--num-generations 1": "(1) must be at least 2: --advantage-estimator grpo compares the completions",
    "--micro-batch-size 2 --max-tokens-per-microbatch 4096": "--micro-batch-size (2) and --max-tokens-per-microbatch "
    "(4096) cannot both be given",
    "--max-tokens-per-microbatch 4096 --loss-type bnpo": "--loss-type bnpo needs --micro-batch-size",
}
