"""One update of each family on a pack of three sequences: logits, gradients and weights of transformers in float32."""

import pytest
from float64 import bound, gap
from slow import FEW, slow_except
from toy_checkpoints import FAMILIES, GEMMA4, HYBRID, MAMBA_MOE, VOCAB, build, make, save, tensors_of, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
import torch.nn.functional as F

from megatron_grpo.models.gpt import packed_seq_params
from megatron_grpo.training import train_step
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import hf, model_weights
from megatron_grpo.weights.stream import stream_hf

LENGTHS = (17, 5, 23)
# Adam divides by the size of each gradient; with a smaller epsilon it magnifies differences of those near zero.
UPDATE = {"lr": 1e-2, "min_lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0, "train_iters": 1, "adam_eps": 1e-2}
QUICK = (*FEW, "glm4_moe_lite")


def gradients(args, chunk) -> dict[str, torch.Tensor]:
    """Return the gradients of a model's chunk by the names in the files."""
    table = {weight.name: weight for weight in reversed(model_weights.table(args))}
    found = {}
    for name, parameter in chunk.module.named_parameters():
        for canonical, gradient in model_weights.canonical(chunk.module, name, parameter.main_grad):
            weight = table[canonical]
            for key, part in zip(weight.hf, weight.split([gradient]), strict=True):
                if weight.all_experts:
                    found.setdefault(key, {})[weight.expert] = part
                else:
                    found[key] = part
    experts = {k: torch.stack([v[i] for i in sorted(v)]) for k, v in found.items() if isinstance(v, dict)}
    return found | experts


@pytest.mark.parametrize("family", slow_except(QUICK, (*FAMILIES, MAMBA_MOE)))
def test_an_update_equals_transformers(world, tmp_path, family):
    theirs = make(tmp_path / "model", family, tied="gemma" in family)
    args = replaced(toy_args(tmp_path / "model", **UPDATE), explicit=frozenset())
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path / "model")
    (model,), optimizer, _ = train_step.setup_optimizer(args, chunks)
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    ids = torch.cat(sequences)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    pack = packed_seq_params(ends, max(LENGTHS), "local")
    found = model(ids[None], positions[None], attention_mask=None, packed_seq_params=pack)[0][:, :VOCAB]
    expected = torch.cat([theirs(sequence[None]).logits[0] for sequence in sequences])
    assert expected.std() > 0.5
    assert gap(found, expected) < bound(1e-5)

    def loss(logits):
        parts = logits.split(LENGTHS)
        return sum(F.cross_entropy(part[:-1], one[1:]) for part, one in zip(parts, sequences, strict=True))

    model.zero_grad_buffer()
    loss(found).backward()
    loss(expected).backward()
    ours = gradients(args, model)
    decayed = {
        n for n, p in theirs.named_parameters() if p.dim() > 1 and "bias" not in n
    }  # not vectors, of experts too
    groups = [
        {"params": [p for n, p in theirs.named_parameters() if n in decayed], "weight_decay": UPDATE["weight_decay"]},
        {"params": [p for n, p in theirs.named_parameters() if n not in decayed], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=UPDATE["lr"], eps=UPDATE["adam_eps"])
    adam.step()
    save(theirs, tmp_path / "updated")
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    save(theirs, tmp_path / "gradients")
    of_modules = tuple(name.rpartition(".")[2] for name, _ in theirs.named_buffers())  # files have other prefixes
    buffers = {name for name in tensors_of(tmp_path / "model") if name.endswith(of_modules)}
    wanted = {k: v for k, v in tensors_of(tmp_path / "gradients").items() if k not in buffers}
    assert ours.keys() == wanted.keys()
    # Of Gemma 4 transformers itself differs from its float64 by 1.0e-5 (tensors) and 6.5e-6 (all) in float32. Decays
    # have small gradients. In float64 (test_float64.py) all agree.
    limit = bound(3e-5 if family in (*GEMMA4, *HYBRID) else 1e-5)
    for name, gradient in wanted.items():
        assert gap(ours[name], gradient) < limit, name
    assert gap(*(torch.cat([each[name].flatten() for name in wanted]) for each in (ours, wanted))) < bound(1e-5)

    model.start_grad_sync()
    model.finish_grad_sync()
    optimizer.step()
    updated = tensors_of(tmp_path / "updated")
    before = tensors_of(tmp_path / "model")
    for name, tensor in stream_hf([model], args):
        assert gap(tensor, updated[name]) < bound(1e-5), name
        assert name in buffers or gap(updated[name], before[name]) > 2e-4, name
