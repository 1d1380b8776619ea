"""What a reader of metrics needs beside ``metrics.METRICS``: under which heading each stands, and its remedy.

A remedy says what to do when the metric goes wrong; one whose key ends with a slash is that of a family (``memory/``).
"""

HEADINGS = {
    "reward": "Rewards",
    "advantage": "Rewards",
    "eval": "Evaluation",
    "": "Learning",
    "clip": "Learning",
    "teacher": "Learning",
    "ratio": "Learning",
    "moe": "Learning",
    "completion": "Completions",
    "sampling": "Completions",
    "mismatch": "Trainer and engine",
    "perf": "Time",
    "time": "Time",
    "memory": "Memory",
    "tokens": "Amounts",
    "consumed": "Amounts",
}
TITLES = (*dict.fromkeys(HEADINGS.values()), "Other")

REMEDIES = {
    "reward/mean": "Flat at its start: see reward/zero_std_groups (no signal) and read completions.jsonl. Rising while "
    "eval/* falls: the reward is being gamed; make it stricter. Collapsing: lower --lr, raise --beta.",
    "reward/std": "Near 0: completions of a prompt are equally good, so nothing is learned. Raise --temperature or "
    "--num-generations, or take prompts of medium difficulty.",
    "reward/<function>/mean": "One function rising alone while others fall: change --reward-weights.",
    "reward/<function>/std": "0: this function says the same of everything; it costs time and teaches nothing.",
    "reward/<function>/min": "Outside of what the function should give: it has a mistake.",
    "reward/<function>/max": "As reward/<function>/min; never the full score: too hard, or the answer is not found.",
    "reward/kl_penalty": "Large beside reward/mean: the penalty rules; lower --beta.",
    "advantage/": "A standard deviation near 0: no signal, see reward/zero_std_groups. A mean far from 0: unequal "
    "lengths or groups; it is no error by itself.",
    "reward/zero_std_groups": "Near 1: prompts are too hard or too easy for the model. Change the data, raise "
    "--num-generations, or begin with supervised training.",
    "reward/failures": "Above 0: the log names the function and the completion. Mend the function, or raise "
    "--reward-timeout; such completions are left out, not counted as 0.",
    "sampling/": "Much replaced or given back: prompts are too easy or too hard; change the data.",
    "completion/length_mean": "Growing without reward: a length bias of the loss (--loss-type dr_grpo or dapo), or "
    "completions that do not end. Shrinking to nothing: the reward pays for brevity.",
    "completion/length_max": "Always --max-completion-length: see completion/truncated.",
    "completion/truncated": "Above some 0.1: raise --max-completion-length, check that the chat template's end token "
    "is the tokenizer's, or keep cut ones out of the loss with --overlong-filter.",
    "loss": "No measure of progress: advantages are centred, so it stays near 0. Not finite: see grad_norm.",
    "kl": "Growing fast: the policy leaves the reference; lower --lr or raise --beta. With --beta 0 it is 0: there is "
    "no reference.",
    "entropy": "Falling to 0 early: the policy stops to explore; raise --epsilon-high or --entropy-coef, lower --lr, "
    "try --clip-cov-ratio. Rising steadily: the policy dissolves; lower --lr and check the rewards.",
    "teacher/kl": "Not falling: raise --teacher-kl-coef, or the teacher's vocabulary or chat template is another's.",
    "clip/low": "Above some 0.2: updates of one rollout go too far; lower --lr, --num-iterations or "
    "--steps-per-generation.",
    "clip/high": "As clip/low; if unlikely tokens never gain, raise --epsilon-high.",
    "clip/masked": "Near 1: next to nothing is learned from; loosen the threshold of the mask that was asked for.",
    "ratio/max": "Far above 1 in the first update of a rollout: engine or old policy disagree with the trainer, see "
    "mismatch/*. In later updates: lower --lr, or bound it with --delta.",
    "grad_norm": "Spikes: lower --clip-grad or --lr, raise the batch. Not finite: look for inf in the rewards, try "
    "--bf16 in place of --fp16. 0: no signal, see reward/zero_std_groups.",
    "moe/balance_loss": "Far above 1: few experts do the work; raise --moe-aux-loss-coeff.",
    "lr": "Not what was meant: --lr-decay-iters counts updates, and so does --lr-warmup-iters.",
    "mismatch/mean_abs": "In float32 about 1e-6, in bfloat16 some 0.01. Larger: run tools/check_engine.py and "
    "--check-weight-sync; then weigh it with --rollout-importance-sampling-mode.",
    "mismatch/max_abs": "Single large values are rounding of unlikely tokens; with a large mean see mismatch/mean_abs.",
    "mismatch/kl": "Growing during a run: training off its policy; --rollout-importance-sampling-mode corrects it, and "
    "--vllm-dtype float32 shows whether precision is the cause.",
    "mismatch/perplexity_ratio": "Away from 1: engine and trainer do not hold the same model; see mismatch/mean_abs.",
    "mismatch/effective_sample_size": "Below some 0.9: corrections rest on few tokens; bring the two nearer (dtype, "
    "--router-replay-mode R3 for experts) instead of raising thresholds.",
    "mismatch/clipped": "Above some 0.05: as mismatch/effective_sample_size.",
    "eval/greedy_reward": "As eval/greedy_accuracy.",
    "eval/greedy_accuracy": "Falling while reward/mean rises: overfitting or a gamed reward; more prompts, fewer "
    "--num-epochs, higher --beta, and go back to an earlier checkpoint.",
    "eval/sampled_reward": "As eval/sampled_accuracy.",
    "eval/sampled_accuracy": "Far below eval/greedy_accuracy: the distribution is broad; it closes with training, or "
    "lower --temperature.",
    "eval/pass_at_<k>": "Falling while eval/sampled_accuracy rises: the policy sharpens what it could do and loses "
    "variety; see entropy. Not above eval/sampled_accuracy: more samples of these prompts give no signal.",
    "tokens/update": "Jumping about: lengths differ much between rollouts; --max-tokens-per-microbatch keeps the "
    "memory bounded.",
    "tokens/total": "A count: an axis to compare runs of different batches along.",
    "consumed/prompts": "A count: over the number of rows it is the number of epochs.",
    "consumed/left_out": "Many: filters take most of the data away, and reading it takes time. Filter the files once.",
    "memory/": "Near the device's size: --offload-optimizer, --offload-model, --sleep-level 2, a smaller "
    "--vllm-gpu-memory-utilization or --max-tokens-per-microbatch; --dry-run estimates them.",
    "time/rollout": "Most of the step: more --vllm-max-num-seqs, a larger --vllm-gpu-memory-utilization, "
    "--rollout-balancing dynamic, no --vllm-enforce-eager; long completions wait for the longest.",
    "time/offload": "Much beside the update: offload less (--offload-gradients is nearly free).",
    "time/scoring": "Much: more --reward-workers, a quicker function; scoring overlaps generation, this is the rest.",
    "time/logprobs": "Avoidable: with one update per rollout and --beta 0 there is no forward-only pass.",
    "time/update": "Most of the step: --max-tokens-per-microbatch, less recomputation, fused kernels; see "
    "docs/performance.md.",
    "time/sync": "Much on servers: another --weight-sync-method.",
    "time/save": "Much: a longer --save-interval.",
    "time/eval": "Much: a longer --eval-interval, --eval-max-prompts.",
    "time/step": "More than its phases together: the host is busy with something else.",
    "perf/tokens_per_second": "Falling in a run: completions grow longer, or the host swaps; compare the time/* rows.",
}


def remedy(name: str) -> str:
    """The remedy of a metric, of its family where that has one for all (``memory/``), or ``""``."""
    return REMEDIES.get(name) or REMEDIES.get(name.partition("/")[0] + "/") or ""


def heading(name: str) -> str:
    """The heading, one of ``TITLES``, under which a metric stands: its prefix decides."""
    prefix, slash, _ = name.partition("/")
    return HEADINGS.get(prefix if slash else "", "Other")
