"""The tokenizer of a served model, from its `tokenizer.json`; the library is an extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import HeadwayError, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenizersMissingError(HeadwayError):
    """The library that reads a tokenizer.json is not installed."""

    exit_code = 3


def available() -> bool:
    """Return whether the library is installed."""
    return find_spec("tokenizers") is not None


def load(path: Path) -> Tokenizer:
    """Return the tokenizer in `path`.

    Raises `InputError` when the file is none and `TokenizersMissingError` without the library (extra `text`).
    """
    if not available():
        raise TokenizersMissingError("a tokenizer.json needs the extra `text`: pip install '.[text]' in a clone")
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path}: not a tokenizer.json: {error}") from None
