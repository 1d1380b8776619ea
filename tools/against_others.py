"""Our algorithms beside TRL's and verl's own functions, on the same numbers: values, gradients, and who is right.

    pip install --no-deps --target /tmp/trl trl accelerate
    pip install --no-deps --target /tmp/verl verl
    python tools/against_others.py --trl /tmp/trl --verl /tmp/verl

Neither is a dependency, and no line of theirs is here: they are imported from the directories given, which may be
clones, with empty stand-ins for what they import and the functions called do not use. TRL's methods are called on a
trainer that was never set up and holds only what they read. Prints a Markdown table: the largest difference of the loss
and of its gradient with respect to the log-probabilities (or of the advantages, or of the factors), relative to the
largest number that is compared. Exit code 1 when what should be the same differs, or the other way round: then the
words here are out of date.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from others import GROUP, Data, Trl, Verl, made_up, our_advantages, our_corrections, our_loss
from torch import Tensor

SAME = 1e-6  # advantages, weights and corrections are float32 with us


class Case(NamedTuple):
    """One line of the table."""

    thing: str
    flags: str
    function: str
    data: Data
    ours: Callable[[Data, str], Any]
    theirs: Callable[[Data], Any]
    difference: str = ""  # what differs and who is right; empty when nothing should


def of_trl(trl: Trl, data: Data) -> Iterator[Case]:
    """Beside GRPOTrainer and RLOOTrainer."""

    def loss(thing: str, flags: str, difference: str = "", data: Data = data, said: str = "", **settings: Any) -> Case:
        shown = said or ", ".join(f"{k}={v}" for k, v in settings.items()).replace("micro_batches", "accumulation")
        function = f"`_compute_loss`, {shown}" if shown else "`_compute_loss`"
        return Case(thing, flags, function, data, our_loss, lambda d: trl.loss(d, **settings), difference)

    plain = "--beta 0 --loss-type"
    yield loss("GRPO", f"{plain} grpo", loss_type="grpo")
    yield loss("GRPO, k3 to the reference", "--beta 0.1", beta=0.1)
    yield loss("GRPO in 6 micro-batches", f"{plain} grpo", micro_batches=6)
    yield loss("clip-higher, delta", f"{plain} grpo --epsilon-high 0.28 --delta 4", epsilon_high=0.28, delta=4.0)
    yield loss("BNPO in 6 micro-batches", f"{plain} bnpo --micro-batch-size 4", loss_type="bnpo", micro_batches=6)
    yield loss("DAPO in 6 micro-batches", f"{plain} dapo", loss_type="dapo", micro_batches=6)
    yield loss(
        "DAPO, two updates a rollout",
        f"{plain} dapo",
        "The tokens of the rollout over the number of updates, not those of the update, are the denominator. DAPO's "
        "mean is over the tokens it sums (section 3.3): ours. Theirs is exact only where all updates have as many tokens.",
        said="loss_type=dapo, steps_per_generation=2, tokens of the rollout 2.2 times those of the update",
        loss_type="dapo",
        steps_per_generation=2,
        rollout_over_update=2.2,
    )
    yield loss("Dr. GRPO", f"{plain} dr_grpo --max-completion-length 512", loss_type="dr_grpo")
    yield loss("CISPO", f"{plain} cispo --epsilon-high 2", loss_type="cispo", epsilon_high=2.0)
    yield loss("SAPO", f"{plain} sapo", loss_type="sapo")
    level = {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06}
    yield loss("GSPO", f"{plain} gspo --epsilon 0.05 --epsilon-high 0.06", **level)
    yield loss("unbiased KL", "--beta 0.1 --kl-estimator unbiased", beta=0.1, use_bias_correction_kl=True)
    yield loss(
        "unbiased KL, GSPO",
        "--beta 0.1 --kl-estimator unbiased --loss-type gspo --epsilon 0.05 --epsilon-high 0.06",
        "They weigh a token's k3 by the ratio of the sequence, we by the token's own. DeepSeek-V3.2's formula has the "
        "token's, and only that makes the mean over old samples the KL: ours.",
        beta=0.1,
        use_bias_correction_kl=True,
        **level,
    )
    yield loss("top entropy", f"{plain} dapo --top-entropy-quantile 0.2", loss_type="dapo", top_entropy_quantile=0.2)
    yield loss(
        "top entropy in 6 micro-batches",
        f"{plain} dapo --top-entropy-quantile 0.2",
        "Their threshold is each micro-batch's, ours the update's. The paper (arXiv:2506.01939, eq. 6) takes it over the "
        "batch: ours, and it does not depend on the micro-batch size.",
        loss_type="dapo",
        top_entropy_quantile=0.2,
        micro_batches=6,
    )
    entropy = {"_entropy_bonus_enabled": True, "entropy_coef": 0.01}
    said = "entropy_coef=0.01, loss_type="
    yield loss(
        "entropy bonus, DAPO", f"{plain} dapo --entropy-coef 0.01", said=f"{said}dapo", loss_type="dapo", **entropy
    )
    yield loss(
        "entropy bonus, GRPO",
        f"{plain} grpo --entropy-coef 0.01",
        "They average the entropy over tokens under every loss type, we as the loss type averages. No paper says; at "
        "equal lengths it is the same.",
        said=f"{said}grpo",
        loss_type="grpo",
        **entropy,
    )
    yield loss("overlong filter", f"{plain} grpo --overlong-filter", mask_truncated_completions=True)
    yield loss(
        "off-policy sequence mask",
        f"{plain} grpo --off-policy-sequence-mask-delta 0.02",
        said="off_policy_mask_threshold=0.02",
        off_policy_mask_threshold=0.02,
    )
    engine = {"use_vllm": True}
    yield loss(
        "engine correction in the loss",
        "--beta 0.1 --rollout-importance-sampling-mode token_truncate",
        beta=0.1,
        **engine,
    )

    def factors(mode: str, difference: str = "") -> Case:
        def theirs(d: Data) -> Tensor:
            ratio = trl.rollout(d, use_vllm=True, vllm_importance_sampling_mode=mode)["importance_sampling_ratio"]
            return ratio * d.mask

        name = f"`_generate_and_score_completions`, {mode}"
        flags = f"--rollout-importance-sampling-mode {mode}"
        return Case(f"engine correction, {mode}", flags, name, data, our_corrections, theirs, difference)

    yield factors("token_truncate")
    yield factors("token_mask")
    product = (
        "They take the product of the completion's ratios, we their geometric mean. The product is the importance "
        "weight of a sequence, and unbiased: theirs by the theory. It soon leaves any bound as completions grow; ours "
        "is GSPO's length-normalised ratio, biased and of low variance"
    )
    yield factors("sequence_truncate", f"{product}.")
    yield factors(
        "sequence_mask", f"{product}, and decides only who is masked: what is left is weighed token by token."
    )

    def advantages(thing: str, flags: str, kind: str, difference: str = "", data: Data = data, **settings: Any) -> Case:
        def theirs(d: Data) -> Tensor:
            return trl.rollout(d, kind, **settings)["advantages"].double()[:, None] * d.mask

        name = {"grpo": "GRPOTrainer", "rloo": "RLOOTrainer"}[kind]
        shown = ", ".join(f"{k}={v}" for k, v in settings.items() if k != "ref_model")
        return Case(thing, flags, f"`{name}`, {shown}", data, our_advantages, theirs, difference)

    missing = data.rewards.clone()
    missing[5] = missing[13] = torch.nan
    for scale in ("group", "batch", "none"):
        yield advantages(f"advantage, std of {scale}", f"--scale-rewards {scale}", "grpo", scale_rewards=scale)
    some = data._replace(rewards=missing)
    yield advantages("some not scored", "--scale-rewards group", "grpo", data=some, scale_rewards="group")
    gdpo = "normalize_then_sum"
    yield advantages("GDPO", "--scale-rewards gdpo", "grpo", multi_objective_aggregation=gdpo)
    yield advantages("RLOO", "--advantage-estimator rloo", "rloo", normalize_advantages=False)
    yield advantages(
        "RLOO, some not scored", "--advantage-estimator rloo", "rloo", data=some, normalize_advantages=False
    )
    yield advantages(
        "RLOO, scaled",
        "--advantage-estimator rloo --scale-rewards batch",
        "rloo",
        "They divide by the std of the advantages, we by that of the rewards. RLOO's paper scales by neither: an option "
        "of each, not the method.",
        normalize_advantages=True,
    )


def of_verl(verl: Verl, data: Data) -> Iterator[Case]:
    """Beside core_algos and rollout_corr_helper."""

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
        "They always bound the loss of A < 0 at clip_ratio_c = 3. Neither GRPO's nor DAPO's formula has this bound: "
        "ours, which has it where it is asked for (the line above).",
    )
    higher = {"clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    yield loss("DAPO, dual clip", f"{plain} dapo --epsilon-high 0.28 --dual-clip 3", "vanilla", by_token, **higher)
    dr_grpo = f"{plain} dr_grpo --max-completion-length 512 --dual-clip 3"
    norm = {"loss_scale_factor": 512, "global_batch_size": len(data.mask)}
    said = ", loss_scale_factor=512"
    yield loss("Dr. GRPO", dr_grpo, "vanilla", "seq-mean-token-sum-norm", said=said, global_batch_info=norm)
    yield loss(
        "Dr. GRPO, no scale factor",
        dr_grpo,
        "vanilla",
        "seq-mean-token-sum-norm",
        "Without loss_scale_factor they divide by the width of the batch at hand, which changes from batch to batch; "
        "Dr. GRPO's is a constant: ours.",
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
        "Without global_batch_size they leave empty completions out of N, so the others count more in a micro-batch "
        "that has one. N is the G of GRPO's formula, all that were sampled: ours, and theirs when told (next line).",
        data=nothing,
    )
    told = {"global_batch_size": len(data.mask)}
    said = ", global_batch_size=N"
    yield loss("the same", filtered, "vanilla", by_completion, said=said, data=nothing, global_batch_info=told)
    narrow = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.06}
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
        "Their default also bounds the ratio from below, at 0.8. MiniMax-M1's formula has such a bound, and its text "
        "leaves it open in all experiments: ours is what was run. Their upper bound is 1 + clip_ratio_high, as in the "
        "formula; ours, as TRL's, is --epsilon-high itself.",
        clip_ratio_high=1.0,
    )
    gmpo = f"{plain} gmpo --epsilon 0.2 --epsilon-high 0.3"
    yield loss("GMPO", gmpo, "geo_mean", by_token, clip_ratio_low=0.2, clip_ratio_high=0.3)
    factors = our_corrections(data, "--rollout-importance-sampling-mode token_truncate")
    yield loss("REINFORCE", f"{plain} reinforce", "gpg", by_token)
    corrected = "--rollout-importance-sampling-mode token_truncate"
    said = ", rollout_is_weights"
    yield loss("REINFORCE, corrected", f"{plain} reinforce {corrected}", "gpg", by_token, said=said, weights=factors)
    yield loss(
        "GMPO, corrected",
        f"{gmpo} {corrected}",
        "geo_mean",
        by_token,
        "A completion's one loss is weighed by the geometric mean of its tokens' factors, with us by their mean. The "
        "papers of the two methods say nothing of the other.",
        said=said,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        weights=factors,
    )
    clip_cov = f"{plain} dapo --clip-cov-ratio 0.9 --clip-cov-lb 0.1 --clip-cov-ub 5"
    cov = {"clip_cov_ratio": 0.9, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
    yield loss(
        "Clip-Cov (all between the bounds)",
        clip_cov,
        "clip_cov",
        by_token,
        "They draw only from tokens that the ratio's clip has left a gradient (the gradients agree here, where all are "
        "drawn). The paper's eq. 11 draws from all between the bounds: ours. Theirs is the authors' code.",
        **cov,
    )
    kl_cov = "--kl-cov-ratio 0.1 --kl-cov-coef 1"
    kl = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}
    open_ = f"{plain} dapo --epsilon 0.99999 --epsilon-high 1e6 {kl_cov}"
    yield loss("KL-Cov, without a clip", open_, "kl_cov", by_token, **kl)
    yield loss(
        "KL-Cov",
        f"{plain} dapo {kl_cov}",
        "kl_cov",
        by_token,
        "The paper's loss (eq. 14) is rho A without a clip: theirs. With us the penalty is added to the loss type "
        "chosen, so the paper's method needs its clip opened, as in the line above.",
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
    far = data.ref.clone()
    far[:, 0] = data.log_probs[:, 0] + 3
    yield of_kl(
        "KL, k3 of tokens 3 nats below the reference",
        "k3",
        "k3",
        "They clamp k3 at 10, beyond which it has no gradient: of tokens more than 2.6 nats below the reference, those "
        "that k3 should pull back most. Schulman's and GRPO's k3 has no bound: ours, where only the exponent is clamped, "
        "at 20.",
        data._replace(ref=far),
    )

    def factors_of(mode: str, flags: str, said: str, theirs: Callable[[Data], Tensor], difference: str = "") -> Case:
        flags = f"--rollout-importance-sampling-mode {mode} {flags}".strip()
        return Case(f"engine correction, {mode}", flags, said, data, our_corrections, theirs, difference)

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
        "Their k1 is log p(engine) - log p(trainer), so these bounds are of the inverse of the ratio that the weights "
        "are made of: an upper bound of 2 there cuts ratios below 0.5. The papers bound trainer over engine: ours; "
        "theirs takes the inverse bounds (the line above).",
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
        "The product against the geometric mean, as with TRL: theirs by the theory, ours for its variance.",
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
        "1e-6 is added to the std, with us (and TRL) 1e-4. The formula has none.",
    )
    plain_grpo = "--scale-rewards none"
    yield advantages("advantage, not scaled", plain_grpo, "grpo", norm_adv_by_std_in_grpo=False)
    yield advantages("RLOO", "--advantage-estimator rloo", "rloo")
    alone = data.rows(slice(0, 1))
    yield advantages(
        "a group of one",
        plain_grpo,
        "grpo",
        "A = R, with us 0. By the formula R minus the mean of the group is 0: ours. Theirs is REINFORCE without a "
        "baseline, for which we have other estimators.",
        data=alone,
        norm_adv_by_std_in_grpo=False,
    )
    plus = "--advantage-estimator reinforce_plus_plus --kl-in-reward --beta 0.1 --gamma 0.9"
    yield advantages(
        "REINFORCE++, KL and discount",
        plus,
        "reinforce_plus_plus",
        "1e-8 is added to the variance, with us 1e-4 to the std; the formula has neither. Nothing else (next line).",
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
        "They whiten over tokens, so a long completion counts more in mean and std, and the mean is taken off again; "
        "we divide by the std over completions, whose mean is 0 already. The paper normalises over the global batch; "
        "of tokens or of completions is a matter of reading.",
    )
    yield advantages(
        "GDPO of one reward",
        "--scale-rewards gdpo",
        "gdpo",
        "They whiten over tokens. The mean and std of the paper's last step are over the prompts and completions of the "
        "batch: ours, and TRL's.",
        data=data._replace(rewards=data.rewards[:, 1:]),
    )
    best = f"--advantage-estimator pass_at_k --pass-at-k {GROUP} --scale-rewards none"
    yield advantages(
        "pass@k, k = G",
        best,
        "grpo_passk",
        "Ours is G times theirs (next line), which has k = G only. The loss averages over completions, so that the "
        "gradient is that of E[max of k] with the G: ours. It is a factor of the learning rate.",
        norm_adv_by_std_in_grpo=False,
    )
    yield advantages(
        "the same, both divided by their largest",
        best,
        "grpo_passk",
        scale=lambda values: values / values.abs().max(),
        norm_adv_by_std_in_grpo=False,
    )


def differences(case: Case) -> list[float]:
    """Largest difference of value and gradient, relative to the largest number; one number where there is no gradient."""
    ours, theirs = case.ours(case.data, case.flags), case.theirs(case.data)
    if isinstance(ours, Tensor):
        ours, theirs = (ours,), (theirs,)
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in zip(ours, theirs, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="directory that holds TRL's package, trl/")
    parser.add_argument("--verl", type=Path, required=True, help="directory that holds verl's package, verl/")
    args = parser.parse_args()
    torch.manual_seed(0)
    data, wrong = made_up(), 0
    for library, cases in ((Trl(args.trl), of_trl), (Verl(args.verl), of_verl)):
        print(f"\n| {library.version} | our flags | theirs | value | gradient | |\n|---|---|---|---|---|---|")
        for case in cases(library, data):
            numbers = differences(case)
            unexpected = (max(numbers) > SAME) != bool(case.difference)
            wrong += unexpected
            verdict = "UNEXPECTED " * unexpected + (case.difference or "same")
            shown = " | ".join(f"{number:.0e}" if number else "0" for number in numbers) + " |" * (2 - len(numbers))
            print(f"| {case.thing} | `{case.flags}` | {case.function} | {shown} | {verdict} |")
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
