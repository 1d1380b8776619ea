"""What test_speculative.py runs: completions of vLLM with --vllm-speculative-config.

    torchrun --nproc-per-node 1 tests/distributed/speculative_worker.py MODEL OUT [FLAGS]

The engine starts with other weights than those of the Hugging Face directory MODEL, which a weight sync then brings.
OUT gets the completions and the number of engine steps.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from megatron_grpo.utils import cpu_backend

cpu_backend.install()

from safetensors.torch import load_file

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.engine import Request
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.training.entry_point import run
from megatron_grpo.weights import hf
from tools import made_up

PROMPTS = [[1, 2, 3, 1, 2], [4, 4, 4], [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
GREEDY = Sampling(max_tokens=20, temperature=0.0, log_probs=True)
SAMPLES, SAMPLED_TOKENS = 4000, 3  # of the first prompt


def ask(engine, requests: list[Request]) -> dict:
    """Return the completions' tokens and log-probabilities, in the order of the requests, and the number of steps."""
    steps, done = 0, []
    with engine.rollout(1):
        engine.submit(requests)
        while len(done) < len(requests):
            done += engine.poll()
            steps += 1
    done.sort(key=lambda completion: completion.id)
    return {"ids": [c.token_ids for c in done], "log_probs": [c.log_probs for c in done], "steps": steps}


def main() -> None:
    model, out, *flags = sys.argv[1:]
    sizes = "--max-prompt-length 12 --max-completion-length 20 --vllm-max-num-seqs 64".split()
    args = made_up.parse(["--load-hf", model, *sizes, "--make-vocab-size-divisible-by", "1", *flags], 1)
    initialize_distributed(args)
    engine = VllmColocate(args, hf.read_config(model))
    engine.update_weights(iter(load_file(Path(model, "model.safetensors")).items()), version=1)
    sampled = replace(GREEDY, max_tokens=SAMPLED_TOKENS, temperature=args.temperature)
    found = {
        "greedy": ask(engine, [Request(i, ids, GREEDY) for i, ids in enumerate(PROMPTS)]),
        "sampled": ask(engine, [Request(i, PROMPTS[0], sampled) for i in range(SAMPLES)]),
    }
    engine.close()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    run(main)
