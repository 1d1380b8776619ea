"""Rules of advantages and KL: what is filled in, and each refusal with its reason."""

import pytest
from test_validation import MOE, validated

from megatron_grpo.utils import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.algorithm.advantages import ESTIMATORS
from megatron_grpo.algorithm.arguments import check_advantages, needs_old_log_probs
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError


def checked(flags: str):
    args = parse_args(flags.split())
    check_advantages(args)
    return args


@pytest.mark.parametrize(
    ("estimator", "scale"),
    [
        ("grpo", "group"),
        ("rloo", "none"),
        ("reinforce_plus_plus", "batch"),
        ("reinforce_plus_plus_baseline", "batch"),
        ("pass_at_k", "none"),
    ],
)
def test_scale_is_the_estimators(estimator, scale):
    k = " --pass-at-k 2" * (estimator == "pass_at_k")
    assert checked(f"--advantage-estimator {estimator}{k}").scale_rewards == scale
    assert checked(f"--advantage-estimator {estimator}{k} --scale-rewards batch").scale_rewards == "batch"


def test_every_estimator_has_a_scale():
    for estimator in ESTIMATORS:
        checked(f"--advantage-estimator {estimator}" + " --pass-at-k 8" * (estimator == "pass_at_k"))


@pytest.mark.parametrize(
    "flags",
    [
        "--scale-rewards gdpo --reward-funcs a b",
        "--advantage-estimator rloo --kl-in-reward --kl-estimator k1",
        "--advantage-estimator reinforce_plus_plus --num-generations 1 --gamma 0.99 --kl-in-reward",
        "--advantage-estimator reinforce_plus_plus --loss-type gmpo --off-policy-sequence-mask-delta 1",
        "--kl-estimator unbiased",
        "--beta 0",
    ],
)
def test_what_goes_together(flags):
    checked(flags)


PLUS_PLUS = "--advantage-estimator reinforce_plus_plus"
REFUSED = {
    f"{PLUS_PLUS} --scale-rewards group": "divides by the standard deviation over the batch, so --scale-rewards group",
    f"{PLUS_PLUS}_baseline --scale-rewards none": "so --scale-rewards none has no effect",
    "--advantage-estimator rloo --scale-rewards gdpo --reward-funcs a b": "whatever --advantage-estimator rloo",
    "--scale-rewards gdpo --reward-funcs a": "--reward-funcs names one: give --scale-rewards group",
    "--scale-rewards gdpo --reward-funcs a b --kl-in-reward": "gdpo normalises each reward function by itself",
    "--pass-at-k 2": "--pass-at-k and --advantage-estimator pass_at_k go together",
    "--advantage-estimator pass_at_k": "--pass-at-k and --advantage-estimator pass_at_k go together",
    "--advantage-estimator pass_at_k --pass-at-k 9": "(9) must lie between 2 and --num-generations (8)",
    "--advantage-estimator pass_at_k --pass-at-k 1": "for k = 1 there is --advantage-estimator rloo",
    "--advantage-estimator pass_at_k --pass-at-k 4 --kl-in-reward": "leave the KL in the loss",
    f"{PLUS_PLUS} --gamma 0": "--gamma (0.0) must be greater than 0 and at most 1",
    f"{PLUS_PLUS} --gamma 1.5": "--gamma (1.5) must be greater than 0 and at most 1",
    "--gamma 0.9": "--gamma has no effect with --advantage-estimator grpo",
    "--beta -1": "--beta (-1.0) must not be negative",
    "--beta 0 --kl-in-reward": "--kl-in-reward needs --beta",
    "--beta 0 --kl-estimator k2": "--kl-estimator needs --beta",
    "--kl-estimator k1": "its gradient has mean zero. Give k2, k3 or unbiased",
    "--kl-in-reward --kl-estimator k3": "--kl-estimator k3 in the reward would give that of something else",
    f"{PLUS_PLUS} --gamma 0.9 --loss-type real": "--loss-type real asks whether a completion's advantage is positive",
    f"{PLUS_PLUS} --kl-in-reward --loss-type gmpo": "with --kl-in-reward each token has its own",
    f"{PLUS_PLUS} --gamma 0.9 --off-policy-sequence-mask-delta 1": "--off-policy-sequence-mask-delta asks whether",
    f"{PLUS_PLUS} --num-generations 1 --loss-type real": "--num-generations (1) must be at least 2",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refusals(flags):
    with pytest.raises(GrpoError) as error:
        checked(flags)
    assert REFUSED[flags] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("", False),
        ("--beta 0 --loss-type cispo --epsilon-high 5 --top-entropy-quantile 0.2 --clip-cov-ratio 0.1", False),
        ("--loss-type real --kl-estimator unbiased --off-policy-sequence-mask-delta 1 --router-replay-mode R3", False),
        ("--num-iterations 2", True),
        ("--steps-per-generation 2", True),
        ("--global-batch-size 64 --generation-batch-size 128", True),
        ("--rollout-importance-sampling-mode icepop", True),
        ("--m2po-threshold 0.04", True),
        ("--kl-in-reward", True),
        ("--teacher-load-hf t --teacher-kl-coef 1", True),
        ("--router-replay-mode R2", True),
    ],
)
def test_the_pass_for_the_old_policy_is_made_where_something_reads_it(flags, needed):
    moe = f" {MOE}" * ("router" in flags)
    assert needs_old_log_probs(validated(flags + moe)) is needed
