"""The errors of Headway, split by whose fault they are.

    HeadwayError
      InputError        the caller's: a file, a flag, a header (exit code 2, HTTP 400)
      EngineError       the engine's or the machine's: vLLM missing, port taken, no memory (exit code 3, HTTP 503)

Messages name what was read, where, the value found and what was expected.
"""

from __future__ import annotations

from pathlib import Path

#: Most characters of a bad value in a message.
_SHOWN = 160


class HeadwayError(Exception):
    """Base of every error that Headway raises on purpose; never raised itself."""

    exit_code = 1
    http_status = 500


class InputError(HeadwayError):
    """Something the caller wrote is wrong."""

    exit_code = 2
    http_status = 400

    @classmethod
    def at(cls, file: str | Path, line: int | None, key: str | None, value: object, expected: str) -> InputError:
        """Return the error for one bad value in a file: `file:line: key = value: expected ...`."""
        where = f"{file}:{line}" if line is not None else f"{file}"
        shown = repr(value)
        if len(shown) > _SHOWN:
            shown = f"{shown[: _SHOWN - 20]}... ({len(shown):,} characters)"
        subject = f"{key} = {shown}" if key else shown
        return cls(f"{where}: {subject}: expected {expected}")


class EngineError(HeadwayError):
    """The engine, or the machine under it, cannot do what was asked."""

    exit_code = 3
    http_status = 503
