"""Toy tokenizers of published instruct models; expected strings are written from the model cards and prompt docs."""

import json

import jinja2
import pytest
from instruct_models import NAMES, build_tokenizer, published
from transformers import AutoTokenizer

from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.training.arguments import parse_args

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
]
CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
    "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
)
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n1<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nTwo?"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA_TURNS = (
    "One?<end_of_turn>\n<start_of_turn>model\n1<end_of_turn>\n<start_of_turn>user\nTwo?<end_of_turn>\n"
    "<start_of_turn>model\n"
)
GEMMA4 = (
    "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nOne?<turn|>\n<|turn>model\n1<turn|>\n<|turn>user\nTwo?<turn|>\n"
    "<|turn>model\n"
)
PHI3 = (
    "<|system|>\nBe brief.<|end|>\n<|user|>\nOne?<|end|>\n<|assistant|>\n1<|end|>\n<|user|>\nTwo?<|end|>\n"
    "<|assistant|>\n"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>Be brief.<｜User｜>One?<｜Assistant｜>1<｜end▁of▁sentence｜><｜User｜>Two?<｜Assistant｜>"
)
KIMI = (
    "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>One?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>1<|im_end|><|im_user|>user<|im_middle|>Two?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>"
)
TEXTS = {
    "DeepSeek-R1-Distill-Qwen-7B": DEEPSEEK + "<think>\n",
    "DeepSeek-V3-0324": DEEPSEEK,
    "GLM-4-9B-0414": "[gMASK]<sop><|system|>\nBe brief.<|user|>\nOne?<|assistant|>\n1<|user|>\nTwo?<|assistant|>",
    "GLM-4.5-Air": (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nOne?<|assistant|>\n<think></think>\n1<|user|>\nTwo?<|assistant|>"
    ),
    "GLM-4.7-Flash": (
        "[gMASK]<sop><|system|>Be brief.<|user|>One?<|assistant|></think>1<|user|>Two?<|assistant|><think>"
    ),
    "Kimi-K2-Instruct": KIMI,
    "Kimi-K2.5": KIMI.replace("<|im_middle|>1", "<|im_middle|><think></think>1") + "<think>",
    "Llama-3.1-8B-Instruct": LLAMA,
    "Llama-3.2-3B-Instruct": LLAMA,
    "MiniMax-M2.5": (
        "]~!b[]~b]system\nBe brief.[e~[\n]~b]user\nOne?[e~[\n]~b]ai\n1[e~[\n]~b]user\nTwo?[e~[\n]~b]ai\n<think>\n"
    ),
    "Mistral-Nemo-Instruct-2407": "<s>[INST]One?[/INST]1</s>[INST]Be brief.\n\nTwo?[/INST]",
    "Mixtral-8x7B-Instruct-v0.1": "<s> [INST] Be brief.\n\nOne? [/INST] 1</s> [INST] Two? [/INST]",
    "Moonlight-16B-A3B-Instruct": KIMI,
    "NVIDIA-Nemotron-3-Nano-30B-A3B": CHATML.replace("assistant\n1", "assistant\n<think></think>1") + "<think>\n",
    "NVIDIA-Nemotron-Nano-9B-v2": (
        "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nOne?\n<SPECIAL_11>Assistant\n1\n<SPECIAL_12>\n"
        "<SPECIAL_11>User\nTwo?\n<SPECIAL_11>Assistant\n<think>\n"
    ),
    "Phi-3-mini-4k-instruct": PHI3,
    "Phi-3.5-mini-instruct": PHI3,
    "Qwen2.5-7B-Instruct": CHATML,
    "Qwen3-30B-A3B-Instruct-2507": CHATML,
    "Qwen3-8B": CHATML,
    "Qwen3-Next-80B-A3B-Instruct": CHATML,
    "Qwen3.5-27B": CHATML + "<think>\n",
    "Qwen3.5-35B-A3B": CHATML + "<think>\n",
    "gemma-2-2b-it": "<bos><start_of_turn>user\n" + GEMMA_TURNS,
    "gemma-3-1b-it": "<bos><start_of_turn>user\nBe brief.\n\n" + GEMMA_TURNS,
    "gemma-4-26B-A4B-it": GEMMA4,
    "gemma-4-E2B-it": GEMMA4,
    "gpt-oss-20b": (
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>One?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>1<|end|><|start|>user<|message|>Two?<|end|><|start|>assistant"
    ),
    "phi-4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>One?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>1<|im_end|><|im_start|>user<|im_sep|>Two?<|im_end|><|im_start|>assistant<|im_sep|>"
    ),
}
# The tokens that end a completion: generation_config.json's, or config.json's where there is no other.
ENDS = {
    "DeepSeek": ["<｜end▁of▁sentence｜>"],
    "GLM": ["<|endoftext|>", "<|observation|>", "<|user|>"],
    "Kimi": ["<|im_end|>"],
    "Llama": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    "MiniMax": ["[e~["],
    "Mistral": ["</s>"],
    "Mixtral": ["</s>"],
    "Moonlight": ["<|im_end|>"],
    "NVIDIA-Nemotron-3": ["</s>", "<|im_end|>"],
    "NVIDIA": ["</s>", "<SPECIAL_11>", "<SPECIAL_12>"],
    "Phi": ["<|assistant|>", "<|end|>", "<|endoftext|>"],
    "Qwen": ["<|endoftext|>", "<|im_end|>"],
    "gemma-4": ["<eos>", "<turn|>", "<|tool_response>"],
    "gemma": ["<end_of_turn>", "<eos>"],
    "gpt": ["<|call|>", "<|endoftext|>", "<|return|>"],
    "phi": ["<|im_end|>"],
}
WITHOUT_START = "NVIDIA-Nemotron-Nano-9B-v2"  # its template does not begin with what its tokenizer puts before a text
OWN_SYSTEM_MESSAGE = "gpt-oss-20b"  # its template puts a system message with today's date before the conversation


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that builds and loads the tokenizer of a model, once per model."""
    loaded = {}

    def _load(name):
        if name not in loaded:
            directory = tmp_path_factory.mktemp(name)
            ids = build_tokenizer(name, directory)
            loaded[name] = (AutoTokenizer.from_pretrained(directory), ids, directory)
        return loaded[name]

    return _load


def render(tokenizer, messages=CONVERSATION, **kwargs):
    """Return the text of a conversation up to the assistant's answer."""
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024", **kwargs
    )


def test_every_model_has_its_text():
    assert sorted(TEXTS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_rendered_as_the_model_card_says(load, name):
    tokenizer, _, _ = load(name)
    if name == "gemma-2-2b-it":
        with pytest.raises(jinja2.TemplateError, match="System role not supported"):
            render(tokenizer)
    text = render(tokenizer, CONVERSATION[1:] if name == "gemma-2-2b-it" else CONVERSATION)
    if name == OWN_SYSTEM_MESSAGE:
        assert text.startswith("<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n")
        assert text.endswith("<|end|>" + TEXTS[name])
    else:
        assert text == TEXTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_special_token_is_one_id_after_the_bytes(load, name):
    tokenizer, ids, _ = load(name)
    assert sorted(ids.values()) == list(range(256, 256 + len(ids)))
    for content, toy_id in ids.items():
        assert tokenizer.encode("a" + content, add_special_tokens=False) == [64, toy_id], content  # "a" is 64th
        kept = tokenizer.decode([64, toy_id], skip_special_tokens=True)
        assert kept == ("a" if content in published(name, "tokens.json")["special"] else "a" + content)
    assert len(tokenizer.encode(TEXTS[name], add_special_tokens=False)) < len(TEXTS[name].encode())


@pytest.mark.parametrize("name", NAMES)
def test_stop_ids_stand_for_the_tokens_that_end_a_turn(load, name):
    tokenizer, _, directory = load(name)
    settings = json.loads((directory / "config.json").read_text())
    if (directory / "generation_config.json").exists():
        settings |= json.loads((directory / "generation_config.json").read_text())
    ends = settings["eos_token_id"] if isinstance(settings["eos_token_id"], list) else [settings["eos_token_id"]]
    family = next(family for family in ENDS if name.startswith(family))
    assert sorted(tokenizer.convert_ids_to_tokens(ends)) == sorted(ENDS[family])


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("Llama-3.1-8B-Instruct", ["<|begin_of_text|>"]),
        ("gemma-3-1b-it", ["<bos>"]),
        ("DeepSeek-R1-Distill-Qwen-7B", ["<｜begin▁of▁sentence｜>"]),
        ("Qwen2.5-7B-Instruct", []),
        ("gpt-oss-20b", []),
    ],
)
def test_a_text_begins_with_the_token_that_the_tokenizer_adds(load, name, first):
    tokenizer, ids, _ = load(name)
    assert tokenizer.encode("a") == [*(ids[token] for token in first), 64]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_is_a_rendered_template_has_one_start(load, name, tmp_path, capsys):
    """Its ids are those of its messages, which begin once with what the published tokenizer adds to a text."""
    tokenizer, ids, directory = load(name)
    ours = HuggingFaceTokenizer(directory)
    messages = CONVERSATION[1:]
    rendered = ours.render_chat(messages)
    if name == WITHOUT_START:
        assert ours.encode(rendered) == [ids["<s>"], *ours.apply_chat_template(messages)]
        return
    assert ours.encode(rendered) == ours.apply_chat_template(messages)
    assert ours.encode("a") == tokenizer.encode("a") and ours.encode_rest("a") == [64]
    adds = [ids[token] for token in published(name, "tokens.json")["encode_adds"] or []]
    assert ours.text_start == "".join(tokenizer.convert_ids_to_tokens(adds))
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in (rendered, rendered, "One?")))
    args = parse_args(["--max-prompt-length", "4000"])
    data = PromptDataset([file], ours, args)
    for prompt in data:
        assert [prompt.ids.count(token) for token in adds] == [1] * len(adds) and prompt.ids[: len(adds)] == adds
    line = f"2 prompts bring {ours.text_start}: the tokenizer adds no second one"
    assert (line in capsys.readouterr().out.splitlines()) == bool(adds)
    PromptDataset([file], ours, args, streamed=True)
    assert ("the first row's prompt brings" in capsys.readouterr().out) == bool(adds)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("system", "prompt", "plain"),
    [
        (None, "One?", True),
        ("Be short.", "One?", False),
        (None, [{"role": "user", "content": "One?"}], False),
        (None, '[{"role": "user", "content": "One?"}]', False),
        (None, "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_texts_without_the_chat_template_are_counted(load, tmp_path, capsys, system, prompt, plain, streamed):
    _, _, directory = load("Qwen2.5-7B-Instruct")
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": prompt}))
    words = ["--max-prompt-length", "4000", *(["--system-prompt", system] if system else [])]
    PromptDataset([file], HuggingFaceTokenizer(directory), parse_args(words), streamed=streamed)
    assert ("used unchanged, without the tokenizer's chat template" in capsys.readouterr().out) == plain


def test_eleven_published_tokenizers_begin_a_text():
    assert sum(bool(published(name, "tokens.json")["encode_adds"]) for name in NAMES) == 11


@pytest.mark.parametrize(
    ("name", "kwargs", "has"),
    [
        ("Qwen3-8B", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("GLM-4.5-Air", {"enable_thinking": False}, "<|user|>\nTwo?/nothink<|assistant|>\n<think></think>"),
        ("GLM-4.7-Flash", {"enable_thinking": False}, "<|user|>Two?<|assistant|></think>"),
        ("Kimi-K2.5", {"thinking": False}, "Two?<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"),
        ("gpt-oss-20b", {"reasoning_effort": "high"}, "\n\nReasoning: high\n\n"),
    ],
)
def test_a_switch_changes_the_prompt(load, name, kwargs, has):
    tokenizer, _, _ = load(name)
    assert has in render(tokenizer, **kwargs)
    assert has not in render(tokenizer)
