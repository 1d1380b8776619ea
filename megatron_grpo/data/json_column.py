"""JSON text in a column of a data row."""

import json
from typing import Any


def json_column(column: Any) -> Any:
    """Return the value of a column, with text parsed as JSON; None for text that is not JSON.

    Parquet needs JSON text for values that differ in structure between rows.
    """
    if not isinstance(column, str):
        return column
    try:
        return json.loads(column)
    except (ValueError, RecursionError):
        return None
