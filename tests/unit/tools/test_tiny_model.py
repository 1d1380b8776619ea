import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_grpo.data.pack import IGNORED_LABEL
from megatron_grpo.utils.errors import GrpoError
from tools.make_tiny_model import (
    TextRows,
    accuracy,
    build_parser,
    encode,
    make,
    make_model,
    make_tokenizer,
    warm_up,
)


def arguments(tmp_path, *flags):
    return build_parser().parse_args(["--save", str(tmp_path / "model"), "--quiet", *flags])


@pytest.mark.parametrize("shape", ["qwen2", "qwen3", "llama"])
def test_the_tokenizer_has_the_models_vocabulary(tmp_path, shape):
    make(arguments(tmp_path, "--steps", "0", "--shape", shape))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 16


def test_a_vocabulary_larger_than_the_tokenizers(tmp_path):
    make(arguments(tmp_path, "--steps", "0", "--vocab-size", "64"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").get_input_embeddings().num_embeddings == 64
    with pytest.raises(GrpoError, match=r"--vocab-size \(15\) is below the tokenizer's 16 tokens"):
        make(arguments(tmp_path, "--steps", "0", "--vocab-size", "15"))


@pytest.fixture
def rows(tmp_path):
    """A file of five sums and its path."""
    path = tmp_path / "rows.jsonl"
    sums = [("1+2=", "3"), ("4+5=", "9"), ("12+7=", "91"), ("60+60=", "021"), ("0+0=", "0")]
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in sums))
    return path


def test_conversations_are_learnt_where_the_assistant_speaks(tmp_path):
    function = {"name": "calculate", "arguments": {"expression": "12+7"}}
    messages = [
        {"role": "user", "content": "12+7="},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "19"},
        {"role": "assistant", "content": "19"},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    tokenizer = make_tokenizer("tools")
    ids, labels = encode([tmp_path / "rows.jsonl"], tokenizer)
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "12+7"}}</tool_call><eos>'
    assert tokenizer.decode(ids[0]) == f"user: 12+7=\nassistant: {call}tool: 19\nassistant: 19"
    assert tokenizer.decode(labels[0][labels[0] != IGNORED_LABEL]) == f"{call}19<eos>"
    assert (labels != IGNORED_LABEL).sum() == 9 + 3  # the fixed parts of a call have one token each


def test_parameter_count_of_the_default_shape(tmp_path):
    make(arguments(tmp_path, "--steps", "0"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    attention = 128 * 128 + 2 * 64 * 128 + 128 * 128 + 2 * 32  # q, k and v, output, two head norms
    layer = attention + 3 * 128 * 384 + 2 * 128
    assert sum(p.numel() for p in model.parameters()) == 2 * 16 * 128 + 4 * layer + 128
    assert model.dtype == torch.float32
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (14, 15)


@pytest.mark.parametrize(
    ("shape", "has", "lacks"),
    [
        ("qwen3", "q_norm.weight", "q_proj.bias"),
        ("qwen2", "q_proj.bias", "q_norm"),
        ("llama", "q_proj.weight", "bias"),
        ("qwen3_moe", "mlp.gate.weight", "shared_experts"),
        ("deepseek_v3", "mlp.gate.e_score_correction_bias", "q_norm"),
        ("glm4_moe_lite", "kv_a_proj_with_mqa.weight", "q_norm"),
        ("minimax_m2", "q_norm.weight", "shared_experts"),
        ("gemma4_text", "per_layer_input_gate.weight", "q_proj.bias"),
    ],
)
def test_shapes(tmp_path, shape, has, lacks):
    make(arguments(tmp_path, "--steps", "0", "--shape", shape, "--num-layers", "2", "--tie-embeddings"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    names = list(model.state_dict())
    assert model.config.model_type == shape and model.config.tie_word_embeddings
    assert any(name.endswith(has) for name in names) and not any(lacks in name for name in names)


@torch.no_grad()
def test_the_bias_of_the_experts_matters(tmp_path):
    model = make_model(arguments(tmp_path, "--shape", "deepseek_v3"), make_tokenizer("characters"))
    ids = torch.arange(14)[None]
    before = model(ids).logits
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    assert (model(ids).logits - before).abs().max() > 1e-3


def test_weights_follow_the_seed(tmp_path):
    tokenizer = make_tokenizer("characters")
    first, same, other = (
        make_model(arguments(tmp_path, "--seed", seed), tokenizer).lm_head.weight for seed in ("1", "1", "2")
    )
    assert torch.equal(first, same) and not torch.equal(first, other)


@pytest.mark.parametrize(("kind", "text"), [("characters", "12+7*3-4="), ("bytes", "Wie viel ist 3 × 4?\n\tEnd ")])
def test_tokenizer_round_trip(tmp_path, kind, text):
    make_tokenizer(kind).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text if kind == "characters" else text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens([len(tokenizer) - 2, len(tokenizer) - 1]) == ["<eos>", "<pad>"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")


def test_chat_template_of_the_byte_tokenizer():
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2"}]
    tokenizer = make_tokenizer("bytes")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "system: Add.\nuser: 1+2\nassistant: "


def test_labels_are_the_answer_and_its_end(rows):
    ids, labels = encode([rows], make_tokenizer("characters"))
    # Ids: digits are themselves, + is 10, = is 13, end 14, padding 15. The longest row is 60+60=021 and its end.
    assert ids[0].tolist() == [1, 10, 2, 13, 3, 15, 15, 15, 15]
    assert labels[0].tolist() == [IGNORED_LABEL] * 3 + [3, 14] + [IGNORED_LABEL] * 4
    assert ids[3].tolist() == [6, 0, 10, 6, 0, 13, 0, 2, 1]
    assert labels[3].tolist() == [IGNORED_LABEL] * 5 + [0, 2, 1, 14]


def test_accuracy_is_that_of_sampling_token_by_token(tmp_path, rows):
    """Against the product of next-token probabilities, each from its own prefix, and a greedy decoding loop."""
    tokenizer = make_tokenizer("characters")
    model = make_model(arguments(tmp_path, "--num-layers", "2", "--seed", "7"), tokenizer).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)  # far from uniform
    expected_sampled, expected_greedy = [], []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        context, probability, right = tokenizer.encode(row["prompt"]), 1.0, True
        for token in [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]:
            with torch.no_grad():
                distribution = model(torch.tensor([context])).logits[0, -1].softmax(-1)
            probability *= distribution[token].item()
            right = right and distribution.argmax().item() == token
            context.append(token)
        expected_sampled.append(probability)
        expected_greedy.append(right)
    sampled, greedy = accuracy(model, TextRows([rows], tokenizer))
    assert sampled == pytest.approx(sum(expected_sampled) / 5, rel=6e-6)
    assert greedy == sum(expected_greedy) / 5


def test_warm_up_learns_and_stops_at_the_goal(tmp_path, rows):
    tokenizer = make_tokenizer("characters")
    args = arguments(tmp_path, "--num-layers", "1", "--steps", "400", "--stop-accuracy", "0.5", "--lr", "3e-3")
    model, data = make_model(args, tokenizer), TextRows([rows], tokenizer)
    before, _ = accuracy(model, data)
    steps = warm_up(model, data, data, args)
    assert before < 0.05 and 10 <= steps < 400
    assert accuracy(model, data)[0] >= 0.5


def test_warm_up_that_is_too_short_is_refused(tmp_path, rows):
    args = arguments(tmp_path, "--train", str(rows), "--valid", str(rows), "--num-layers", "1", "--steps", "10")
    with pytest.raises(GrpoError, match=r"after 10 steps .* below --stop-accuracy 0.3"):
        make(args)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+x=", "answer": "3"}, r"rows.jsonl:1: .* characters that the tokenizer lacks"),
        ({"prompt": "1+1=", "answer": 2}, r"rows.jsonl:1: `prompt` and `answer` must be non-empty strings"),
        ({"answer": "2"}, r"rows.jsonl:1: `prompt` and `answer` must be non-empty strings"),
    ],
)
def test_unusable_rows_are_named(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(GrpoError, match=message):
        encode([path], make_tokenizer("characters"))


def test_warm_up_without_data_is_refused(tmp_path):
    with pytest.raises(GrpoError, match="--train and --valid"):
        make(arguments(tmp_path))
