"""From a rollout and flags to the advantages that the update reads, worked by hand."""

import statistics
from argparse import Namespace

import numpy as np
import pytest
import torch
from plugins import plugins  # noqa: F401

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import pretrain_grpo
from megatron_grpo.algorithm.arguments import check_advantages, resolve_advantages
from megatron_grpo.algorithm.policy_term import drop_overlong, policy_term, update_statistics
from megatron_grpo.algorithm.registry import register_loss
from megatron_grpo.algorithm.rollout_advantages import estimate_advantages
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.rollout.rollout_metrics import rollout_metrics
from megatron_grpo.rollout.source import Rollout
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced, resolved
from megatron_grpo.utils.errors import GrpoError

NAN = float("nan")


def arguments(flags: str) -> Namespace:
    return replaced(resolved(parse_args(flags.split()), resolve_advantages, check_advantages), updates_per_rollout=1)


def rollout(rewards) -> RolloutBatch:
    """Four completions of 1, 2, 1 and 2 tokens behind prompts of one; groups 7 and 3, interleaved."""
    batch = RolloutBatch.from_completions(
        prompts=[[1]] * 4,
        completions=[[5], [6, 7], [8], [9, 10]],
        log_probs=[None] * 4,
        weight_version=0,
        group_ids=[7, 3, 7, 3],
        row_ids=[0, 1, 0, 1],
        sample_ids=range(4),
        finish_reasons=[FinishReason.STOP] * 4,
    )
    batch.rewards = np.array(rewards, np.float32).reshape(4, -1)
    return batch


def with_log_probs(batch: RolloutBatch) -> RolloutBatch:
    """k1 to the reference: 1; 2, -1; 0; 0, 4 on the tokens of the four completions."""
    batch.old_log_probs = np.float32([NAN, -1, NAN, -1, -2, NAN, -3, NAN, -1, -1])
    batch.ref_log_probs = batch.old_log_probs - np.float32([0, 1, 0, 2, -1, 0, 0, 0, 0, 4])
    return batch


def estimated(flags: str, batch: RolloutBatch):
    rewards = batch.rewards.sum(axis=1)
    return estimate_advantages(arguments(flags), batch, rewards)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [  # rewards 3, 0, 1, 4: groups {3, 1} and {0, 4}
        ("--scale-rewards none", [1, -2, -1, 2]),
        ("", np.array([1, -2, -1, 2]) / (np.array([2, 8, 2, 8]) ** 0.5 + 1e-4)),
        ("--scale-rewards batch", np.array([1, -2, -1, 2]) / ((10 / 3) ** 0.5 + 1e-4)),
        ("--advantage-estimator rloo", [2, -4, -2, 4]),
        (
            "--advantage-estimator reinforce_plus_plus_baseline",
            np.array([1, -2, -1, 2]) / ((10 / 3) ** 0.5 + 1e-4),
        ),
        ("--advantage-estimator pass_at_k --pass-at-k 2", [4, 0, 0, 8]),
    ],
)
def test_estimators(flags, expected):
    batch = rollout([3, 0, 1, 4])
    batch, metrics = estimated(flags, batch)
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)
    assert batch.token_advantages is None and batch.advantages.dtype == np.float32
    assert metrics["advantage/mean"] == pytest.approx(np.mean(expected), abs=1e-7)
    assert metrics["advantage/std"] == pytest.approx(statistics.stdev(np.array(expected).tolist()))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("first", "largest"), [(3e38, r"3e\+38"), (np.inf, "inf")])
def test_advantages_beyond_float32_are_refused(first, largest):
    """Recorded rewards with other weights: no reward function is called that could fail. RLOO's is 3e38 + 3e38."""
    args = arguments("--advantage-estimator rloo --scale-rewards none")
    with pytest.raises(GrpoError, match=rf"rloo returned infinity or NaN for rewards of up to {largest}: give smaller"):
        estimate_advantages(args, rollout([0] * 4), np.float32([first, 0, -3e38, NAN]))


def test_gdpo_takes_the_matrix_and_the_weights():
    batch = rollout([[1, 0], [0, 9], [0, 0], [1, 5]])
    args = arguments("--advantage-estimator gdpo --reward-funcs a b")
    args = replaced(args, reward_weights=[1.0, 0.5])
    batch, _ = estimate_advantages(args, batch, np.zeros(4, np.float32))
    z = 0.5**0.5  # one standard deviation of two values, from their mean
    total = [z, -z + z / 2, -z, z - z / 2]
    np.testing.assert_allclose(batch.advantages, np.array(total) / statistics.stdev(total), rtol=1e-3)


def test_kl_in_the_reward_of_completions():
    """Penalties 0.5 (1, 1, 0, 4): rewards 2.5, -0.5, 1, 2."""
    batch = with_log_probs(rollout([3, 0, 1, 4]))
    batch, metrics = estimated("--kl-in-reward --beta 0.5 --advantage-estimator rloo", batch)
    np.testing.assert_allclose(batch.advantages, [1.5, -2.5, -1.5, 2.5], rtol=1e-6)
    assert metrics["reward/kl_penalty"] == pytest.approx(0.75)
    assert batch.token_advantages is None


def test_reinforce_plus_plus_gives_each_token_its_own():
    """r, token by token: 3 - 0.5; -1, 0.5; 1; 0, 4 - 2. With gamma 1/2 the returns are 2.5; -0.75, 0.5; 1; 1, 2."""
    batch = with_log_probs(rollout([3, 0, 1, 4]))
    batch, metrics = estimated("--kl-in-reward --beta 0.5 --gamma 0.5 --advantage-estimator reinforce_plus_plus", batch)
    returns = [2.5, -0.75, 0.5, 1, 1, 2]
    a = [(r - statistics.mean(returns)) / (statistics.stdev(returns) + 1e-4) for r in returns]
    expected = [0, a[0], 0, a[1], a[2], 0, a[3], 0, a[4], a[5]]
    np.testing.assert_allclose(batch.token_advantages, expected, rtol=1e-6)
    means = [a[0], (a[1] + a[2]) / 2, a[3], (a[4] + a[5]) / 2]
    np.testing.assert_allclose(batch.advantages, means, rtol=1e-6)
    assert metrics["advantage/mean"] == pytest.approx(np.mean(means), abs=1e-7)
    batch.validate()


def test_the_teachers_opinion_is_added():
    batch = with_log_probs(rollout([3, 0, 1, 4]))
    batch.teacher_log_probs = batch.old_log_probs + np.float32([0, 1, 0, 0, 2, 0, -1, 0, 0, 0])
    args = arguments("--scale-rewards none")
    args = replaced(args, teacher_kl_coef=0.5)
    batch, metrics = estimate_advantages(args, batch, batch.rewards[:, 0])
    assert metrics["teacher/kl"] == pytest.approx(-(1 + 0 + 2 - 1 + 0 + 0) / 6)  # of the tokens in the loss
    np.testing.assert_allclose(batch.token_advantages, [0, 1.5, 0, -2, -1, 0, -1.5, 0, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(batch.advantages, [1.5, -1.5, -1.5, 2], rtol=1e-6)


def test_a_new_rollout_forgets_token_advantages():
    batch = rollout([3, 0, 1, 4])
    batch.token_advantages = np.ones(10, np.float32)
    batch, _ = estimated("", batch)
    assert batch.token_advantages is None


def test_covariances_are_those_of_the_tokens_own_advantages():
    """Three tokens, A = 1, -3, 2 (mean 0), lp = -1, -1, -4 (mean -2): covariances 1, -3, -4; the first is left out."""
    batch = rollout([3, 0, 1, 4])
    batch.advantages, batch.token_advantages = np.zeros(4, np.float32), np.zeros(10, np.float32)
    batch.token_advantages[[1, 3, 4]] = 1, -3, 2
    scores = np.zeros((2, 10), np.float32)
    scores[0, [1, 3, 4]] = -1, -1, -4
    args = arguments("--clip-cov-ratio 0.5 --clip-cov-lb 0.5 --clip-cov-ub 5")
    batch, _ = update_statistics(args, batch, np.array([0, 1]), 0, lambda *_: scores)
    assert np.flatnonzero(batch.policy_mask == 0).tolist() == [1]


@pytest.mark.usefixtures("plugins")
def test_a_loss_reads_statistics_of_the_update():
    """Covariances 1, -3, -4 as above, and entropies; for an update without tokens no pass is made."""
    seen = {}

    def foo(log_probs, covariances, entropies):
        seen.update(covariances=covariances.tolist(), entropies=entropies.tolist())
        return -covariances * log_probs

    register_loss("foo", aggregation="grpo")(foo)
    batch = rollout([3, 0, 1, 4])
    batch.advantages, batch.token_advantages = np.zeros(4, np.float32), np.zeros(10, np.float32)
    batch.token_advantages[[1, 3, 4]] = 1, -3, 2
    scores = np.zeros((2, 10), np.float32)
    scores[:, [1, 3, 4]] = [-1, -1, -4], [0.5, 0.25, 2]
    args = arguments("--loss-type foo")
    changed, _ = update_statistics(args, batch, np.array([0, 1]), 0, lambda *_: scores)
    pack = pack_completions(changed, [1, 0])  # completion 1 has the tokens 3 and 4, completion 0 the token 1
    tensors = {name: torch.from_numpy(values) for name, values in pack.of_labels.items()}
    tensors["completion"] = torch.from_numpy(pack.completion)
    term = policy_term(args, torch.tensor([-1.0, -4.0, -1.0]), torch.zeros(3), tensors)
    assert seen == {"covariances": [-3, -4, 1], "entropies": [0.25, 2, 0.5]}
    assert term.loss.tolist() == [-3, -16, 1]

    batch.finish_reasons[:] = FinishReason.LENGTH
    changed, _ = update_statistics(args, drop_overlong(batch), np.array([0, 1]), 0, lambda *_: None)
    assert not changed.covariances.any() and len(changed.entropies) == 10


def test_real_replaces_what_tokens_had():
    batch = rollout([3, 0, 1, 4])
    batch, _ = estimated("--advantage-estimator reinforce_plus_plus", batch)
    assert batch.token_advantages is not None
    args = arguments("--loss-type real --advantage-estimator reinforce_plus_plus")
    changed, _ = update_statistics(args, batch, np.arange(4), 0, lambda *_: None)
    assert changed.token_advantages is None and (changed.advantages[[0, 3]] > 0).all()


def test_real_learns_nothing_from_what_nothing_scored():
    """Groups {3, not scored} and {0, 4}: without its mate's reward the first has no negative, so nothing is learnt."""
    batch = rollout([3, 0, NAN, 4])
    batch, _ = estimated("", batch)
    changed, _ = update_statistics(arguments("--loss-type real"), batch, np.arange(4), 0, lambda *_: None)
    assert (changed.advantages[[0, 2]] == 0).all() and changed.advantages[1] < 0 < changed.advantages[3]


def test_the_overlong_filter():
    """Completions cut at the limit leave the loss, and nothing else: all of them, an update learns nothing."""
    batch = rollout([3, 0, 1, 4])
    batch, _ = estimated("", batch)
    before = batch.advantages.copy()
    batch.finish_reasons[[1, 2]] = FinishReason.LENGTH, FinishReason.ABORT
    batch = drop_overlong(batch)
    assert batch.response_lengths.tolist() == [1, 0, 1, 2] and batch.completion_lengths.tolist() == [1, 2, 1, 2]
    np.testing.assert_array_equal(batch.advantages, before)
    batch.validate()
    batch.finish_reasons[:] = FinishReason.LENGTH
    batch = drop_overlong(batch)
    args = arguments("--top-entropy-quantile 0.5 --clip-cov-ratio 0.5 --loss-type real")
    assert update_statistics(args, batch, np.arange(4), 0, lambda *_: None)[0] is batch


def test_no_function_changes_the_batch_that_it_receives():
    batch = with_log_probs(rollout([3, 0, 1, 4]))
    batch.rollout_log_probs = batch.old_log_probs - 1
    batch.teacher_log_probs = batch.old_log_probs + 1
    batch.finish_reasons[1] = FinishReason.LENGTH
    flags = "--kl-in-reward --beta 0.5 --advantage-estimator rloo --rollout-importance-sampling-mode token_truncate"
    args = arguments(f"{flags} --rollout-importance-sampling-threshold 2 --m2po-threshold 0.1 --loss-type real")
    args = replaced(args, teacher_kl_coef=0.5)
    batch, _ = estimate_advantages(args, batch, batch.rewards[:, 0])
    before = {name: None if array is None else array.copy() for name, array in vars(batch).items()}
    for function in (
        lambda: estimate_advantages(args, batch, batch.rewards[:, 0])[0],
        lambda: drop_overlong(batch),
        lambda: update_statistics(args, batch, np.arange(4), 0, lambda *_: np.zeros((2, 10), np.float32))[0],
    ):
        assert function() is not batch
        for name, array in before.items():
            np.testing.assert_array_equal(getattr(batch, name), array, err_msg=name)


def test_metrics_of_reward_functions():
    batch = rollout([[1, NAN], [0, 2], [1, 6], [2, NAN]])
    args = Namespace(environment=None, tool_call_parser=None, reward_funcs=["right", "style"])
    row = rollout_metrics(args, Rollout(batch, {}, 0), np.float32([1, 2, 7, 2]))
    assert [row[f"reward/right/{what}"] for what in ("mean", "min", "max")] == [1, 0, 2]
    assert row["reward/right/std"] == pytest.approx((2 / 3) ** 0.5)
    assert [row[f"reward/style/{what}"] for what in ("mean", "min", "max")] == [4, 2, 6]
    assert row["reward/style/std"] == pytest.approx(8**0.5)
    assert row["reward/zero_std_groups"] == 0.5  # {2, 2} of {1, 7} and {2, 2}


def test_lengths_of_completions_are_those_of_sampled_tokens():
    """An environment has said 3 tokens between and behind the 2 that were sampled."""
    batch = RolloutBatch.from_completions(
        [[1]] * 2, [[5, 6, 7, 8, 9], [5]], [None] * 2, 0, [0, 0], [0, 0], [0, 1], [FinishReason.STOP] * 2,
        response_masks=[[1, 0, 0, 1, 0], None], turns=[2, 1],
    )  # fmt: skip
    batch.rewards = np.zeros((2, 1), np.float32)
    args = Namespace(environment="calculator", tool_call_parser=None, reward_funcs=["right"])
    row = rollout_metrics(args, Rollout(batch, {}, 0), np.zeros(2, np.float32))
    assert [row[f"completion/length_{what}"] for what in ("mean", "min", "max")] == [1.5, 1, 2]
    assert row["tokens/rollout"] == 3 and row["environment/tokens"] == 1.5


# ---- the loss


def loss_and_gradient(flags: str, monkeypatch):
    """loss_func on three tokens with weights 1, advantages 0, x = 0.3, -0.2, 1.0, and ratios to the old policy."""
    monkeypatch.setattr(pretrain_grpo.parallel_state, "get_data_parallel_world_size", lambda: 1)
    monkeypatch.setattr(pretrain_grpo, "whole_pack", lambda values, *_: values)
    args = parse_args(f"--epsilon 0.2 --epsilon-high 0.2 {flags}".split())
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    batch = {"weights": torch.ones(3), "advantages": torch.zeros(3), "completion": torch.tensor([0, 0, 1])}
    batch |= {"ref_log_probs": log_probs.detach() - X, "old_log_probs": log_probs.detach() - D, "own_labels": None}
    batch["rollout_log_probs"] = torch.full((3,), NAN)
    loss, report = pretrain_grpo.loss_func(args, batch, 1, 1, torch.stack([log_probs, torch.zeros(3)]))
    loss.backward()
    return loss.detach(), log_probs.grad, report


X, D = torch.tensor([0.3, -0.2, 1.0]), torch.tensor([0.1, 0.0, -0.4])
K3 = torch.exp(-X) - 1 + X


@pytest.mark.parametrize(
    ("flags", "loss", "gradient"),
    [
        ("--kl-estimator k2", 0.1 * X**2 / 2, 0.1 * X),
        ("--kl-estimator k3", 0.1 * K3, 0.1 * (1 - torch.exp(-X))),
        ("--kl-estimator unbiased", 0.1 * D.exp() * K3, 0.1 * D.exp() * X),
        ("--kl-in-reward", torch.zeros(3), torch.zeros(3)),
    ],
)
def test_the_loss_has_the_kl_term_asked_for_and_reports_k3(flags, loss, gradient, monkeypatch):
    value, slope, report = loss_and_gradient(f"--beta 0.1 {flags}", monkeypatch)
    torch.testing.assert_close(value, loss.sum())
    torch.testing.assert_close(slope, gradient)
    torch.testing.assert_close(report["kl"], K3.sum())
