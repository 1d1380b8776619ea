"""Import against transformers' logits, export and stream bit by bit, and every refusal, in one process."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
from float64 import bound, gap
from slow import FEW, slow_except
from toy_checkpoints import (
    HYBRID,
    MAMBA_MOE,
    MEMBERS,
    PADDED_VOCAB,
    SHAPES,
    VOCAB,
    add_mtp,
    build,
    logits,
    make,
    packed,
    same_bits,
    tensors_of,
    toy_args,
    verify_hf,
)

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
import vision_models
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_grpo.parallel import agreement
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import families, hf, model_weights, safetensors_files
from megatron_grpo.weights.safetensors_files import Safetensors
from megatron_grpo.weights.stream import stream_hf
from tools.benchmark.scale import Recorded

ONCE = dict(reversed(MEMBERS))  # every family, with an output layer of its own where it may have one
LLAMA3, YARN = SHAPES["llama"]["rope_scaling"], {"factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [9.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(("family", "tied"), slow_except(list(ONCE.items()), MEMBERS))
def test_logits_equal_transformers(world, tmp_path, family, tied):
    theirs = make(tmp_path, family, tied)
    args = toy_args(tmp_path)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    found = logits(model, ids)
    assert expected.std() > 0.5
    assert gap(found[:, :VOCAB], expected) < bound(1e-5)
    assert (found[:, VOCAB:] == 0).all() and found.shape[1] == PADDED_VOCAB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1, "rope_scaling": None, "first_k_dense_replace": 0}),
        ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 1}),
        ("deepseek_v2", {"q_lora_rank": 24, "first_k_dense_replace": 1}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
        ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0, "original_max_position_embeddings": 64}}),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 16, "truncate": False}}),
        ("qwen2", {"rope_scaling": {"type": "yarn", **YARN, "beta_slow": 2}}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 0}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
        ("mistral", {"sliding_window": None, "rope_scaling": {"rope_type": "yarn", **YARN}}),
        ("mixtral", {"sliding_window": 10}),
        ("phi3", {"rope_scaling": None, "partial_rotary_factor": 1.0, "sliding_window": None, "hidden_size": 64}),
        # As E2B and E4B, and as 31B.
        ("gemma4_text", {"attention_k_eq_v": False, "num_global_key_value_heads": None}),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0},
        ),
        ("gemma4_moe", {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True}),
        ("glm4_moe", {"attention_bias": False, "use_qk_norm": False, "partial_rotary_factor": 1.0}),
        (
            "glm4_moe",
            {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "rope_scaling": {"type": "yarn", **YARN}},
        ),
        (
            "glm4_moe_lite",
            {
                "q_lora_rank": None,
                "first_k_dense_replace": 2,
                "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
                "rope_scaling": {"type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
            },
        ),
        ("llama", {"rope_scaling": {"rope_type": "longrope", **LONGROPE}, "max_position_embeddings": 256}),
    ],
)
def test_logits_of_other_members_of_the_families(world, tmp_path, family, config):
    theirs = make(tmp_path, family, tied=False, **config)
    args = toy_args(tmp_path)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    assert expected.std() > 0.5 and gap(logits(model, ids)[:, :VOCAB], expected) < bound(1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", *HYBRID])
def test_multi_token_prediction_equals_transformers(world, tmp_path, family):
    theirs = make(tmp_path, family, tied=False)
    extra = add_mtp(tmp_path, theirs)
    args = toy_args(tmp_path, mtp_num_layers=1)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(6))

    # Position t combines the hidden state there with the embedding of token t + 1.
    embedded, positions = extra.embed_tokens(ids[None, 1:]), torch.arange(39)[None]
    layer, rotary = extra.layers[0], extra.rotary_emb(embedded, positions)
    causal = torch.full((39, 39), -torch.inf).triu(1)[None, None]
    expected = extra.shared_head(layer(embedded, hidden[None, :39], rotary, causal, positions, None))[0]

    out, *_ = model.mtp.layers[0](
        ids.roll(-1)[None],
        torch.arange(40)[None],
        hidden[:, None],
        attention_mask=None,
        packed_seq_params=packed(ids),
        embedding=model.embedding,
        rotary_pos_emb=None if args.multi_latent_attention else model.rotary_pos_emb(40, packed_seq=True),
    )
    found = out[:39, 0] @ model.output_layer.weight[:VOCAB].T
    assert expected.std() > 0.5
    assert gap(found, expected) < bound(1e-5)


# Every family once in float32, with tied embeddings where it has no others, and a few in bfloat16; then all.
EXPORTS = [(*member, dtype) for dtype in (torch.float32, torch.bfloat16) for member in (*MEMBERS, (MAMBA_MOE, False))]
QUICK_EXPORTS = [
    (family, ONCE[family], torch.float32) for family in (*FEW, "gpt_oss", "qwen3_next", "minimax_m2", "nemotron_h")
]
QUICK_EXPORTS += [("qwen3", True, torch.float32)]


@pytest.mark.parametrize(("family", "tied", "dtype"), slow_except(QUICK_EXPORTS, EXPORTS))
def test_export_is_bit_exact(world, tmp_path, family, tied, dtype):
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, family, tied, dtype)
    (source / "tokenizer.json").write_text("{}")
    args = toy_args(source, bf16=dtype is torch.bfloat16)
    chunks = build(args)
    hf.load_hf(chunks, args, source)
    hf.save_hf(chunks, args, target, tokenizer_dir=source, max_shard_bytes=50_000)
    before, after = tensors_of(source), tensors_of(target)
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    assert verify_hf(chunks, args, target) == len(before)
    assert (target / "tokenizer.json").exists() and (target / "generation_config.json").exists()
    files = sorted(path.name for path in target.glob("*.safetensors"))
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 1
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in before.values())
    loaded, reference = (AutoModelForCausalLM.from_pretrained(path) for path in (target, source))
    assert loaded.dtype is dtype
    assert loaded.config.eos_token_id == 2 and type(loaded) is type(reference)
    ids = torch.arange(30)[None]
    # The weights are equal bit for bit; some processors order sums by the place of the tensors in memory.
    torch.testing.assert_close(loaded(ids).logits, reference(ids).logits, rtol=1e-5, atol=1e-5)


def test_export_replaces_only_a_model_directory(world, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, "qwen3", tied=True)
    args = toy_args(source)
    chunks = build(args)
    hf.load_hf(chunks, args, source)
    target.mkdir()
    hf.save_hf(chunks, args, target)  # an empty one will do
    assert [path.name for path in sorted(target.iterdir())] == ["checksums.json", "config.json", "model.safetensors"]
    hf.save_hf(chunks, args, target, max_shard_bytes=50_000, dtype=torch.bfloat16)
    assert not (target / "model.safetensors").exists()
    assert {tensor.dtype for tensor in tensors_of(target).values()} == {torch.bfloat16}
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("precious")
    with pytest.raises(GrpoError, match="home exists and is not a Hugging Face model directory"):
        hf.save_hf(chunks, args, home)
    assert [path.name for path in home.iterdir()] == ["thesis.tex"]
    with pytest.raises(GrpoError, match=r"thesis\.tex/out cannot be written"):
        hf.save_hf(chunks, args, home / "thesis.tex" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "source", "target"]  # nothing left beside


@pytest.mark.parametrize("bucket_bytes", [1, 30_000, 2**28])
def test_stream_gives_the_files_tensors_whatever_the_buckets(world, tmp_path, bucket_bytes):
    make(tmp_path, "qwen2", tied=True)
    args = toy_args(tmp_path)
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    streamed = dict(stream_hf(chunks, args, bucket_bytes))
    stored = tensors_of(tmp_path)
    assert streamed.keys() == stored.keys()
    assert all(same_bits(stored[name], streamed[name]) for name in stored)


def test_names_of_wrapped_and_fused_models(world, tmp_path):
    make(tmp_path, "qwen3", tied=False)
    args = toy_args(tmp_path)
    (model,) = build(args)
    expected = {weight.name for weight in model_weights.table(args)}
    assert {name for name, _ in model_weights.named_weights([model])} == expected
    model.config.bf16 = True
    wrapped = Float16Module(model.config, model)
    assert {name for name, _ in model_weights.named_weights([wrapped])} == expected

    class Stage(torch.nn.Module):
        """The last stage of a model with Transformer Engine's names: layers 2 (dense) and 3 (experts 4 and 5)."""

        share_embeddings_and_output_weights = True

        def __init__(self):
            super().__init__()
            dense, sparse, deep = (modules("self_attention mlp") for _ in range(3))
            linear(dense.self_attention, "linear_qkv"), linear(dense.mlp, "linear_fc1")
            for block in (sparse, deep):
                linear(block.self_attention, "linear_q_up_proj"), linear(block.self_attention, "linear_kv_up_proj")
                block.mlp.experts, block.mlp.router = modules("linear_fc1 linear_fc2"), torch.nn.Module()
                block.mlp.local_expert_indices = [4, 5]
                for part in block.mlp.experts.children():
                    part.weight0, part.weight1 = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
                block.mlp.router.register_buffer("expert_bias", torch.ones(6, dtype=torch.bfloat16))
            self.decoder, self.mtp = torch.nn.Module(), torch.nn.Module()
            self.decoder.layers = torch.nn.ModuleList([dense, sparse])
            self.mtp.layers = torch.nn.ModuleList([modules("enorm")])
            self.mtp.layers[0].mtp_model_layer = deep
            self.mtp.layers[0].enorm.weight = torch.nn.Parameter(torch.ones(2))
            # megatron-core counts layers from 1
            dense.layer_number, sparse.layer_number, self.mtp.layers[0].layer_number = 3, 4, 1
            self.output_layer = torch.nn.Linear(2, 2, bias=False)

    def modules(names):
        parent = torch.nn.Module()
        for name in names.split():
            parent.add_module(name, torch.nn.Module())
        return parent

    def linear(parent, name):
        setattr(parent, name, torch.nn.Linear(2, 2, bias=False))
        getattr(parent, name).layer_norm_weight = torch.nn.Parameter(torch.ones(2))

    sparse = """
        self_attention.linear_q_up_proj.weight self_attention.q_layernorm.weight
        self_attention.linear_kv_up_proj.weight self_attention.kv_layernorm.weight mlp.router.expert_bias
        mlp.experts.local_experts.4.linear_fc1.weight mlp.experts.local_experts.5.linear_fc1.weight
        mlp.experts.local_experts.4.linear_fc2.weight mlp.experts.local_experts.5.linear_fc2.weight
    """.split()
    found = dict(model_weights.named_weights([Stage()]))
    assert sorted(found) == sorted(
        [
            "decoder.layers.2.input_layernorm.weight",
            "decoder.layers.2.mlp.linear_fc1.weight",
            "decoder.layers.2.pre_mlp_layernorm.weight",
            "decoder.layers.2.self_attention.linear_qkv.weight",
            *(f"decoder.layers.3.{name}" for name in sparse),
            *(f"mtp.layers.0.transformer_layer.{name}" for name in sparse),
            "mtp.layers.0.enorm.weight",
            "embedding.word_embeddings.weight",
        ]
    )


# ---- refusals


@pytest.fixture
def untied(world, tmp_path):
    """(directory, function that tries to load it): an untied Qwen3 checkpoint for a test to spoil."""
    make(tmp_path, "qwen3", tied=False)
    args = toy_args(tmp_path)
    chunks = build(args)

    def load():
        try:
            hf.load_hf(chunks, args, tmp_path)
        finally:  # nothing is copied before everything is checked
            assert all(parameter.isnan().all() for parameter in chunks[0].parameters())

    return tmp_path, load


def edit_index(directory, change):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    return index["weight_map"]


def edit_file(directory, change, name="model.norm.weight"):
    path = directory / edit_index(directory, lambda names: None)[name]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


def test_missing_shard(untied):
    directory, load = untied
    lost = edit_index(directory, lambda names: None)["model.layers.1.mlp.up_proj.weight"]
    (directory / lost).unlink()
    with pytest.raises(GrpoError, match=rf"{lost} does not exist \(needed for tensor .*a shard .* is missing"):
        load()


def test_truncated_shard(untied):
    directory, load = untied
    path = directory / edit_index(directory, lambda names: None)["model.norm.weight"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(GrpoError, match=rf"{path.name} is truncated or not a safetensors file \(needed for tensor"):
        load()


def test_empty_shard(untied):
    directory, load = untied
    path = directory / edit_index(directory, lambda names: None)["model.norm.weight"]
    path.write_bytes(b"")
    with pytest.raises(GrpoError, match=f"{path.name} is truncated"):
        load()


def test_tensor_absent_from_the_shard_that_the_index_names(untied):
    directory, load = untied
    path = edit_file(directory, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(GrpoError, match=rf"{path.name} does not hold the tensor model\.norm\.weight"):
        load()


@pytest.mark.parametrize("part", ["k_norm", "v_proj"])  # the second is one of three tensors of a parameter
def test_tensor_absent_from_the_index(untied, part):
    directory, load = untied
    edit_index(directory, lambda names: names.pop(f"model.layers.1.self_attn.{part}.weight"))
    with pytest.raises(
        GrpoError, match=rf"lacks the tensor model\.layers\.1\.self_attn\.{part}\.weight, from which de"
    ):
        load()


def test_tensor_that_no_row_claims(untied):
    directory, load = untied
    path = edit_file(directory, lambda tensors: tensors.update(strange=torch.zeros(3)))
    edit_index(directory, lambda names: names.update(strange=path.name))
    with pytest.raises(GrpoError, match="holds the tensor strange, which is not in the model family"):
        load()


def test_wrong_shape(untied):
    directory, load = untied
    edit_file(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}))
    with pytest.raises(GrpoError, match=r"tensor model\.norm\.weight has shape \(65,\), but the conf.* says \(64,\)"):
        load()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_tensors(untied, dtype):
    directory, load = untied
    name = "model.layers.0.mlp.down_proj.weight"
    edit_file(directory, lambda tensors: tensors.update({name: tensors[name].to(dtype)}), name)
    with pytest.raises(GrpoError, match=rf"tensor {name} is stored as .*8.*: convert the model"):
        load()


EXPERT = "model.layers.1.mlp.experts.7.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop(EXPERT),
            rf"lacks the tensor {EXPERT}, from which de.*\.1\.mlp\..*\.7\.linear_fc2",
        ),
        (
            lambda tensors: tensors.update({EXPERT.replace("7", "8"): tensors[EXPERT].clone()}),
            rf"holds the tensor {EXPERT.replace('7', '8')}, which is not in the model family",
        ),
        (
            lambda tensors: tensors.update({EXPERT: torch.zeros(64, 33)}),
            rf"tensor {EXPERT} has shape \(64, 33\), but the configuration says \(64, 32\)",
        ),
    ],
    ids=["missing", "too many", "misshaped"],
)
def test_wrong_experts(world, tmp_path, change, message):
    make(tmp_path, "qwen3_moe", tied=False)
    args = toy_args(tmp_path)
    chunks = build(args)
    tensors = tensors_of(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(GrpoError, match=message):
        hf.load_hf(chunks, args, tmp_path)
    assert all(parameter.isnan().all() for parameter in chunks[0].parameters())


def test_copies_that_differ(world, tmp_path):
    add_mtp(tmp_path, make(tmp_path, "deepseek_v3", tied=False))
    args = toy_args(tmp_path)
    name = "model.layers.4.shared_head.head.weight"
    edit_file(tmp_path, lambda tensors: tensors[name].view(-1)[-1].add_(1), name)
    with pytest.raises(GrpoError, match=rf"{name} differs from lm_head\.weight, but the model has one parameter"):
        hf.load_hf(build(args), args, tmp_path)


def test_copies_that_are_left_out(world, tmp_path):
    add_mtp(tmp_path, make(tmp_path, "glm4_moe", tied=False))
    args = toy_args(tmp_path)
    copies = {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    for name in copies:
        edit_file(tmp_path, lambda tensors, name=name: tensors.pop(name), name)
    names = edit_index(tmp_path, lambda names: [names.pop(name) for name in copies])
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    assert verify_hf(chunks, args, tmp_path) == len(names)
    assert {name for weight in model_weights.table(args) for name in weight.hf} == names.keys() | copies


def test_checkpoints_that_transformers_saved_without_their_multi_token_prediction(world, tmp_path):
    make(tmp_path, "deepseek_v3", tied=False, num_nextn_predict_layers=1)
    args = toy_args(tmp_path)
    with pytest.raises(GrpoError, match=r"layers\.4\.enorm\.weight, from which mtp.*set num_nextn_predict_layers to 0"):
        hf.check_tensors(Safetensors(tmp_path), args, model_weights.table(args))


def test_a_table_is_made_once_for_arguments_that_do_not_change(tmp_path):
    """A sync reads it twice, and that of 235B takes a quarter of a second."""
    make(tmp_path, "qwen3_moe", tied=False)
    args = toy_args(tmp_path)
    table = model_weights.table(args)
    assert model_weights.table(args) is table
    free = Namespace(**vars(args))
    assert model_weights.table(free) == table
    free.num_experts //= 2
    fewer = model_weights.table(free)
    assert 0 < len(fewer) < len(table)
    assert model_weights.table(replaced(args, num_experts=free.num_experts)) == fewer
    assert model_weights.table(args) == table


@pytest.mark.parametrize("family", slow_except(["qwen3_next"], HYBRID))
def test_multi_token_prediction_of_a_hybrid_is_read_on_request(world, tmp_path, capsys, family):
    """Exported bit for bit; without the flag it is not read, and one line says so."""
    add_mtp(tmp_path / "whole", make(tmp_path / "whole", family, tied=False))
    stored = tensors_of(tmp_path / "whole")
    ours = {name for name in stored if name.startswith("mtp.")}
    for layers in (1, None):
        args = toy_args(tmp_path / "whole", mtp_num_layers=layers)
        chunks = build(args)
        hf.load_hf(chunks, args, tmp_path / "whole")
        unread = f"{len(ours)} tensors are not read, such as mtp.fc.weight" in capsys.readouterr().out
        assert unread == (layers is None)
        hf.save_hf(chunks, args, tmp_path / "out")
        written = tensors_of(tmp_path / "out")
        assert written.keys() == stored.keys() - (set() if layers else ours)
        assert all(same_bits(stored[name], written[name]) for name in written)
        key = "num_nextn_predict_layers" if family == "qwen3_next" else "mtp_num_hidden_layers"
        assert hf.read_config(tmp_path / "out")[key] == (layers or 0)


@pytest.mark.parametrize(
    ("family", "change", "more", "message"),
    [
        ("qwen3_5_text", {}, {"mtp_num_layers": 2}, "has one such layer: give 1"),
        ("qwen3_5_text", {"num_hidden_layers": 3, "layer_types": None}, {}, "needs a last layer with attention"),
        ("qwen3_next", {"mlp_only_layers": [1]}, {}, "experts in all layers or in none"),
    ],
)
def test_multi_token_prediction_that_a_hybrid_cannot_have(world, tmp_path, family, change, more, message):
    make(tmp_path, family, tied=False, **change)
    args = toy_args(tmp_path, **{"mtp_num_layers": 1, **more})
    with pytest.raises(GrpoError, match=message):
        families.for_args(args).hf_from_args(args)


def test_stacked_experts_of_multi_token_prediction(world, tmp_path):
    """Some files have all experts of the layer in one tensor: the model is that of the files with each apart."""
    add_mtp(tmp_path, make(tmp_path, "qwen3_5_moe_text", tied=False))
    args = toy_args(tmp_path, mtp_num_layers=1)
    hf.load_hf(chunks := build(args), args, tmp_path)
    block, count = "mtp.layers.0.mlp.experts.", args.num_experts

    def stack(tensors):
        apart = {n: [tensors.pop(f"{block}{e}.{n}_proj.weight") for e in range(count)] for n in ("gate", "up", "down")}
        both = [torch.cat(pair) for pair in zip(apart["gate"], apart["up"], strict=True)]
        tensors |= {block + "gate_up_proj": torch.stack(both), block + "down_proj": torch.stack(apart["down"])}

    edit_file(tmp_path, stack, f"{block}0.gate_proj.weight")
    names = tensors_of(tmp_path)
    edit_index(tmp_path, lambda index: [index.pop(name) for name in list(index) if name not in names])
    edit_index(tmp_path, lambda index: index.update({name: "mtp.safetensors" for name in names if block in name}))
    hf.load_hf(others := build(args), args, tmp_path)
    assert len([name for name in names if block in name]) == 2
    assert all(map(torch.equal, chunks[0].parameters(), others[0].parameters()))


def test_published_files_of_gemma4_have_more_than_the_language_model(world, tmp_path, capsys):
    """Towers, and the keys and values that layers 2 and 3 would have if they did not share those of others."""
    make(tmp_path / "text", "gemma4_text", tied=True)
    text = tensors_of(tmp_path / "text")
    published = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text.items()}
    more = [f"language_model.layers.{n}.self_attn.{name}" for n in (2, 3) for name in ("k_proj", "v_proj", "k_norm")]
    more += ["vision_tower.patch_embedder.input_proj", "audio_tower.layers.0.norm", "embed_vision.embedding_projection"]
    published |= {f"model.{name}.weight": torch.ones(2, 2) for name in more}
    (tmp_path / "whole").mkdir()
    save_file(published, tmp_path / "whole" / "model.safetensors")
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True}
    config["text_config"] = hf.read_config(tmp_path / "text")
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    args = toy_args(tmp_path / "whole")
    hf.load_hf(chunks := build(args), args, tmp_path / "whole")
    assert f"{len(more)} tensors are not read" in capsys.readouterr().out
    hf.save_hf(chunks, args, tmp_path / "out")
    written = tensors_of(tmp_path / "out")
    assert written.keys() == text.keys() and all(same_bits(text[name], written[name]) for name in text)
    assert hf.read_config(tmp_path / "out")["architectures"] == ["Gemma4ForCausalLM"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(40)
    with torch.no_grad():
        assert gap(logits(chunks[0], ids)[:, :VOCAB], again(ids[None]).logits[0]) < bound(1e-5)


def test_multi_token_prediction_that_files_lack(world, tmp_path):
    make(tmp_path, "qwen3_5_text", tied=False)
    args = toy_args(tmp_path, mtp_num_layers=1)
    with pytest.raises(GrpoError, match=r"lacks the tensor mtp\.pre_fc_norm_embedding.*leave out --mtp-num-layers"):
        hf.load_hf(build(args), args, tmp_path)


def test_multi_token_prediction_is_not_every_familys(world, tmp_path):
    make(tmp_path, "qwen3_moe", tied=False)
    with pytest.raises(GrpoError, match="qwen3_moe has no multi-token prediction: leave out --mtp-num-layers"):
        model_weights.table(toy_args(tmp_path, mtp_num_layers=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "valid JSON"), ("[]", "a JSON object"), ('{"metadata": {}}', "an index of tensors"), (None, None)],
)
def test_index_that_is_none(untied, text, message):
    directory, load = untied
    index = directory / "model.safetensors.index.json"
    index.unlink()
    index.mkdir() if text is None else index.write_text(text)
    expected = r"cannot be read \(Is a directory\)" if text is None else f"is not {message}"
    with pytest.raises(GrpoError, match=rf"model\.safetensors\.index\.json {expected}"):
        load()


def test_a_shard_without_permission_is_not_called_missing(untied, monkeypatch):
    """Safetensors raises FileNotFoundError for it."""
    _, load = untied

    def refused(path, **options):
        raise FileNotFoundError(f"No such file or directory: {path}")

    monkeypatch.setattr(safetensors_files, "safe_open", refused)
    with pytest.raises(GrpoError, match=r"safetensors cannot be read \(needed for tensor .*: change its permissions"):
        load()


def test_a_tokenizer_that_cannot_be_listed_is_not_left_out(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(GrpoError, match=r"tokenizer files cannot be copied from .*: .*Permission denied"):
        hf.copy_assets(tmp_path, tmp_path / "copy")


def test_pickles_and_empty_directories(untied):
    directory, load = untied
    for path in directory.glob("model*"):
        path.unlink()
    with pytest.raises(GrpoError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        load()
    (directory / "pytorch_model-00001-of-00002.bin").write_bytes(b"x")
    with pytest.raises(GrpoError, match=r"pytorch_model-00001-of-00002\.bin is a pickle"):
        load()


def test_single_file_with_rotary_buffers(world, tmp_path):
    model = make(tmp_path, "llama", tied=False)
    tensors = tensors_of(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    args = toy_args(tmp_path)
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    assert torch.equal(dict(stream_hf(chunks, args))["model.norm.weight"], model.model.norm.weight)


TIED = {
    "qwen3": ("lm_head.weight", "model.embed_tokens.weight"),
    "qwen3_vl": ("lm_head.weight", "model.language_model.embed_tokens.weight"),
    "qwen3_5": ("lm_head.weight", "model.language_model.embed_tokens.weight"),
    "internvl": ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
    "llava_onevision": ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
}


@pytest.mark.parametrize("family", slow_except(["qwen3", "qwen3_vl", "internvl"], TIED))
def test_head_stored_although_tied(world, tmp_path, family):
    """The names are those of published files."""
    head, embedding = TIED[family]
    if family == "qwen3":
        make(tmp_path, family, tied=True)
    else:
        vision_models.make(tmp_path, tied=True, shape=family)
    args = toy_args(tmp_path, padded_vocab_size=PADDED_VOCAB if family == "qwen3" else 264)
    chunks, values = build(args), tensors_of(tmp_path)[embedding]
    edit_index(tmp_path, lambda names: names.update({head: "head.safetensors"}))
    save_file({head: values.clone()}, tmp_path / "head.safetensors")
    hf.load_hf(chunks, args, tmp_path)
    sent = dict(stream_hf(chunks, args))
    assert head not in sent and torch.equal(sent[embedding], values)
    save_file({head: values + 1}, tmp_path / "head.safetensors")
    with pytest.raises(GrpoError, match=rf"ties {re.escape(head)} to {re.escape(embedding)}, but .* two different"):
        hf.load_hf(chunks, args, tmp_path)


def test_model_and_table_that_disagree(world, tmp_path):
    make(tmp_path, "qwen3", tied=False)
    args = toy_args(tmp_path)
    without, other = replaced(args, qk_layernorm=False), replaced(args, ffn_hidden_size=128)
    with pytest.raises(GrpoError, match=r"no parameter decoder\.layers\.0\.self_attention\.q_layernorm\.weight"):
        hf.load_hf(build(without), args, tmp_path)
    with pytest.raises(GrpoError, match=r"fc1\.weight has shape \(256, 64\), its family's table says \(192, 64\)"):
        hf.load_hf(build(other), args, tmp_path)
    biased = replaced(args, add_qkv_bias=True)
    with pytest.raises(GrpoError, match=r"parameter decoder\.layers\.0\.self_attention\.linear_qkv\.bias is not in"):
        list(stream_hf(build(biased), args))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is not a Hugging Face model directory"), ("{", "not valid JSON"), ("[1]", "not a JSON object")],
)
def test_config_that_is_none(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(GrpoError, match=rf"config\.json .*{message}"):
        hf.read_config(tmp_path)


def test_other_ranks_open_the_files_of_their_own_weights(world, tmp_path, monkeypatch):
    """A rank that holds the embedding alone: rank 0 has read the headers of all files."""
    make(tmp_path, "llama", tied=False).save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    args, group = toy_args(tmp_path), Recorded(2)
    chunks, held, load = build(args), model_weights.local_weights, Safetensors._load
    opened: list[str] = []
    monkeypatch.setattr(agreement, "host_group", lambda: group)
    monkeypatch.setattr(Safetensors, "_load", lambda self, path: opened.append(path.name) or load(self, path))
    hf.load_hf(chunks, args, tmp_path)
    assert sorted(opened) == sorted(set(files.values())) and len(opened) > 3
    opened.clear()
    group.place = 1

    def embedding(*arguments):
        return [row for row in held(*arguments) if "model.embed_tokens.weight" in row[0].hf]

    monkeypatch.setattr(model_weights, "local_weights", embedding)
    monkeypatch.setattr(model_weights, "owning_stages", lambda *_: None)
    hf.load_hf(chunks, args, tmp_path)
    assert opened == [files["model.embed_tokens.weight"]] and not group.sent


@pytest.mark.parametrize("what", ["tensor", "config.json"])
def test_other_files_on_another_host_are_refused(world, tmp_path, monkeypatch, what):
    """Rank 0 has checked the files of its host; those of another host have more rows, or describe another model."""
    make(tmp_path, "llama", tied=False)
    args, group = toy_args(tmp_path), Recorded(2)
    chunks = build(args)
    monkeypatch.setattr(agreement, "host_group", lambda: group)
    hf.load_hf(chunks, args, tmp_path)
    group.place = 1
    if what == "tensor":
        name = "model.embed_tokens.weight"
        files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        tensors = load_file(tmp_path / files[name])
        tensors[name] = torch.cat([tensors[name], tensors[name]])
        save_file(tensors, tmp_path / files[name])
    else:
        (tmp_path / what).write_text(json.dumps({"hidden_size": 1}))
    monkeypatch.setattr(model_weights, "owning_stages", lambda *_: None)
    with pytest.raises(
        GrpoError, match="embed_tokens.weight has shape" if what == "tensor" else "has another config.json"
    ):
        hf.load_hf(chunks, args, tmp_path)
