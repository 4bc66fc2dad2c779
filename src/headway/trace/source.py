"""Where a trace comes from: a file or a folder of files, its first bytes, its digest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import InputError

HEAD_BYTES = 1 << 20  # enough for a header and the first row of every known format
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK": "zip"}


@dataclass(frozen=True, slots=True)
class Source:
    """A readable file or folder. Raises `InputError` when it is missing, empty or compressed."""

    path: Path
    head: bytes = field(init=False, default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.path.is_dir():
            return
        try:
            with self.path.open("rb") as file:
                head = file.read(HEAD_BYTES)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from None
        if not head.strip():
            raise InputError(f"{self.path}: empty file: expected a request trace")
        for magic, name in _MAGIC.items():
            if head.startswith(magic):
                raise InputError(f"{self.path}: {name} data: expected an uncompressed trace (unpack it first)")
        object.__setattr__(self, "head", head)

    @property
    def name(self) -> str:
        """File name without folders."""
        return self.path.name

    @property
    def is_folder(self) -> bool:
        """Whether the source is a folder of files."""
        return self.path.is_dir()

    def files(self) -> list[Path]:
        """Return the files of the source in a fixed order."""
        if not self.is_folder:
            return [self.path]
        return sorted(file for file in self.path.rglob("*") if file.is_file())

    def sha256(self) -> str:
        """Return the SHA-256 of the bytes; of a folder: of names and bytes of its files, in order of name."""
        digest = hashlib.sha256()
        for file in self.files():
            if self.is_folder:
                digest.update(str(file.relative_to(self.path)).encode() + b"\0")
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def head_lines(self) -> list[str]:
        """Return the non-empty lines of the first bytes (the last one may be cut short)."""
        text = self.head.decode("utf-8-sig", errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def csv_header(self) -> list[str]:
        """Return the column names of the first line, or nothing when that is no CSV header."""
        lines = self.head_lines()
        if not lines or lines[0].startswith(("{", "[")):
            return []
        return [name.strip().strip('"') for name in lines[0].split(",")]

    def first_object(self) -> dict[str, Any]:
        """Return the first JSON line when it is an object, else an empty dict."""
        lines = self.head_lines()
        if not lines or not lines[0].startswith("{"):
            return {}
        try:
            value = json.loads(lines[0])
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def json_keys(self, opening: str) -> set[str]:
        """Return the keys, of any depth, in the first bytes of a JSON document that begins with `opening`."""
        text = self.head.decode("utf-8-sig", errors="replace").lstrip()
        return set(re.findall(r'"([^"\\\n]{1,80})"\s*:', text)) if text.startswith(opening) else set()

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (line number from 1, text) of every non-empty line."""
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise InputError(f"{self.path}:{number}: not UTF-8 text ({error.reason})") from None
                if text.strip():
                    yield number, text
