"""The one place that documents metrics: what each means, under which heading it stands, and its remedy.

A remedy says what to do when the metric goes wrong; one whose key ends with a slash is that of a family (``memory/``).
"""

import re
from collections.abc import Iterable

from megatron_grpo.algorithm.registry import LOSSES

METRICS = {
    "reward/mean": "mean over completions of the weighted sum of the reward functions",
    "reward/std": "mean over prompts of the standard deviation of that sum over a prompt's completions",
    "reward/<function>/mean": "mean over completions of one reward function, unweighted",
    "reward/<function>/std": "standard deviation over all completions of one reward function, unweighted",
    "reward/<function>/min": "smallest value of one reward function",
    "reward/<function>/max": "largest value of one reward function",
    "reward/kl_penalty": "mean over completions of what --kl-in-reward subtracts: beta times the sum of k1",
    "advantage/mean": "mean over completions of the advantage (of a completion: the mean over its tokens)",
    "teacher/kl": "KL divergence of the old policy from the teacher: mean over tokens of log p(old) - log p(teacher)",
    "advantage/std": "standard deviation over completions of the same",
    "reward/zero_std_groups": "share of prompts whose completions all have the same reward (no signal)",
    "reward/failures": "calls of reward functions that raised, hung or gave no number",
    "sampling/resampled_groups": "groups without signal that --dynamic-sample replaced in this rollout",
    "sampling/rounds": "most replacements one after the other for one of its groups",
    "sampling/aborted_groups": "groups that were begun and not needed (--over-sampling-ratio); their prompts come next",
    "completion/length_mean": "mean length of a completion, tokens",
    "completion/length_min": "length of the shortest completion, tokens",
    "completion/length_max": "length of the longest completion, tokens",
    "completion/truncated": "share of completions cut off at --max-completion-length",
    "loss": "the loss that was differentiated, KL term included",
    "kl": "mean k3 estimate of KL(policy || reference) over completion tokens, whatever --kl-estimator",
    "entropy": "mean entropy of the policy's next-token distribution over completion tokens, nats",
    "clip/low": "share of completion tokens whose ratio is clipped below (advantage < 0)",
    "clip/high": "share of completion tokens whose ratio is clipped above (advantage > 0; --loss-type cispo: any)",
    "clip/masked": "share of completion tokens whose policy term is left out (entropy, clip-cov, m2po, off-policy)",
    "ratio/min": "smallest probability ratio new/old of a completion token",
    "ratio/max": "largest probability ratio new/old of a completion token",
    "grad_norm": "L2 norm of the gradient over all parameters, before clipping",
    "params_norm": "L2 norm of all parameters after the update (--log-params-norm)",
    "moe/balance_loss": "the routers' load-balancing loss before its coefficient, mean over layers: 1 when all is even",
    "lr": "learning rate of this update",
    "mismatch/mean_abs": "mean |log p(trainer) - log p(engine)| of the sampled tokens, nats",
    "mismatch/max_abs": "largest |log p(trainer) - log p(engine)| of a sampled token, nats",
    "mismatch/kl": "mean k3 estimate of KL(engine || trainer) over the sampled tokens, nats a token",
    "mismatch/perplexity_ratio": "perplexity of the sampled tokens under the trainer over that under the engine",
    "mismatch/effective_sample_size": "(sum r)^2 / (n sum r^2) over tokens, r = p(trainer) / p(engine): at most 1",
    "mismatch/clipped": "share of completion tokens that --rollout-importance-sampling-mode truncates or masks",
    "eval/greedy_reward": "mean reward of greedy completions of the held-out prompts",
    "eval/greedy_accuracy": "share of held-out prompts whose greedy completion is right",
    "eval/sampled_reward": "mean reward of sampled completions of the held-out prompts",
    "eval/sampled_accuracy": "share of sampled completions of the held-out prompts that are right",
    "eval/pass_at_<k>": "share of held-out prompts of which one of k sampled completions is right, k = 1, 2, 4 ...",
    "tokens/update": "prompt and completion tokens that this update trained on",
    "tokens/rollout": "tokens of the rollout's completions, in the row of its first update",
    "flops/update": "TFLOP of the model's forward and backward passes in this update, all devices, no recomputation",
    "tokens/total": "tokens/update, since the start of the run",
    "consumed/prompts": "training prompts used since the start of the run",
    "consumed/left_out": "rows whose turn came and that were left out (streamed data only), since the start of the run",
    "memory/peak": "most GiB that this process's tensors took on the device at a time since the row before",
    "memory/train": "GiB in use on the device, by all processes, at the end of the updates",
    "memory/sync": "as memory/train, when the engine has taken over the weights",
    "memory/rollout": "as memory/train, when generation begins",
    "memory/asleep": "as memory/train, when the engine has given back what --sleep-level says",
    "time/rollout": "seconds for generating completions",
    "time/offload": "seconds for moving the trainer's tensors to host memory and back (--offload-model and the like)",
    "time/scoring": "seconds for the reward functions",
    "time/logprobs": "seconds for forward-only passes: old policy and reference",
    "time/update": "seconds for forward, backward and optimizer",
    "time/sync": "seconds for sending the weights to the engine",
    "time/save": "seconds for saving a checkpoint (a save is counted in the row that follows it)",
    "time/eval": "seconds for evaluation",
    "time/step": "seconds of wall clock since the row before",
    "perf/tokens_per_second": "tokens/update over time/step",
    "perf/mfu": "flops/update over time/update and what the devices could do then (--device-peak-tflops)",
    "perf/tokens_per_second_per_device": "perf/tokens_per_second over the training processes",
    "perf/update_tokens_per_second": "tokens/update over time/update",
    "perf/rollout_tokens_per_second": "tokens/rollout over time/rollout, of all engines",
    "perf/tflops_per_device": "flops/update over time/update and the training processes, TFLOP/s",
}

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
    "flops": "Amounts",
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
    "completion/length_min": "0 or 1: the model ends at once; check the prompt's end and the chat template.",
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
    "ratio/min": "Near 0: as ratio/max, of tokens that became unlikely.",
    "ratio/max": "Far above 1 in the first update of a rollout: engine or old policy disagree with the trainer, see "
    "mismatch/*. In later updates: lower --lr, or bound it with --delta.",
    "grad_norm": "Spikes: lower --clip-grad or --lr, raise the batch. Not finite: look for inf in the rewards, try "
    "--bf16 in place of --fp16. 0: no signal, see reward/zero_std_groups.",
    "params_norm": "Growing steadily: --weight-decay, a lower --lr. Jumping: see grad_norm.",
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
    "tokens/rollout": "A count: completion/length_mean times the completions of a rollout.",
    "flops/update": "A count: perf/mfu is made of it.",
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
    "perf/mfu": "Below some 0.3 in 16 bits: larger --max-tokens-per-microbatch, less recomputation, fused kernels, "
    "less tensor parallelism; docs/performance.md has a measured step.",
    "perf/tokens_per_second_per_device": "Falling with more devices: see which of time/* does not shrink.",
    "perf/update_tokens_per_second": "As time/update.",
    "perf/rollout_tokens_per_second": "As time/rollout.",
    "perf/tflops_per_device": "As perf/mfu.",
    "perf/tokens_per_second": "Falling in a run: completions grow longer, or the host swaps; compare the time/* rows.",
}


def documented(name: str) -> str | None:
    """The name under which METRICS has a metric: ``reward/<function>/mean`` for ``reward/f1/mean``; None for none."""
    if name in METRICS:
        return name
    patterns = ((known, re.sub("<.*?>", "[^/]+", known)) for known in METRICS if "<" in known)
    return next((known for known, pattern in patterns if re.fullmatch(pattern, name)), None)


def check_names(metrics: Iterable[str]) -> None:
    """Raise KeyError for a metric that is not in METRICS, unless its prefix is a loss type, which then returned it."""
    for name in metrics:
        if documented(name) is None and name.partition("/")[0] not in LOSSES.entries:
            raise KeyError(f"metric {name!r} is not documented in megatron_grpo.observability.metric_guide.METRICS")


def remedy(name: str) -> str:
    """The remedy of a metric, of its family where that has one for all (``memory/``), or ``""``."""
    return REMEDIES.get(name) or REMEDIES.get(name.partition("/")[0] + "/") or ""


def heading(name: str) -> str:
    """The heading, one of ``TITLES``, under which a metric stands: its prefix decides."""
    prefix, slash, _ = name.partition("/")
    return HEADINGS.get(prefix if slash else "", "Other")
