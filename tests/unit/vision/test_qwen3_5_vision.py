"""Qwen3.5 with its tower against transformers: logits, all gradients, weights there and back, published sizes."""

import json

import pytest
from float64 import bound
from instruct_models import DATA, published
from slow import slow_except
from toy_checkpoints import build, same_bits, tensors_of, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import numpy as np
import torch
from convert_tool import check_same, load_tool
from safetensors.torch import save_file
from test_vision_model import batch_of, inputs_of, read_all
from transformers import AutoConfig, AutoModelForImageTextToText
from vision_models import make

from megatron_grpo.data.pack import pack_completions
from megatron_grpo.models.gpt import packed_seq_params
from megatron_grpo.training import train_step
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.arguments import check_vision
from megatron_grpo.vision.images import attach
from megatron_grpo.weights import families, hf, model_weights
from megatron_grpo.weights.arguments import architecture_of
from megatron_grpo.weights.stream import stream_hf

SHAPES = ["qwen3_5", "qwen3_5_moe"]
NAMES = {"qwen3_5": "Qwen3.5-27B", "qwen3_5_moe": "Qwen3.5-35B-A3B"}
# Adam divides by the size of each gradient; with a smaller epsilon it magnifies differences of those near zero.
UPDATE = {"lr": 1e-2, "min_lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0, "train_iters": 1, "adam_eps": 1e-2}
LENGTHS = (5, 70, 21)  # of completions behind two pictures, no picture and one


def logits_of(model, pack) -> torch.Tensor:
    """Return the logits of all tokens of a pack."""
    arrays = {name: torch.from_numpy(array) for name, array in pack.device_arrays().items()}
    return model(
        arrays["tokens"][None],
        arrays["position_ids"][None],
        attention_mask=None,
        packed_seq_params=packed_seq_params(torch.from_numpy(pack.cu_seqlens), pack.max_seqlen, "local"),
        rope_positions=arrays.get("rope_positions"),
        images=pack.images,
    )[0]


def loaded(directory, **more):
    """Return the arguments, the model, the reader of images and the prompts of a directory."""
    args = toy_args(directory, tokenizer_model=str(directory), padded_vocab_size=264, **more)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, directory)
    reader, prompts = read_all(args)
    attach(chunks, reader, lambda row: prompts[row].images)
    return args, model, reader, prompts


@pytest.mark.parametrize("recompute", slow_except([None], [None, "full"]))
@pytest.mark.parametrize("shape", slow_except(["qwen3_5_moe"], SHAPES))
def test_logits_and_gradients_of_packs_equal_transformers(world, tmp_path, shape, recompute):
    theirs = make(tmp_path, shape=shape)
    flags = {"recompute_granularity": recompute, "recompute_method": recompute and "uniform"}
    args, model, reader, prompts = loaded(tmp_path, **flags, recompute_num_layers=1 if recompute else None)
    rng = np.random.default_rng(0)
    completions = [rng.integers(9, 264, size).tolist() for size in LENGTHS]
    completions[1][2] = prompts[0].images.token  # a sampled image token is text
    expected, tokens = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        given = inputs_of(reader, prompt, completion)
        positions, _ = theirs.model.get_rope_index(**{k: v for k, v in given.items() if k != "pixel_values"})
        assert np.array_equal(positions[:, 0].numpy().T, prompt.images.layout(prompt.ids + completion)[0])
        expected.append(theirs(**given).logits[0])
        tokens.append(given["input_ids"][0])
    for order in ([0, 1, 2], [1], [2, 0]):
        pack = pack_completions(batch_of(prompts, order, [completions[p] for p in order]), np.arange(len(order)))
        found, wanted = logits_of(model, pack), torch.cat([expected[p] for p in order])
        assert (found - wanted).abs().max() < bound(1e-5) * wanted.abs().max()

    pack = pack_completions(batch_of(prompts, [0, 1, 2], completions), np.arange(3))
    found, wanted, ids = logits_of(model, pack), torch.cat(expected), torch.cat(tokens)[:, None]
    assert wanted.std() > 0.3
    factors = torch.from_numpy(rng.standard_normal(len(ids))).float()
    for logits in (found, wanted):
        (logits.log_softmax(-1).gather(1, ids)[:, 0] * factors).sum().backward()
    theirs_by_name = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    ours = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        ours |= dict(model_weights.canonical(model, name, parameter.grad))
    compared = set()
    for weight in model_weights.table(args):
        for name, own in zip(weight.hf, weight.split([ours[weight.name]]), strict=True):
            want = theirs_by_name[name][weight.expert] if weight.all_experts else theirs_by_name[name]
            # The bias of the keys moves all scores of a softmax alike: its gradient is zero.
            assert want.norm() > 1e-4 and (own - want).norm() <= bound(2e-5) * max(want.norm(), 1e-1), name
            compared.add(name)
    assert compared == theirs_by_name.keys()


@pytest.mark.parametrize("shape", slow_except(["qwen3_5_moe"], SHAPES))
def test_an_update_equals_transformers(world, tmp_path, shape):
    """AdamW moves every weight, those of the tower too, as torch's moves transformers' weights."""
    theirs = make(tmp_path, shape=shape)
    args, inner, reader, prompts = loaded(tmp_path, **UPDATE, explicit=frozenset())
    (model,), optimizer, _ = train_step.setup_optimizer(args, [inner])
    completions = [[9, 30, 31, 200], [77, 78], [12] * 9]
    pack = pack_completions(batch_of(prompts, [0, 1, 2], completions), np.arange(3))
    given = [inputs_of(reader, prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    ids = torch.cat([one["input_ids"][0] for one in given])[:, None]
    model.zero_grad_buffer()
    for logits in (logits_of(model, pack), torch.cat([theirs(**one).logits[0] for one in given])):
        logits.log_softmax(-1).gather(1, ids).sum().backward()
    before = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
    decay = {True: UPDATE["weight_decay"], False: 0.0}
    groups = [
        {
            "params": [p for n, p in theirs.named_parameters() if (p.dim() > 1 and "bias" not in n) == matrices],
            "weight_decay": decay[matrices],
        }
        for matrices in decay
    ]
    torch.optim.AdamW(groups, lr=UPDATE["lr"], eps=UPDATE["adam_eps"]).step()
    model.start_grad_sync()
    model.finish_grad_sync()
    optimizer.step()
    updated, streamed = dict(theirs.named_parameters()), dict(stream_hf([model], args))
    assert streamed.keys() == updated.keys()
    for name, tensor in streamed.items():
        assert (tensor - updated[name]).norm() < bound(1e-5) * updated[name].norm(), name
        assert (updated[name] - before[name]).norm() > 2e-4 * before[name].norm(), name


TIED = [("qwen3_5", False), ("qwen3_5", True), ("qwen3_5_moe", False)]


@pytest.mark.parametrize(("shape", "tied"), slow_except(TIED[2:], TIED))
def test_weights_there_and_back_bit_for_bit(world, tmp_path, capsys, shape, tied):
    """HF -> Megatron -> HF; multi-token prediction is not read; transformers reads the export."""
    theirs = make(tmp_path / "first", tied, shape=shape)
    before = tensors_of(tmp_path / "first")
    extra = tmp_path / "first" / "mtp.safetensors"
    save_file({"mtp.fc.weight": torch.ones(4, 8)}, extra)
    index = tmp_path / "first" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["mtp.fc.weight"] = extra.name
    index.write_text(json.dumps(content))
    args, model, reader, prompts = loaded(tmp_path / "first")
    assert "1 tensors are not read, such as mtp.fc.weight" in capsys.readouterr().out
    hf.save_hf([model], args, tmp_path / "second", tokenizer_dir=tmp_path / "first")
    after = tensors_of(tmp_path / "second")
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    again = families.for_hf_config(config).args_from_hf(config)
    assert again == {name: getattr(args, name) for name in again}
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "second").eval()
    given = inputs_of(reader, prompts[0], [])
    with torch.no_grad():
        assert exported(**given).logits.equal(theirs(**given).logits)


@pytest.mark.parametrize("shape", slow_except(["qwen3_5_moe"], SHAPES))
def test_published_configurations(shape):
    """Names and shapes of all weights are those of transformers' model; config.json is written again as it was."""
    config = published(NAMES[shape], "config.json")
    family = families.for_hf_config(config)
    arguments = family.args_from_hf(config)
    assert arguments["model_family"] == shape
    assert arguments["mrope_section"] == [11, 11, 10] and arguments["rotary_percent"] == 0.25
    assert arguments["rotary_base"] == 10000000 and arguments["linear_attention_freq"] == 4
    args = replaced(toy_args_of(arguments), padded_vocab_size=248320)
    written = family.hf_from_args(args)
    assert family.args_from_hf(written) == arguments
    ours, theirs = (AutoConfig.for_model(**{**c, "model_type": shape}) for c in (written, config))
    for part in ("text_config", "vision_config"):
        own, want = getattr(ours, part).to_dict(), getattr(theirs, part).to_dict()
        skipped = """bos_token_id eos_token_id pad_token_id dtype attn_output_gate mlp_only_layers router_aux_loss_coef
            mtp_num_hidden_layers mtp_use_dedicated_embeddings full_attention_interval intermediate_size
            tie_word_embeddings""".split()
        if part == "vision_config" or shape == "qwen3_5":
            skipped.remove("intermediate_size")
        assert {k: v for k, v in own.items() if k not in skipped} == {k: v for k, v in want.items() if k not in skipped}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(theirs)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {name: shape for weight in model_weights.table(args) for name, shape in weight.hf.items()} == shapes


def toy_args_of(arguments):
    return replaced(parse_args(["--transformer-impl", "local"]), **arguments)


@pytest.mark.parametrize("shape", slow_except(["qwen3_5_moe"], SHAPES))
def test_the_language_model_alone(world, tmp_path, capsys, shape):
    """--model-family of the text reads the published directory without its tower, and has transformers' logits."""
    theirs = make(tmp_path, shape=shape)
    args = replaced(toy_args(tmp_path, f"{shape}_text"), explicit=frozenset({"model_family"}))
    assert architecture_of(args, str(tmp_path))["model_family"] == f"{shape}_text"
    assert args.model_family == f"{shape}_text" and args.vision_config is None and args.mrope_section is None
    args = replaced(args, padded_vocab_size=264)
    (model,) = chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    assert "tensors are not read, such as model.visual." in capsys.readouterr().out
    ids = torch.randint(9, 264, (1, 40), generator=torch.Generator().manual_seed(5))
    pack = packed_seq_params(torch.tensor([0, 40], dtype=torch.int32), 40, "local")
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits[0]
        found = model(ids, torch.arange(40)[None], attention_mask=None, packed_seq_params=pack)[0]
    assert (found - expected).abs().max() < bound(3e-5) * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "text"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5", True)])
def test_conversion_there_and_back(world, tmp_path, capsys, shape, text):
    """With a check of the logits; with --model-family of the text, of the language model alone."""
    source, middle, target, tool = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back", load_tool()
    make(source, shape=shape)
    for words in (
        ["--hf-to-megatron", "--load", source, "--save", middle, *["--model-family", f"{shape}_text"][: 2 * text]],
        ["--megatron-to-hf", "--load", middle, "--save", target],
    ):
        tool.convert(tool.build_parser().parse_args([*map(str, words), "--verify"]))
    assert capsys.readouterr().out.count("the logits of 16 tokens differ from transformers' by at most") == 2
    if not text:
        check_same(source, target)
        return
    before, after = tensors_of(source), tensors_of(target)
    inner = {name.replace("model.language_model.", "model."): tensor for name, tensor in before.items()}
    assert after.keys() == {name for name in inner if not name.startswith("model.visual.")}
    assert all(same_bits(inner[name], after[name]) for name in after)


def test_a_published_template_shows_pictures(world, tmp_path):
    """Qwen3.5's own chat template: the image token stands between its borders as often as the image has tokens."""
    make(tmp_path, shape="qwen3_5")
    for file in ("chat_template.jinja", "chat_template.json"):
        (tmp_path / file).unlink(missing_ok=True)
    (tmp_path / "chat_template.jinja").write_text((DATA / NAMES["qwen3_5"] / "chat_template.jinja").read_text())
    args = toy_args(tmp_path, tokenizer_model=str(tmp_path), padded_vocab_size=264)
    reader, prompts = read_all(args)
    # 56 x 84 pixels are 2 x 3 squares of 32 x 32, 150 x 100 are 5 x 3, 61 x 140 are 2 x 4.
    pictures = [f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in (6, 15, 8)]
    texts = [f"{pictures[0]}and{pictures[1]}?", "no picture", f"{pictures[2]}what is it?"]
    for prompt, text in zip(prompts, texts, strict=True):
        shown = reader.processor.tokenizer.decode(prompt.ids)
        assert shown == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_another_family_is_no_part_of_the_directory(tmp_path):
    make(tmp_path)
    args = replaced(toy_args(tmp_path), model_family="qwen3_5_text", explicit=frozenset({"model_family"}))
    with pytest.raises(GrpoError, match=r"model-family is qwen3_5_text, but .*config.json says qwen2_5_vl"):
        architecture_of(args, str(tmp_path))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_refusal_names_the_family_of_texts(tmp_path, shape):
    """Pictures go to vLLM only; other engines train the language model of the same directory."""
    make(tmp_path, shape=shape)
    with pytest.raises(GrpoError, match=f"sent to vLLM only; leave it out, or give --model-family {shape}_text"):
        check_vision(toy_args(tmp_path, rollout_engine="megatron"))
    check_vision(toy_args(tmp_path, f"{shape}_text", rollout_engine="megatron"))
