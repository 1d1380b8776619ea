"""Hooks of mkdocs (mkdocs.yml)."""

import re


def on_page_markdown(markdown: str, **_) -> str:
    r"""Replace ``\|`` by ``|`` in code in tables: GitHub needs the backslash, but Python-Markdown would show it."""
    lines = (
        re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line) if line.startswith("|") else line
        for line in markdown.split("\n")
    )
    return "\n".join(lines)
