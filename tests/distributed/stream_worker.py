"""What test_stream.py runs: greedy answers of vLLM before and after weights came through the stream.

    torchrun --nproc-per-node N tests/distributed/stream_worker.py DIR...

In each DIR are two Hugging Face directories, and every N-th DIR is for one rank, which is by itself. An engine starts
from the files of DIR/first, as `vllm serve` would; then it is given the weights of DIR/other, then those of DIR/first,
both by the trainer's stream. What it answers each time, and what differs between engine and stream before and after,
goes to DIR/answers.json.
"""

import json
import os
import sys
from pathlib import Path

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

import torch.distributed as dist
import vllm
from megatron.core import parallel_state
from vllm import LLM

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import families, hf
from megatron_grpo.weights.arguments import architecture_of
from megatron_grpo.weights.stream import stream_hf

PROMPTS = [[5, 9, 33, 7, 21, 90, 14], [44], [3 + 7 * i % 100 for i in range(40)]]
GREEDY = Sampling(max_tokens=16, temperature=0.0, log_probs=True)
FLAGS = """--lr 1e-3 --train-iters 1 --transformer-impl local --train-data-path unused --reward-funcs exact_match
    --tokenizer-model unused --vllm-enforce-eager --vllm-max-num-seqs 4 --micro-batch-size 2 --global-batch-size 4
    --num-generations 4 --max-prompt-length 48 --max-completion-length 16 --make-vocab-size-divisible-by 64"""


def answers(directory: Path) -> dict[str, list]:
    """What the engine says with the weights from files, with others, and with the first ones from the stream."""
    first = str(directory / "first")
    args = parse_args([*FLAGS.split(), "--load-hf", first])
    args = replaced(args, **architecture_of(args, first))
    if args.experimental_attention_variant:  # all that vLLM has on a CPU
        args = replaced(args, vllm_dtype="bfloat16")
    args = resolve_args(args, 1)
    initialize_distributed(args)
    set_random_seed(args.seed)
    model = forward.build_model(args, model_provider)

    class FromFiles(LLM):
        """The engine as VllmColocate makes it, but with the weights of the files."""

        def __init__(self, model, load_format, **options):
            assert load_format == "dummy"
            super().__init__(model=first, **options)

    vllm.LLM = FromFiles
    engine = VllmColocate(args, families.for_args(args).hf_from_args(args))
    hf.load_hf(model, args, first)
    found = {"files": ask(engine), "files after": engine.compare_weights(stream_hf(model, args))}
    found["names"] = [name for name, _ in stream_hf(model, args)]
    for name, weights in (("other", directory / "other"), ("stream", first)):
        hf.load_hf(model, args, weights)
        found[f"{name} before"] = engine.compare_weights(stream_hf(model, args))
        engine.update_weights(stream_hf(model, args), version=1)
        found[name] = ask(engine)
        found[f"{name} after"] = engine.compare_weights(stream_hf(model, args))
    engine._llm.llm_engine.engine_core.shutdown()  # ends vLLM's process groups, and the world's
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)  # so that it makes a group of its own
    for directory in map(Path, sys.argv[1 + rank :: ranks]):
        (directory / "answers.json").write_text(json.dumps(answers(directory)))


def ask(engine) -> list:
    """[ids, log-probabilities] of each prompt's completion."""
    with engine.rollout(1):
        done = generate(engine, [Request(i, ids, GREEDY) for i, ids in enumerate(PROMPTS)])
        return [[c.token_ids, c.log_probs] for c in sorted(done, key=lambda c: c.id)]


if __name__ == "__main__":
    run(main)
