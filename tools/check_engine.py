"""Measure the difference between the log-probabilities of engine and trainer for your model, before a long run.

    torchrun --nproc-per-node N tools/check_engine.py --load-hf DIR [flags of pretrain_grpo.py]

The trainer loads the model. The engine gets the weights by the weight sync of a run and samples completions of random
prompts. The trainer computes the log-probabilities of their tokens. Prints the mean and the largest absolute difference
in nats; --with-transformers adds the difference from transformers' model (eager attention, same dtype). --layers
follows one sequence through the layers of both, and prints the tensors whose bits differ. --steps asks a colocated vLLM
whether decode steps, prompts at once and in parts, and hits of the prefix cache give the same bits. With
--exact-log-probs a difference ends it with an error.
"""

import argparse
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
import torch.distributed as dist

import pretrain_grpo
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.rollout.collect import collect_rollout
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.setup import build_engine
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import hf
from megatron_grpo.weights.families.mla import set_latent_epsilon
from megatron_grpo.weights.stream import stream_hf
from tools import engine_steps, made_up, tensor_differences

PROMPTS, PROMPT_LENGTH = 16, 24
HEAD = "| model | engine against trainer: mean | max | engine against transformers: mean | max |\n|---|--:|--:|--:|--:|"


def start(flags: list[str]):
    """Return arguments, the trainer's model and an engine with its weights; all ranks must call this function."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    size = f"--global-batch-size {4 * world} --max-prompt-length {PROMPT_LENGTH} --max-completion-length 64".split()
    args = made_up.parse([*size, *flags], world)
    initialize_distributed(args)
    set_random_seed(args.seed)
    model = forward.build_model(args, model_provider)
    hf.load_hf(model, args, args.load_hf)
    engine = build_engine(args, model, SimpleNamespace(decode=None))
    engine.wake_weights()
    engine.update_weights(stream_hf(model, args), version=1)
    engine.wake_cache()
    return args, model, engine


def compare(flags: list[str], with_transformers: bool, layers: bool, steps: bool) -> tuple[str, bool]:
    """Return the text of the report, and whether --exact-log-probs was given in vain; all ranks must call this."""
    args, model, engine = start(flags)
    of_steps = [answer.line for answer in engine_steps.answers(args, engine)] if steps else []
    batch = sample(args, engine)
    trainer = forward.log_probs(args, model, pretrain_grpo.forward_step, batch)
    row = [Path(args.load_hf).name, *distance(trainer, batch.rollout_log_probs)]
    in_vain = args.exact_log_probs and bool(gaps(trainer, batch.rollout_log_probs).any())
    if with_transformers and dist.get_rank() == 0:
        row += distance(by_transformers(args, batch), batch.rollout_log_probs)
    text = f"{HEAD}\n| {' | '.join(row)} |"
    if steps:
        text += "\n\n" + "\n".join(of_steps)
    if layers:
        text += "\n\n" + of_layers(args, engine, model, batch)
    engine.close()
    return text, in_vain


def of_layers(args, engine, model, batch: RolloutBatch) -> str:
    """Return the lines of the first 20 tensors of the longest sequence whose bits differ, and of the last one."""
    longest = batch.select([int(np.argmax(batch.lengths))])
    found = [item for item in tensor_differences.differences(args, engine, model, longest) if item[1]]
    if not found:
        return "All tensors of all layers are equal, bit for bit."
    shown = found[:20] + found[20:][-1:]
    return "\n".join(tensor_differences.line(*item) for item in shown)


def sample(args, engine) -> RolloutBatch:
    """Return completions of random prompts; each replica of the engine generates a share."""
    shape = PROMPTS, min(PROMPT_LENGTH, args.max_prompt_length)
    ids = np.random.default_rng(0).integers(3, args.vocab_size, shape).tolist()
    prompts = [Prompt(id=i, ids=prompt, row={}, source="made up") for i, prompt in enumerate(ids)]
    sampling = Sampling(args.max_completion_length, args.temperature, log_probs=True)
    batch, _ = collect_rollout(engine, RolloutPlan(prompts, 1, sampling, args.seed), None, None, Timers())
    return batch


@torch.no_grad()
def by_transformers(args, batch: RolloutBatch) -> np.ndarray:
    """Return transformers' log-probabilities of the tokens ``[total]``, nan for the first token of a sequence."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if args.bf16 else torch.float32
    other = AutoModelForCausalLM.from_pretrained(args.load_hf, dtype=dtype, attn_implementation="eager").to(device())
    set_latent_epsilon(other, other.config)
    found = np.full(len(batch.tokens), np.nan, np.float32)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64)).to(device())
        logits = other(ids[None]).logits[0, :-1].float() / args.temperature
        found[start + 1 : end] = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].cpu().numpy()
    return found


def distance(one: np.ndarray, engine: np.ndarray) -> list[str]:
    """Return the mean and the largest of `gaps`."""
    found = gaps(one, engine)
    return [f"{found.mean():.1e}", f"{found.max():.1e}"]


def gaps(one: np.ndarray, engine: np.ndarray) -> np.ndarray:
    """Return the absolute difference for each token that the engine sampled; nan where only the engine has a number."""
    return np.abs(one - engine)[~np.isnan(engine)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--with-transformers", action="store_true", help="compare with transformers' model as well")
    parser.add_argument("--layers", action="store_true", help="compare the tensors of all layers, of one replica")
    parser.add_argument("--steps", action="store_true", help="compare the steps of a colocated vLLM, of one replica")
    options, flags = parser.parse_known_args()
    text, in_vain = compare(flags, options.with_transformers, options.layers, options.steps)
    if dist.get_rank() == 0:
        print(text, flush=True)
    if in_vain:
        raise GrpoError(
            "--exact-log-probs: engine and trainer have other log-probabilities of this model on this GPU: leave the "
            "flag out. --layers prints the first tensor that differs"
        )


if __name__ == "__main__":
    run(main)
