"""Flags that do not go together, and words of the message that refuses them; test_flag_combinations.py mixes them.

A row a rule: add yours here, or to REFUSED of test_validation.py, which is taken too. Each comes on top of a good run's
flags (test_validation.MODEL and RUN, 8 ranks).
"""

CONFLICTS = {
    # reuse and sampling
    "--max-resample-times 2": "--dynamic-sample",
    "--dynamic-sample --max-resample-times 0": "--max-resample-times (0) must be greater than 0",
    "--dynamic-sample --rollout-balancing dynamic": "--rollout-balancing dynamic cannot both be given",
    "--over-sampling-ratio 2 --rollout-balancing dynamic": "--rollout-balancing dynamic cannot both be given",
    "--dynamic-sample --advantage-estimator reinforce_plus_plus --beta 0": "learns from them too",
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
    "--structured-outputs-regex a --m2po-threshold 0.04": "cannot go with --m2po-threshold",
    "--structured-outputs-regex a --off-policy-sequence-mask-delta 1": "cannot go with --off-policy-sequence-mask",
    "--structured-outputs-regex a --rollout-importance-sampling-mode icepop": "--rollout-importance-sampling-mode",
    "--truncation-strategy right": "invalid choice",
    # reward models
    "--reward-model a": "--reward-model a: expected NAME=VALUE",
    "--reward-model a=http://h:1 a=http://h:2": "expected NAME=VALUE, each name once",
    "--reward-model a=http://h:1": "--reward-model a: name it in --reward-funcs as well",
    "--reward-funcs a --reward-model a=ftp://h": "no server's address",
    "--reward-funcs a --reward-model a=http://me:key@h:1": "must not hold a key",
    "--reward-funcs a --reward-model a=absent": "no Hugging Face model directory",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-timeout 0": "--reward-model-timeout (0.0) must be gr",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-concurrency 0": "must be greater than 0",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-max-tokens 9": "needs --reward-model-template",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-pattern a=(.)": "needs --reward-model-template",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-pattern b=(.)": "there is no --reward-model b",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-template a=absent.txt": "cannot be read",
    "--reward-funcs a --reward-model a=model --reward-model-plugin a=mine": "a judge is asked over HTTP",
    "--reward-funcs a --reward-model a=http://h:1 --reward-model-plugin a=b --reward-model-pattern a=(.)": "leave out",
    "--reward-model-template a=judge.txt": "--reward-model-template needs --reward-model",
    "--reward-model-timeout 5": "--reward-model-timeout needs --reward-model",
    # ends and schedules
    "--exit-duration-in-mins 5": "--save",
    "--exit-signal-handler": "--save",
    "--save out --exit-duration-in-mins 0": "--exit-duration-in-mins (0) must be greater than 0",
    "--start-weight-decay 0.1": "--weight-decay-incr-style linear or cosine",
    "--end-weight-decay 0.1": "--weight-decay-incr-style linear or cosine",
    "--weight-decay-incr-style linear": "--start-weight-decay is missing",
    "--weight-decay-incr-style cosine --start-weight-decay 0.1": "--end-weight-decay is missing",
    "--weight-decay-incr-style linear --start-weight-decay -1 --end-weight-decay 0.1": "must not be negative",
    "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1 --weight-decay 1": "each says",
    "--clip-grad -1": "--clip-grad (-1.0) must not be negative",
    "--lr-decay-iters 0": "--lr-decay-iters (0) must be greater than 0",
    "--lr-decay-iters 5 --lr-warmup-iters 5": "--lr-warmup-iters (5) must be at least 0 and less than",
    # what argparse refuses
    "--lr fast": "invalid float value",
    "--num-iterations 1.5": "invalid int value",
    "--loss-type ppo": "invalid choice",
    "--dynamic-sample yes": "unexpected argument",
    "--dynamic-sampling": "did you mean",
}

# What makes no difference to any rule: thrown in between.
HARMLESS = (
    "--seed 7",
    "--log-interval 2",
    "--reward-workers 2",
    "--adam-beta2 0.95",
    "--distributed-timeout-minutes 20",
    "--system-prompt brief",
    "--min-p 0.0",
    "--no-shuffle",
    "--curriculum",
    "--scale-rewards batch",
    "--lr-decay-style cosine",
)
