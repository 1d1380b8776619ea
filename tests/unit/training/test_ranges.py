"""Ranges of values: a number, an empty text or a path outside its flag's range ends with one line that says so."""

import pytest

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.training.arguments import FLAGS, build_parser, parse_args, print_args
from megatron_grpo.utils.core_flags import RANGES, core_flags, integer_or_pattern, integers
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flag_values import integer_or_auto
from megatron_grpo.utils.flags import PATH, Flag, Number

ROWS = {name: Flag(name, kind, *rest).values for rows in FLAGS.values() for name, kind, *rest in rows}
KINDS = {name: kind[0] if isinstance(kind, list) else kind for name, kind in ROWS.items()}
KINDS |= {core.option: RANGES[core.dest] for core in core_flags().values() if core.dest in RANGES}
NUMBERS = {name: kind for name, kind in KINDS.items() if isinstance(kind, Number)}
PATHS = [name for name, kind in KINDS.items() if kind == PATH]


def numeric_flags() -> list[str]:
    """Flags that the parser reads as numbers, whatever the tables of ranges say."""
    types = (int, float, integers, integer_or_pattern, integer_or_auto)
    return [action.option_strings[0] for action in build_parser()._actions if action.type in types]


def test_every_numeric_flag_has_a_range():
    assert sorted(numeric_flags()) == sorted(NUMBERS) and len(NUMBERS) > 150


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beyond_either_end_are_refused_with_flag_value_and_range(name):
    kind = NUMBERS[name]
    below = kind.low if kind.above else kind.low - 1
    for value in (below, 10**30):
        # window_size takes two integers
        text = f"{int(value)},0" if name == "--window-size" else str(kind.type(value))
        with pytest.raises(GrpoError) as error:
            parse_args([f"{name}={text}"])
        assert str(error.value) == f"{name} ({kind.type(value)}) {kind}"
        assert f"{kind.high:g}" in str(kind).replace(str(kind.high), f"{kind.high:g}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--init-method-std -1", "--init-method-std (-1.0) must lie between 0 and 1e+09"),
        ("--loss-scale -1", "--loss-scale (-1.0) must be greater than 0 and at most 1.84467e+19"),
        ("--reward-workers 1000000", "--reward-workers (1000000) must be greater than 0 and at most 1024"),
        ("--optimizer-offload-fraction 2.5", "--optimizer-offload-fraction (2.5) must lie between 0 and 1"),
        ("--beta inf", "--beta is inf: give a finite number"),
        ("--moe-layer-freq [1,-1]", "--moe-layer-freq (-1) must lie between 0 and 2147483647"),
        ("--reward-weights 1 nan", "--reward-weights is nan: give a finite number"),
    ],
)
def test_messages(words, message):
    with pytest.raises(GrpoError) as error:
        parse_args(words.split())
    assert str(error.value) == message


@pytest.mark.parametrize("name", PATHS)
def test_paths_that_no_file_system_has_are_refused(name):
    for path in ("x" * 5000, "x" * 256, "x/" * 2048):
        with pytest.raises(GrpoError, match=rf"^{name} x.*\.\.\.: a path of {len(path)} characters, .* 4095 and 255"):
            parse_args([name, path])
    if name != "--external-plugins":  # a plug-in is read at once
        parse_args([name, "/".join(["x" * 255] * 15)])


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind in (str, PATH)])
def test_empty_texts_are_refused(name):
    with pytest.raises(GrpoError, match=f"^{name} is empty: give a value, or leave the flag out$"):
        parse_args([name, ""])


TEXTS = [name for name, kind in KINDS.items() if kind in (str, PATH)]
TEXTS += [core.option for core in core_flags().values() if core.kind in (str, [str])]


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_no_utf_8_are_refused(name):
    """As Python reads a byte of a path that is no UTF-8, and half of a pair that JSON can have."""
    for text, shown in (("a\udcffb", r"a\\udcffb"), ("\ud800", r"\\ud800")):
        with pytest.raises(GrpoError, match=f"^{name} {shown}: the value is not valid UTF-8"):
            parse_args([name, text])


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind is dict])
def test_json_that_is_no_utf_8_is_refused(name):
    with pytest.raises(GrpoError, match=f"^{name} .*: the value is not valid UTF-8"):
        parse_args([name, '{"a": "\\ud800"}'])


def test_long_list_expressions_are_refused_before_they_are_built(capsys):
    for text in ("[1]*1000000000000", "1000000*[1]", "([1]*9000+[0])*9000", "(" * 10_000):
        with pytest.raises(SystemExit):
            parse_args(["--moe-layer-freq", text])
        assert "invalid integer_or_pattern value" in capsys.readouterr().err
    assert parse_args(["--moe-layer-freq", "([1]*3+[0])*2"]).moe_layer_freq == [1, 1, 1, 0, 1, 1, 1, 0]


def test_json_of_any_depth_is_read_or_refused(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--rope-scaling", '{"a":' * 100_000])
    assert 'argument --rope-scaling: \'{"a":' in capsys.readouterr().err


def test_a_flag_that_is_set_twice_is_named(capsys):
    args = parse_args("--lr 1e-6 --bf16 --seed 1 --lr 2e-6 --no-bf16".split())
    assert (args.lr, args.bf16, args.repeated) == (2e-6, False, ("--bf16", "--lr"))
    print_args(args, everything=True)
    printed = capsys.readouterr().out
    assert "note: set more than once, the last value counts: --bf16, --lr\n" in printed
