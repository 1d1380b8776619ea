"""Agent programs over a scripted engine: OpenAI's own client, a real pool of processes, samples of branches, limits."""

import itertools
import math
import re
from types import SimpleNamespace

import pytest
from instruct_models import build_tokenizer

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.environments.rendering import TurnRenderer
from megatron_grpo.environments.tool_calls import ToolCallParser
from megatron_grpo.rollout.agents.agents import Agents
from megatron_grpo.rollout.agents.endpoint import Endpoint
from megatron_grpo.rollout.engine import Completion, Request, generate
from tools.make_tiny_model import make_tokenizer

PROGRAMS = '''
import asyncio, json, os, urllib.error, urllib.request
from openai import AsyncOpenAI, BadRequestError, OpenAI

def say(text): return {"role": "user", "content": text}

async def talk(base_url, row, **metadata):
    """Three turns with the calculator, and one of another tree; streams one answer."""
    client = AsyncOpenAI(base_url=base_url, api_key=metadata["api_key"])
    ask = client.chat.completions.create
    messages = [say(row["question"])]
    answer = (await ask(model="policy", messages=messages, max_tokens=40)).choices[0].message
    call = answer.tool_calls[0]
    messages += [answer.model_dump(), {"role": "tool", "tool_call_id": call.id,
                 "content": str(eval(json.loads(call.function.arguments)["expression"]))}]
    stream = await ask(model="policy", messages=messages, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    other = await client.completions.create(model="policy", prompt="free")
    return {"right": float(text == "19"), "free": float(other.choices[0].text == "text")}

def branches(base_url, row, **metadata):
    """Two different second turns after the same first one."""
    ask = OpenAI(base_url=base_url, api_key="any").chat.completions.create
    first = ask(model="policy", messages=[say("begin")]).choices[0].message
    for text in ("left", "right"):
        ask(model="policy", messages=[say("begin"), first.model_dump(exclude_none=True), say(text)])
    return 1

def endless(base_url, row, **metadata):
    ask, messages = OpenAI(base_url=base_url, api_key="any").chat.completions.create, [say("begin")]
    while True:
        answer = ask(model="policy", messages=messages).choices[0]
        messages += [{"role": "assistant", "content": answer.message.content}, say("more")]

def impatient(base_url, row, **metadata):
    """The second answer does not come in time; OpenAI's client asks again."""
    with open(row["file"], "a") as file:
        file.write("begun ")
    ask = OpenAI(base_url=base_url, api_key="any", timeout=1.0, max_retries=99).chat.completions.create
    first = ask(model="policy", messages=[say("begin")]).choices[0].message
    ask(model="policy", messages=[say("begin"), first.model_dump(exclude_none=True), say("left")])
    return 1

def breaks_once(base_url, row, **metadata):
    OpenAI(base_url=base_url, api_key="any").chat.completions.create(model="policy", messages=[say("begin")])
    if not os.path.exists(row["file"]):
        open(row["file"], "w").close()
        raise OSError("no connection")
    return 0.5

def typed(base_url, row, **metadata):
    """Calls of a format of texts: the types are those of the request's tools; a malformed call is text."""
    ask = OpenAI(base_url=base_url, api_key="any").chat.completions.create
    def tools(kind):
        parameters = {"type": "object", "properties": {"a": {"type": kind}}}
        return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    found = []
    for given in ({"tools": tools("integer")}, {"tools": tools("string")}, {"tools": tools("number")},
                  {"tools": tools("integer"), "tool_choice": "none"}):
        answer = ask(model="policy", messages=[say("call")], **given).choices[0].message
        found.append([[json.loads(call.function.arguments)["a"] for call in answer.tool_calls or ()], answer.content])
    call = "<tool_call>\\n<function=f>\\n<parameter=a>\\n5\\n</parameter>\\n</function>\\n</tool_call>"
    bad = "<tool_call>f(5)</tool_call>"
    return float(found == [[[5], bad], [["5"], bad], [[5], bad], [[], call + bad]])

def two_answers(base_url, row, **metadata):
    """A client of its own, whose error lacks the text of the answer."""
    body = json.dumps({"model": "policy", "messages": [say("begin")], "n": 2}).encode()
    try:
        urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body))
    except urllib.error.HTTPError:
        if row["raises"]:
            raise
    return 1

async def side_by_side(base_url, row, **metadata):
    """Two calls at once, each of which may sample all."""
    ask = AsyncOpenAI(base_url=base_url, api_key="any").chat.completions.create
    await asyncio.gather(*(ask(model="policy", messages=[say("begin")]) for _ in range(2)))
    return 1

def stops(base_url, row, **metadata):
    """Stop words, of which the client sees none: a second turn, and texts that go on with the word or without it."""
    client = OpenAI(base_url=base_url, api_key="any")
    def ask(messages):
        return client.chat.completions.create(model="policy", messages=messages, stop=["STOP", "never"])
    answer = ask([say("stop")]).choices[0]
    found = [answer.message.content, answer.finish_reason]
    ask([say("stop"), answer.message.model_dump(exclude_none=True), say("begin")])
    text = client.completions.create(model="policy", prompt="say", stop="STOP").choices[0].text
    for more in ("STOP", "STOP.", "STOP or", " then"):
        client.completions.create(model="policy", prompt=f"say{text}{more}")
    return float([*found, text] == ["ok ", "stop", "so "])

def drafted(base_url, row, **metadata):
    ask = OpenAI(base_url=base_url, api_key="any").chat.completions.create
    try:
        ask(model="policy", messages=[say("begin")], stop="STOP")
    except BadRequestError as error:
        ask(model="policy", messages=[say("begin")])
        return float("--vllm-speculative-config" in str(error))

def goes_on(base_url, row, **metadata):
    """A call is refused, the next one is answered; another reason ends the program."""
    two_answers(base_url, row | {"raises": False})
    OpenAI(base_url=base_url, api_key="any").chat.completions.create(model="policy", messages=[say("begin")])
    raise OSError("no connection")

def breaks(base_url, row, **metadata):
    raise OSError("no connection")

def malformed(base_url, row, **metadata):
    """Requests that are not OpenAI's; the reward is their number. Then one that is."""
    bodies = [("chat/completions", {"messages": messages}) for messages in
              (None, [], ["begin"], [{"content": "begin"}], [say("begin") | {"tool_calls": [{}]}],
               [say("begin") | {"tool_calls": 3}], [say("begin") | {"content": ["begin"]}])]
    bodies += [("chat/completions", {"messages": [say("begin")]} | more) for more in
               ({"max_tokens": "many"}, {"max_tokens": [1]}, {"stop": 3}, {"stop": [3]}, {"n": 2}, {"tools": 3},
                {"tools": [3]}, {"tools": [{"type": "function", "function": {"name": "f", "description": 3}}]},
                {"chat_template_kwargs": 3})]
    bodies += [("completions", {"prompt": prompt}) for prompt in (None, "", 3, [], [-1], [10**9], ["free"])]
    refused = 0
    for path, body in bodies:
        request = urllib.request.Request(f"{base_url}/{path}", json.dumps(body).encode())
        try:
            print(path, body, urllib.request.urlopen(request).read())
        except urllib.error.HTTPError as error:
            refused += error.code == 400 and bool(json.loads(error.read())["error"]["message"])
    OpenAI(base_url=base_url, api_key="any").chat.completions.create(model="policy", messages=[say("begin")])
    return refused / len(bodies)
'''
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "12+7"}}</tool_call>'
CODED = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
REPLIES = {"user: call": f"{CODED}<tool_call>f(5)</tool_call>", "user: 12+7=": CALL,
           "tool: 19": "19", "free": "text", "user: begin": "ok", "user: left": "to the left",
           "user: stop": "ok STOP", "say": "so STOP.", "sayso STOP.": "1", "sayso STOP. or": "2",
           "sayso STOP. then": "3",
           "user: right": "to the right", "user: more": "still more"}  # fmt: skip


class Script:
    """An engine that answers by the newest message of the prompt."""

    def __init__(self, tokenizer):
        self.tokenizer, self.running = tokenizer, []

    def submit(self, requests):
        self.running += requests

    def poll(self):
        request = self.running.pop(0)
        prompt = self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        reply = REPLIES[prompt.removesuffix("assistant: ").rstrip("\n").rpartition("<eos>")[2]]
        stopped = any(word in reply for word in request.sampling.stop)
        ids = [*self.tokenizer.encode(reply), *[self.tokenizer.backend.eos_token_id] * (not stopped)]
        reason = "stop" if len(ids) <= request.sampling.max_tokens else "length"
        ids = ids[: request.sampling.max_tokens]
        return [Completion(request.id, ids, [-1.0] * len(ids), reason, [3] * len(ids))]

    def close(self):
        pass


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer("tools").save_pretrained(directory)
    return HuggingFaceTokenizer(directory)


def test_a_continued_text_has_no_second_start(tmp_path):
    """The tokenizer puts <|begin_of_text|> before a text: not before the part of it that follows an answer."""
    ids = build_tokenizer("Llama-3.1-8B-Instruct", tmp_path)
    node = SimpleNamespace(text="<|begin_of_text|>ab", stop_word="")
    agents = SimpleNamespace(
        _tokenizer=HuggingFaceTokenizer(tmp_path), _expanded=lambda parent, ids, *rest: (parent, ids)
    )
    start, letters = ids["<|begin_of_text|>"], [64, 65, 66]
    for parent, prompt, expected in (
        (None, "abc", [start, *letters]),
        (None, "<|begin_of_text|>abc", [start, *letters]),
        (node, "<|begin_of_text|>abc", letters[2:]),
    ):
        run = SimpleNamespace(tree=SimpleNamespace(continued_by_text=lambda text, parent=parent: parent))
        assert Agents._text_prompt(agents, run, prompt) == (parent, expected)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """One process for all programs: each test has another."""
    directory = tmp_path_factory.mktemp("programs")
    (directory / "programs.py").write_text(PROGRAMS)
    names = re.findall(r"^(?:async )?def (\w+)\(base_url", PROGRAMS, re.MULTILINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        made = EnvironmentPool([f"agent:programs:{name}" for name in names], timeout=30, retries=1)
    yield made
    made.close()


@pytest.fixture
def run(tokenizer, pool):
    def start(
        program,
        max_tokens=60,
        max_environment_tokens=60,
        history="keep",
        parser="hermes",
        engine=None,
        drafts=None,
        **row,
    ):
        args = SimpleNamespace(
            environment=f"agent:programs:{program}", end_token_ids=(256,), on_rewritten_history=history,
            tool_role="tool", chat_template_kwargs=None, max_prompt_length=20, vocab_size=300,
            max_environment_tokens=max_environment_tokens, vllm_speculative_config=drafts,
        )  # fmt: skip
        parser = ToolCallParser(parser, tokenizer.backend) if parser else None
        renderer = TurnRenderer(tokenizer, (256,))
        agents = Agents(engine or Script(tokenizer), pool, renderer, parser, tokenizer, args)
        try:
            (done,) = generate(
                agents, [Request(5, [1, 2], Sampling(max_tokens, log_probs=True), row={"program": program} | row)]
            )
        finally:
            agents.close()
        return done, agents.failures()

    return start


def texts(tokenizer, completion):
    """Return (prompt, text) of each sample, with what the policy sampled in brackets."""
    edges = [0, *completion.sample_starts, len(completion.token_ids)]
    found = []
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        text, before = "" if number else tokenizer.decode(list(completion.prompt_ids)), 0
        for token, sampled in zip(completion.token_ids[begin:end], completion.response_mask[begin:end]):
            text += "]" if before and not sampled else "[" if sampled and not before else ""
            text += tokenizer.decode([token], skip_special_tokens=False)
            before = sampled
        found.append(text + "]" * before)
    return found


def test_calls_of_openais_client(run, tokenizer):
    done, failures = run("talk", question="12+7=")
    assert texts(tokenizer, done) == [
        f"user: 12+7=\nassistant: [{CALL}<eos>]tool: 19\nassistant: [19<eos>]",
        "free[text<eos>]",
    ]
    assert done.id == 5 and done.turns == 3 and done.finish_reason == "stop" and not failures
    assert done.environment_reward == 2.0
    assert [math.isnan(x) for x in done.log_probs] == [m == 0 for m in done.response_mask]
    assert done.messages[-1] == {"role": "assistant", "content": "19"}


class Together(Script):
    """It answers when the endpoint has handed over two calls, in however many steps."""

    def __init__(self, tokenizer, monkeypatch):
        super().__init__(tokenizer)
        self.handed, calls = 0, Endpoint.calls

        def counted(endpoint, wait=0.0):
            found = calls(endpoint, wait)
            self.handed += len(found)
            return found

        monkeypatch.setattr(Endpoint, "calls", counted)

    def poll(self):
        return super().poll() if self.handed == 2 else []


def test_a_call_waits_for_what_others_have_reserved(run, tokenizer, monkeypatch):
    """The first of two calls without max_tokens may sample all, and needs three tokens."""
    engine = Together(tokenizer, monkeypatch)
    done, failures = run("side_by_side", max_tokens=500, engine=engine)
    assert done.finish_reason == "stop" and done.environment_reward == 1.0 and not failures
    assert texts(tokenizer, done) == ["user: begin\nassistant: [ok<eos>]"] * 2


@pytest.mark.parametrize("history", ["keep", "split", "refuse"])
@pytest.mark.parametrize("parser", ["hermes", None])
def test_an_answer_ends_before_its_stop_word(run, tokenizer, history, parser):
    """The tokens keep it, and an answer that the client sends back without it goes on with them."""
    done, failures = run("stops", 500, 500, history=history, parser=parser)
    assert done.environment_reward == 1.0 and done.finish_reason == "stop" and not failures
    first, *others = texts(tokenizer, done)
    assert first.startswith("user: stop\nassistant: [ok STOP]") and first.endswith("user: begin\nassistant: [ok<eos>]")
    assert [message["content"] for message in done.messages] == ["stop", "ok ", "begin", "ok"]
    so = "sayso STOP."
    assert others == ["say[so STOP.1<eos>]", f"{so}[1<eos>]", f"{so} or[2<eos>]", f"{so} then[3<eos>]"]


def test_stop_words_are_refused_where_drafts_keep_what_follows(run):
    done, failures = run("drafted", drafts={"method": "ngram"})
    assert done.environment_reward == 1.0 and done.turns == 1 and not failures


def test_types_are_those_of_the_requests_tools(run):
    done, failures = run("typed", parser="qwen3_coder", max_tokens=500, max_environment_tokens=500)
    assert not failures and done.environment_reward == 1.0
    assert done.malformed_calls == 3 and done.turns == 4


def test_a_prefix_that_branches_share_is_trained_once(run, tokenizer):
    done, _ = run("branches")
    assert texts(tokenizer, done) == [
        "user: begin\nassistant: [ok<eos>]user: left\nassistant: [to the left<eos>]",
        "user: begin\nassistant: ok<eos>user: right\nassistant: [to the right<eos>]",
    ]
    assert done.environment_reward == 1.0 and done.weight_versions == [3] * len(done.token_ids)


class Slow(Script):
    """It never answers the second request, until it is aborted."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.submitted, self.held, self.aborted = 0, [], []

    def submit(self, requests):
        for request in requests:
            self.submitted += 1
            (self.held if self.submitted == 2 else self.running).append(request)

    def poll(self):
        return super().poll() if self.running else []

    def abort(self, ids):
        self.aborted += ids
        self.held = [request for request in self.held if request.id not in ids]


def test_a_call_whose_client_has_gone_takes_nothing(run, tokenizer, tmp_path):
    """The engine drops it, and the run has its tokens again: those of a second try would not fit beside them."""
    environment = 200
    for name in ("one", "two"):
        engine, file = Slow(tokenizer), tmp_path / name
        more = {"max_environment_tokens": environment, "engine": engine, "file": str(file)}
        done, failures = run("impatient", max_tokens=30, **more)
        assert file.read_text() == "begun "  # a program whose call is refused would begin again
        assert not failures and done.environment_reward == 1.0 and done.finish_reason == "stop"
        assert len(engine.aborted) >= 1 and not engine.held
        expected = "user: begin\nassistant: [ok<eos>]user: left\nassistant: [to the left<eos>]"
        assert texts(tokenizer, done) == [expected]
        environment = len(done.prompt_ids) + done.response_mask.count(0) - 20  # beside --max-prompt-length


@pytest.mark.parametrize(("tokens", "environment"), [(25, 200), (500, 30)])
def test_limits(run, tokens, environment):
    """A program that ends by the refusal at a limit has not failed."""
    done, failures = run("endless", max_tokens=tokens, max_environment_tokens=environment)
    assert done.finish_reason == "length" and not failures and done.environment_reward is None
    assert done.num_sampled <= tokens and len(done.token_ids) - done.num_sampled <= 20 + environment
    assert len(done.token_ids) > 30


def test_a_program_that_fails_is_repeated_from_the_beginning(run, tokenizer, tmp_path):
    done, failures = run("breaks_once", file=str(tmp_path / "once"))
    assert done.environment_reward == 0.5 and not failures
    assert texts(tokenizer, done) == ["user: begin\nassistant: [ok<eos>]"]
    done, failures = run("breaks")
    assert done.finish_reason == "failed" and done.token_ids == []
    (failure,) = failures
    assert failure.startswith("the agent failed in 1 episode: raised OSError: no connection")
    assert failure.endswith("; not scored, and not in the loss")


@pytest.mark.parametrize(
    ("raises", "reason"),
    [
        (True, "raised HTTPError: HTTP Error 400: Bad Request"),
        (False, "the agent ended without a call that was answered"),
    ],
)
def test_the_reason_of_a_refused_call_is_in_the_failure(run, raises, reason):
    done, (failure,) = run("two_answers", raises=raises)
    assert done.finish_reason == "failed" and reason in failure
    assert "; a call was refused: n must be 1: send a request for each answer" in failure


def test_a_refusal_before_an_answered_call_is_not_the_reason(run):
    done, (failure,) = run("goes_on")
    assert done.finish_reason == "failed" and "OSError: no connection" in failure and "refused" not in failure


def test_malformed_requests_are_refused(run):
    done, failures = run("malformed")
    assert done.environment_reward == 1 and done.turns == 1 and not failures
