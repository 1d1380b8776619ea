"""Losses and advantage estimators by name: those of the package, and those of plug-in files with their flags."""

import pytest
from plugins import plugins  # noqa: F401

from megatron_grpo.algorithm.advantages import ADVANTAGES
from megatron_grpo.algorithm.arguments import STEPS
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.registry import Flag, register_advantage, register_loss
from megatron_grpo.training.arguments import build_parser, parse_args
from megatron_grpo.utils.arguments import resolved
from megatron_grpo.utils.errors import GrpoError

pytestmark = pytest.mark.usefixtures("plugins")
HEAD = "from megatron_grpo.algorithm.registry import Flag, register_advantage, register_loss\n"
FOO = """
@register_loss("foo", aggregation="grpo", flags=[Flag("--foo-alpha", float, 1.0, "foo: strength", within=(0, 9))])
def foo(log_ratio, advantages, foo_alpha):
    return -foo_alpha * log_ratio * advantages
"""
BAR = """
@register_advantage("bar", flags=[Flag("--bar-shift", float, 0.5, "bar: what is subtracted")])
def bar(rewards, bar_shift):
    return rewards - bar_shift
"""


def foo(log_ratio, advantages, foo_alpha):
    return -foo_alpha * log_ratio * advantages


ALPHA = Flag("--foo-alpha", float, 1.0, "foo: strength")


def parsed(tmp_path, text, words=""):
    (tmp_path / "foo.py").write_text(HEAD + text)
    return resolved(parse_args(["--external-plugins", str(tmp_path / "foo.py"), *words.split()]), *STEPS)


def test_an_unknown_name_is_refused():
    with pytest.raises(GrpoError, match="--loss-type: no loss 'ppo'; there are grpo, bnpo, "):
        LOSSES.get("ppo")
    with pytest.raises(GrpoError, match="--advantage-estimator: no advantage estimator 'gae'; there are grpo, rloo, "):
        ADVANTAGES.get("gae")


def test_every_choice_has_a_function():
    """The parser's choices are the registered names, and each has a function whose parameters exist."""
    actions = build_parser()._option_string_actions
    for option, registry in (("--loss-type", LOSSES), ("--advantage-estimator", ADVANTAGES)):
        assert list(actions[option].choices) == list(registry.entries)
        flags = {action.dest for action in actions.values()}
        for entry in registry.entries.values():
            assert callable(entry.function)
            assert set(entry.parameters) <= {*registry.inputs, *flags}, entry.name


def test_a_name_is_taken_once():
    with pytest.raises(GrpoError, match=r"loss gmpo \(.*test_registry\).*taken by loss gmpo \(megatron_grpo.*losses\)"):
        register_loss("gmpo", aggregation="grpo")(foo)
    with pytest.raises(GrpoError, match=r"estimator rloo \(.*taken by advantage estimator rloo \(megatron_grpo"):
        register_advantage("rloo")(lambda rewards: rewards)


def test_a_flag_of_another_loss_is_taken():
    with pytest.raises(GrpoError, match=r"loss foo \(.*--tau-pos is taken by --loss-type sapo"):
        register_loss("foo", aggregation="grpo", flags=[Flag("--tau-pos", float, 1.0, "mine")])(foo)
    register_loss("foo", aggregation="grpo", flags=[ALPHA])(foo)
    with pytest.raises(GrpoError, match=r"loss bar \(.*--foo-alpha is taken by loss foo \("):
        register_loss("bar", aggregation="grpo", flags=[ALPHA])(foo)
    assert "bar" not in LOSSES.entries


@pytest.mark.parametrize("name", ["--lr", "--hidden-size", "--world-size", "--explicit"])
def test_a_flag_of_the_program_is_taken(tmp_path, name):
    text = FOO.replace("--foo-alpha", name).replace("foo_alpha", name[2:].replace("-", "_"))
    with pytest.raises(GrpoError, match=rf"loss foo \(plugin:.*{name} (is taken by {name} |cannot be a flag)"):
        parsed(tmp_path, text)


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"aggregation": "mean"}, "aggregation must be one of grpo, bnpo, dapo, dr_grpo, not 'mean'"),
        ({"flags": [Flag("--foo-beta", float, 1.0, "")]}, "has no parameter foo_beta for the flag --foo-beta"),
        ({"flags": [Flag("--advantages", float, 1.0, "")]}, "cannot be a flag"),
    ],
)
def test_registrations_that_cannot_work(properties, message):
    with pytest.raises(GrpoError, match=message):
        register_loss("foo", **{"aggregation": "grpo"} | properties)(foo)


def test_flags_of_a_plugin_are_parsed(tmp_path):
    args = parsed(tmp_path, FOO + BAR, "--loss-type foo --foo_alpha 2 --advantage-estimator bar")
    assert (args.loss_type, args.foo_alpha, args.bar_shift) == ("foo", 2.0, 0.5)
    assert "foo_alpha" in args.explicit and "bar_shift" not in args.explicit


def test_flags_of_a_plugin_are_in_help(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(tmp_path, FOO, "--help-all")
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "--foo-alpha X foo: strength [1.0]" in text and "gkd,sft,chord,luffy,foo}" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--foo-alpha 2", "--foo-alpha has no effect with --loss-type grpo: leave it out"),
        ("--loss-type foo --tau-pos 2", "--tau-pos has no effect with --loss-type foo: leave it out"),
        ("--loss-type foo --epsilon 0.1", "--epsilon has no effect with --loss-type foo: leave it out"),
        ("--loss-type foo --foo-alpha 10", r"--foo-alpha \(10.0\) must lie between 0 and 9"),
        ("--bar-shift 2", "--bar-shift has no effect with --advantage-estimator grpo: leave it out"),
        ("--advantage-estimator bar --gamma 0.9", "--gamma has no effect with --advantage-estimator bar"),
        (
            "--advantage-estimator bar --scale-rewards group",
            "so --scale-rewards group has no effect",
        ),
    ],
)
def test_a_flag_that_is_not_read_is_refused(tmp_path, words, message):
    with pytest.raises(GrpoError, match=message):
        parsed(tmp_path, FOO + BAR, words)


def test_a_parameter_that_is_no_flag_is_refused(tmp_path):
    with pytest.raises(GrpoError, match=r"parameter foo_gamma is neither an input .* nor a flag"):
        parsed(tmp_path, FOO.replace("foo_alpha):", "foo_alpha, foo_gamma):"), "--loss-type foo")


def test_a_plugin_that_fails_is_refused_with_its_line(tmp_path):
    with pytest.raises(GrpoError, match=r"--external-plugins .*foo.py: line 2: ZeroDivisionError: .*: 1 / 0"):
        parsed(tmp_path, "1 / 0\n")
    with pytest.raises(GrpoError, match=r"--external-plugins gone.py: no such file"):
        parse_args(["--external-plugins", "gone.py"])


def test_the_check_of_a_loss_reads_the_level_of_the_loss(tmp_path):
    text = """
def check(importance_sampling_level):
    assert importance_sampling_level == "sequence"

@register_loss("foo", aggregation="grpo", level="sequence", check=check)
def foo(log_ratio, advantages):
    return -log_ratio * advantages
"""
    assert parsed(tmp_path, text, "--loss-type foo").importance_sampling_level == "sequence"
