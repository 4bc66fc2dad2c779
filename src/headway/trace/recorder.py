"""The file of a live recording: one line a finished request, on disk as soon as it has finished.

The file is Headway JSONL whose header says `"recorded": true`: rows lie in the order of completion, a row
`{"arrival_s": ..., "dropped": "why"}` stands for a request without lengths, and a last line that a kill cut
short is dropped when the file is read. A new recording never touches an existing file, because its salt is
new too.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

from headway.errors import InputError
from headway.trace.fingerprint import BLOCK_TOKENS, Encode, prompt_ids


class Recorder:
    """Appends requests to a recording. Times are seconds on the caller's clock, counted from `start_s`.

    One `write` system call a line on a descriptor opened for appending: killing the process loses no request
    that finished. `salt` is random unless given (tests).
    """

    def __init__(
        self, path: str | Path, *, start_s: float, encode: Encode | None = None, salt: bytes | None = None
    ) -> None:
        self.path = Path(path)
        self.kept = 0
        self.dropped: Counter[str] = Counter()
        self._start_s = start_s
        self._encode = encode
        self._salt = salt or secrets.token_bytes(32)
        self._sessions: dict[str, tuple[int, float]] = {}  # id -> (turns so far, end of the last one)
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise InputError(f"{self.path}: exists: expected a new file (a recording is never appended to)") from None
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror}") from None
        how = "tokens" if encode else "64 bytes of text as 16 tokens (no tokenizer given)"
        history = [f"recorded live; hash ids by blocks of {how}, salted"]
        self._line({"headway_trace": 1, "block_size": BLOCK_TOKENS, "recorded": True, "history": history})

    def keep(
        self,
        *,
        arrival_s: float,
        end_s: float,
        input_tokens: int,
        output_tokens: int,
        prompt: str,
        slo_class: str | None = None,
        session: str | None = None,
    ) -> None:
        """Write one finished request; `prompt` and `session` leave only salted hashes behind."""
        row: dict[str, Any] = {
            "arrival_s": arrival_s - self._start_s,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
        }
        if slo_class is not None:
            row["slo_class"] = slo_class
        if session is not None:
            row |= self._turn(session, arrival_s, end_s)
        ids = prompt_ids(prompt, self._salt, self._encode)[: input_tokens // BLOCK_TOKENS]
        if ids:
            row["hash_ids"] = ids
        self.kept += 1
        self._line(row)

    def drop(self, *, arrival_s: float, reason: str) -> None:
        """Write that a request came and why it has no lengths."""
        self.dropped[reason] += 1
        self._line({"arrival_s": arrival_s - self._start_s, "dropped": reason})

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _turn(self, session: str, arrival_s: float, end_s: float) -> dict[str, Any]:
        name = hashlib.blake2b(session.encode("utf-8", "surrogateescape"), key=self._salt, digest_size=8).hexdigest()
        turn, last_end_s = self._sessions.get(name, (0, None))
        self._sessions[name] = (turn + 1, end_s)
        row: dict[str, Any] = {"session_id": name, "turn": turn}
        if last_end_s is not None and arrival_s >= last_end_s:
            row["think_s"] = arrival_s - last_end_s
        return row

    def _line(self, row: dict[str, Any]) -> None:
        data = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        while data:
            data = data[os.write(self._file, data) :]
