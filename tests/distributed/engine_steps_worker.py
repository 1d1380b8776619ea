"""What test_engine_steps.py runs: the questions of `check_engine.py --steps` to an engine.

    torchrun --nproc-per-node 1 tests/distributed/engine_steps_worker.py OUT FLAGS

OUT gets, of each call of `decode`, whether it may find prompts in the prefix cache, and of each request its prompt's
tokens and those that it found.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import engine_steps, made_up  # first of ours: it prepares for machines without a GPU

# isort: split
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.rollout.vllm.scheduler import scheduler_of
from megatron_grpo.training.entry_point import run
from megatron_grpo.weights import families

engine_steps.PROMPTS, engine_steps.TOKENS = 4, 10


def main() -> None:
    out, *flags = sys.argv[1:]
    args = made_up.parse(flags, 1)
    initialize_distributed(args)
    engine = VllmColocate(args, families.for_args(args).hf_from_args(args))
    manager, calls = scheduler_of(engine._engine).kv_cache_manager, []
    find, decode = manager.get_computed_blocks, engine_steps.decode

    def noted(request):
        found = find(request)
        calls[-1]["requests"].append([request.num_tokens, found[1]])
        return found

    def called(engine, prompts, tokens, cached=False):
        calls.append({"cached": cached, "requests": []})
        return decode(engine, prompts, tokens, cached)

    manager.get_computed_blocks, engine_steps.decode = noted, called
    asked = [answer.question for answer in engine_steps.answers(args, engine)]
    Path(out).write_text(json.dumps({"asked": asked, "calls": calls}))
    engine.close()


if __name__ == "__main__":
    run(main)
