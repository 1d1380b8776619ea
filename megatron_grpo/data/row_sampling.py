"""Sampling parameters of a single data row: its column ``sampling_params``.

    {"prompt": "Yes or no? ...", "sampling_params": {"max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}}

The temperature and other parameters of the distribution cannot differ by row: the trainer computes all
log-probabilities at --temperature, and the log-probability contract (rollout/engine.py) is the same for all rows.
"""

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.data.constraints import compile_error
from megatron_grpo.data.end_of_turn import special_stop_words
from megatron_grpo.data.sampling_params import Sampling, constraint_refused, continues_on_servers
from megatron_grpo.utils.errors import GrpoError

COLUMN = "sampling_params"
DISTRIBUTION = set("temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty".split())
# vLLM's names of constraints, and the type of each.
CONSTRAINTS: dict[str, Any] = {
    "regex": str,
    "json": (str, dict),
    "choice": list,
    "grammar": str,
}


def structured_json(constraint: Mapping[str, Any]) -> str:
    """Return `Sampling.structured_outputs` for a constraint such as ``{"regex": ...}``; "" if all values are None."""
    given = {name: value for name, value in constraint.items() if value is not None}
    return json.dumps(given, sort_keys=True) if given else ""


def row_sampling(row: Mapping[str, Any], args: Namespace, special_tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of `Sampling` that a row sets; raise GrpoError for a field that a row cannot set.

    None counts as absent, because Parquet gives every row the keys of all rows.
    """
    given = row.get(COLUMN)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise GrpoError(f'"{COLUMN}" must be an object, such as {{"max_tokens": 16}}, found {given!r:.200}')
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "max_tokens":
            if type(value) is not int or not 1 <= value <= args.max_completion_length:
                raise GrpoError(
                    f"max_tokens of {COLUMN} is {value!r:.200}: give a whole number from 1 to --max-completion-length "
                    f"({args.max_completion_length})"
                )
            fields["max_tokens"] = value
        elif name == "stop":
            words = [value] if isinstance(value, str) else value
            if not isinstance(words, list) or not words or not all(isinstance(w, str) and w for w in words):
                raise GrpoError(f"stop of {COLUMN} is {value!r:.200}: give a string, or a list of strings")
            if args.tokenizer_type != "HuggingFaceTokenizer":
                raise GrpoError(
                    f"stop of {COLUMN} needs --tokenizer-type HuggingFaceTokenizer: the engine searches stop words in "
                    "the text"
                )
            if continues_on_servers(args):
                raise GrpoError(
                    f"stop of {COLUMN} cannot be used with --rollout-ranks and servers: a continued completion is a "
                    "new request to a server, which sees no stop word across its begin"
                )
            if args.vllm_speculative_config:
                raise GrpoError(
                    f"stop of {COLUMN} and --vllm-speculative-config cannot both be given: vLLM keeps tokens of a "
                    "draft behind a stop word"
                )
            fields["stop"] = tuple(words)
            fields["stop_token_ids"] = tuple(special_stop_words(words, special_tokens))
        elif name == "structured_outputs":
            fields["structured_outputs"] = _constraint(value, args)
        elif name in DISTRIBUTION:
            raise GrpoError(
                f"{name} of {COLUMN} cannot differ by row: the trainer computes all log-probabilities with one "
                f"distribution; give --{name.replace('_', '-')} for all rows"
            )
        else:
            raise GrpoError(f"{COLUMN} has {name!r}: a row can set max_tokens, stop and structured_outputs only")
    return fields


def _constraint(value: Any, args: Namespace) -> str:
    where = f"structured_outputs of {COLUMN}"
    given: dict[str, Any] = {}
    if isinstance(value, dict):
        given = {name: content for name, content in value.items() if content is not None}
    if len(given) != 1 or not given.keys() <= CONSTRAINTS.keys():
        raise GrpoError(f"{where} is {value!r:.200}: give an object with one of {', '.join(CONSTRAINTS)}")
    name, content = next(iter(given.items()))
    if not isinstance(content, CONSTRAINTS[name]) or not content:
        raise GrpoError(f"{name} of {where} is {content!r:.200}: the value has the wrong type or is empty")
    if name == "choice" and not all(isinstance(word, str) and word for word in content):
        raise GrpoError(f"choice of {where} is {content!r:.200}: give a list of strings")
    try:
        if name == "regex":
            re.compile(content)
        if name == "json" and isinstance(content, str):
            json.loads(content)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise GrpoError(f"{name} of {where} is {content!r:.200}: {error}") from error
    why_not = constraint_refused(args)
    if why_not:
        raise GrpoError(f"{where} {why_not}")
    if failed := compile_error(name, content):
        raise GrpoError(f"{name} of {where} is {content!r:.200}: vLLM cannot compile it: {failed:.400}")
    return structured_json(given)


def with_row(sampling: Sampling, fields: Mapping[str, Any]) -> Sampling:
    """Return the run's sampling parameters with the fields of a row.

    End tokens of a row are added to the run's. A request with a constraint does not return log-probabilities, because
    they are those of the constrained distribution.
    """
    if not fields:
        return sampling
    ends = sampling.stop_token_ids + fields.get("stop_token_ids", ())
    changed = replace(sampling, **{**fields, "stop_token_ids": ends})
    free = not changed.structured_outputs
    return replace(changed, log_probs=changed.log_probs and free, kept_token_ids=changed.kept_token_ids and free)
