"""A trial of a plug-in's loss and advantage estimator on made-up completions, before the model is built.

Without it a mistake in them ends the run at its first update, after the model and the engine have started.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_grpo.algorithm.advantages import ADVANTAGES
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.policy_term import policy_loss
from megatron_grpo.algorithm.registry import Entry, call
from megatron_grpo.algorithm.rollout_advantages import of_shape
from megatron_grpo.utils.errors import GrpoError, raised_at

# A mistake in the code. Other errors can be those of made-up numbers on a CPU: a kernel that needs a GPU.
MISTAKES = (AttributeError, ImportError, NameError, TypeError)
LENGTHS = (3, 5, 2, 4)  # tokens of the completions, in two groups


def check_functions(args: Namespace) -> None:
    """Raise GrpoError for a plug-in's loss or estimator with a mistake in its code or a wrong shape of its result."""
    _check(LOSSES.get(args.loss_type), "--loss-type", lambda: _try_loss(args))
    _check(ADVANTAGES.get(args.advantage_estimator), "--advantage-estimator", lambda: _try_estimator(args))


def _check(entry: Entry, option: str, attempt: Callable[[], None]) -> None:
    if entry.function.__module__.startswith("megatron_grpo."):
        return
    try:
        attempt()
    except MISTAKES as error:
        raise GrpoError(f"{option} {entry.name} raised {type(error).__name__}: {error}{raised_at(error)}") from error
    except GrpoError:
        raise
    except Exception:  # the first update tells
        return


def _try_loss(args: Namespace) -> None:
    completion = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    tokens = len(completion)
    old = -torch.linspace(0.1, 3.0, tokens)
    log_probs = (old + 0.01).requires_grad_()
    advantages = torch.where(completion % 2 == 0, 1.0, -1.0)
    statistics = {"covariances": torch.zeros(tokens), "entropies": torch.ones(tokens)}
    batch = {"advantages": advantages, "completion": completion, **statistics}
    if not policy_loss(args, log_probs, old, batch).loss.requires_grad:
        raise GrpoError(
            f"--loss-type {args.loss_type} returned a loss that does not depend on log_probs or log_ratio: nothing "
            "would be trained (leave out detach, item and numpy)"
        )


def _try_estimator(args: Namespace) -> None:
    estimator, tokens, count = ADVANTAGES.get(args.advantage_estimator), sum(LENGTHS), len(LENGTHS)
    inputs: dict[str, Any] = {
        "rewards": np.array([0.0, 1.0, 1.0, 1.0], np.float32),
        "function_rewards": np.ones((count, len(args.reward_funcs or ())), np.float32),
        "group_ids": np.array([0, 0, 1, 1]),
        "response_mask": np.ones(tokens, np.uint8),
        "cu_seqlens": np.cumsum([0, *LENGTHS]),
        "penalties": np.zeros(tokens, np.float32) if args.kl_in_reward else None,
        "gather": np.asarray,
        "turns": np.ones(count, np.int64),
    }
    if estimator.parameters.keys() & {"turn_rewards", "turn_states"}:
        return  # made-up turns would be those of no environment
    advantages = np.asarray(call(estimator.function, inputs, args), np.float32)
    of_shape(estimator, advantages, tokens if estimator.per_token else count)
