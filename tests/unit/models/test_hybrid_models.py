"""Models with recurrent layers against transformers: log-probabilities and all gradients of a pack of three lengths."""

import json
import re

import pytest
from float64 import bound
from slow import slow_except
from toy_checkpoints import HYBRID, MAMBA, MAMBA_MOE, VOCAB, add_mtp, build, logits, make, tensors_of, toy_args

# isort: split
import numpy as np
import torch
from safetensors.torch import save_file

from megatron_grpo.data.pack import IGNORED_LABEL
from megatron_grpo.models.gpt import packed_seq_params
from megatron_grpo.models.recurrence import RecurrentLayer
from megatron_grpo.weights import hf, model_weights

LENGTHS = (3, 70, 21)  # less than the convolution's width, more than a chunk, and between


def theirs_of(parameters: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The gradient of a tensor of the files; transformers stacks the experts of a layer, and renames one family's."""
    name = re.sub("^backbone[.]", "model.", name)
    if name in parameters:
        return parameters[name].grad
    block, _, rest = name.partition(".experts.")
    expert, part, _ = rest.split(".")
    if f"{block}.experts.{part}" in parameters:
        return parameters[f"{block}.experts.{part}"].grad[int(expert)]
    gate, up = parameters[f"{block}.experts.gate_up_proj"].grad[int(expert)].chunk(2)
    return gate if part == "gate_proj" else up


@pytest.mark.parametrize("recompute", slow_except([None], [None, "full"]))
@pytest.mark.parametrize("family", (*HYBRID, *MAMBA, MAMBA_MOE))
def test_gradients_of_a_pack_equal_transformers(world, tmp_path, family, recompute):
    theirs = make(tmp_path, family, tied=False)
    flags = {"recompute_granularity": recompute, "recompute_method": recompute and "uniform"}
    args = toy_args(tmp_path, **flags, recompute_num_layers=1 if recompute else None)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, VOCAB, (sum(LENGTHS),), generator=generator)  # transformers' padding has no gradient
    cu = np.append(0, np.cumsum(LENGTHS)).astype(np.int32)
    factors = torch.randn(len(ids), generator=generator)

    expected = torch.cat([theirs(part[None]).logits[0] for part in ids.split(LENGTHS)])
    (expected.log_softmax(-1).gather(1, ids[:, None])[:, 0] * factors).sum().backward()
    found = model(
        ids[None],
        torch.cat([torch.arange(length) for length in LENGTHS])[None],
        attention_mask=None,
        packed_seq_params=packed_seq_params(torch.from_numpy(cu), max(LENGTHS), "local"),
    )[0]
    (found[:, :VOCAB].log_softmax(-1).gather(1, ids[:, None])[:, 0] * factors).sum().backward()
    # In float32 a recurrence over 70 tokens, and experts behind it, round differently on other processors.
    limit = bound({"qwen3_5_moe_text": 5e-5, "qwen3_5_text": 2e-5}.get(family, 1e-5))
    assert (found[:, :VOCAB] - expected).abs().max() < limit * expected.abs().max()

    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    compared = 0
    # A bias for the choice of experts has no gradient.
    tensors = {name: x for name, x in model_weights.named_weights(chunks) if not name.endswith("expert_bias")}
    by_tensor = {}
    for name, parameter in model.named_parameters():
        by_tensor |= dict(model_weights.canonical(model, name, parameter.grad))
    assert by_tensor.keys() == tensors.keys()
    for weight in (one for one in model_weights.table(args) if one.name in tensors):
        for name, own in zip(weight.hf, weight.split([by_tensor[weight.name]]), strict=True):
            want = theirs_of(dict(theirs.named_parameters()), name)
            want = want[weight.expert] if weight.all_experts else want
            error, size = (own - want).norm(), want.norm()
            assert error <= limit * max(size, 1e-2), f"{name}: {error} of {size}"
            compared += 1
    assert compared >= 40


@pytest.mark.parametrize("family", HYBRID)
def test_multi_token_prediction_of_a_pack(world, tmp_path, family):
    """Log-probabilities and gradients by the formula, sequence by sequence; the policy gets no gradient."""
    theirs = make(tmp_path, family, tied=False)
    extra = add_mtp(tmp_path, theirs)
    args = toy_args(tmp_path, mtp_num_layers=1, mtp_loss_scaling_factor=0.1)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, VOCAB, (sum(LENGTHS),), generator=generator)
    cu = np.append(0, np.cumsum(LENGTHS)).astype(np.int32)
    labels, expected = [], []
    for part in ids.split(LENGTHS):
        labels.append(torch.cat([part[1:], torch.tensor([IGNORED_LABEL])]))
        with torch.no_grad():
            hidden, embedded = theirs.model(part[None]).last_hidden_state[:, :-1], extra.embed_tokens(part[None, 1:])
        positions, size = torch.arange(len(part) - 1)[None], len(part) - 1
        causal = torch.full((size, size), -torch.inf).triu(1)[None, None]
        out = extra.layers[0](embedded, hidden, extra.rotary_emb(embedded, positions), causal, positions, None)
        table = (out[0] @ theirs.lm_head.weight.detach().T).log_softmax(-1)
        # Position t has the policy's label t + 1 and the layer's, t + 2; behind the end 0.
        expected.append(torch.cat([table[:-1].gather(1, part[2:, None])[:, 0], torch.zeros(1)]))
    expected = torch.cat(expected)
    factors = torch.randn(len(expected), generator=generator)
    (expected * factors).sum().backward()

    next_tokens = torch.cat([torch.cat([part[1:], torch.tensor([0])]) for part in ids.split(LENGTHS)])
    after_labels = torch.cat([torch.cat([part[2:], torch.tensor([IGNORED_LABEL])]) for part in ids.split(LENGTHS)])
    _, _, found = model(
        ids[None],
        torch.cat([torch.arange(length) for length in LENGTHS])[None],
        attention_mask=None,
        further_tokens=next_tokens[None],
        further_labels=after_labels[None],
        labels=torch.cat(labels)[None],
        packed_seq_params=packed_seq_params(torch.from_numpy(cu), max(LENGTHS), "local"),
    )
    assert expected.std() > 0.5 and (found - expected).abs().max() < bound(1e-5) * expected.abs().max()
    (found * factors).sum().backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters() if name.startswith("mtp.")}
    others = {name: p.grad for name, p in model.named_parameters() if name not in ours and p.grad is not None}
    assert not any(gradient.any() for gradient in others.values())
    by_tensor = {name: part for full, grad in ours.items() for name, part in model_weights.canonical(model, full, grad)}
    weights = [weight for weight in model_weights.table(args) if weight.name in by_tensor]
    assert len(weights) == len(by_tensor)
    parameters = extra.layers[0].published()
    for weight in weights:
        for name, own in zip(weight.hf, weight.split([by_tensor[weight.name]]), strict=True):
            want = theirs_of(parameters, name)
            assert (own - want).norm() <= bound(1e-5) * max(want.norm(), 1e-2), name


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_a_planted_error_is_found(world, tmp_path, family):
    """The bound of the test above is a bound: with the decay of one head changed by a percent it fails."""
    theirs = make(tmp_path, family, tied=False)
    args = toy_args(tmp_path)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    net = next(module for module in model.modules() if isinstance(module, RecurrentLayer))
    net.A_log.data[3] += 0.01
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    cu = torch.tensor([0, 40], dtype=torch.int32)
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        pack = packed_seq_params(cu, 40, "local")
        found = model(ids[None], torch.arange(40)[None], attention_mask=None, packed_seq_params=pack)[0]
    assert (found[:, :VOCAB] - expected).abs().max() > 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_a_log_stays_float32_in_a_model_of_16_bits(world, tmp_path, family):
    make(tmp_path, family, tied=False, dtype=torch.bfloat16)
    args = toy_args(tmp_path, bf16=True)
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    dtypes = {name: tensor.dtype for name, tensor in model_weights.named_weights(chunks)}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("A_log")} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("A_log")} == {torch.float32}
    source = hf.open_weights(tmp_path)
    stored = source.read(next(name for name in source.names() if re.search("layers.0.*A_log", name)))
    own = dict(model_weights.named_weights(chunks))["decoder.layers.0.self_attention.A_log"]
    assert torch.equal(own, stored) and not torch.equal(stored, stored.bfloat16().float())


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_the_text_part_of_a_vision_language_checkpoint(world, tmp_path, capsys, family):
    """--model-family of a text: the tower and multi-token prediction are not read, and one line says so."""
    text, whole = tmp_path / "text", tmp_path / "whole"
    theirs = make(text, family, tied=False)
    whole.mkdir()
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors_of(text).items()}
    extra = {"model.visual.pos_embed.weight": torch.ones(2, 3), "mtp.fc.weight": torch.ones(4, 8)}
    save_file(tensors | extra, whole / "model.safetensors")
    config = json.loads((text / "config.json").read_text())
    architecture = config.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    config["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    nested = {"architectures": [architecture], "model_type": family.removesuffix("_text"), "text_config": config}
    nested |= {"vision_config": {"depth": 1}, "tie_word_embeddings": config.pop("tie_word_embeddings")}
    (whole / "config.json").write_text(json.dumps(nested))
    args = toy_args(whole, family)
    assert args.model_family == family and args.vision_config is None
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, whole)
    assert "2 tensors are not read, such as model.visual.pos_embed.weight" in capsys.readouterr().out
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    assert (logits(model, ids)[:, :VOCAB] - expected).abs().max() < 1e-5 * expected.abs().max()
