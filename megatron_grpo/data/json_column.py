"""JSON text in a column of a data row, and the names of JSON types."""

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


def kind(value: Any) -> str:
    """Return the name of a value's JSON type for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
