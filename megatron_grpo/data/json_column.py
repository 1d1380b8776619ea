"""JSON text in a column of a row."""

import json
from typing import Any


def json_column(column: Any) -> Any:
    """A row's column, or its text read as JSON (Parquet needs text where rows differ in shape); None for other text."""
    if not isinstance(column, str):
        return column
    try:
        return json.loads(column)
    except (ValueError, RecursionError):
        return None
