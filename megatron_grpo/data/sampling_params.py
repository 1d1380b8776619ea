"""Sampling parameters of completions, and the flags that they exclude."""

from argparse import Namespace
from dataclasses import dataclass

from megatron_grpo.utils.rules import flag


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request.

    ``temperature`` 0 is greedy decoding. ``top_k`` -1, ``top_p`` 1, ``min_p`` 0, a repetition penalty of 1, and a
    presence or frequency penalty of 0 have no effect.
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
    stop_token_ids: tuple[int, ...] = ()  # empty: a completion ends at a stop word or at max_tokens only
    structured_outputs: str = ""  # JSON of vLLM's StructuredOutputsParams, a constraint of the text; "": none
    log_probs: bool = False
    kept_token_ids: bool = False  # return the tokens that top_k, top_p and min_p keep; needs log_probs
    routed_experts: bool = False  # return the experts of each token

    @property
    def num_kept(self) -> int:
        """Columns of the kept token ids; 0 without them."""
        return self.top_k if self.kept_token_ids else 0


def uses_engine_log_probs(args: Namespace) -> str | None:
    """Return a given flag that needs the rollout log-probabilities of every sampled token; None without one."""
    for dest in ("rollout_importance_sampling_mode", "off_policy_sequence_mask_delta", "m2po_threshold"):
        if getattr(args, dest) is not None:
            return flag(dest)
    return "--exact-log-probs" if args.exact_log_probs else None


def continues_on_servers(args: Namespace) -> bool:
    """Return whether a completion can go on as a new request to a server, which knows nothing of its begin."""
    return bool(args.rollout_ranks) and args.vllm_mode == "server"


def constraint_refused(args: Namespace) -> str | None:
    """Return the reason why this run cannot constrain completions, with the cure; None if it can."""
    if args.rollout_engine != "vllm":
        return f"needs --rollout-engine vllm: {args.rollout_engine} is not supported for constraints"
    if args.tokenizer_type != "HuggingFaceTokenizer":
        return (
            "needs --tokenizer-type HuggingFaceTokenizer: vLLM builds the constraint from the vocabulary of the "
            "tokenizer"
        )
    if args.partial_rollouts or continues_on_servers(args) or (args.rollout_ranks and args.max_staleness):
        given = "--partial-rollouts" if args.partial_rollouts else "--rollout-ranks and servers or --max-staleness"
        return f"cannot be used with {given}: a continued completion is a new request, whose constraint begins again"
    if args.vllm_speculative_config:
        return "cannot be used with --vllm-speculative-config: constraints on drafts have not been checked"
    user = uses_engine_log_probs(args)
    if user:
        return (
            f"cannot be used with {user}: the rollout log-probabilities are those of the constrained distribution, not "
            "of the policy; leave one of them out"
        )
    if args.ignore_eos:
        return "cannot be used with --ignore-eos: a completion must end when it matches the constraint; leave one out"
    return None
