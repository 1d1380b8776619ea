"""Comparisons of losses, advantages, KL and importance weights with verl's core_algos and rollout_corr_helper."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.others import GROUP, Case, Data, load, our_advantages, our_importance_weights, our_loss, our_mismatch, summed


class Verl:
    """verl's core_algos and rollout_corr_helper."""

    def __init__(self, directory: Path) -> None:
        names = "verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper", "verl.workers.config", "verl"
        self.core, self.corrections, self.config, package = load(directory, *names)
        self.version = f"verl {package.__version__}"

    def loss(self, data: Data, name: str, mode: str, weights: Tensor | None = None, **settings: Any) -> Any:
        """Return a policy loss of verl's registry and its gradient; ``settings`` are fields of its configuration."""
        log_probs = data.log_probs.clone().requires_grad_()
        of_loss = {k: settings.pop(k) for k in list(settings) if k.startswith(("clip_cov", "kl_cov", "ppo_kl"))}
        config = self.config.ActorConfig(
            strategy="fsdp", rollout_n=GROUP, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True,
            policy_loss=self.config.PolicyLossConfig(**of_loss), **settings,
        )  # fmt: skip
        advantages = data.advantages[:, None].expand_as(data.mask) * data.mask
        loss, _ = self.core.get_policy_loss_fn(name)(
            old_log_prob=data.old, log_prob=log_probs, advantages=advantages, response_mask=data.mask,
            loss_agg_mode=mode, config=config, rollout_is_weights=weights,
        )  # fmt: skip
        return loss.detach(), torch.autograd.grad(loss, log_probs)[0]

    def kl(self, data: Data, kind: str) -> tuple[Tensor, Tensor]:
        """Return verl's KL term, averaged over all tokens, and its gradient."""
        log_probs = data.log_probs.clone().requires_grad_()
        loss = self.core.agg_loss(self.core.kl_penalty(log_probs, data.ref, kind), data.mask, "token-mean")
        return loss.detach(), torch.autograd.grad(loss, log_probs)[0]

    def advantages(self, data: Data, estimator: str, beta: float = 0.0, **settings: Any) -> Tensor:
        """Return the advantages of an estimator of verl's registry, [n, s].

        The last token of a completion has the reward; all tokens have the KL penalty.
        """
        last = (data.mask * torch.arange(1, data.mask.shape[1] + 1)).argmax(1)
        rewards = -beta * (data.old - data.ref) * data.mask
        rewards[torch.arange(len(last)), last] += summed(data)
        groups = np.arange(len(last)) // GROUP
        config = SimpleNamespace(gamma=settings.pop("gamma", 1.0), get=lambda key, default=None: default)
        if "norm_adv_by_std_in_grpo" in settings and estimator == "grpo_passk":
            config.get = lambda key, default=None: settings["norm_adv_by_std_in_grpo"]
        function = self.core.get_adv_estimator_fn(estimator)
        return function(rewards, response_mask=data.mask, index=groups, config=config, **settings)[0]


def of_verl(verl: Verl, data: Data) -> Iterator[Case]:
    """Yield the comparisons with core_algos and rollout_corr_helper."""

    def loss(
        thing: str, flags: str, name: str, mode: str, difference: str = "", said: str = "", **settings: Any
    ) -> Case:
        data_ = settings.pop("data", data)
        shown = "".join(f", {k}={v}" for k, v in settings.items() if k not in ("global_batch_info", "weights"))
        function = f"`{name}`, {mode}{shown}{said}"

        def theirs(d: Data) -> Any:
            return verl.loss(d, name, mode, **settings)

        return Case(thing, flags, function, data_, our_loss, theirs, difference)

    plain = "--beta 0 --loss-type"
    by_completion, by_token = "seq-mean-token-mean", "token-mean"
    yield loss("GRPO, dual clip", f"{plain} grpo --dual-clip 3", "vanilla", by_completion)
    yield loss(
        "GRPO",
        f"{plain} grpo",
        "vanilla",
        by_completion,
        "verl always bounds the loss of A < 0 at clip_ratio_c = 3. Neither GRPO's nor DAPO's formula has this bound; "
        "here it is an option (previous line).",
    )
    higher: dict[str, Any] = {"clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    yield loss("DAPO, dual clip", f"{plain} dapo --epsilon-high 0.28 --dual-clip 3", "vanilla", by_token, **higher)
    dr_grpo = f"{plain} dr_grpo --max-completion-length 512 --dual-clip 3"
    norm: dict[str, Any] = {"loss_scale_factor": 512, "global_batch_size": len(data.mask)}
    said = ", loss_scale_factor=512"
    yield loss("Dr. GRPO", dr_grpo, "vanilla", "seq-mean-token-sum-norm", said=said, global_batch_info=norm)
    yield loss(
        "Dr. GRPO, no scale factor",
        dr_grpo,
        "vanilla",
        "seq-mean-token-sum-norm",
        "Without loss_scale_factor verl divides by the width of the current batch, which varies; Dr. GRPO divides by a "
        "constant, as here.",
    )
    empty = data.mask.clone()
    empty[2] = empty[9] = 0
    nothing = data._replace(mask=empty)
    filtered = f"{plain} grpo --dual-clip 3"
    yield loss(
        "completions without a token in the loss",
        filtered,
        "vanilla",
        by_completion,
        "Without global_batch_size verl does not count empty completions in N, so the other completions of such a "
        "micro-batch have a larger weight. GRPO's formula divides by G, all sampled completions, as here, and as verl "
        "with global_batch_size (next line).",
        data=nothing,
    )
    with_batch_size: dict[str, Any] = {"global_batch_size": len(data.mask)}
    said = ", global_batch_size=N"
    yield loss(
        "the same", filtered, "vanilla", by_completion, said=said, data=nothing, global_batch_info=with_batch_size
    )
    narrow: dict[str, Any] = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.06}
    gspo = "--epsilon 0.05 --epsilon-high 0.06"
    yield loss("GSPO", f"{plain} gspo {gspo}", "gspo", by_completion, **narrow)
    token = f"{plain} grpo --importance-sampling-level sequence_token {gspo}"
    yield loss("GSPO-token", token, "gspo", by_completion, **narrow)
    yield loss("SAPO", f"{plain} sapo", "sapo", by_completion)
    cispo = f"{plain} cispo --epsilon-high 2"
    yield loss("CISPO", cispo, "cispo", by_token, clip_ratio_low=1.0, clip_ratio_high=1.0)
    yield loss(
        "CISPO, their clip_ratio_low",
        cispo,
        "cispo",
        by_token,
        "verl's default also bounds the ratio from below, at 0.8. MiniMax-M1's formula has such a bound, but its "
        "experiments do not use it: ours is the loss of the experiments. verl's upper bound is 1 + clip_ratio_high, "
        "as in the formula; ours, like TRL's, is --epsilon-high itself.",
        clip_ratio_high=1.0,
    )
    gmpo = f"{plain} gmpo --epsilon 0.2 --epsilon-high 0.3"
    yield loss("GMPO", gmpo, "geo_mean", by_token, clip_ratio_low=0.2, clip_ratio_high=0.3)
    factors = our_importance_weights(data, "--rollout-importance-sampling-mode token_truncate")
    yield loss("REINFORCE", f"{plain} reinforce", "gpg", by_token)
    corrected = "--rollout-importance-sampling-mode token_truncate"
    said = ", rollout_is_weights"
    yield loss("REINFORCE, corrected", f"{plain} reinforce {corrected}", "gpg", by_token, said=said, weights=factors)
    yield loss(
        "GMPO, corrected",
        f"{gmpo} {corrected}",
        "geo_mean",
        by_token,
        "verl multiplies the loss of a completion by the geometric mean of its tokens' weights, we by their arithmetic "
        "mean. Neither paper covers the combination.",
        said=said,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        weights=factors,
    )
    clip_cov = f"{plain} dapo --clip-cov-ratio 0.9 --clip-cov-lb 0.1 --clip-cov-ub 5"
    cov: dict[str, Any] = {"clip_cov_ratio": 0.9, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
    yield loss(
        "Clip-Cov (all between the bounds)",
        clip_cov,
        "clip_cov",
        by_token,
        "verl draws only from tokens with a gradient after the clip of the ratio (here all are drawn, so the gradients "
        "agree). The paper's eq. 11 draws from all tokens between the bounds, as here; verl follows the authors' code.",
        **cov,
    )
    kl_cov = "--kl-cov-ratio 0.1 --kl-cov-coef 1"
    kl: dict[str, Any] = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}
    open_ = f"{plain} dapo --epsilon 0.99999 --epsilon-high 1e6 {kl_cov}"
    yield loss("KL-Cov, without a clip", open_, "kl_cov", by_token, **kl)
    yield loss(
        "KL-Cov",
        f"{plain} dapo {kl_cov}",
        "kl_cov",
        by_token,
        "The paper's loss (eq. 14) is rho A without a clip, as in verl. Here the penalty is added to the chosen loss "
        "type, so the paper's method needs flags that disable the clip (previous line).",
        **kl,
    )

    def of_kl(thing: str, kind: str, estimator: str, difference: str = "", data: Data = data) -> Case:
        def ours(d: Data, flags: str) -> tuple[Tensor, Tensor]:
            with_kl, without = our_loss(d, flags), our_loss(d, flags.replace("--beta 1", "--beta 0"))
            return with_kl[0] - without[0], with_kl[1] - without[1]

        flags = f"--loss-type dapo --beta 1 --kl-estimator {estimator}"
        return Case(thing, flags, f"`kl_penalty`, {kind}", data, ours, lambda d: verl.kl(d, kind), difference)

    yield of_kl("KL, k1", "k1", "k1")
    yield of_kl("KL, k2", "k2", "k2")
    yield of_kl("KL, k3", "k3", "k3")
    yield of_kl(
        "KL, k3+",
        "k3+",
        "k2",
        "The value is that of k3, the gradient that of our k2, which is correct for samples of the policy itself.",
    )
    far = data.ref.clone()
    far[:, 0] = data.log_probs[:, 0] + 3
    yield of_kl(
        "KL, k3 of tokens 3 nats below the reference",
        "k3",
        "k3",
        "verl clamps k3 at 10 and so removes the gradient of tokens more than 2.6 nats below the reference, which k3 "
        "should pull back most. Schulman's and GRPO's k3 has no bound; ours has only a bound of 20 on the exponent.",
        data._replace(ref=far),
    )

    def factors_of(mode: str, flags: str, said: str, theirs: Callable[[Data], Tensor], difference: str = "") -> Case:
        flags = f"--rollout-importance-sampling-mode {mode} {flags}".strip()
        return Case(
            f"rollout importance weights, {mode}", flags, said, data, our_importance_weights, theirs, difference
        )

    def weights(d: Data, threshold: Any, level: str = "token") -> Tensor:
        ratios = verl.corrections.compute_rollout_correction_weights(d.old - d.rollout, d.mask, level, threshold)
        return ratios[0] * d.mask

    def kept(d: Data, options: str, threshold: str) -> Tensor:
        return verl.corrections.compute_rollout_rejection_mask(d.old - d.rollout, d.mask, options, threshold)[0]

    name = "`compute_rollout_correction_weights`"
    reject = f"{name}, token, times `compute_rollout_rejection_mask`"
    yield factors_of("token_truncate", "", f"{name}, token, 2.0", lambda d: weights(d, 2.0))
    bounds = "--rollout-importance-sampling-threshold 2 --rollout-importance-sampling-lower-bound 0.5"
    yield factors_of("icepop", bounds, f"{name}, token, 0.5_2.0", lambda d: weights(d, "0.5_2.0"))
    yield factors_of(
        "token_mask",
        "",
        f'{reject}, token_k1, "0.5_1e9"',
        lambda d: weights(d, 1e9) * kept(d, "token_k1", "0.5_1e9"),
    )
    yield factors_of(
        "token_mask",
        "",
        f'{reject}, token_k1, "1e-9_2"',
        lambda d: weights(d, 1e9) * kept(d, "token_k1", "1e-9_2"),
        "verl's k1 is log p(engine) - log p(trainer), so its bounds apply to the inverse of the ratio in the weights: "
        "an upper bound of 2 masks ratios below 0.5. The papers bound trainer over engine, as here; verl needs the "
        "inverse bounds (previous line).",
    )
    yield factors_of(
        "sequence_mask",
        "",
        f'{reject}, seq_mean_k1, "0.5_1e9"',
        lambda d: weights(d, 1e9) * kept(d, "seq_mean_k1", "0.5_1e9"),
    )
    yield factors_of(
        "sequence_truncate",
        "",
        f"{name}, sequence, 2.0",
        lambda d: weights(d, 2.0, "sequence"),
        "Product and geometric mean, as for TRL: the product is unbiased, the geometric mean has a lower variance.",
    )

    def measured(name: str, theirs: str, difference: str = "") -> Case:
        def of_theirs(d: Data) -> Tensor:
            metrics = verl.corrections.compute_offpolicy_metrics(d.old, d.rollout, d.mask)
            return torch.tensor([metrics[theirs]]).double()

        function = f"`compute_offpolicy_metrics`, {theirs}"
        return Case("engine mismatch", name, function, data, lambda d, _: our_mismatch(d, name), of_theirs, difference)

    yield measured("mismatch/kl", "k3_kl")
    yield measured(
        "mismatch/perplexity_ratio",
        "ppl_ratio",
        "verl averages the ratios of completions, we compute the ratio of all tokens. No formula defines the metric.",
    )

    def advantages(
        thing: str,
        flags: str,
        name: str,
        difference: str = "",
        data: Data = data,
        scale: Callable[[Tensor], Tensor] = lambda values: values,
        **settings: Any,
    ) -> Case:
        def ours(d: Data, flags: str) -> Tensor:
            return scale(our_advantages(d, flags))

        def theirs(d: Data) -> Tensor:
            return scale(verl.advantages(d, name, **settings))

        shown = "".join(f", {k}={v}" for k, v in settings.items())
        return Case(thing, flags, f"`{name}`{shown}", data, ours, theirs, difference)

    yield advantages("advantage, std of group", "--scale-rewards group", "grpo", epsilon=1e-4)
    yield advantages(
        "advantage, std of group, their epsilon",
        "--scale-rewards group",
        "grpo",
        "verl adds 1e-6 to the std, we (and TRL) 1e-4. The formula has no epsilon.",
    )
    plain_grpo = "--scale-rewards none"
    yield advantages("advantage, not scaled", plain_grpo, "grpo", norm_adv_by_std_in_grpo=False)
    yield advantages("RLOO", "--advantage-estimator rloo", "rloo")
    alone = data.rows(slice(0, 1))
    yield advantages(
        "a group of one",
        plain_grpo,
        "grpo",
        "verl's advantage is R, ours 0. In the formula R minus the mean of the group is 0, as here. verl's is "
        "REINFORCE without a baseline, for which this project has other estimators.",
        data=alone,
        norm_adv_by_std_in_grpo=False,
    )
    plus = "--advantage-estimator reinforce_plus_plus --kl-in-reward --beta 0.1 --gamma 0.9"
    yield advantages(
        "REINFORCE++, KL and discount",
        plus,
        "reinforce_plus_plus",
        "verl adds 1e-8 to the variance, we 1e-4 to the std; the formula has neither. No other difference (next line).",
        beta=0.1,
        gamma=0.9,
    )
    yield advantages(
        "the same, both divided by their std",
        plus,
        "reinforce_plus_plus",
        scale=lambda values: values / values[data.mask == 1].std(),
        beta=0.1,
        gamma=0.9,
    )
    yield advantages(
        "REINFORCE++ with baseline",
        "--advantage-estimator reinforce_plus_plus_baseline",
        "reinforce_plus_plus_baseline",
        "verl whitens over tokens, so long completions have a larger weight in mean and std, and subtracts the mean "
        "again; we divide by the std over completions, which already have the mean 0. The paper normalises over the "
        "global batch and does not specify tokens or completions.",
    )
    yield advantages(
        "GDPO of one reward",
        "--advantage-estimator gdpo",
        "gdpo",
        "verl whitens over tokens. The mean and std of the paper's last step are over the prompts and completions of "
        "the batch, as here and in TRL.",
        data=data._replace(rewards=data.rewards[:, 1:]),
    )
    best = f"--advantage-estimator pass_at_k --pass-at-k {GROUP} --scale-rewards none"
    yield advantages(
        "pass@k, k = G",
        best,
        "grpo_passk",
        "Ours is G times verl's (next line), which supports k = G only. The loss averages over completions, so the "
        "factor G gives the gradient of E[max of k]. It is a factor of the learning rate.",
        norm_adv_by_std_in_grpo=False,
    )
    yield advantages(
        "the same, both divided by their maximum",
        best,
        "grpo_passk",
        scale=lambda values: values / values.abs().max(),
        norm_adv_by_std_in_grpo=False,
    )
