"""What test_reference_model.py runs under torchrun on 2 or 4 ranks: reference and teacher in layouts of their own.

torchrun --nproc-per-node 2 tests/distributed/reference_worker.py DIRECTORY     (the test puts DIRECTORY/teacher there)
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from checkpoint_worker import MOE, SHARDED, enter, fill, say
from megatron.core import parallel_state
from transformers import AutoModelForCausalLM

import pretrain_grpo
from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel.initialize import set_random_seed
from megatron_grpo.reference.model_args import reference_args, teacher_args
from megatron_grpo.reference.reference_model import ReferenceModel, SwappedReference
from megatron_grpo.training import setup, train_step
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.update_flops import UpdateFlops
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import hf
from megatron_grpo.weights.stream import stream_hf
from tools import made_up

REF = "--ref-tensor-model-parallel-size 1 --ref-pipeline-model-parallel-size 1 --ref-expert-model-parallel-size 2"
SHARE = 0.6
# By the number of ranks: the policy's layout beside references, and beside teachers
LAYOUTS = {2: ("TP2 SP", "PP2"), 4: ("TP2 SP PP2", "PP2 EP2")}


class Trainer:
    """What updates and separate passes need."""

    def __init__(self, args, model):
        self.iteration = 0
        self.model, self.optimizer, self.scheduler = train_step.setup_optimizer(args, model)
        self.bad_updates, self.flops = BadUpdates("stop", None, None), UpdateFlops(args, None)


def weights(separate, policy) -> dict[str, torch.Tensor]:
    with separate.ready(policy) as ready:
        return {name: tensor.clone() for name, tensor in stream_hf(ready.model, ready.args)}


def same_bits(one, other) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def references(root: Path, layout: str) -> None:
    """A reference in another layout is the one in the policy's own: at first, updated, and as a checkpoint holds it."""
    args, model = enter(f"{MOE} {SHARDED} {REF} --sync-ref-model --ref-model-sync-steps 1", layout)
    fill(model, args, "weight")
    before = {name: tensor.clone() for name, tensor in stream_hf(model, args)}
    coordinates = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    swapped, separate = SwappedReference(args, model), ReferenceModel(reference_args(args), model_provider)
    separate.update_from(args, model)
    trainer = Trainer(args, model)
    batch = made_up.rollout(args)

    def log_probs() -> list[np.ndarray]:
        return [
            reference.log_probs(batch, trainer.model, pretrain_grpo.forward_step) for reference in (swapped, separate)
        ]

    first = log_probs()
    np.testing.assert_array_equal(first[0], forward.log_probs(args, trainer.model, pretrain_grpo.forward_step, batch))
    np.testing.assert_allclose(first[1], first[0], rtol=0, atol=1e-5)
    assert (np.isfinite(first[0]) == (batch.response_mask == 1)).all()

    batch.old_log_probs, batch.ref_log_probs = first[0], first[1]
    pretrain_grpo.update(args, trainer, batch, np.arange(batch.num_completions // 2))
    for reference in (swapped, separate):
        reference.ema_update(args, trainer.model, SHARE)
    after = {name: tensor.clone() for name, tensor in stream_hf(trainer.model, args)}
    updated = weights(separate, trainer.model)
    assert same_bits(updated, weights(swapped, trainer.model))
    for name, tensor in updated.items():
        torch.testing.assert_close(tensor, SHARE * after[name] + (1 - SHARE) * before[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(updated[name], before[name]) for name in updated)
    second = log_probs()
    np.testing.assert_allclose(second[1], second[0], rtol=0, atol=1e-5)
    assert np.nanmax(np.abs(second[1] - first[1])) > 1e-3
    assert coordinates == (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    say("one reference in two layouts")

    for name, reference in (("separate", separate), ("swapped", swapped)):
        args = replaced(args, **dict.fromkeys(("save", "load"), str(root / name)))
        checkpoint.save_checkpoint(
            args,
            1,
            trainer.model,
            trainer.optimizer,
            trainer.scheduler,
            {},
            save_reference=lambda directory, reference=reference: reference.save(directory, trainer.model),
        )
        for own in (separate.args, args) if reference is separate else (args,):
            flags = args if own is separate.args else without_layout(args)  # --ref-* given, or left out
            again, optimizer, scheduler, resumed, _ = setup.build_model_and_optimizer(flags, model_provider, True, own)
            checkpoint.load_checkpoint(args, again, optimizer, scheduler)
            assert isinstance(resumed, ReferenceModel if own is separate.args else SwappedReference) and resumed.updated
            assert same_bits(weights(resumed, again), updated)
            assert same_bits({n: t.clone() for n, t in stream_hf(again, args)}, after)
    say("the updated reference survives a resume")

    hf.save_hf(trainer.model, args, root / "hf")
    set_random_seed(7)
    fresh = {name: tensor.clone() for name, tensor in stream_hf(forward.build_model(args, model_provider), args)}
    for own, flag, origin in ((separate.args, "ref_load_hf", root / "hf"), (args, "ref_load", root / "separate")):
        flags = args if own is separate.args else without_layout(args)
        flags = replaced(flags, **{"ref_load": None, "ref_load_hf": None, flag: str(origin)})
        set_random_seed(7)
        policy, _, _, loaded, _ = setup.build_model_and_optimizer(flags, model_provider, False, own)
        assert same_bits(weights(loaded, policy), after) and not loaded.updated
        assert same_bits({name: tensor.clone() for name, tensor in stream_hf(policy, args)}, fresh)
    say("a reference of its own origin leaves the policy alone")


def without_layout(args):
    flags = replaced(args, **dict.fromkeys(k for k in vars(args) if k.startswith("ref_") and k.endswith("_size")))
    return flags


def teacher(root: Path, layout: str) -> None:
    """A dense teacher of another family beside a mixture of experts gives what transformers gives."""
    directory = root / "teacher"
    sizes = f"--teacher-tensor-model-parallel-size {os.environ['WORLD_SIZE']} --teacher-pipeline-model-parallel-size 1"
    flags = f"{MOE} --teacher-load-hf {directory} --teacher-kl-coef 1 {sizes} --temperature 0.7"
    args, model = enter(flags, layout)
    fill(model, args, "weight")
    (own,) = teacher_args(args)
    separate = ReferenceModel(own, model_provider, lambda chunks: hf.load_hf(chunks, own, directory))
    batch = made_up.rollout(args)
    found = separate.log_probs(batch, Trainer(args, model).model, pretrain_grpo.forward_step)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for start, end, prompt in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], batch.prompt_lengths, strict=True):
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        with torch.no_grad():
            expected = torch.log_softmax(theirs(ids[None]).logits[0, :-1] / 0.7, -1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(found[start + prompt : end], expected[prompt - 1 :].numpy(), rtol=0, atol=1e-5)
    say("the teacher is transformers'")


if __name__ == "__main__":
    root = Path(sys.argv.pop())
    beside_references, beside_teachers = LAYOUTS[int(os.environ["WORLD_SIZE"])]

    def main() -> None:
        references(root, beside_references)
        teacher(root, beside_teachers)

    run(main)
