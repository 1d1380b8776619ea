"""Search for the policy: BM25 over the rows of a local file, by the package bm25s."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from megatron_grpo.data.row_files import read_rows
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.packages import require


def search_tool(
    corpus: str | Path, column: str = "text", results: int = 3, longest: int = 1000
) -> Callable[[str], str]:
    """Return the tool ``search`` over the texts of ``column`` of a .jsonl or .parquet file.

    It returns the ``results`` best passages, each cut after ``longest`` characters. GrpoError without the package bm25s
    or for a row without text.
    """
    require("the tool search", "bm25s")
    texts = []
    for where, row in read_rows(Path(corpus)):
        if not isinstance(row.get(column), str):
            raise GrpoError(f'{where}: "{column}" must be a text, found {row.get(column)!r:.80}')
        texts.append(row[column])
    most = min(results, len(texts))

    @cache
    def index() -> Any:
        import bm25s  # in the worker that searches: it imports numba, after which vLLM's CPU build does not start

        made = bm25s.BM25()
        made.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
        return made

    def search(query: str) -> str:
        """Search the corpus for passages that contain the words of a query.

        Args:
            query: A few words.
        """
        import bm25s

        words = bm25s.tokenize([query], show_progress=False)
        numbers, scores = index().retrieve(words, k=most, show_progress=False)
        found = [texts[number][:longest] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(found) or "nothing was found"

    return search
