"""What tests/test_checkpointing.py runs under torchrun: real models and optimizers, saved, loaded and refused."""

import json
import os
import random
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_grpo import cpu_backend

cpu_backend.install()

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from megatron_grpo import checkpoint_directory, checkpointing, training
from megatron_grpo.arguments import parse_args
from megatron_grpo.errors import GrpoError
from megatron_grpo.initialize import initialize_distributed, run, set_random_seed
from megatron_grpo.models.gpt import model_provider

MODEL = """--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 8 --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm
    --untie-embeddings-and-output-weights --vocab-size 100 --max-position-embeddings 64 --transformer-impl local
    --attention-dropout 0 --hidden-dropout 0 --train-iters 10 --lr 1e-3 --lr-decay-style linear""".split()
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
DISTRIBUTED = ["--use-distributed-optimizer"]
POSITION = {"sampler": {"epoch": 1}, "rollouts": 7}


def build(*flags, seed=1, padded_vocab_size=128):
    """Arguments and a freshly initialised model with optimizer and schedule, in the layout that the flags ask for."""
    args = parse_args([*MODEL, *flags])
    args.padded_vocab_size = padded_vocab_size
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    else:
        initialize_distributed(args)
    set_random_seed(seed)
    model = training.build_model(args, model_provider)
    return args, *training.setup_optimizer(args, model)


def update(model, optimizer, scheduler, step):
    """An update with made-up gradients, equal where a parameter is replicated."""
    for chunk in model:
        chunk.zero_grad_buffer()
        for name, parameter in chunk.named_parameters():
            generator = torch.Generator().manual_seed(1000 * step + len(name))
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()
    scheduler.step(increment=1)


def say(text):
    """One write, which no other rank's can come between."""
    os.write(1, f"{text}\n".encode())


def tensors(root):
    _, directory = checkpoint_directory.find(root)
    stored = dist_checkpointing.load_plain_tensors(str(directory))
    return {key: value for key, value in stored.items() if torch.is_tensor(value)}


def check_equal(name, root, other):
    expected, actual = tensors(root), tensors(other)
    assert expected.keys() == actual.keys(), expected.keys() ^ actual.keys()
    assert any("exp_avg_sq" in key for key in expected)
    different = [key for key in expected if not torch.equal(expected[key], actual[key])]
    assert not different, different
    say(f"{name}: all tensors equal")


def draws():
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def load_and_save_again(name, source, target, *flags):
    """Load ``source`` in the layout of the flags and save it from there: both must hold the same."""
    args, model, optimizer, scheduler = build(*flags, "--load", str(source), "--save", str(target), seed=99)
    iteration, position = checkpointing.load_checkpoint(args, model, optimizer, scheduler)
    assert (iteration, position) == (2, POSITION)
    assert [group["step"] for group in optimizer.param_groups] == [2] * len(optimizer.param_groups)
    assert scheduler.num_steps == 2
    drawn = draws()
    checkpointing.save_checkpoint(args, iteration, model, optimizer, scheduler, position)
    check_equal(name, source, target)
    return drawn


def reshard(root):
    """Save under TP2, with the distributed optimizer and without; load in every other layout of two ranks."""
    for kind, flags in {"distributed": DISTRIBUTED, "plain": []}.items():
        args, model, optimizer, scheduler = build(*TP2, *flags, "--save", str(root / kind))
        for step in range(2):
            update(model, optimizer, scheduler, step)
        checkpointing.save_checkpoint(args, 2, model, optimizer, scheduler, POSITION)
        if kind == "distributed":
            expected = draws()
    source = root / "distributed"
    assert load_and_save_again("TP2 again", source, root / "a", *TP2, *DISTRIBUTED) == expected
    assert load_and_save_again("TP2 SP", source, root / "b", *TP2, "--sequence-parallel", *DISTRIBUTED) == expected
    assert load_and_save_again("DP2", source, root / "c", *DISTRIBUTED) != expected
    load_and_save_again("PP2", source, root / "d", *PP2, *DISTRIBUTED)
    load_and_save_again("PP2 without the distributed optimizer", root / "plain", root / "e", *PP2)

    # New hyper-parameters are taken from the flags, and the schedule is at its place under them.
    args, model, optimizer, scheduler = build(*TP2, *DISTRIBUTED, "--load", str(source), "--lr", "5e-4")
    checkpointing.load_checkpoint(args, model, optimizer, scheduler)
    assert [group["max_lr"] for group in optimizer.param_groups] == [5e-4] * len(optimizer.param_groups)
    assert optimizer.param_groups[0]["lr"] == 5e-4 * 8 / 10  # linear to 0 in 10 updates, 2 of them done

    # --no-load-optim and --no-load-rng.
    flags = ["--no-load-optim", "--no-load-rng", "--load", str(source)]
    args, model, optimizer, scheduler = build(*TP2, *DISTRIBUTED, *flags, seed=5)
    set_random_seed(6)
    expected = draws()
    set_random_seed(6)
    checkpointing.load_checkpoint(args, model, optimizer, scheduler)
    assert draws() == expected
    assert not optimizer.optimizer.state
    update(model, optimizer, scheduler, 0)
    assert optimizer.param_groups[0]["step"] == 1


def one_rank(root):
    """What two ranks wrote is loaded by one, also into a larger padded vocabulary."""
    load_and_save_again("one rank", root / "distributed", root / "f", *DISTRIBUTED)
    _, model, _, _ = build(padded_vocab_size=256)
    checkpointing.load_weights(root / "distributed", [chunk.module for chunk in model])
    weight = model[0].module.embedding.word_embeddings.weight
    stored = tensors(root / "distributed")["embedding.word_embeddings.weight"]
    assert weight.shape[0] == 256 and stored.shape[0] == 128
    assert torch.equal(weight[:100], stored[:100])


def refuse(root):
    """Checkpoints that cannot be loaded: every rank must say why."""

    def refused(directory, *flags, weights_only=False):
        args, model, optimizer, scheduler = build(*TP2, *flags, "--load", str(directory))
        try:
            if weights_only:
                checkpointing.load_weights(directory, model)
            else:
                checkpointing.load_checkpoint(args, model, optimizer, scheduler)
        except GrpoError as error:
            say(f"refused on rank {dist.get_rank()}: {error}")
        else:
            raise AssertionError(f"{directory} was loaded with {flags}")

    def changed(name, change):
        """A copy of the good checkpoint, changed by rank 0."""
        if dist.get_rank() == 0:
            shutil.copytree(good, root / name)
            change(root / name / "iter_0000002")
        dist.barrier()
        return root / name

    good = root / "good"
    args, model, optimizer, scheduler = build(*TP2, *DISTRIBUTED, "--save", str(good))
    checkpointing.save_checkpoint(args, 2, model, optimizer, scheduler, POSITION)  # before the first update

    refused(good, *DISTRIBUTED, "--num-layers", "2", "--hidden-size", "64")
    refused(good, *DISTRIBUTED, "--vocab-size", "99", weights_only=True)
    refused(good)
    refused(changed("truncated", lambda d: os.truncate(d / "__1_0.distcp", 100)), *DISTRIBUTED)
    refused(changed("missing", lambda d: (d / "__1_0.distcp").unlink()), weights_only=True)

    # Without its own notes (as Megatron-LM writes it), a checkpoint is judged by the tensors that it has.
    def forget(directory):
        for name in (checkpoint_directory.ARGS, checkpoint_directory.MANIFEST):
            (directory / name).unlink()

    foreign = changed("foreign", forget)
    refused(foreign, *DISTRIBUTED, "--ffn-hidden-size", "64", weights_only=True)
    plain = root / "plain"
    args = parse_args([*MODEL, *TP2, "--save", str(plain)])
    args.padded_vocab_size = 128
    args.qk_layernorm = False
    model = training.build_model(args, model_provider)
    checkpointing.save_checkpoint(args, 0, model, None, None, {})
    if dist.get_rank() == 0:
        stored = plain / "iter_0000000" / checkpoint_directory.ARGS
        stored.write_text(json.dumps(json.loads(stored.read_text()) | {"qk_layernorm": None}))
        manifest = plain / "iter_0000000" / checkpoint_directory.MANIFEST
        manifest.unlink()
    dist.barrier()
    refused(plain, weights_only=True)
    refused(plain)

    # A file lies where the directory of checkpoints should be.
    (root / "file").touch()
    args, model, optimizer, scheduler = build(*TP2, "--save", str(root / "file"))
    try:
        checkpointing.save_checkpoint(args, 2, model, optimizer, scheduler, POSITION)
    except GrpoError as error:
        say(f"refused on rank {dist.get_rank()}: {error}")


if __name__ == "__main__":
    case, directory = sys.argv[1:]
    sys.argv[1:] = []
    run(lambda: {"reshard": reshard, "one_rank": one_rank, "refuse": refuse}[case](Path(directory)))
