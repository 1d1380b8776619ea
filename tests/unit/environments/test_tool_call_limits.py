"""Tool calls that a policy makes by accident: no text and no schema of a tool ends a run or stops it for minutes."""

import json

import pytest

from megatron_grpo.environments.tool_calls import _MOST_ARGUMENTS, _has_too_many_arguments, _plain, _typed, _types


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("array", "[b'a']"),
        ("array", "[{1, 2}]"),
        ("array", "[1+2j]"),
        ("array", "[...]"),
        ("array", "[{(1, 2): 3}]"),
        ("object", "{(1, 2): 3}"),
        ("object", "{'a': b'x'}"),
        ("object", "{1: 2}"),
        ("object", "{None: 1}"),
        ("array", "[(1, 2)]"),
        ("integer", "0x" + "f" * 5000),
        ("number", "1e999"),
    ],
)
def test_values_of_python_that_json_does_not_have_stay_texts(kind, text):
    assert _typed({"x": text}, {"x": {"type": kind}}) == {"x": text}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("array", "['a', None, True]", ["a", None, True]),
        ("object", "{'a': [1, 2.5]}", {"a": [1, 2.5]}),
        ("integer", "7", 7),
    ],
)
def test_values_of_python_become_those_of_json(kind, text, value):
    assert _typed({"x": text}, {"x": {"type": kind}}) == {"x": value}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer", "anyOf": None}, {"integer"}),
        ({"type": "integer", "oneOf": 5}, {"integer"}),
        ({"type": [{"a": 1}, "null"]}, {"null"}),
        ({"anyOf": [{"type": "string"}, None, {"type": ["null"]}]}, {"string", "null"}),
        ({}, set()),
    ],
)
def test_types_of_odd_schemas(schema, types):
    assert _types(schema) == types


def test_a_schema_that_names_itself_is_resolved_once():
    node = {"type": "object", "properties": {name: {"$ref": "#/$defs/N"} for name in "abcdefgh"}}
    root = {"properties": {"tree": {"$ref": "#/$defs/N"}}, "$defs": {"N": node}}
    plain = _plain(root, root)
    assert plain["properties"]["tree"] == {"type": "object", "properties": {name: {} for name in "abcdefgh"}}
    assert len(json.dumps(plain)) < 1000


def test_calls_with_thousands_of_arguments_do_not_reach_the_parser():
    assert _has_too_many_arguments("<parameter=s>" * (_MOST_ARGUMENTS + 1))
    assert _has_too_many_arguments("<arg_key>a" * (_MOST_ARGUMENTS + 1))
    assert not _has_too_many_arguments("<parameter=s>1</parameter>" * _MOST_ARGUMENTS)
