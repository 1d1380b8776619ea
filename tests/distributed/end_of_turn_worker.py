"""What test_instruct_models_end.py runs: requests with the end tokens of instruct models, in vLLM and our own engine.

    torchrun --nproc-per-node 1 tests/distributed/end_of_turn_worker.py OUT_DIR FLAGS

OUT_DIR/requests.json has [[prompt, end tokens], ...]; OUT_DIR/completions.json gets {engine: [[ids, reason], ...]}.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.megatron.engine import MegatronEngine
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.training.setup import build_engine
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import hf
from megatron_grpo.weights.arguments import architecture_of


def main() -> None:
    out = Path(sys.argv[1])
    args = parse_args(sys.argv[2:])
    args = replaced(args, **architecture_of(args, args.load_hf))
    args = resolve_args(args, 1)
    initialize_distributed(args)
    set_random_seed(args.seed)
    model = forward.build_model(args, model_provider)
    hf.load_hf(model, args, args.load_hf)
    asked = json.loads((out / "requests.json").read_text())
    sampling = [Sampling(args.max_completion_length, temperature=0.0, stop_token_ids=tuple(ends)) for _, ends in asked]
    requests = [Request(i, prompt, one) for i, ((prompt, _), one) in enumerate(zip(asked, sampling, strict=True))]
    answers = {}
    engines = {
        "megatron": lambda: MegatronEngine(args, model, SimpleNamespace(decode=None)),
        "vllm": lambda: build_engine(args, model, None),  # its end destroys the process groups
    }
    for name, build in engines.items():
        engine = build()
        engine.wake_weights()
        EngineLifecycle.sync(SimpleNamespace(args=args, model=model, engine=engine, timers=Timers()), 0)
        engine.wake_cache()
        with engine.rollout(1):
            done = {c.id: [c.token_ids, c.finish_reason] for c in generate(engine, requests)}
        answers[name] = [done[i] for i in range(len(requests))]
        engine.close()
    (out / "completions.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    run(main)
