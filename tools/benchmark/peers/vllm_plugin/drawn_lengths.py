"""vLLM plug-in of the benchmark: ignore end tokens; with LENGTHS=long_tail, draw the length of each completion.

vLLM loads it in every process whose PYTHONPATH has this folder (docs.vllm.ai, "Plugin System"): the lengths are the
same in all trainers, whatever they let one set. A model with random weights never ends a completion by itself.
"""

import itertools
import math
import os
import random

MEDIAN, MEAN = 384, 687
SIGMA = math.sqrt(2 * math.log(MEAN / MEDIAN))  # of a lognormal distribution


def length(number: int) -> int:
    """Return the length of a completion, by its number in the run."""
    return max(round(MEDIAN * random.Random(number).lognormvariate(0, SIGMA)), 1)


def register() -> None:
    """Patch the one function through which the synchronous and the asynchronous engine take requests."""
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs
    if original.__module__ == __name__:  # vLLM may call this more than once in a process
        return
    # Each rank of torchrun has an engine of its own: they take turns with the numbers.
    numbers = itertools.count(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    def process_inputs(self, request_id, prompt, params, *args, **kwargs):
        params.ignore_eos, params.stop, params.stop_token_ids = True, [], []
        request = original(self, request_id, prompt, params, *args, **kwargs)
        if os.environ["LENGTHS"] == "long_tail":
            request.sampling_params.max_tokens = min(length(next(numbers)), request.sampling_params.max_tokens)
        return request

    InputProcessor.process_inputs = process_inputs
