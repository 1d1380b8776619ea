"""One changed key of config.json at a time: the model's logits are transformers' then, too, or the key is refused."""

import json
import os

import pytest
from huggingface_hub.errors import StrictDataclassError
from slow import FEW, slow_except
from toy_checkpoints import FAMILIES, MAMBA_MOE, VOCAB, build, make, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
from transformers import AutoModelForCausalLM

from megatron_grpo.models.gpt import packed_seq_params
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import hf

LENGTHS = (17, 5, 43)  # the last one is longer than all windows and original lengths, except Phi-3's
# Sizes of tensors and of the vocabulary, and the identity of a model.
SIZES = ("_size", "_dim", "_rank", "_heads", "_layers", "_token_id", "n_groups", "n_routed_experts", "num_experts")
SIZES += ("num_local_experts", "n_shared_experts", "head_dim_", "num_key_value", "chunk_size", "conv_kernel")
# Keys that toys lack and vLLM, transformers or other families read.
MORE = {
    "is_causal": False,
    "attention_bias": True,
    "attention_dropout": 0.3,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 2.0,
    "layer_norm_epsilon": 1e-2,
    "n_group": 2,
    "norm_topk_prob": False,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.25,
    "query_pre_attn_scalar": 7,
    "rms_norm_eps": 1e-2,
    "rope_interleave": False,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rope_theta": 77.0,
    "routed_scaling_factor": 3.7,
    "scoring_func": "softmax",
    "sliding_window": 6,
    "swiglu_limit": 0.5,
    "topk_group": 0,
    "use_qk_norm": True,
    "use_sliding_window": True,
}
# vLLM has no lower bound of steps, and the trainer is the engine's (docs/models.md). A run refuses to be longer than
# LongRoPE's original length.
EXCEPT = {("nemotron_h", "time_step_min"), (MAMBA_MOE, "time_step_min"), ("phi3", "original_max_position_embeddings")}


def changes(config):
    """Yield (key, other value) for every key that is a switch or a number, but no size."""
    for key, value in config.items():
        if isinstance(value, bool):
            yield key, not value
        elif isinstance(value, float):
            yield key, 1e-2 if "eps" in key else value * 1.7 or 0.3
        elif isinstance(value, int) and not key.endswith(SIZES) and key != "max_position_embeddings":
            yield key, value + 1
    yield from MORE.items()
    rope = config.get("rope_parameters") or {}
    for path in [(), *((kind,) for kind, part in rope.items() if isinstance(part, dict))]:
        part = rope[path[0]] if path else rope
        for key, value in part.items():
            if isinstance(value, bool | int | float):
                other = not value if isinstance(value, bool) else value * 2
                new = {**part, key: other}
                yield "rope_parameters", {**rope, path[0]: new} if path else new


@torch.no_grad()
def theirs(directory, sequences):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):  # transformers has 1e-6, whatever config.json says
            module.variance_epsilon = model.config.rms_norm_eps
    return torch.cat([model(sequence[None]).logits[0] for sequence in sequences])


@torch.no_grad()
def ours(directory, args, sequences):
    chunks = build(args)
    hf.load_hf(chunks, args, directory)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    pack = packed_seq_params(ends, max(LENGTHS), "local")
    ids = torch.cat(sequences)
    return chunks[0](ids[None], positions[None], attention_mask=None, packed_seq_params=pack)[0][:, :VOCAB]


@pytest.mark.parametrize("family", slow_except(FEW, (*FAMILIES, MAMBA_MOE)))
def test_a_changed_key_changes_what_it_changes_in_transformers(world, tmp_path, family):
    model = make(tmp_path / "model", family, tied="gemma" in family)
    config = json.loads((tmp_path / "model/config.json").read_text())
    whole = {**json.loads(model.config.to_json_string(use_diff=False)), **config}
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    base = vars(toy_args(tmp_path / "model"))
    unchanged = ours(tmp_path / "model", toy_args(tmp_path / "model"), sequences)
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in (tmp_path / "model").iterdir():
        if file.name != "config.json":
            os.symlink(file, changed / file.name)
    wrong, read = [], 0
    for key, value in changes(whole):
        (changed / "config.json").write_text(json.dumps({**config, key: value}))
        try:
            args = toy_args(changed)
            same = vars(args) == base
            found = unchanged if same else ours(changed, args, sequences)
        except GrpoError:
            continue
        try:
            expected = theirs(changed, sequences)
        except (StrictDataclassError, AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            continue  # transformers, and vLLM with its classes, have no such model
        read += not same
        gap = ((found - expected).norm() / expected.norm()).item()
        if not gap < 1e-5 and (family, key) not in EXCEPT:
            wrong.append((key, value, gap))
    assert not wrong
    assert read
