"""Registry of losses and advantage estimators by name.

The parameters of a registered function are its inputs: each is one of the tensors or arrays below, or the value of the
flag of that name (``foo_alpha``: ``--foo-alpha``). A flag that the chosen function does not read is refused.

    @register_loss("foo", aggregation="dapo", flags=[Flag("--foo-alpha", float, 1.0, "foo: strength", positive=True)])
    def foo_loss(log_ratio, advantages, foo_alpha):
        return -foo_alpha * log_ratio.exp() * advantages

To use this loss, save it as ``foo.py``: ``--external-plugins foo.py --loss-type foo --foo-alpha 2``. This module does
not import torch, because worker processes of reward functions load the same files.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import Flag as Flag

Function = Callable[..., Any]
Aggregation = Literal["grpo", "bnpo", "dapo", "dr_grpo"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
Level = Literal["token", "sequence", "sequence_token"]

# Statistics of the tokens of a whole update, under the weights before the update. A loss that reads a statistic costs a
# forward pass.
# covariances: (A - mean A)(lp - mean lp), of `masks.covariances`; entropies: of the policy, nats.
TOKEN_STATISTICS = ("covariances", "entropies")
# Inputs of a loss, [t] each: the label tokens of a pack. log_ratio is log_probs - old_log_probs at the loss's level,
# divergence that of the policy's distribution from a teacher's (models/divergence.py), with its gradient.
LOSS_INPUTS = ("log_probs", "old_log_probs", "log_ratio", "advantages", "completion", "divergence", *TOKEN_STATISTICS)
# Inputs of update_advantages and update_metrics, [n] each: the completions of an update. scores is the mean of d over
# each completion, lengths its number of tokens in the loss, over_reference their sum of log_probs - ref_log_probs.
UPDATE_INPUTS = ("scores", "advantages", "group_ids", "lengths", "over_reference")
# Inputs of an estimator, of all completions of the rollout: rewards (the weighted sums) and group_ids [n], and
# function_rewards [n, f] of each of --reward-funcs. Of the tokens that this rank holds, those of other completions are
# left out: response_mask and penalties [total] (penalties is None without --kl-in-reward); cu_seqlens [n + 1].
# gather(values [..., n]) returns a number of each completion, computed from its tokens, of all completions.
# turns [n], and of episodes with an environment turn_rewards and turn_states [n, most turns]: `RolloutBatch`.
ADVANTAGE_INPUTS = (
    *("rewards", "function_rewards", "group_ids", "response_mask", "cu_seqlens", "penalties", "gather"),
    *("turns", "turn_rewards", "turn_states"),
)


class PolicyLoss(NamedTuple):
    """Result of a loss for one micro-batch: tensors of its tokens, [t] each."""

    loss: Any  # L of each token
    clip_low: Any = None  # 1.0 on tokens without gradient because the ratio fell too far, else 0.0
    clip_high: Any = None  # 1.0 on tokens whose ratio rose too far; None: the loss clips nothing
    # Further metrics, logged as means over the tokens of an update. Names begin with the loss type: "foo/strength".
    metrics: Mapping[str, Any] = MappingProxyType({})


@cache
def parameters(function: Function) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name: inputs and flags."""
    return inspect.signature(function).parameters


@dataclass(frozen=True)
class Entry:
    """A registered function with its name."""

    name: str
    function: Function
    check: Function | None = None  # raises GrpoError for invalid flags, which its parameters name
    example: str | None = ""  # flags of its comparison by tools/check_parallel.py; None: no comparison

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters by name: inputs and flags."""
        return parameters(self.function)


@dataclass(frozen=True)
class Loss(Entry):
    """A policy loss: ``function`` returns a `PolicyLoss`, or only L of each token, [t]."""

    aggregation: Aggregation = "grpo"  # how weighting.token_weights averages over tokens
    level: Level | None = None  # fixed ratio level; None: --importance-sampling-level
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of flags whose general default is None
    # Replaces the advantages of an update, from statistics of all its completions (UPDATE_INPUTS): [n].
    update_advantages: Function | None = None
    # Returns metrics of an update from the same statistics, by name: "foo/strength". Needs update_advantages.
    update_metrics: Function | None = None
    one_advantage: bool = False  # needs the same advantage at all tokens of a completion
    demonstrations: bool = False  # --sft-loss-type: of demonstrations beside a rollout, not of --loss-type

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters by name, including those of ``update_advantages`` and ``update_metrics``."""
        functions = self.function, self.update_advantages, self.update_metrics
        return {name: value for own in functions if own for name, value in parameters(own).items()}

    @property
    def distils(self) -> bool:
        """Whether the loss reads the distribution of a teacher."""
        return "divergence" in self.parameters

    @property
    def reads_reference(self) -> bool:
        """Whether the loss reads the reference model's log-probabilities, with --beta 0, too."""
        return "over_reference" in self.parameters

    @property
    def joins_groups(self) -> bool:
        """Whether demonstrations have advantages: each then belongs to the group of its prompt."""
        return self.demonstrations and "advantages" in self.parameters

    @property
    def whole_groups(self) -> bool:
        """Whether an update needs all completions of a prompt, one after the other.

        Such a loss compares the completions of a prompt, or averages over blocks of consecutive completions. A rollout
        is then divided into updates in the order of its prompts, as with --no-shuffle-completions.
        """
        return "group_ids" in self.parameters or self.aggregation == "bnpo"


@dataclass(frozen=True)
class Estimator(Entry):
    """An advantage estimator: ``function`` returns one advantage of each completion, [n], or of each token, [total]."""

    scale: str = "none"  # default of --scale-rewards
    per_token: bool = False  # returns [total]
    # Returns the flag that gives tokens of one completion different advantages, or None. Without it per_token decides.
    tokens_differ: Function | None = None
    compares_group: bool = True  # A = 0 for a single completion of a prompt, or a group of equal rewards


class Registry[E: Entry]:
    """The choices of one flag, and the flags that the choices read."""

    def __init__(self, what: str, option: str, inputs: Sequence[str]) -> None:
        self.what, self.option, self.inputs = what, option, tuple(inputs)
        self.entries: dict[str, E] = {}
        self.flags: dict[str, Flag] = {}  # by attribute of the parsed arguments
        self.owners: dict[str, str] = {}  # of flags registered with an entry: "loss foo (plugin:foo.py)"

    def declare(self, *flags: Flag) -> None:
        """Declare flags of built-in entries, in the order of --help."""
        self.flags.update((flag.dest, flag) for flag in flags)

    def get(self, name: str) -> E:
        """Return the entry of this name; GrpoError with all known names for an unknown name."""
        if name not in self.entries:
            raise GrpoError(f"{self.option}: no {self.what} {name!r}; there are {', '.join(self.entries)}")
        return self.entries[name]

    def add(self, entry: E, flags: Sequence[Flag]) -> None:
        """Register an entry with its own flags; GrpoError for a name in use or a flag that the entry does not read."""
        owner = _owner(self, entry)
        if entry.name in self.entries:
            raise GrpoError(f"{owner}: the name is taken by {_owner(self, self.entries[entry.name])}; choose another")
        if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in entry.parameters.values()):
            raise GrpoError(f"{owner}: its parameters must have names: write out *args, **kwargs and those before /")
        for flag in flags:
            taken = next((r for r in (LOSSES, ADVANTAGES) if flag.dest in r.flags), None)
            if taken:
                by = taken.owners.get(flag.dest, f"{taken.option} {' or '.join(taken.readers(flag.dest))}")
                raise GrpoError(f"{owner}: the flag {flag.name} is taken by {by}; choose another")
            if not flag.name.startswith("--") or flag.dest in self.inputs:
                raise GrpoError(f"{owner}: {flag.name!r} cannot be a flag: write --{entry.name}-NAME")
            if flag.dest not in entry.parameters:
                raise GrpoError(f"{owner}: its function has no parameter {flag.dest} for the flag {flag.name}")
        self.entries[entry.name] = entry
        for flag in flags:
            self.flags[flag.dest], self.owners[flag.dest] = flag, owner

    def readers(self, dest: str) -> list[str]:
        """Return the names of the entries that read a flag."""
        return [entry.name for entry in self.entries.values() if dest in entry.parameters]


LOSSES: Registry[Loss] = Registry("loss", "--loss-type", (*LOSS_INPUTS, *UPDATE_INPUTS))


class DemonstrationLosses(Mapping[str, Loss]):
    """The choices of --sft-loss-type: the losses of demonstrations, with those that plug-ins register later."""

    def __getitem__(self, name: str) -> Loss:
        if not LOSSES.entries[name].demonstrations:
            raise KeyError(name)
        return LOSSES.entries[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, loss in LOSSES.entries.items() if loss.demonstrations)

    def __len__(self) -> int:
        return sum(1 for _ in self)


ADVANTAGES: Registry[Estimator] = Registry("advantage estimator", "--advantage-estimator", ADVANTAGE_INPUTS)


def register_loss(
    name: str, *, aggregation: Aggregation, flags: Sequence[Flag] = (), **properties: Any
) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as ``--loss-type name``; ``properties`` are fields of `Loss`."""

    def register(function: Function) -> Function:
        if aggregation not in AGGREGATIONS:
            raise GrpoError(f"loss {name}: aggregation must be one of {', '.join(AGGREGATIONS)}, not {aggregation!r}")
        if properties.get("update_metrics") and not properties.get("update_advantages"):
            raise GrpoError(
                f"loss {name}: update_metrics needs update_advantages, with whose statistics it is called: give both "
                "(lambda advantages: advantages changes nothing), or return metrics of the tokens in a PolicyLoss"
            )
        LOSSES.add(Loss(name, function, aggregation=aggregation, **properties), flags)
        return function

    return register


def register_advantage(name: str, *, flags: Sequence[Flag] = (), **properties: Any) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as ``--advantage-estimator name``.

    ``properties`` are fields of `Estimator`.
    """

    def register(function: Function) -> Function:
        ADVANTAGES.add(Estimator(name, function, **properties), flags)
        return function

    return register


def call(function: Function, inputs: Mapping[str, Any], args: Any) -> Any:
    """Call a function with ``inputs`` or attributes of the parsed arguments, selected by parameter name.

    Raises:
        GrpoError: a parameter without a default is neither an input nor an attribute.
    """
    values = {}
    for parameter in parameters(function).values():
        if parameter.name in inputs:
            values[parameter.name] = inputs[parameter.name]
        elif hasattr(args, parameter.name):
            values[parameter.name] = getattr(args, parameter.name)
        elif parameter.default is parameter.empty:
            raise GrpoError(
                f"{function.__module__}.{function.__name__} has a parameter {parameter.name}, which is neither an "
                f"input ({', '.join(inputs)}) nor a flag: rename it, or declare --{parameter.name.replace('_', '-')}"
            )
    return function(**values)


def _owner(registry: Registry[Any], entry: Entry) -> str:
    return f"{registry.what} {entry.name} ({getattr(entry.function, '__module__', '?')})"
