"""Chat templates, end tokens and tokenizers in Python of published instruct models, as a run reads them."""

import json
import shutil

import pytest
from instruct_models import NAMES, build_tokenizer, published
from test_instruct_models import CONVERSATION, ENDS
from transformers import AutoTokenizer

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data import tokenizer as tokenizers
from megatron_grpo.data.arguments import read_chat_template
from megatron_grpo.data.end_of_turn import end_token_ids
from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.observability.provenance import banner
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import hf

DATE = {"date_string": "26 Jul 2024"}  # Llama's templates print today's date otherwise
VARIABLES = {"Llama-3.1-8B-Instruct": DATE, "Llama-3.2-3B-Instruct": DATE}
THINKING = {  # the model's switch: (variables, end of the prompt without it, and with it)
    "Qwen3-8B": ({"enable_thinking": False}, "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"),
    "Qwen3.5-27B": ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n"),
    "GLM-4.5-Air": ({"enable_thinking": False}, "<|assistant|>", "Two?/nothink<|assistant|>\n<think></think>"),
    "GLM-4.7-Flash": ({"enable_thinking": False}, "Two?<|assistant|><think>", "Two?<|assistant|></think>"),
    "Kimi-K2.5": (
        {"thinking": False},
        "Two?<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
        "Two?<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        {"enable_thinking": False},
        "Two?<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "Two?<|im_end|>\n<|im_start|>assistant\n<think></think>",
    ),
    "gemma-4-E2B-it": ({"enable_thinking": True}, "<|turn>system\nBe brief.", "<|turn>system\n<|think|>\nBe brief."),
    "gpt-oss-20b": ({"reasoning_effort": "low"}, "Reasoning: medium", "Reasoning: low"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """``directory(name)``: the toy tokenizer of a model, made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            build_tokenizer(name, made[name])
        return made[name]

    return make


def arguments(directory, *flags):
    return replaced(parse_args(["--tokenizer-model", str(directory), *flags]), max_prompt_length=None)


def prompts(tmp_path, args, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(PromptDataset([file], tokenizers.build_tokenizer(args), args))


def conversation(name):
    return CONVERSATION[1:] if name == "gemma-2-2b-it" else CONVERSATION  # it has no system role


@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_transformers_ids(name, directory, tmp_path):
    variables = VARIABLES.get(name, {})
    args = arguments(directory(name), "--chat-template-kwargs", json.dumps(variables))
    (prompt,) = prompts(tmp_path, args, {"prompt": conversation(name)})
    theirs = AutoTokenizer.from_pretrained(directory(name))
    expected = theirs.apply_chat_template(
        conversation(name), add_generation_prompt=True, return_dict=False, **variables
    )
    assert prompt.ids == expected
    tokens = published(name, "tokens.json")
    assert set(prompt.ids) & {theirs.convert_tokens_to_ids(token) for token in tokens["special"]}  # not their letters


CALLING = ["Llama-3.1-8B-Instruct", "Kimi-K2-Instruct", "GLM-4.5-Air", "Qwen3-8B", "Qwen3.5-27B", "MiniMax-M2.5"]


@pytest.mark.parametrize("name", [*CALLING, "gpt-oss-20b", "gemma-4-E2B-it", "DeepSeek-V3-0324"])
def test_earlier_calls_in_openais_form(name, directory, tmp_path):
    """Arguments as JSON text are those of an object, which templates expect; DeepSeek's joins the text."""

    def called(arguments):
        call = {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": arguments}}
        answer = {"role": "tool", "name": "find", "tool_call_id": "call00001", "content": "3 trains"}
        return [
            {"role": "user", "content": "When?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            answer,
        ]

    variables = VARIABLES.get(name, {})
    args = arguments(directory(name), "--chat-template-kwargs", json.dumps(variables))
    made, text = {"to": "Zürich", "stops": [1, None]}, '{"to": "Zürich", "stops": [1, null]}'
    theirs = AutoTokenizer.from_pretrained(directory(name))
    expected = theirs.apply_chat_template(
        called(text if name == "DeepSeek-V3-0324" else made), add_generation_prompt=True, return_dict=False, **variables
    )
    of_object, of_text = prompts(tmp_path, args, *({"prompt": called(arguments)} for arguments in (made, text)))
    assert of_text.ids == expected
    if name != "DeepSeek-V3-0324":
        assert of_object.ids == expected
    assert "Zürich" in theirs.decode(of_text.ids)


def test_earlier_calls_that_are_no_openai_calls(directory, tmp_path):
    """Templates read calls without "function" around them; text that is no JSON is shown as it is."""
    flat = [{"name": "find", "arguments": text} for text in ('{"a": 1}', "{a", "")]
    user, answer = {"role": "user", "content": "?"}, {"role": "tool", "content": "3"}
    rows = [{"prompt": [user, {"role": "assistant", "tool_calls": [call]}, answer]} for call in flat]
    found = prompts(tmp_path, arguments(directory("Qwen3-8B")), *rows)
    texts = [AutoTokenizer.from_pretrained(directory("Qwen3-8B")).decode(prompt.ids) for prompt in found]
    for text, shown in zip(texts, ('{"a": 1}', "{a", "{}"), strict=True):
        assert f'"arguments": {shown}}}' in text


@pytest.mark.parametrize("name", NAMES)
def test_the_end_tokens_are_the_models(name, directory):
    args = arguments(directory(name))
    tokenizer = tokenizers.build_tokenizer(args)
    ends = end_token_ids(args, tokenizer)
    assert ends[0] == tokenizer.eos_id
    texts = {tokenizer.decode([token], skip_special_tokens=False) for token in ends}
    # The tokenizer's own counts in any case: for the Kimi-K2 that is a token which its turns do not end with.
    family = next(family for family in ENDS if name.startswith(family))
    assert texts == {*ENDS[family], published(name, "tokens.json")["eos_token"]}


@pytest.mark.parametrize("name", THINKING)
def test_thinking_is_switched_for_all_rows_or_for_one(name, directory, tmp_path):
    variables, without, having = THINKING[name]
    messages = conversation(name)
    row = {"prompt": messages, "chat_template_kwargs": variables}
    as_text = {"prompt": messages, "chat_template_kwargs": json.dumps(variables)}
    plain = arguments(directory(name))
    tokenizer = tokenizers.build_tokenizer(plain)
    default, one, text = prompts(tmp_path, plain, {"prompt": messages, "chat_template_kwargs": None}, row, as_text)
    switched = arguments(directory(name), "--chat-template-kwargs", json.dumps(variables))
    (everywhere,) = prompts(tmp_path, switched, {"prompt": messages})
    assert one.ids == text.ids == everywhere.ids != default.ids
    rendered, changed = (tokenizer.decode(p.ids, skip_special_tokens=False) for p in (default, one))
    assert without in rendered and having not in rendered and having in changed
    # A row's own wins.
    ((variable, value),) = variables.items()
    default_value = not value if isinstance(value, bool) else "medium"
    own = {"prompt": messages, "chat_template_kwargs": {variable: default_value}}
    (back,) = prompts(tmp_path, switched, own)
    assert back.ids == default.ids


def test_a_template_of_ones_own_is_used_saved_and_exported(directory, tmp_path):
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    file = tmp_path / "own.jinja"
    file.write_text(text)
    assert read_chat_template(str(file)) == read_chat_template(text) == text
    args = arguments(directory("Qwen3-8B"), "--chat-template", text)
    tokenizer = tokenizers.build_tokenizer(args)
    (prompt,) = prompts(tmp_path, args, {"prompt": [{"role": "user", "content": "One?"}]})
    assert tokenizer.decode(prompt.ids) == "user: One?\nassistant:"
    for target in ("saved", "saved"):  # the second time by a run that reads its tokenizer there
        hf.copy_assets(args.tokenizer_model, tmp_path / target, args.chat_template)
        args = replaced(args, tokenizer_model=str(tmp_path / target))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == text


@pytest.mark.parametrize(
    ("flags", "row", "message"),
    [
        (
            '--chat-template-kwargs {"enable_thinkin":false}',
            {},
            "has no variable enable_thinkin: .* reads .*enable_thinking",
        ),
        ("", {"chat_template_kwargs": {"thinking": 1}}, r"rows.jsonl:1: .* has no variable thinking"),
        ("", {"chat_template_kwargs": "[1]"}, '"chat_template_kwargs" must be an object'),
        ("", {"prompt": "One?", "chat_template_kwargs": {"enable_thinking": True}}, "needs a prompt of chat messages"),
        ("", {"chat_template_kwargs": "{"}, '"chat_template_kwargs" must be an object'),
    ],
)
def test_bad_variables_are_refused(flags, row, message, directory, tmp_path):
    args = arguments(directory("Qwen3-8B"), *flags.split())
    with pytest.raises(GrpoError, match=message):
        prompts(tmp_path, args, {"prompt": [{"role": "user", "content": "One?"}]} | row)


def test_a_template_that_is_no_file_is_refused():
    with pytest.raises(
        GrpoError, match=r"--chat-template gone\.jinja: neither a template, which has {{ or {%, nor a file"
    ):
        read_chat_template("gone.jinja")


@pytest.mark.parametrize(
    ("template", "message"),
    [("{% generation %}{{ a }}{%- endgeneration -%}", None), ("{{ a }}\n{% if %}", "line 2 of the chat template in ")],
)
def test_variables_of_unusual_templates(template, message, directory, tmp_path):
    """transformers' own tag is known; a template that is not Jinja is an error of its own."""
    args = arguments(directory("Qwen3-8B"), "--chat-template", template, "--chat-template-kwargs", '{"a": "x"}')
    rows = [{"prompt": [{"role": "user", "content": "One?"}]}]
    if message:
        with pytest.raises(GrpoError, match=message):
            prompts(tmp_path, args, *rows)
    else:
        (prompt,) = prompts(tmp_path, args, *rows)
        assert tokenizers.build_tokenizer(args).decode(prompt.ids) == "x"


PYTHON_TOKENIZER = '''
from transformers import PreTrainedTokenizer


class OwnTokenizer(PreTrainedTokenizer):
    """Bytes, as tiktoken-based tokenizers of models on the hub are written in Python."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **options):
        self.names = [f"byte {i}" for i in range(256)]
        super().__init__(**options)

    vocab_size = property(lambda self: 256)

    def get_vocab(self):
        return {name: i for i, name in enumerate(self.names)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return [self.names[byte] for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return self.names.index(token)

    def _convert_id_to_token(self, index):
        return self.names[index]

    def convert_tokens_to_string(self, tokens):
        return bytes(self.names.index(token) for token in tokens).decode(errors="replace")
'''


def test_code_in_a_tokenizers_directory_runs_only_when_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = tmp_path / "model"
    source.mkdir()
    (source / "tiktoken.model").write_text("")
    (source / "tokenization_own.py").write_text(PYTHON_TOKENIZER)
    (source / "other.py").write_text("")
    (source / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "eos_token": "[EOS]"})
    )
    args = arguments(source)
    with pytest.raises(GrpoError, match="has a tokenizer in Python: read it, and add --trust-remote-code to run it"):
        tokenizers.build_tokenizer(args)
    args = replaced(args, transformer_impl="local", world_size=1)
    assert "trust" not in str(vars(args)["explicit"])
    trusted = arguments(source, "--trust-remote-code")
    tokenizer = tokenizers.build_tokenizer(trusted)
    assert tokenizer.encode("hé") == [104, 195, 169] and tokenizer.decode([104, 195, 169]) == "hé"
    assert tokenizer.special_tokens == {"[EOS]": tokenizer.eos_id} == {"[EOS]": 256}
    hf.copy_assets(source, tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"tiktoken.model", "tokenization_own.py", "tokenizer_config.json"}
    shutil.rmtree(source)
    again = arguments(tmp_path / "saved", "--trust-remote-code")
    assert tokenizers.build_tokenizer(again).encode("h") == [104]


def test_the_banner_names_the_code_that_runs(monkeypatch):
    monkeypatch.setattr("megatron_grpo.observability.provenance.parallel_configuration", lambda args: "1 rank")
    assert "--trust-remote-code: runs the Python code in DIR" in banner(arguments("DIR", "--trust-remote-code"))
    assert "trust" not in banner(arguments("DIR"))
