"""Single values out of JSON that somebody else wrote: of the expected kind, or an error that names where they lie."""

from __future__ import annotations

import json
from typing import Any

from headway.errors import InputError
from headway.trace.source import Source

#: Whole numbers fit a column of 64 bits.
MOST = 2**63 - 1


def parse(source: Source, line: int | None, text: str | bytes) -> Any:
    """Return the value of a JSON text; `line` is where it begins (None: the whole file)."""
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise InputError(f"{source.path}: not UTF-8 text ({error.reason})") from None
    except json.JSONDecodeError as error:
        at = error.lineno if line is None else line
        raise InputError(f"{source.path}:{at}: not valid JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        where = source.path if line is None else f"{source.path}:{line}"
        raise InputError(f"{where}: JSON nested too deeply: expected a few levels") from None
    except ValueError as error:  # a number of thousands of digits
        where = source.path if line is None else f"{source.path}:{line}"
        raise InputError(f"{where}: not valid JSON ({error})") from None


def number(source: Source, line: int | None, key: str, value: object) -> float:
    """Return a number as float."""
    if type(value) not in (int, float) or (type(value) is int and abs(value) > MOST):
        raise InputError.at(source.path, line, key, value, "a number")
    return float(value)  # type: ignore[arg-type]


def whole(source: Source, line: int | None, key: str, value: object) -> int:
    """Return a whole number; some tools write counts as 550.0."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or abs(value) > MOST:
        raise InputError.at(source.path, line, key, value, "a whole number")
    return value


def mapping(source: Source, line: int | None, key: str | None, value: object) -> dict[str, Any]:
    """Return an object; null and nothing are an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError.at(source.path, line, key, value, "an object")
    return value


def items(source: Source, line: int | None, key: str | None, value: object) -> list[Any]:
    """Return a list; null and nothing are an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError.at(source.path, line, key, value, "a list")
    return value


def name(value: object) -> str | None:
    """Return an identifier as text, whatever its kind; None for nothing."""
    return None if value is None else str(value)
