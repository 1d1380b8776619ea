"""Code blocks of the pages work: their imports exist, JSON parses, rewards of commands are defined, plug-ins run."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
from plugins import plugins  # noqa: F401

from megatron_grpo.environments.environment import Reply, Turn
from megatron_grpo.environments.registry import get_environment
from megatron_grpo.rewards.registry import _BUILTIN, Sample, load_plugins
from megatron_grpo.rewards.reward_models.judge import get_judge

REPO = Path(__file__).resolve().parents[3]
PAGES = {path: path.read_text() for path in [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of each fenced block of a language."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.S | re.M)
    return [(path.name, block) for path, text in PAGES.items() for block in fence.findall(text)]


def test_python_imports_what_exists():
    seen = 0
    for page, block in blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("megatron_grpo"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page}: {node.module} has no {alias.name}"
                    seen += 1
    assert seen > 15


def test_json_parses():
    found = blocks("json")
    assert len(found) >= 4
    for page, block in found:
        try:
            json.loads(block)
        except ValueError as error:
            pytest.fail(f"{page}: {error}: {block}")


def test_rewards_of_commands_exist():
    """A name after --reward-funcs is built in, or a block, --reward-model or --reward-adapter of a page defines it."""
    known = set(_BUILTIN)
    for _, block in blocks("python"):
        known |= set(re.findall(r'@register_(?:group_)?reward\("(\w+)"\)', block))
    count = 0
    for path, text in PAGES.items():
        if path.parent.name == "performance":  # quotes messages
            continue
        models = set(re.findall(r"(\w+)=(?:http|DIR|\w+\.py:)", text))
        code = [*re.findall(r"^(?: {4}|```).*", text, re.M), *re.findall(r"`([^`\n]+)`", text)]
        for names in re.findall(r"(?<!of )--reward-funcs((?: [a-z]\w*)+)", re.sub(r"\\\n *", "", "\n".join(code))):
            unknown = set(names.split()) - known - models - {"name"}  # "name" stands for any
            assert not unknown, f"{path.name}: {unknown}"
            count += 1
    assert count >= 10


def plugin(page: str, line: str, folder: Path) -> None:
    """Load the block of a page that begins with this line as a file of --external-plugins."""
    (block,) = [block for name, block in blocks("python") if name == page and block.startswith(line)]
    (folder / "plugin.py").write_text(block)
    load_plugins([folder / "plugin.py"])


def test_the_environment_of_the_page(tmp_path, plugins):
    plugin("environments.md", "# guess.py", tmp_path)
    guess = get_environment("guess").make()
    guess.reset({"number": 3})
    assert guess.step(Turn("5")) == Reply([{"role": "user", "content": "lower"}], reward=0.0)
    assert guess.step(Turn("no")) == Reply([{"role": "user", "content": "higher"}], reward=0.0)
    assert guess.step(Turn("3")) == Reply(reward=1.0, done=True)


def test_the_tool_of_the_page(tmp_path, plugins):
    plugin("environments.md", "# shop.py", tmp_path)
    (tool,) = get_environment("shop").tools
    assert tool["function"]["name"] == "price"
    assert tool["function"]["parameters"]["required"] == ["article"]


def test_the_judge_of_the_page(tmp_path, plugins):
    plugin("rewards.md", "# safe.py", tmp_path)
    judge = get_judge("safe")
    sample = Sample("", "good day", {})
    (message,) = judge.request(sample)["messages"]
    assert message["content"].endswith("good day")
    assert [judge.score(sample, answer) for answer in (" Yes\n", "no")] == [-1.0, 0.0]
