"""A trial of a plug-in's loss and advantage estimator on made-up completions, before the model is built.

Without it a mistake in them ends the run at its first update, after the model and the engine have started. A trial
changes nothing: it runs in a fork of this process, without its output, random numbers and process groups, so that a
plug-in with a state (a moving average, a number of calls) begins the run as it was loaded.
"""

import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.algorithm.advantages import ADVANTAGES
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.policy_term import loss_metrics_of_update, policy_loss
from megatron_grpo.algorithm.registry import Entry, Function, call
from megatron_grpo.algorithm.rollout_advantages import of_shape
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError, raised_at

# A mistake in the code. Other errors can be those of made-up numbers on a CPU: a kernel that needs a GPU.
MISTAKES = (AttributeError, ImportError, NameError, TypeError)
LENGTHS = (3, 5, 2, 4)  # tokens of the completions, again and again
SECONDS = 30  # of a trial; a slower one says nothing

_passed: set[Function] = set()  # in this process, which resolves its arguments several times


def check_functions(args: Namespace) -> None:
    """Raise GrpoError for a plug-in's loss or estimator with a mistake in its code or a wrong shape of its result."""
    args = replaced(args, train_iters=args.train_iters or 1)  # of --num-epochs: the data tell it later
    _check(args, LOSSES.get(args.loss_type), "--loss-type", _try_loss)
    _check(args, ADVANTAGES.get(args.advantage_estimator), "--advantage-estimator", _try_estimator)


def _check(args: Namespace, entry: Entry, option: str, attempt: Callable[[Namespace], None]) -> None:
    if entry.function.__module__.startswith("megatron_grpo.") or entry.function in _passed:
        return

    def mistake() -> str:
        try:
            attempt(args)
        except GrpoError as error:
            return str(error)
        except MISTAKES as error:
            if args.dry_run and isinstance(error, ImportError):  # of a package that this machine need not have
                return ""
            return f"{option} {entry.name} raised {type(error).__name__}: {error}{raised_at(error)}"
        except Exception:  # the first update tells
            return ""
        return ""

    if message := _in_a_fork(mistake):
        raise GrpoError(message)
    _passed.add(entry.function)


def _in_a_fork(function: Callable[[], str]) -> str:
    """Return what a function returns in a fork of this process; "" if it does not return within SECONDS."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else both processes write what is in it
    # Not a pipe: processes that the child leaves behind would keep it open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(SECONDS)
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for number in (1, 2):
                    os.dup2(nowhere, number)
                torch.set_num_threads(1)  # the threads of OpenMP are the parent's
                dist.GroupMember.WORLD = None  # a collective raises: its connections are those of the parent
                with open(nowhere, "w") as silent, redirect_stdout(silent), redirect_stderr(silent):  # pytest's files
                    found = function()
                file.write(found)
                file.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        file.seek(0)
        return file.read()


def _try_loss(args: Namespace) -> None:
    lengths = _lengths(args)
    completion = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    tokens = len(completion)
    old = -torch.linspace(0.1, 3.0, tokens)
    log_probs = (old + 0.01).requires_grad_()
    advantages = torch.where(completion % 2 == 0, 1.0, -1.0)
    statistics = {"covariances": torch.zeros(tokens), "entropies": torch.ones(tokens)}
    batch = {"advantages": advantages, "completion": completion, "divergence": -log_probs, **statistics}
    loss = policy_loss(args, log_probs, old, batch).loss
    if not loss.requires_grad and (loss.any() or not (args.beta or args.entropy_coef)):  # 0: the other terms train
        raise GrpoError(
            f"--loss-type {args.loss_type} returned a loss that does not depend on log_probs or log_ratio: nothing "
            "would be trained (leave out detach, item and numpy)"
        )
    chosen = LOSSES.get(args.loss_type)
    if chosen.update_advantages:
        zeros, signs = np.zeros(len(lengths)), np.resize(np.array([1.0, -1.0], np.float32), len(lengths))
        inputs = {"scores": zeros, "advantages": signs, "group_ids": _group_ids(args), "lengths": lengths}
        inputs["over_reference"] = zeros
        call(chosen.update_advantages, inputs, args)
        loss_metrics_of_update(args, chosen, inputs)


def _try_estimator(args: Namespace) -> None:
    estimator, lengths = ADVANTAGES.get(args.advantage_estimator), _lengths(args)
    tokens, count = int(lengths.sum()), len(lengths)
    inputs: dict[str, Any] = {
        "rewards": np.minimum(np.arange(count, dtype=np.float32), 1),  # the first group has a signal
        "function_rewards": np.ones((count, len(args.reward_funcs or ())), np.float32),
        "group_ids": _group_ids(args),
        "response_mask": np.ones(tokens, np.uint8),
        "cu_seqlens": np.cumsum([0, *lengths]),
        "penalties": np.zeros(tokens, np.float32) if args.kl_in_reward else None,
        "gather": np.asarray,
        "turns": np.ones(count, np.int64),
    }
    if estimator.parameters.keys() & {"turn_rewards", "turn_states"}:
        return  # made-up turns would be those of no environment
    advantages = np.asarray(call(estimator.function, inputs, args), np.float32)
    of_shape(estimator, advantages, tokens if estimator.per_token else count)


def _group_ids(args: Namespace) -> np.ndarray:
    """Return the groups of the completions, [n]: two prompts."""
    return np.repeat([0, 1], args.num_generations)


def _lengths(args: Namespace) -> np.ndarray:
    return np.resize(LENGTHS, 2 * args.num_generations)
