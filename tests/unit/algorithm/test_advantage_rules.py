"""Rules of advantages and KL: what is filled in, and each refusal with its reason."""

import pytest
from flag_conflicts import ADVANTAGES
from good_args import MOE, validated

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.algorithm.advantages import ADVANTAGES as ESTIMATORS
from megatron_grpo.algorithm.arguments import STEPS, needs_old_log_probs
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import resolved
from megatron_grpo.utils.errors import GrpoError


def checked(flags: str):
    return resolved(parse_args(flags.split()), *STEPS)


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
    for estimator in ESTIMATORS.entries:
        needed = {"pass_at_k": "--pass-at-k 8"} | dict.fromkeys(["turn_returns", "gigpo"], "--environment calculator")
        checked(f"--advantage-estimator {estimator} {needed.get(estimator, '')}")
    for given in ("", " --environment calculator --agent my:run"):
        with pytest.raises(GrpoError, match="--advantage-estimator gigpo needs --environment"):
            checked(f"--advantage-estimator gigpo{given}")


@pytest.mark.parametrize(
    "flags",
    [
        "--advantage-estimator gdpo --reward-funcs a b",
        "--advantage-estimator rloo --kl-in-reward --kl-estimator k1",
        "--advantage-estimator reinforce_plus_plus --num-generations 1 --gamma 0.99 --kl-in-reward",
        "--advantage-estimator reinforce_plus_plus --loss-type gmpo --off-policy-sequence-mask-delta 1",
        "--kl-estimator unbiased",
        "--beta 0",
    ],
)
def test_what_goes_together(flags):
    checked(flags)


@pytest.mark.parametrize("flags", ADVANTAGES)
def test_refusals(flags):
    with pytest.raises(GrpoError) as error:
        checked(flags)
    assert ADVANTAGES[flags] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("", False),
        ("--beta 0 --loss-type cispo --epsilon-high 5 --top-entropy-quantile 0.2 --clip-cov-ratio 0.1", False),
        ("--loss-type real --kl-estimator unbiased --off-policy-sequence-mask-delta 1 --router-replay-mode R3", False),
        ("--num-iterations 2", True),
        ("--steps-per-generation 2", True),
        ("--global-batch-size 64 --generation-batch-size 128", True),
        ("--rollout-importance-sampling-mode icepop", False),
        ("--m2po-threshold 0.04", True),
        ("--kl-in-reward", True),
        ("--teacher-load-hf t --teacher-kl-coef 1", True),
        ("--router-replay-mode R2", True),
    ],
)
def test_the_pass_for_the_old_policy_is_made_where_something_reads_it(flags, needed):
    moe = f" {MOE}" * ("router" in flags)
    assert needs_old_log_probs(validated(flags + moe)) is needed
