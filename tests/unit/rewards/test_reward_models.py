"""Reward models against doubles of their servers: what they are asked, what their faults do, what is refused."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from classifiers import by_transformers, make_classifier
from server_double import HANDLERS, Double, Handler, called
from transformers import AutoConfig, AutoTokenizer

from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.registry import Sample
from megatron_grpo.rewards.reward_models.arguments import check_reward_models, reward_models
from megatron_grpo.rewards.reward_models.models import build_model, check_models
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import args_to_json
from megatron_grpo.utils.errors import GrpoError


class ModelHandler(Handler):
    """What both kinds have in common: one model, and a fault that is told from the first request on."""

    def answer(self, path: str, query: str, body: dict):
        double = self.server
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in double.config.get("models", ["toy"])]}
        if double.fault.isdigit() and double.config.get("ready"):
            return int(double.fault), {"error": {"message": "out of order"}}
        if body.get("model") not in double.config.get("models", ["toy"]):
            return 404, {"error": {"message": "The model does not exist"}}
        with double.lock:
            double.running += 1
            double.most_running = max(double.most_running, double.running)
            if double.running == double.config.get("gather"):
                double.gathered.set()
        try:
            if "gather" in double.config:
                double.gathered.wait(20)
            time.sleep(double.config.get("seconds", 0.0))
            return self.asked(path, body)
        finally:
            with double.lock:
                double.running -= 1

    def asked(self, path: str, body: dict):
        raise NotImplementedError


class ClassifierHandler(ModelHandler):
    """Its score is the number of x in the text, less a half; a template writes <role> before each message."""

    def asked(self, path: str, body: dict):
        if path != "/classify":
            return 404, {"detail": "Not Found"}
        if "messages" in body and self.server.config.get("no_template"):
            return 400, {"error": {"message": "default chat template is no longer allowed"}}
        text = body.get("input") or "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
        assert body["use_activation"] is False
        self.server.texts.append(text)
        scores = [text.count("x") - 0.5] * self.server.config.get("classes", 1)
        return 200, {"data": [{"index": 0, "label": "LABEL_0", "probs": scores, "num_classes": len(scores)}]}


class JudgeHandler(ModelHandler):
    """It says the number of y in the last message, in words that a pattern has to find."""

    def asked(self, path: str, body: dict):
        if path != "/v1/chat/completions":
            return 404, {"detail": "Not Found"}
        if "refused" in self.server.config and "max_tokens" in body:
            return 400, {"error": {"message": "'max_tokens' is not supported with this model"}}
        text = body["messages"][-1]["content"]
        self.server.texts.append(text)
        said = self.server.config.get("says", "I thought of 7.\nScore: {}").format(text.count("y"))
        return 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": said}}]}


HANDLERS |= {"classifier": ClassifierHandler, "judge": JudgeHandler}


@pytest.fixture
def double():
    """Makes a double of a kind."""
    doubles = []

    def make(kind: str, **config) -> Double:
        doubles.append(Double(kind, make_model=lambda: None, **config))
        doubles[-1].texts, doubles[-1].lock, doubles[-1].gathered = [], threading.Lock(), threading.Event()
        return doubles[-1]

    yield make
    for one in doubles:
        one.stop()


def make_pool(flags: str, **options) -> RewardPool:
    args = parse_args(f"--reward-model-timeout 60 {flags}".split())
    check_reward_models(args)
    plugins = args.external_plugins or []
    options = {"flags": args_to_json(args), "models": reward_models(args), "retries": 0} | options
    return RewardPool(args.reward_funcs, plugins, **options)


@pytest.fixture
def pool():
    """The pool that flags describe, as setup.py makes it."""
    pools = []

    def make(flags: str, **options) -> RewardPool:
        pools.append(make_pool(flags, **options))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


def samples(count: int, letter: str = "x") -> list[Sample]:
    return [Sample(f"{n}?", letter * n, {"prompt": f"{n}?"}, source=f"data:{n}") for n in range(count)]


@pytest.fixture
def template(tmp_path) -> Path:
    (tmp_path / "judge.txt").write_text("Asked {{ row.prompt }}, it said: {{ completion }}\n")
    return tmp_path / "judge.txt"


def test_a_function_a_classifier_and_a_judge_score_the_same_samples(double, pool, template):
    one, two = double("classifier"), double("judge")
    flags = f"--reward-funcs cls repetition say --reward-model cls={one.url} say={two.url}/v1"
    rewards = pool(f"{flags} --reward-model-template say={template} --reward-model-concurrency 3", clip=4.0)
    values, failures = rewards.score([Sample("a?", "xy" * n, {"prompt": "a?"}) for n in range(6)])
    assert values[:, 0].tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.0]  # the last is cut by clip
    assert values[:, 2].tolist() == [0, 1, 2, 3, 4, 4.0]
    assert (values[:, 1] == 0).all() and not failures
    assert sorted(one.texts[2:]) == sorted("a?" + "xy" * n for n in range(6))  # after the two of the start
    assert sorted(two.texts[1:]) == sorted(f"Asked a?, it said: {'xy' * n}\n" for n in range(6))
    body = next(body for path, body in two.calls if path == "/v1/chat/completions" and body["max_tokens"] > 1)
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("toy", 0.0, 512)
    assert one.most_running <= 3 and two.most_running <= 3


def test_requests_are_made_side_by_side_and_within_the_bound(double, pool):
    one = double("classifier", seconds=0.05)
    rewards = pool(f"--reward-funcs cls --reward-model cls={one.url} --reward-model-concurrency 8")
    one.config["gather"] = 8  # it answers none before so many are there; more than these would be seen meanwhile
    values, _ = rewards.score(samples(40))
    assert values.ravel().tolist() == [n - 0.5 for n in range(40)]
    assert one.most_running == 8


def test_a_chat_is_shown_by_the_models_own_template_or_as_text(double, pool, capfd):
    chat = {"prompt": [{"role": "user", "content": "why?"}]}
    with_template, without = double("classifier"), double("classifier", no_template=True)
    rewards = pool(f"--reward-funcs a b --reward-model a={with_template.url} b={without.url} --system-prompt brief")
    assert "reward model b receives chats as plain text" in capfd.readouterr().err
    rewards.score([Sample("U: why? A: ", "xx", chat)])
    assert with_template.texts[-1] == "<system>brief<user>why?<assistant>xx"
    assert without.texts[-1] == "U: why? A: xx"


PLUGIN = """
from megatron_grpo.rewards.reward_models.judge import register_judge

@register_judge("blunt")
class Blunt:
    def request(self, sample):
        if sample.completion == "yyyy":
            raise ValueError("not four")
        return {"messages": [{"role": "user", "content": sample.completion}], "n": 1}

    def score(self, sample, answer):
        number = int(answer[-1])
        return None if number == 3 else number / 10
"""


def test_a_plugin_asks_and_reads(double, pool, tmp_path):
    (tmp_path / "own.py").write_text(PLUGIN)
    two = double("judge", refused=True)  # it takes what a plugin sends, not what a template would
    flags = f"--reward-funcs say --reward-model say={two.url} --reward-model-plugin say=blunt"
    values, failures = pool(f"{flags} --external-plugins {tmp_path}/own.py").score(samples(6, "y"))
    assert values.ravel() == pytest.approx([0, 0.1, 0.2, np.nan, np.nan, 0.5], nan_ok=True)  # None is no failure
    place = f"{tmp_path}/own.py, line 8"
    assert [(f.source, f.reason) for f in failures] == [("data:4", f"raised ValueError: not four, {place}")]


def test_an_answer_without_a_score_costs_that_sample(double, pool, template):
    two = double("judge", says="{}/10")
    flags = f"--reward-funcs say --reward-model say={two.url} --reward-model-template say={template}"
    rewards = pool(flags + r" --reward-model-pattern say=([1-9]\d*)/10")
    values, failures = rewards.score(samples(3, "y"))
    assert values.ravel() == pytest.approx([np.nan, 1, 2], nan_ok=True)
    assert [failure.source for failure in failures] == ["data:0"]
    assert failures[0].reason == r"no match of '([1-9]\\d*)/10' in the judge's answer, which ends in '0/10'"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["die", "500", "429"])
def test_what_passes_costs_no_sample_and_is_counted_once(double, pool, fault, capfd):
    one = double("classifier", ready=True, seconds=0.01)
    rewards = pool(f"--reward-funcs cls --reward-model cls={one.url} --reward-model-concurrency 4")
    for key, sample in enumerate(samples(30)):
        rewards.submit(key, sample)
        if key == 10:
            one.fault = fault
    said = ""
    while "retrying" not in said:
        assert rewards.poll(0.1)
        said += capfd.readouterr().err
    one.fault = ""
    assert rewards.finish().ravel().tolist() == [n - 0.5 for n in range(30)]
    assert not rewards.failures
    said += capfd.readouterr().err
    assert said.count("retrying for 60 s (--reward-model-timeout)") == said.count("answers again, after ") == 1


@pytest.mark.slow
def test_a_server_that_stays_away_costs_its_samples_and_then_no_time(double, pool):
    one = double("classifier", ready=True)
    flags = f"--reward-funcs cls --reward-model cls={one.url} --reward-model-concurrency 2 --reward-model-timeout 4"
    rewards = pool(flags)
    rewards.submit(0, samples(1)[0])
    assert rewards.wait([0]).tolist() == [[-0.5]]
    one.fault = "die"
    for key, sample in enumerate(samples(40), start=1):
        rewards.submit(key, sample)
    values = rewards.finish()
    assert values[0] == [-0.5] and np.isnan(values[1:]).all() and len(rewards.failures) == 40
    assert all("retried for 4 s" in failure.reason for failure in rewards.failures)
    assert called(one, "/classify") < 2 + 1 + 40 + 20  # one attempt each, but for the first
    # Two are asked at a time, so any of the first may be among the four that end first.
    with pytest.raises(
        GrpoError, match=r'reward "cls" returned no value and timed out on 4 samples; the first, data:\d: /cl'
    ):
        rewards.score(samples(10))


@pytest.mark.slow
def test_the_process_that_asks_may_die(double, pool):
    one = double("classifier", seconds=0.05)
    rewards = pool(f"--reward-funcs cls --reward-model cls={one.url} --reward-model-concurrency 4", retries=1)
    for key, sample in enumerate(samples(30)):
        rewards.submit(key, sample)
    rewards.wait([0])
    rewards._workers[0].process.kill()
    assert rewards.finish().ravel().tolist() == [n - 0.5 for n in range(30)]
    assert not rewards.failures


def test_a_key_is_read_from_the_environment_for_its_model_alone(double, pool, template, monkeypatch, capfd):
    one, two = double("classifier", key="first"), double("judge", key="second")
    monkeypatch.setenv("CLS_API_KEY", "first")
    flags = f"--reward-funcs cls say-it --reward-model cls={one.url} say-it={two.url}"
    flags += f" --reward-model-template say-it={template}"
    with pytest.raises(GrpoError, match=r"refuses the API key: .*SAY_IT_API_KEY in the environment"):
        pool(flags)
    monkeypatch.setenv("SAY_IT_API_KEY", "second")
    assert pool(flags).score(samples(2))[0].tolist() == [[-0.5, 0], [0.5, 0]]
    assert "first" not in capfd.readouterr().err


@pytest.mark.slow
def test_one_of_several_models_is_named(double, pool, template):
    two = double("judge", models=["small", "large"])
    flags = f"--reward-funcs say --reward-model-template say={template} --reward-model say={two.url}"
    with pytest.raises(GrpoError, match=r"2 models \(small, large\): choose one with http://.*#MODEL"):
        pool(flags)
    pool(f"{flags}#large").score(samples(1))
    assert two.calls[-1][1]["model"] == "large"


@pytest.mark.slow
def test_a_server_of_the_wrong_kind_is_refused(double, pool, template):
    one, two, three = double("classifier"), double("judge"), double("classifier", classes=2)
    with pytest.raises(GrpoError, match=r"say=http.*404.*Is it a classifier, started by `vllm serve DIR --runner poo"):
        pool(f"--reward-funcs say --reward-model say={two.url}")
    with pytest.raises(GrpoError, match=r"cls=http.*404.*Is it a generative model with a chat template"):
        pool(f"--reward-funcs cls --reward-model cls={one.url} --reward-model-template cls={template}")
    with pytest.raises(GrpoError, match=r"the classifier has 2 classes: serve one with a single score"):
        pool(f"--reward-funcs cls --reward-model cls={three.url}")
    one.instead = {"/v1/models": "<html>Bad gateway</html>"}.get
    with pytest.raises(
        GrpoError, match=r"/v1/models answered <html>.*, not as an inference server .*: start it, or co"
    ):
        pool(f"--reward-funcs cls --reward-model cls={one.url}")
    three.stop()
    with pytest.raises(GrpoError, match=r"cls=http.*retried for 0.5 s: start it, or correct"):
        pool(f"--reward-funcs cls --reward-model cls={three.url} --reward-model-timeout 0.5")


# --- a classifier in process


@pytest.fixture(scope="module")
def classifier(tiny_models, tmp_path_factory) -> Path:
    """A random classifier, whose scores differ."""
    directory = tmp_path_factory.mktemp("classifier")
    return make_classifier(tiny_models["qwen3"], directory)


@pytest.fixture(scope="module")
def scoring(classifier):
    """A pool with this classifier, whose process takes seconds to start."""
    with contextlib.closing(make_pool(f"--reward-funcs cls --reward-model cls={classifier}")) as rewards:
        yield rewards


@pytest.mark.slow
def test_a_classifier_in_process_scores_as_transformers_does(classifier, scoring):
    chats = [{"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(6)]
    values, failures = scoring.score([*samples(6), *(Sample("", "y" * n, row) for n, row in enumerate(chats))])
    # The template of make_tiny_model.py.
    written = [f"user: {n}?\nassistant: {'y' * n}\nassistant: " for n in range(6)]
    expected = by_transformers(classifier, [*(f"{n}?{'x' * n}" for n in range(6)), *written])
    assert values.ravel() == pytest.approx(expected, abs=2e-5) and not failures
    assert np.ptp(values) > 0.5


@pytest.mark.slow
def test_a_text_that_is_too_long_costs_that_sample(scoring):
    values, (failure,) = scoring.score([*samples(2), Sample("", "x" * 600, {"prompt": "a"})])
    assert np.isfinite(values[:2]).all() and np.isnan(values[2])
    assert failure.reason == "the input has 601 tokens, the classifier's limit is 512"


def start_classifier(directory: Path | str) -> None:
    """What the pool's process does at its start, in this one: it would take seconds to import."""
    args = parse_args(f"--reward-funcs cls --reward-model cls={directory}".split())
    check_reward_models(args)
    asyncio.run(build_model(reward_models(args)["cls"], args_to_json(args)).check())


def test_a_directory_that_cannot_score_is_refused(classifier, tiny_models, tmp_path, pool):
    with pytest.raises(GrpoError, match=r"has Qwen3ForCausalLM, not \.\.\.ForSequenceClassification"):
        pool(f"--reward-funcs cls --reward-model cls={tiny_models['qwen3']}")
    with pytest.raises(GrpoError, match="not a Hugging Face model directory"):
        start_classifier(tmp_path / "absent")
    config = json.loads((classifier / "config.json").read_text())
    for labels in ({}, {"id2label": {"0": "bad", "1": "good"}}):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "2" not in k} | labels))
        with pytest.raises(GrpoError, match="has 2 classes"):
            start_classifier(tmp_path)
    for text in ("[]", '{"architectures": "Qwen3ForSequenceClassification"}', '{"architectures": [3]}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(GrpoError, match="has no architecture, not "):
            start_classifier(tmp_path)
    # A generative model's files under a classifier's name: the score would be random.
    own = AutoConfig.from_pretrained(classifier)
    AutoTokenizer.from_pretrained(classifier).save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(Path(tiny_models["qwen3"], "model.safetensors"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(GrpoError, match=r"its files lack score\.weight, which would have random weights"):
        start_classifier(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes((classifier / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(GrpoError, match=rf"--reward-model cls={tmp_path}: cannot be loaded: .*header"):
        start_classifier(tmp_path)


# --- flags that do not go together


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ completion", "line 1 is not valid Jinja"),
        ("{{ completion }} {{ answer }}", "unknown variable answer: the variables are prompt, completion, row"),
        ("Rate this: {{ prompt }}", "the template does not contain the completion"),
    ],
)
def test_a_template_that_cannot_work_is_refused(text, message, template):
    template.write_text(text)
    args = parse_args(f"--reward-model a=http://h:1 --reward-funcs a --reward-model-template a={template}".split())
    with pytest.raises(GrpoError, match=f"--reward-model-template a={template}: {message}"):
        check_reward_models(args)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [(r"\d+", "has 0 groups"), (r"(\d)/(\d)", "has 2 groups"), ("(", "is not a regular expression")],
)
def test_a_pattern_that_cannot_work_is_refused(pattern, message, template):
    flags = f"--reward-model a=http://h:1 --reward-funcs a --reward-model-template a={template}"
    with pytest.raises(GrpoError, match=f"--reward-model-pattern a: .*{message}"):
        check_reward_models(parse_args(f"{flags} --reward-model-pattern a={pattern}".split()))


def test_a_template_that_asks_for_what_a_row_lacks_ends_the_run(double, pool, template):
    template.write_text("{{ completion }} {{ row.gold }}")
    two = double("judge")
    rewards = pool(f"--reward-funcs say --reward-model say={two.url} --reward-model-template say={template}")
    with pytest.raises(GrpoError, match=r'"say" on data:0: .*the row lacks a value of the template: .*gold'):
        rewards.score(samples(1))


def test_names_that_are_taken_and_plugins_that_are_not_there_are_refused():
    models = reward_models(parse_args("--reward-model format=http://h:1".split()))
    with pytest.raises(GrpoError, match="--reward-model format: a reward function has this name"):
        check_models(models, 512)
    models = reward_models(parse_args("--reward-model a=http://h:1 --reward-model-plugin a=mine".split()))
    with pytest.raises(GrpoError, match='unknown judge "mine"; known: '):
        check_models(models, 512)


def test_the_client_needs_no_torch():
    """A judge behind HTTP must not wait for what a classifier in process needs."""
    code = "import sys, megatron_grpo.rewards.reward_models.worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
