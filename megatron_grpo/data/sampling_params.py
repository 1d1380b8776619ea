"""How completions are sampled, and which flags that excludes."""

from argparse import Namespace
from dataclasses import dataclass

from megatron_grpo.utils.rules import flag


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled. ``temperature`` 0 is greedy; ``top_k`` -1, ``top_p`` 1, ``min_p`` 0 and penalties of
    1 (repetition) and 0 (presence, frequency) are off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    structured_outputs: str = ""  # JSON of vLLM's StructuredOutputsParams that the text has to match; "": any text
    ignore_eos: bool = False
    log_probs: bool = False


def uses_engine_log_probs(args: Namespace) -> str | None:
    """The flag, if one is given, that needs the engine's log-probabilities of every sampled token."""
    for dest in ("rollout_importance_sampling_mode", "off_policy_sequence_mask_delta", "m2po_threshold"):
        if getattr(args, dest) is not None:
            return flag(dest)
    return None


def constraint_refused(args: Namespace) -> str | None:
    """Why completions cannot be constrained in this run, with the cure; None if they can."""
    if args.rollout_engine != "vllm":
        return f"needs --rollout-engine vllm: {args.rollout_engine} is not asked for constrained completions here"
    if args.tokenizer_type != "HuggingFaceTokenizer":
        return "needs a HuggingFaceTokenizer: vLLM builds the constraint from its vocabulary"
    user = uses_engine_log_probs(args)
    if user:
        return (
            f"cannot go with {user}: the engine's log-probabilities are those of the constrained distribution, and "
            "not the policy's: leave one of them out"
        )
    if args.ignore_eos:
        return "cannot go with --ignore-eos: a completion that has matched must be able to end"
    return None
