"""A plug-in's loss and estimator are tried before the model is built: mistakes end the start, other errors do not."""

import pytest
import torch
from plugins import plugins  # noqa: F401

from megatron_grpo.algorithm import trial
from megatron_grpo.algorithm.arguments import STEPS
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.trial import check_functions
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import resolved
from megatron_grpo.utils.errors import GrpoError

pytestmark = pytest.mark.usefixtures("plugins")
HEAD = """
import torch
from megatron_grpo.algorithm.registry import PolicyLoss, register_advantage, register_loss

"""


def tried(tmp_path, text, words=""):
    words = f"--num-generations 8 --beta 0.1 {words}"
    (tmp_path / "mine.py").write_text(HEAD + text)
    args = parse_args(["--external-plugins", str(tmp_path / "mine.py"), *words.split()])
    check_functions(resolved(args, *STEPS))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return -log_ratio.exp() * advantages", None),
        ("return PolicyLoss(-log_ratio * advantages, metrics={'mine/ratio': log_ratio.exp()})", None),
        ("return log_ratio * missing", r"raised NameError: name 'missing' is not defined, .*mine\.py, line 7"),
        ("return torch.expp(log_ratio)", r"raised AttributeError: .*expp.*, .*mine\.py, line 7"),
        ("return (log_ratio * advantages).mean()", r"returned a loss of shape \(\) for 56 tokens"),
        ("return PolicyLoss(log_ratio, metrics={'mine/a': log_ratio.mean()})", r"the metric 'mine/a' of shape \(\)"),
        ("return PolicyLoss(log_ratio, metrics={'a': log_ratio})", 'name it "mine/NAME"'),
        ("return -log_ratio.detach() * advantages", "does not depend on log_probs or log_ratio: nothing would be"),
        ("raise RuntimeError('this kernel needs a GPU')", None),
        ("return log_ratio[99]", None),  # an error of the values: the first update tells
        ("return log_ratio * 0", None),
        ("return torch.zeros_like(log_ratio)", None),  # the KL term alone trains
        ("return torch.ones_like(log_ratio)", "does not depend on log_probs"),
        ("raise SystemExit", None),
    ],
)
def test_a_loss(tmp_path, body, message):
    text = f"@register_loss('mine', aggregation='dapo')\ndef mine(log_ratio, advantages):\n    {body}\n"
    if message is None:
        tried(tmp_path, text, "--loss-type mine")
        return
    tried(tmp_path, text)  # another loss is chosen
    with pytest.raises(GrpoError, match=f"^--loss-type mine .*{message}"):
        tried(tmp_path, text, "--loss-type mine")


@pytest.mark.parametrize(
    ("parameters", "body", "message"),
    [
        ("rewards", "return rewards - rewards.mean()", None),
        (
            "rewards, gather, response_mask, cu_seqlens",
            "return rewards / gather(cu_seqlens[1:] - cu_seqlens[:-1])",
            None,
        ),
        ("rewards, function_rewards, turns, group_ids", "return rewards + function_rewards.sum(1) * turns", None),
        (  # the best of each prompt, which has num_generations completions
            "rewards, group_ids, num_generations",
            "return torch.cat([torch.eye(num_generations)[rewards[group_ids == g].argmax()] for g in set(group_ids)])",
            None,
        ),
        (
            "rewards",
            "return rewards.mean()",
            r"returned advantages of shape \(\): return one of each completion \(16\)",
        ),
        ("rewards", "return rewards - nonsense(rewards)", r"raised NameError: .*, .*mine\.py, line 7"),
        ("rewards, turn_rewards", "return turn_rewards.sum(1)", None),
    ],
)
def test_an_estimator(tmp_path, parameters, body, message):
    text = f"@register_advantage('mine')\ndef mine({parameters}):\n    {body}\n"
    words = "--advantage-estimator mine --reward-funcs accuracy format"
    if message is None:
        tried(tmp_path, text, words)
        return
    with pytest.raises(GrpoError, match=f"^--advantage-estimator mine .*{message}"):
        tried(tmp_path, text, words)


@pytest.mark.parametrize("given", ["response_mask", "rewards"])
def test_an_estimator_of_tokens(tmp_path, given):
    text = f"@register_advantage('mine', per_token=True)\ndef mine({given}):\n    return {given} * 1.0\n"
    if given == "response_mask":
        tried(tmp_path, text, "--advantage-estimator mine")
        return
    with pytest.raises(GrpoError, match=r"shape \(16,\): return one of each token \(56\)"):
        tried(tmp_path, text, "--advantage-estimator mine")


def test_a_trial_leaves_no_trace(tmp_path, capfd):
    """State, random numbers and output of a plug-in are those of its first update."""
    text = """
calls = [0]

@register_loss('mine', aggregation='dapo')
def mine(log_ratio, advantages):
    calls[0] += 1
    print("called")
    return -log_ratio * advantages * (torch.rand_like(log_ratio) < 0.5)
"""
    before = torch.get_rng_state()
    tried(tmp_path, text, "--loss-type mine")
    assert torch.equal(torch.get_rng_state(), before)
    function = LOSSES.get("mine").function
    assert function.__globals__["calls"] == [0] and "called" not in "".join(capfd.readouterr())
    function(torch.zeros(2), torch.ones(2))
    assert function.__globals__["calls"] == [1] and "called" in capfd.readouterr().out


def test_a_slow_loss_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 1)
    text = "@register_loss('mine', aggregation='dapo')\ndef mine(log_ratio):\n    while True:\n        pass\n"
    tried(tmp_path, text, "--loss-type mine")


def test_a_number_that_the_data_tell_later(tmp_path):
    text = "@register_loss('mine', aggregation='dapo')\ndef mine(log_ratio, train_iters):\n"
    tried(tmp_path, text + "    return log_ratio / train_iters\n", "--loss-type mine --num-epochs 2")


def test_a_package_that_is_not_here(tmp_path, monkeypatch):
    """A dry run runs on any machine; on this one the run would fail."""
    text = "@register_loss('mine', aggregation='dapo')\ndef mine(log_ratio):\n    import nowhere_to_be_found\n"
    tried(tmp_path, text, "--loss-type mine --dry-run")
    with pytest.raises(GrpoError, match="raised ModuleNotFoundError: No module named 'nowhere_to_be_found'"):
        monkeypatch.setattr(trial, "_passed", set())
        tried(tmp_path, text, "--loss-type mine")


def test_advantages_of_an_update(tmp_path):
    text = (
        "@register_loss('mine', aggregation='grpo', update_advantages=lambda scores, group_ids: nonsense(scores))\n"
        "def mine(log_ratio, advantages):\n    return -log_ratio * advantages\n"
    )
    with pytest.raises(GrpoError, match=r"^--loss-type mine raised NameError: name 'nonsense'"):
        tried(tmp_path, text, "--loss-type mine")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'mine/tokens': lengths.sum(), 'mine/rate': 0.5}", None),
        ("return lengths.nonsense", r" raised AttributeError: .*nonsense.*mine\.py, line 6"),
        ("pass", ": update_metrics returned None: return a dict of numbers by name"),
        ("return {'mine/tokens': lengths}", r": update_metrics returned 'mine/tokens': array\(.*, not a number"),
        ("return {'mine': 1}", ": update_metrics returned a metric 'mine': name it \"mine/NAME\""),
        ("return {'tokens/mine': 1}", ": update_metrics returned a metric 'tokens/mine': name it \"mine/NAME\""),
    ],
)
def test_metrics_of_an_update(tmp_path, body, message):
    text = (
        f"def metrics(lengths):\n    {body}\n\n"
        "@register_loss('mine', aggregation='dapo', update_advantages=lambda advantages: advantages, "
        "update_metrics=metrics)\ndef mine(log_ratio, advantages):\n    return -log_ratio * advantages\n"
    )
    if message is None:
        tried(tmp_path, text, "--loss-type mine")
        return
    with pytest.raises(GrpoError, match=f"^--loss-type mine{message}"):
        tried(tmp_path, text, "--loss-type mine")


def test_metrics_of_an_update_need_its_advantages(tmp_path):
    text = "@register_loss('mine', aggregation='dapo', update_metrics=len)\ndef mine(log_ratio):\n    pass\n"
    with pytest.raises(GrpoError, match=r"loss mine: update_metrics needs update_advantages"):
        tried(tmp_path, text)
