"""Two updates under several parallel layouts in one torchrun; run by test_parallel_layouts.py, which compares the
results.

    torchrun --nproc-per-node W tests/parallel_layouts.py HF_DIR OUT_DIR "NAME: FLAGS" ["NAME: FLAGS" ...]

writes OUT_DIR/NAME.safetensors (all weights after the second update, as Hugging Face tensors) and OUT_DIR/NAME.json
(loss and gradient norm of each update).
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

import pretrain_grpo
from megatron_grpo import training
from megatron_grpo.arguments import parse_args
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.initialize import initialize_distributed, set_random_seed
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.validation import merge_architecture, validate_args
from megatron_grpo.weights import families, hf
from megatron_grpo.weights.stream import stream_hf

COMMON = """--lr 1e-3 --num-generations 4 --global-batch-size 16 --steps-per-generation 2 --train-iters 2 --beta 0.1
 --max-completion-length 24 --max-prompt-length 8 --reward-funcs exact_match --train-data-path unused
 --no-save-hf --adam-eps 1e-4
 --temperature 0.8 --tokenizer-model unused --transformer-impl local"""


def rollout(vocab_size: int) -> RolloutBatch:
    """32 made-up completions of very different lengths, with advantages and engine log-probabilities."""
    rng = np.random.default_rng(0)
    vocab_size -= 2  # without end-of-sequence and padding: the latter's embedding is 0, and a norm makes that explode
    prompts = [rng.integers(3, vocab_size, rng.integers(2, 8)).tolist() for _ in range(8) for _ in range(4)]
    completions = [rng.integers(3, vocab_size, rng.integers(1, 24)).tolist() for _ in prompts]
    n = len(prompts)
    batch = RolloutBatch.from_completions(
        prompts,
        completions,
        log_probs=[(-4 - rng.random(len(c))).tolist() for c in completions],
        weight_version=0,
        group_ids=np.arange(n) // 4,
        row_ids=np.arange(n) // 4,
        sample_ids=np.arange(n),
        finish_reasons=[FinishReason.STOP] * n,
    )
    batch.advantages = rng.standard_normal(n).astype(np.float32)
    return batch


def perturbations(total: int) -> np.ndarray:
    """What makes old policy and reference differ from the present one, so that ratios and KL are not trivial."""
    return np.random.default_rng(1).normal(0, 0.2, (2, total)).astype(np.float32)


def run(flags: str, hf_dir: str) -> tuple[list[dict], dict]:
    args = parse_args((COMMON + " " + flags).split())
    config = hf.read_config(hf_dir)
    merge_architecture(args, families.for_hf_config(config).args_from_hf(config), hf_dir)
    validate_args(args, int(os.environ["WORLD_SIZE"]))
    initialize_distributed(args)
    set_random_seed(args.seed)
    model = training.build_model(args, model_provider)
    hf.load_hf(model, args, hf_dir)
    model, optimizer, scheduler = training.setup_optimizer(args, model)
    trainer = SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler)
    batch = rollout(args.vocab_size)
    batch.old_log_probs = batch.ref_log_probs = pretrain_grpo.log_probs(args, trainer, batch)
    noise = perturbations(len(batch.tokens))
    batch.old_log_probs, batch.ref_log_probs = batch.old_log_probs + noise[0], batch.ref_log_probs + noise[1]
    rows = []
    for completions in np.split(np.arange(32), 2):
        rows.append(pretrain_grpo.update(args, trainer, batch, completions))
    with training.parameters_complete(args, model):
        weights = {name: tensor.cpu().contiguous() for name, tensor in stream_hf(model, args)}
    parallel_state.destroy_model_parallel()
    return rows, weights


def main() -> None:
    hf_dir, out_dir, *cases = sys.argv[1:]
    for case in cases:
        name, _, flags = case.partition(":")
        rows, weights = run(flags, hf_dir)
        if dist.get_rank() == 0:
            save_file(weights, Path(out_dir, f"{name}.safetensors"))
            Path(out_dir, f"{name}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
