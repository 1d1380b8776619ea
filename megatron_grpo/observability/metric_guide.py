"""Documentation of every metric: its meaning, its heading and its remedy. Source of docs/metrics.md.

A remedy lists bad values of the metric, their cause and the flags to change. A key with a final slash (``memory/``) is
the remedy of all metrics with this prefix.
"""

import re
from collections.abc import Iterable

from megatron_grpo.algorithm.registry import LOSSES

METRICS = {
    "reward/mean": "mean over completions of the weighted sum of the reward functions",
    "reward/std": "standard deviation of that sum over a prompt's completions, mean over prompts",
    "reward/<function>/mean": "mean over completions of one reward function, unweighted",
    "reward/<function>/std": "standard deviation over all completions of one reward function, unweighted",
    "reward/<function>/min": "smallest value of one reward function",
    "reward/<function>/max": "largest value of one reward function",
    "reward/kl_penalty": "KL penalty subtracted by --kl-in-reward, beta times the sum of k1: mean over completions",
    "advantage/mean": "mean over completions of the advantage (of a completion: the mean over its tokens)",
    "teacher/kl": "KL divergence of the old policy from the teacher: mean over tokens of log p(old) - log p(teacher)",
    "teacher/divergence": "divergence from the teacher, which --loss-type gkd lowers: mean over tokens, in nats",
    "advantage/std": "standard deviation over completions of the advantage",
    "reward/zero_std_groups": "fraction of prompts whose completions all have the same reward (no learning signal)",
    "reward/failures": "calls of reward functions that raised an error, timed out or returned no number",
    "sampling/resampled_groups": "groups without learning signal that --dynamic-sample replaced in this rollout",
    "sampling/rounds": "largest number of successive replacements of one group",
    "sampling/aborted_groups": "started groups that were not needed (--over-sampling-ratio); their prompts come next",
    "staleness/mean": "syncs between the sampling of a token and the batch that trains on it: mean over sampled tokens",
    "staleness/max": "largest such number of a token, at most --max-staleness",
    "staleness/interrupted": "fraction of completions with tokens of several versions of the weights",
    "stream/trainer_wait": "seconds that the trainer waited for a batch of the engines of --rollout-ranks",
    "stream/engine_idle": "seconds since the last batch in which an engine had nothing to generate, mean over replicas",
    "stream/replaced_groups": "groups without learning signal that --dynamic-sample replaced since the first batch",
    "drafts/proposed": "tokens of drafts in the rollout; a stream: since the last batch, without evaluations",
    "drafts/accepted": "those of them that the model accepted",
    "drafts/acceptance_length": "tokens of a completion for each draft: 1 + accepted tokens / drafts",
    "environment/turns": "turns of the policy in an episode (--environment), mean",
    "environment/tokens": "tokens that the environment said in an episode, mean",
    "turns/malformed_calls": "malformed tool calls in a turn of the policy (--tool-call-parser), mean",
    "environment/failed": "fraction of episodes whose environment failed: not scored, and not in the loss",
    "completion/length_mean": "mean length of a completion, tokens that the policy sampled",
    "completion/length_min": "length of the shortest completion, sampled tokens",
    "completion/length_max": "length of the longest completion, sampled tokens",
    "completion/truncated": "fraction of completions truncated at --max-completion-length",
    "dpo/loss": "DPO's loss of an update: mean over pairs (--loss-type dpo)",
    "dpo/margin": "mean over pairs of beta times the difference of their log-ratios to the reference",
    "dpo/accuracy": "fraction of pairs whose better completion has the larger log-ratio to the reference",
    "dpo/pairs": "pairs of an update: groups whose best and worst completion differ in advantage",
    "sft/loss": "cross-entropy of the demonstrated tokens of an update (--sft-iters, --sft-loss-type), nats a token",
    "sft/tokens": "demonstrated tokens in the loss of this update",
    "sft/mu": "weight mu of the demonstrations (--sft-loss-type sft, chord)",
    "sft/advantage": "advantage of a demonstration in the group of its prompt (--sft-loss-type luffy), mean",
    "loss": "loss that was differentiated, including the KL term",
    "kl": "k3 estimate of KL(policy || reference), mean over completion tokens, for every --kl-estimator",
    "entropy": "entropy of the policy's next-token distribution, mean over completion tokens, nats",
    "clip/low": "fraction of completion tokens with a ratio clipped at the lower bound (advantage < 0)",
    "clip/high": "fraction of completion tokens with a ratio clipped at the upper bound (advantage > 0; cispo: any)",
    "clip/masked": "fraction of completion tokens masked out of the policy term (entropy, clip-cov, m2po, off-policy)",
    "ratio/mean": "mean probability ratio new/old of the completion tokens",
    "ratio/min": "smallest probability ratio new/old of a completion token",
    "ratio/max": "largest probability ratio new/old of a completion token",
    "grad_norm": "L2 norm of the gradient over all parameters except multi-token prediction, before clipping",
    "mtp/grad_norm": "L2 norm of the gradient of the trained multi-token-prediction layers, before their own clipping",
    "params_norm": "L2 norm of all parameters after the update (--log-params-norm)",
    "moe/balance_loss": "load-balancing loss without coefficients, mean over layers and kinds of loss: 1 if balanced",
    "lr": "learning rate of this update",
    "update/skipped": "1 if the update was bad and left out (--on-bad-update), else 0",
    "mismatch/mean_abs": "mean |log p(trainer) - log p(engine)| over the sampled tokens, nats",
    "mismatch/newest_mean_abs": "the same of the tokens that were sampled with the newest weights (--max-staleness)",
    "mismatch/max_abs": "largest |log p(trainer) - log p(engine)| of a sampled token, nats",
    "mismatch/kl": "k3 estimate of KL(engine || trainer), mean over the sampled tokens, nats per token",
    "mismatch/perplexity_ratio": "perplexity of the sampled tokens under the trainer divided by that under the engine",
    "mismatch/effective_sample_size": "(sum r)^2 / (n sum r^2) over tokens, r = p(trainer) / p(engine): at most 1",
    "mismatch/clipped": "fraction of tokens in the loss truncated or masked by --rollout-importance-sampling-mode",
    "eval/greedy_reward": "mean reward of greedy completions of the held-out prompts",
    "eval/greedy_accuracy": "fraction of held-out prompts with a correct greedy completion. A completion is correct if "
    "its first reward function returns at least --eval-correct-reward",
    "eval/greedy_length": "mean length of greedy completions of the held-out prompts, sampled tokens",
    "eval/greedy_truncated": "fraction of greedy completions truncated at --max-completion-length",
    "eval/greedy_unscored": "fraction of greedy completions that their first reward function did not score; "
    "eval/greedy_accuracy leaves them out",
    "eval/sampled_reward": "mean reward of sampled completions of the held-out prompts",
    "eval/sampled_accuracy": "fraction of sampled completions of the held-out prompts that are correct",
    "eval/sampled_length": "mean length of sampled completions of the held-out prompts, sampled tokens",
    "eval/sampled_truncated": "fraction of sampled completions truncated at --max-completion-length",
    "eval/sampled_unscored": "fraction of sampled completions that their first reward function did not score; "
    "eval/sampled_accuracy leaves them out",
    "eval/pass_at_<k>": "fraction of held-out prompts with a correct completion among k samples, k = 1, 2, 4 ...",
    "eval/<file>/<metric>": "eval/<metric> over the prompts of one file; only if --valid-data-path has several files",
    "tokens/update": "prompt and completion tokens that this update trained on",
    "tokens/shared": "tokens/update that --share-prompts spared: what micro-batches have in common counts once",
    "tokens/rollout": "sampled tokens of the rollout, in the row of its first update",
    "flops/update": "TFLOP of the model's forward and backward passes in this update, all devices, no recomputation; "
    "without tokens/shared",
    "tokens/total": "sum of tokens/update since the start of the run",
    "consumed/prompts": "training prompts used since the start of the run",
    "consumed/left_out": "rows that were drawn and then skipped (streamed data only), since the start of the run",
    "memory/peak": "peak GiB of this process's tensors on the device since the last row, the awake engine's included",
    "memory/peak_update": "as memory/peak, while the engine sleeps: updates and passes for log-probabilities",
    "memory/train": "GiB in use on the device, by all processes, at the end of the updates",
    "memory/sync": "as memory/train, after the weight sync",
    "memory/rollout": "as memory/train, at the start of generation",
    "memory/asleep": "as memory/train, after the engine has freed the memory of --sleep-level",
    "memory/offloaded": "GiB that the trainer copied to host memory (for example --offload-model)",
    "time/rollout": "seconds of generation",
    "time/offload": "seconds of moving the trainer's tensors to host memory and back (for example --offload-model), "
    "without the return of the optimizer state, which runs beside the next passes",
    "time/scoring": "seconds of the reward functions after generation has ended",
    "time/ledger": "seconds until a rollout's last groups and its batch are on the disk (--ledger)",
    "time/logprobs": "seconds of the forward-only passes: old policy and reference model",
    "time/update": "seconds of forward pass, backward pass and optimizer",
    "time/sync": "seconds of the weight sync",
    "lora/sync_bytes": "bytes of the adapter that the newest sync sent (--lora-weight-sync adapter)",
    "lora/base_seconds": "seconds of the newest sync for sending the base weights again (--sleep-level 2), else near 0",
    "lora/adapter_seconds": "seconds of the newest sync for gathering the adapter and loading it into the engine",
    "lora/check_seconds": "seconds of the newest sync for reading the adapter back from the engine and comparing it; "
    "with servers, for a completion by each",
    "time/save": "seconds of saving a checkpoint (counted in the row after the save)",
    "time/eval": "seconds of evaluation",
    "time/step": "wall-clock seconds since the last row",
    "perf/tokens_per_second": "tokens/update divided by time/step",
    "perf/mfu": "model FLOPs utilization: flops/update / time/update / 16-bit peak of all devices, "
    "in FP8 too (--device-peak-tflops)",
    "perf/tokens_per_second_per_device": "perf/tokens_per_second divided by the number of training processes",
    "perf/update_tokens_per_second": "tokens/update divided by time/update",
    "perf/rollout_tokens_per_second": "tokens/rollout divided by time/rollout, all engines",
    "perf/tflops_per_device": "flops/update divided by time/update and the number of training processes, TFLOP/s",
}

HEADINGS = {
    "reward": "Rewards",
    "advantage": "Rewards",
    "eval": "Evaluation",
    "": "Learning",
    "clip": "Learning",
    "teacher": "Learning",
    "sft": "Learning",
    "dpo": "Learning",
    "ratio": "Learning",
    "update": "Learning",
    "moe": "Learning",
    "mtp": "Learning",
    "completion": "Completions",
    "sampling": "Completions",
    "staleness": "Completions",
    "drafts": "Completions",
    "environment": "Completions",
    "turns": "Completions",
    "stream": "Time",
    "mismatch": "Trainer and engine",
    "perf": "Time",
    "lora": "Time",
    "time": "Time",
    "memory": "Memory",
    "tokens": "Amounts",
    "flops": "Amounts",
    "consumed": "Amounts",
}
TITLES = (*dict.fromkeys(HEADINGS.values()), "Other")

REMEDIES = {
    "sft/loss": "Flat from the start: raise --sft-lr. Near 0: the rows are learnt by heart, and the completions of a "
    "prompt become alike; lower --sft-iters, or give more rows.",
    "dpo/loss": "Not falling below log 2 = 0.69: raise --lr or --dpo-beta.",
    "dpo/margin": "Rising fast: the policy leaves the reference; raise --dpo-beta, or lower --lr.",
    "dpo/accuracy": "At 0.5: the pairs teach nothing that lasts; raise --num-generations, or --lr.",
    "dpo/pairs": "Few: see reward/zero_std_groups.",
    "sft/tokens": "A count: small beside the tokens of the rows if prompts are long.",
    "sft/mu": "By the schedule: --chord-mu-peak, --chord-mu-valley.",
    "sft/advantage": "Falls to 0 as the policy earns the same reward. Below 0: raise --luffy-reward.",
    "reward/mean": "Flat from the start: see reward/zero_std_groups (no signal) and read completions.jsonl. Rising "
    "while eval/* falls: reward hacking; make the reward stricter. Collapsing: lower --lr, raise --beta.",
    "reward/std": "Near 0: all completions of a prompt are equally good, so there is no gradient. Raise --temperature "
    "or --num-generations, or use prompts of medium difficulty.",
    "reward/<function>/mean": "One function rises while others fall: change --reward-weights.",
    "reward/<function>/std": "0: the function returns the same value for all completions and has no effect; remove it.",
    "reward/<function>/min": "Outside of the function's range: the function has a bug.",
    "reward/<function>/max": "As reward/<function>/min. Never the full score: the task is too hard, or the function "
    "does not find the answer.",
    "reward/kl_penalty": "Large compared with reward/mean: the penalty dominates; lower --beta.",
    "advantage/": "Standard deviation near 0: no signal, see reward/zero_std_groups. Mean far from 0: lengths or group "
    "sizes are unequal; not an error by itself.",
    "reward/zero_std_groups": "Near 1: prompts are too hard or too easy for the model. Change the data, raise "
    "--num-generations, or start with supervised fine-tuning.",
    "reward/failures": "Above 0: the log names the function and the completion. Fix the function, or raise "
    "--reward-timeout; such completions are excluded, not scored 0.",
    "sampling/": "Many replaced or aborted groups: prompts are too easy or too hard; change the data.",
    "drafts/": "An acceptance length near 1: drafts cost more than they save; propose fewer tokens "
    "(num_speculative_tokens), or leave --vllm-speculative-config out. Falling during a run: the policy has moved away "
    "from the draft model.",
    "turns/malformed_calls": "Not falling: the policy does not write the calls of --tool-call-parser; "
    "completions.jsonl shows them, with what was answered.",
    "environment/": "Failed episodes: the log names the reasons; mend the environment, or raise --environment-timeout. "
    "As many turns as --max-turns: the policy does not come to an end.",
    "stream/": "The trainer waits long: give more --rollout-ranks. The engines are idle: give fewer, or raise "
    "--max-staleness.",
    "staleness/": "Large, with mismatch/effective_sample_size below about 0.9: lower --max-staleness or --lr.",
    "completion/length_mean": "Growing without a higher reward: length bias of the loss (try --loss-type dr_grpo or "
    "dapo), or completions without an end token. Shrinking towards 0: the reward favours short completions.",
    "completion/length_min": "0 or 1: the model ends at once; check the end of the prompt and the chat template.",
    "completion/length_max": "Always --max-completion-length: see completion/truncated.",
    "completion/truncated": "Above about 0.1: raise --max-completion-length, check that the chat template's end token "
    "is the tokenizer's, or mask truncated completions with --overlong-filter.",
    "loss": "Not a measure of progress: advantages are centred, so it stays near 0. Not finite: see grad_norm.",
    "kl": "Growing fast: the policy moves away from the reference model; lower --lr or raise --beta. With --beta 0 "
    "there is no reference model, and it is 0.",
    "entropy": "Falling to 0 early: the policy stops exploring; raise --epsilon-high or --entropy-coef, lower --lr, "
    "or try --clip-cov-ratio. Rising steadily: the policy becomes random; lower --lr and check the rewards.",
    "teacher/kl": "Not falling: raise --teacher-kl-coef, or check that the teacher has the policy's vocabulary and "
    "chat template.",
    "teacher/divergence": "Not falling: raise --lr, or check that the teacher has the policy's chat template.",
    "clip/low": "Above about 0.2: the updates of one rollout are too large; lower --lr, --num-iterations or "
    "--steps-per-generation.",
    "clip/high": "As clip/low. If unlikely tokens never become more likely, raise --epsilon-high.",
    "clip/masked": "Near 1: almost no token is trained on; loosen the threshold of the mask in use.",
    "ratio/mean": "1 on average if old is the distribution that was sampled from. Steadily off 1 in later updates of a "
    "rollout: the samples were truncated and their kept tokens are not replayed, see log_probabilities.md.",
    "ratio/min": "Near 0: as ratio/max, for tokens that became unlikely.",
    "ratio/max": "Far above 1 in the first update of a rollout: engine or old policy differ from the trainer, see "
    "mismatch/*. In later updates: lower --lr, or set the upper bound --dual-clip.",
    "grad_norm": "Spikes: lower --clip-grad or --lr, or enlarge the batch. Not finite: look for inf in the rewards, or "
    "use --bf16 instead of --fp16. 0: no signal, see reward/zero_std_groups.",
    "mtp/grad_norm": "Not finite or spikes: lower --mtp-loss-scaling-factor.",
    "params_norm": "Growing steadily: set --weight-decay, or lower --lr. Jumps: see grad_norm.",
    "moe/balance_loss": "Far above 1: few experts receive most tokens; raise --moe-aux-loss-coeff.",
    "update/skipped": "Above 0: read the batch in {save}/bad_updates; a lower --lr, --clip-grad, other data.",
    "lr": "Not as intended: --lr-decay-iters and --lr-warmup-iters count updates.",
    "mismatch/mean_abs": "About 1e-6 in float32 and 0.01 in bfloat16. Larger: run tools/check_engine.py and "
    "--check-weight-sync; then use rollout importance weights (--rollout-importance-sampling-mode).",
    "mismatch/newest_mean_abs": "As mismatch/mean_abs without --max-staleness; --mismatch-limit bounds it.",
    "mismatch/max_abs": "Single large values are rounding errors of unlikely tokens. With a large mean: see "
    "mismatch/mean_abs.",
    "mismatch/kl": "Growing during a run: training is off-policy; use rollout importance weights "
    "(--rollout-importance-sampling-mode). --vllm-dtype float32 shows whether precision is the cause.",
    "mismatch/perplexity_ratio": "Not near 1: engine and trainer have different models; see mismatch/mean_abs.",
    "mismatch/effective_sample_size": "Below about 0.9: a few tokens dominate the rollout importance weights. Reduce "
    "the mismatch (dtype; --router-replay-mode R3 for experts) instead of raising thresholds.",
    "mismatch/clipped": "Above about 0.05: as mismatch/effective_sample_size.",
    "eval/greedy_reward": "As eval/greedy_accuracy.",
    "eval/greedy_accuracy": "Falling while reward/mean rises: overfitting or reward hacking. Use more prompts, fewer "
    "--num-epochs, a higher --beta, and an earlier checkpoint.",
    "eval/sampled_reward": "As eval/sampled_accuracy.",
    "eval/sampled_accuracy": "Far below eval/greedy_accuracy: the distribution is broad; training narrows it, or lower "
    "--temperature.",
    "eval/greedy_length": "As completion/length_mean.",
    "eval/greedy_truncated": "As completion/truncated: a truncated completion is rarely correct.",
    "eval/greedy_unscored": "Above 0: the log names the function and the completion; see reward/failures.",
    "eval/sampled_length": "As completion/length_mean.",
    "eval/sampled_truncated": "As eval/greedy_truncated.",
    "eval/sampled_unscored": "As eval/greedy_unscored.",
    "eval/<file>/<metric>": "As eval/<metric>. One file falls while the others rise: its task is forgotten; add such "
    "prompts to the training data.",
    "eval/pass_at_<k>": "Falling while eval/sampled_accuracy rises: the policy loses variety; see entropy. Not above "
    "eval/sampled_accuracy: more samples of these prompts give no signal.",
    "tokens/update": "Large changes: lengths differ between rollouts; --max-tokens-per-microbatch bounds the memory.",
    "tokens/shared": "If it is small beside tokens/update, --share-prompts gives little: a larger "
    "--max-tokens-per-microbatch keeps more of a group together.",
    "tokens/rollout": "A count: completion/length_mean times the completions of a rollout.",
    "flops/update": "A count: the numerator of perf/mfu.",
    "tokens/total": "A count: use it as the x axis to compare runs with different batch sizes.",
    "consumed/prompts": "A count: divided by the number of rows in the data it is the number of epochs.",
    "consumed/left_out": "Large: filters remove most rows, and reading them takes time. Filter the files once.",
    "memory/": "Near the device's size: use --offload-optimizer, --offload-model, --sleep-level 2, a smaller "
    "--vllm-gpu-memory-utilization or --max-tokens-per-microbatch. --dry-run estimates the effect.",
    "memory/offloaded": "Large: a smaller --vllm-gpu-memory-utilization leaves more on the GPU. 0: all fits beside it.",
    "time/rollout": "Most of the step: raise --vllm-max-num-seqs or --vllm-gpu-memory-utilization, set "
    "--rollout-balancing dynamic, leave out --vllm-enforce-eager. The longest completion determines the end.",
    "time/offload": "Large compared with time/update: offload less (--offload-gradients is nearly free), or lower "
    "--vllm-gpu-memory-utilization.",
    "time/scoring": "Large: raise --reward-workers, or use a faster function. Scoring overlaps generation; this is the "
    "rest.",
    "time/ledger": "Large: put --ledger on a local disk, if all ranks can read it.",
    "time/logprobs": "Avoidable: with one update per rollout and --beta 0 there is no forward-only pass.",
    "time/update": "Most of the step: raise --max-tokens-per-microbatch, recompute less, enable fused kernels; see "
    "docs/performance/updates.md.",
    "time/sync": "Large with servers: use another --weight-sync-method.",
    "lora/sync_bytes": "A count: with merged weights, the whole model is sent instead.",
    "lora/base_seconds": "Large: --sleep-level 1 keeps the base in host memory, 0 on the device.",
    "lora/adapter_seconds": "It grows with the number of adapted layers, hardly with the rank: name fewer in "
    "--lora-target-modules.",
    "lora/check_seconds": "Large compared with time/sync: --no-check-lora-sync leaves the proof out.",
    "time/save": "Large: raise --save-interval.",
    "time/eval": "Large: raise --eval-interval, or lower --eval-max-prompts.",
    "time/step": "More than the sum of its phases: other work keeps the host busy.",
    "perf/mfu": "Below about 0.3: raise --max-tokens-per-microbatch, recompute less, enable fused kernels, "
    "lower tensor parallelism; docs/performance/steps.md has a measured step.",
    "perf/tokens_per_second_per_device": "Falling with more devices: find the time/* metric that does not shrink.",
    "perf/update_tokens_per_second": "As time/update.",
    "perf/rollout_tokens_per_second": "As time/rollout.",
    "perf/tflops_per_device": "As perf/mfu.",
    "perf/tokens_per_second": "Falling during a run: completions become longer, or the host swaps; compare the time/* "
    "metrics.",
}


def documented(name: str) -> str | None:
    """Return a metric's key in METRICS: ``reward/<function>/mean`` for ``reward/f1/mean``; None without a key."""
    if name in METRICS:
        return name
    patterns = ((known, re.sub("<.*?>", "[^/]+", known)) for known in METRICS if "<" in known)
    return next((known for known, pattern in patterns if re.fullmatch(pattern, name)), None)


def check_names(metrics: Iterable[str]) -> None:
    """Raise KeyError for a metric that is not in METRICS, unless its prefix is a loss type (the loss returned it)."""
    for name in metrics:
        if documented(name) is None and name.partition("/")[0] not in LOSSES.entries:
            raise KeyError(f"metric {name!r} is not documented in megatron_grpo.observability.metric_guide.METRICS")


def remedy(name: str) -> str:
    """Return the remedy of a metric, or of its prefix (``memory/``), or ``""``."""
    return REMEDIES.get(name) or REMEDIES.get(name.partition("/")[0] + "/") or ""


def heading(name: str) -> str:
    """Return the heading of a metric, one of ``TITLES``, by its prefix."""
    prefix, slash, _ = name.partition("/")
    return HEADINGS.get(prefix if slash else "", "Other")
