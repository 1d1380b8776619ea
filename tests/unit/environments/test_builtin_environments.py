"""The built-in environments: Python in the sandbox, the numbers game, the game of rooms, search."""

import asyncio
import json
import sys

import pytest

from megatron_grpo.environments.builtin.search import search_tool
from megatron_grpo.environments.registry import Reply, Turn, get_environment
from megatron_grpo.environments.tools import ToolError
from megatron_grpo.utils.errors import GrpoError


def test_python():
    get_environment("python")
    from megatron_grpo.environments.builtin.python_tool import python

    assert asyncio.run(python("print(2 ** 10)\nprint('ä')")) == "1024\nä\n"
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        asyncio.run(python("1 / 0"))
    assert asyncio.run(python("print('x' * 10000)")).endswith("x ... (10001 characters)")


def test_countdown_game():
    game = get_environment("countdown_game").make()
    game.reset({"nums": [3, 5, 7], "target": 22})
    reply = game.step(Turn("<answer>3 + 5 + 7</answer>"))
    assert not reply.done and reply.reward == 0 and "22 from the numbers 3, 5, 7" in reply.messages[0]["content"]
    reply = game.step(Turn("<answer>5 * 3 + 7</answer>"))
    assert reply.done and reply.reward == 1


def walk(game, goal):
    """Go to a room and return the last reply."""
    reply = None
    for axis, (less, more) in enumerate((("west", "east"), ("north", "south"))):
        while game._at[axis] != goal[axis]:
            reply = game.step(Turn(f"I go {less if goal[axis] < game._at[axis] else more}."))
    return reply


@pytest.mark.parametrize("seed", range(5))
def test_text_game(seed):
    """The key, then the chest; a game that is restored goes on; the chest does not open without the key."""
    game = get_environment("text_game").make()
    (first,) = game.reset({"seed": seed})
    assert first["content"].startswith("You see ") and "Ways: " in first["content"]
    walk(game, game._chest)
    assert not game.step(Turn("open")).done
    assert "a key" in walk(game, game._key).messages[0]["content"]
    copy = get_environment("text_game").make()
    copy.restore(json.loads(json.dumps(game.snapshot())))
    for one in (game, copy):
        taken = one.step(Turn("take"))
        assert taken.reward == 0.2 and "You have the key." in taken.messages[0]["content"]
        assert one.step(Turn("take")).reward == 0
        walk(one, one._chest)
        assert one.step(Turn("open")) == Reply(reward=0.8, done=True)


def test_search_imports_its_package_when_it_searches(tmp_path, monkeypatch):
    """The trainer, which only registers the tool, does not import it."""
    monkeypatch.delitem(sys.modules, "bm25s", raising=False)
    (tmp_path / "bm25s.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "corpus.jsonl").write_text('{"text": "one"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    search = search_tool(tmp_path / "corpus.jsonl")
    with pytest.raises(RuntimeError, match="imported"):
        search("one")


def test_search_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(GrpoError, match="pip install bm25s"):
        search_tool(tmp_path / "corpus.jsonl")
