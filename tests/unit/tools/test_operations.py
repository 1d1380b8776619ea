"""tools/benchmark/operations.py: what an update of a small model computes, counted by hand."""

import re

import pytest

MODEL = """--model-family qwen3 --num-layers 3 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --kv-channels 8 --normalization RMSNorm --swiglu --disable-bias-linear
    --qk-layernorm --vocab-size 64 --max-position-embeddings 64
    --transformer-impl local --bf16 --clip-grad 1e-3""".split()
LAYERS, PACKS = 3, 2


@pytest.mark.distributed
def test_operations_of_an_update(torchrun):
    """Eight completions of nine tokens, four in a pack of at most 36."""
    size = "--completions 8 --tokens 9 --max-tokens-per-microbatch 36 --top 100".split()
    output = torchrun(1, "tools/benchmark/operations.py", *size, *MODEL).stdout
    found: dict[str, dict[str, int]] = {}
    phase = ""
    for name, number in re.findall(r"^\| ([^|]+) \| ([\d,]+) \|", output, re.M):
        if name.startswith("– "):
            found[phase][name[3:-1]] = int(number.replace(",", ""))
        else:
            phase = name
            found[phase] = {"": int(number.replace(",", ""))}
    forward, backward = found["forward"], found["backward"]
    assert f"of one of {PACKS} micro-batches" in output
    assert forward["queries_keys_values"] == forward["attend"] == LAYERS * PACKS, output
    assert forward["rms_norm"] == backward["rms_norm backward"] == (2 * LAYERS + 1) * PACKS
    # four products of a layer, and the head's logits with their gradient
    assert forward["mm.default"] == (4 * LAYERS + 2) * PACKS
    # Nothing in a micro-batch asks for a value of the device.
    waits = {
        name
        for phase in (forward, backward)
        for name in phase
        if re.search("nonzero|of a mask|masked_select|local_scalar", name)
    }
    assert not waits
    # The optimizer launches for lists of parameters.
    assert found["main parameters to the model"][""] == 1
    assert found["gradient norm"]["_foreach_norm.Scalar"] == found["optimizer"]["_foreach_mul_.Scalar"] == 1
    assert found["Adam"]["_fused_adamw_.default"] == 2  # with and without weight decay
    assert found["all"][""] == sum(operations[""] for phase, operations in found.items() if phase != "all")
