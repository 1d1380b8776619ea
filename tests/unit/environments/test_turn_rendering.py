"""Tokens behind a sampled turn: prompt, sampled ids and what is appended are the template's rendering of the whole."""

import datetime
from types import SimpleNamespace

import pytest
from instruct_models import NAMES, build_tokenizer
from slow import slow_except
from transformers.utils import chat_template_utils

from megatron_grpo.data.end_of_turn import turn_end_token_ids
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.environments.rendering import TurnRenderer
from megatron_grpo.utils.errors import GrpoError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculate.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
# Whose templates show tools' answers under the role tool; the others' refuse it, or leave the answers out.
WITH_TOOLS = {
    "GLM-4.5-Air": "<|observation|>",
    "GLM-4.7-Flash": "<|observation|>",
    "Kimi-K2-Instruct": "<|im_end|>",
    "Kimi-K2.5": "<|im_end|>",
    "Llama-3.1-8B-Instruct": "<|eot_id|>",
    "Llama-3.2-3B-Instruct": "<|eot_id|>",
    "MiniMax-M2.5": "[e~[",
    "Mistral-Nemo-Instruct-2407": "</s>",
    "NVIDIA-Nemotron-3-Nano-30B-A3B": "<|im_end|>",
    "NVIDIA-Nemotron-Nano-9B-v2": "<SPECIAL_12>",
    "Qwen2.5-7B-Instruct": "<|im_end|>",
    "Qwen3-30B-A3B-Instruct-2507": "<|im_end|>",
    "Qwen3-8B": "<|im_end|>",
    "Qwen3-Next-80B-A3B-Instruct": "<|im_end|>",
    "Qwen3.5-27B": "<|im_end|>",
    "gemma-4-E2B-it": "<|tool_response>",
    "gpt-oss-20b": "<|call|>",
}
# Whose templates show an earlier turn with other marks of reasoning than a prompt.
REASONING = {"GLM-4.5-Air", "GLM-4.7-Flash", "Kimi-K2.5", "MiniMax-M2.5", "NVIDIA-Nemotron-Nano-9B-v2"}
OTHERS = sorted(set(NAMES) - REASONING)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return (tokenizer, renderer) of a published model, each built once."""
    built = {}

    def build(name):
        if name not in built:
            directory = tmp_path_factory.mktemp(name)
            build_tokenizer(name, directory)
            tokenizer = HuggingFaceTokenizer(directory)
            given = {"stop_token_ids": None, "stop_words": None, "ignore_eos": True, "load_hf": None}
            ends = turn_end_token_ids(SimpleNamespace(**given, tokenizer_model=directory), tokenizer)
            built[name] = tokenizer, TurnRenderer(tokenizer, ends)
        return built[name]

    return build


@pytest.mark.parametrize("name", OTHERS)
def test_users_turns(name, published):
    """Six turns of text; the templates of REASONING remove it from earlier turns, so that their text is another."""
    tokenizer, renderer = published(name)
    messages = [{"role": "user", "content": "one and one?"}]
    ids = tokenizer.apply_chat_template(messages)
    for number in range(6):
        text, new = f"it is {number}", [{"role": "user", "content": f"and {number} more?"}]
        turn = {"role": "assistant", "content": text}
        whole = tokenizer.apply_chat_template([*messages, turn, *new])
        for end in renderer._end_token_ids:
            tail = renderer.after_turn(messages, turn, new, end)
            sampled = whole[len(ids) : len(whole) - len(tail)]
            if sampled[-1:] == [end]:
                break
        else:  # the template's end of a turn is no end token of the model: gpt-oss's <|end|> and <|return|>
            assert name == "gpt-oss-20b"
        assert whole[len(whole) - len(tail) :] == tail
        assert text in tokenizer.decode(whole[: len(whole) - len(tail)])
        assert new[0]["content"] in tokenizer.decode(tail) and text not in tokenizer.decode(tail)
        messages += [turn, *new]
        ids = whole


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_answers(name, published):
    tokenizer, renderer = published(name)
    messages = [{"role": "user", "content": "one and one?"}]
    call = {"name": "calculate", "arguments": {"expression": "1+1"}}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
    }
    answer = [{"role": "tool", "name": "calculate", "tool_call_id": "call00001", "content": "it is 2"}]
    end = tokenizer.special_tokens[WITH_TOOLS[name]]
    tail = renderer.after_turn(messages, turn, answer, end, TOOLS)
    whole = tokenizer.apply_chat_template([*messages, turn, *answer], TOOLS)
    assert whole[len(whole) - len(tail) :] == tail
    assert whole[len(whole) - len(tail) - 1] == end, "the sampled end is not repeated"
    text = tokenizer.decode(tail, skip_special_tokens=False)
    assert "it is 2" in text and "1+1" not in text
    said = {**turn, "content": "I calculate."}  # Gemma 4's template shows this text behind the answer
    assert renderer.after_turn(messages, said, answer, end, TOOLS) == tail


@pytest.mark.parametrize("name", ["gemma-3-1b-it", "phi-4", "Mixtral-8x7B-Instruct-v0.1"])
def test_a_template_without_tools_is_refused(name, published):
    tokenizer, renderer = published(name)
    messages, turn = [{"role": "user", "content": "hi"}], {"role": "assistant", "content": "x"}
    with pytest.raises(GrpoError, match="chat template"):
        renderer.after_turn(messages, turn, [{"role": "tool", "content": "2"}], tokenizer.eos_id)


def test_a_cut_turn_gets_its_end(published):
    """A stop word ends a turn without an end token: the template's is appended, and was not sampled."""
    tokenizer, renderer = published("Qwen3-8B")
    turn, new = {"role": "assistant", "content": "x"}, [{"role": "user", "content": "y"}]
    tail = renderer.after_turn([{"role": "user", "content": "hi"}], turn, new, tokenizer.encode("x")[-1])
    assert tokenizer.decode(tail, False) == "<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"


def test_another_end_than_the_templates(published):
    """Llama's <|eom_id|> stands for <|eot_id|>; GLM's end is the role of the next message, which stays."""
    messages, turn = [{"role": "user", "content": "hi"}], {"role": "assistant", "content": "x"}
    new = [{"role": "user", "content": "y"}]
    tokenizer, renderer = published("Llama-3.1-8B-Instruct")
    tail = renderer.after_turn(messages, turn, new, tokenizer.special_tokens["<|eom_id|>"])
    assert tokenizer.decode(tail, False).startswith("<|start_header_id|>user")
    tokenizer, renderer = published("GLM-4.5-Air")
    ended = tokenizer.special_tokens
    assert tokenizer.decode(renderer.after_turn(messages, turn, new, ended["<|user|>"]), False).startswith("\ny")
    other = renderer.after_turn(messages, turn, new, ended["<|observation|>"])
    assert tokenizer.decode(other, False).startswith("<|user|>\ny")


@pytest.mark.parametrize("name", ["Llama-3.2-3B-Instruct", "gpt-oss-20b"])
def test_a_template_that_prints_the_date_rewrites_nothing_after_midnight(name, published, monkeypatch):
    """Prompts have the date of the launch, too: they follow no clock of transformers."""
    tokenizer, renderer = published(name)
    messages, spoken = [{"role": "user", "content": "hi"}], {"role": "assistant", "content": "x"}
    before = tokenizer.apply_chat_template(messages)

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat("2099-12-31")

    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    assert tokenizer.apply_chat_template(messages) == before
    sampled = "<|channel|>final<|message|>x" if name == "gpt-oss-20b" else "x"
    so_far = [*before, *tokenizer.encode_rest(sampled), renderer._end_token_ids[0]]
    again = [*messages, spoken, {"role": "user", "content": "y"}]
    assert renderer.rewritten(so_far, again)[0] is None
    assert "2099" not in tokenizer.render_chat(again)


def test_a_template_that_changes_the_past_is_detected(published):
    """Qwen3 leaves out the reasoning of turns before the newest question, and writes spaces into tool calls."""
    tokenizer, renderer = published("Qwen3-8B")
    question, answer = {"role": "user", "content": "one and one?"}, {"role": "user", "content": "and one?"}
    prompt = tokenizer.apply_chat_template([question])

    def keeps(text, *new, calls=()):
        spoken = text.partition("<tool_call>")[0].strip() if calls else text
        turn = {"role": "assistant", "content": spoken} | ({"tool_calls": calls} if calls else {})
        sampled = tokenizer.encode(f"{text}<|im_end|>")
        return renderer.rewritten([*prompt, *sampled], [question, turn, *new], TOOLS if calls else None)[0] is None

    assert keeps("two", answer)
    assert not keeps("<think>\n1 + 1\n</think>\n\ntwo", answer)
    prompt = tokenizer.apply_chat_template([question], TOOLS)
    call = [{"type": "function", "function": {"name": "calculate", "arguments": {"expression": "1+1"}}}]
    result = {"role": "tool", "content": "2"}
    exact = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1+1"}}\n</tool_call>'
    assert keeps(exact, result, calls=call)
    assert not keeps(exact.replace(": ", ":"), result, calls=call)


class Counted:
    """A tokenizer that counts the tokens and characters that it decodes and encodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.work = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids, skip_special_tokens=True):
        self.work += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def encode_after(self, token, text):
        ids = self._tokenizer.encode_after(token, text)
        self.work += len(ids)
        return ids

    def apply_chat_template(self, *parts):
        ids = self._tokenizer.apply_chat_template(*parts)
        self.work += len(ids)
        return ids


@pytest.mark.parametrize("name", slow_except(OTHERS[::3], OTHERS))
@pytest.mark.parametrize("rewrites", slow_except([True], [False, True]))  # in every third turn
def test_a_turn_is_compared_by_what_is_new(name, rewrites, published):
    """Thirty turns, the result of each as of the whole conversation; later turns take no more work."""
    tokenizer, renderer = published(name)
    counted = Counted(tokenizer)
    quick = TurnRenderer(counted, renderer._end_token_ids)
    messages, marks, work = [{"role": "user", "content": "one and one?"}], (), []
    ids = tokenizer.apply_chat_template(messages)
    for turn in range(30):
        said = f"{turn} apples\nand  pears, é 中"
        # Templates strip the text of a turn or show it as it is: spaces at its end are another past.
        sampled = tokenizer.encode_rest(said + ("  \n" if rewrites and turn % 3 == 1 else ""))
        so_far = [*ids, *sampled, renderer._end_token_ids[0]]
        before = [*messages, {"role": "assistant", "content": said}]
        messages = [*before, {"role": "user", "content": f"and {turn}?"}]
        whole = renderer.whole(messages)
        text = tokenizer.decode(whole, skip_special_tokens=False)
        kept = text.startswith(tokenizer.decode(so_far[:-1], skip_special_tokens=False))
        counted.work = 0
        found, marks = quick.rewritten(so_far, messages, marks=marks)
        assert found == (None if kept else whole)
        known = found or so_far
        assert all(tokenizer.decode(list(known[: m.tokens]), False) == text[: m.characters] for m in marks)
        work.append(counted.work)
        ids = whole if found else so_far + renderer.after_turn(before[:-1], before[-1], messages[-1:], so_far[-1])
    assert max(work[20:]) < 1.5 * max(work[5:10])
