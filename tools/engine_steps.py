"""Whether a colocated vLLM computes the same bits in other steps: the log-probabilities of greedy completions.

A token's log-probability comes from a decode step, or from the last position of a prompt that holds all tokens before
it. The prompt may be computed at once, in parts, or partly found in the prefix cache, next to any number of others.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import Request
from tools.tensor_differences import steps_of

PROMPTS, TOKENS = 12, 40
PART, EVERY = 48, 8  # tokens of a step, for prompts in parts; of the places those that are asked for then

Scores = dict[tuple[int, int], tuple[int, float]]  # by (prompt, position): token and log-probability


class Answer(NamedTuple):
    """The answer to a question: log-probabilities of other steps beside those of decode steps of all prompts."""

    question: str
    equal: bool
    line: str


def answers(args: Any, engine: Any) -> Iterator[Answer]:
    """Yield the answers to all questions; the engine has weights and is awake."""
    rng = np.random.default_rng(1)
    longest, tokens = args.max_prompt_length, min(TOKENS, args.max_completion_length)
    lengths = rng.integers(max(1, longest // 3), longest + 1, PROMPTS)
    prompts = [rng.integers(3, args.vocab_size - 2, length).tolist() for length in lengths]
    decoded = decode(engine, prompts, tokens)
    whole = [[*prompt, *(decoded[i, k][0] for k in range(tokens))] for i, prompt in enumerate(prompts)]

    def prefilled(every: int = 1, cached: bool = False) -> Scores:
        """Each token after a prompt that holds all tokens before it, or some of these tokens."""
        places = [(i, k) for i in range(PROMPTS) for k in range(i % every, tokens, every)]
        found = decode(engine, [whole[i][: len(prompts[i]) + k] for i, k in places], 1, cached)
        return {place: found[number, 0] for number, place in enumerate(places)}

    yield compare("decode steps once more", decoded, decode(engine, prompts, tokens))
    alone: Scores = {}
    for i, prompt in enumerate(prompts[:4]):
        alone |= {(i, k): score for (_, k), score in decode(engine, [prompt], tokens).items()}
    yield compare("decode steps of one sequence", decoded, alone)
    more = decode(engine, prompts * 8, tokens)
    yield compare(f"decode steps of {8 * PROMPTS} sequences", decoded, {at: more[at] for at in decoded})
    yield compare("prompts", decoded, prefilled())
    if engine._engine.vllm_config.scheduler_config.enable_chunked_prefill:
        with steps_of(engine, PART):
            yield compare(f"prompts in parts of {PART} tokens", decoded, prefilled(EVERY))
    if args.vllm_enable_prefix_caching:
        prefilled(cached=True)
        yield compare("prompts with hits of the prefix cache", decoded, prefilled(cached=True))


def decode(engine: Any, prompts: Sequence[list[int]], tokens: int, cached: bool = False) -> Scores:
    """Return the greedy completions of ``prompts`` with their log-probabilities.

    ``cached``: a prompt finds what it begins with in the prefix cache, of this call and of earlier such calls.
    """
    sampling, left = Sampling(tokens, 0.0, log_probs=True), len(prompts)
    requests = (Request(i, prompt, sampling) for i, prompt in enumerate(prompts))
    engine.submit(requests if cached else apart(engine, requests))
    found: Scores = {}
    while left:
        for completion in engine.poll():
            assert completion.log_probs is not None
            pairs = zip(completion.token_ids, completion.log_probs, strict=True)
            found |= {(completion.id, k): pair for k, pair in enumerate(pairs)}
            left -= 1
    return found


def apart(engine: Any, requests: Iterable[Request]) -> Iterator[Request]:
    """Yield ``requests``, each as after another load of weights: it finds nothing in the prefix cache."""
    for request in requests:
        engine._loads += 1
        yield request
    engine._loads += 1


def compare(question: str, decoded: Scores, other: Scores) -> Answer:
    """Return whether ``other`` has the tokens and the log-probabilities that ``decoded`` has for the same places."""
    wrong = [at for at, score in other.items() if score != decoded[at]]
    if not wrong:
        return Answer(question, True, f"{question}: equal to decode steps, bit for bit ({len(other)} tokens)")
    largest = max(abs(other[at][1] - decoded[at][1]) for at in wrong)
    prompt, position = min(wrong)
    text = f"{len(wrong)} of {len(other)} tokens differ from decode steps, the first at token {position} of prompt "
    return Answer(question, False, f"{question}: {text}{prompt}, by up to {largest:.2g} nats")
