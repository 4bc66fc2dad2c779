"""The reader of an OpenAI event stream: bytes and the time of their arrival in, token times out.

No I/O and no clock. JSON is parsed only where it must be; a token chunk costs a few byte searches.

How tokens are counted, in this order:

1. `usage`: the chunk carries a running `completion_tokens` (`continuous_usage_stats`): its growth is the number of
   tokens that arrived, whatever text came with them. An empty delta with growing usage is a token arrival; a
   role-only delta or the usage-only last chunk is not.
2. `chunk`: one token for each chunk with text, reasoning or a tool call. When the final usage tells another total, the
   tokens are shared out over those chunks by the length of their text, in tokens where the tokenizer is known
   (`tokenizer`), else in bytes (`bytes`).

A chunk of m tokens counts as m tokens at the same moment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_USAGE = b'"completion_tokens"'
# A count of more digits than any answer has is no count: it must neither be parsed nor make as many tokens.
_NUMBER = re.compile(rb"\s*:\s*(\d{1,9})(?!\d)")
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,9})(?!\d)')
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*(?:\[\s*\]|null)')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
# A quote inside a JSON string is escaped, so these keys can't be met inside generated text.
_ANSWER = re.compile(rb'"(?:text|content|refusal|arguments)"\s*:\s*"(?!")|"tool_calls"\s*:\s*\[\s*\{')
_REASONING = re.compile(rb'"(?:reasoning|reasoning_content)"\s*:\s*"(?!")')


#: Most tokens of one answer, and most bytes of one line, that are believed.
MOST_TOKENS, MOST_BYTES = 1 << 22, 1 << 24


class TokenStream:
    """The tokens of one response, in order of arrival.

    Call `feed` with the bytes of each read and its time, `finish` once at the end of the body.
    """

    __slots__ = (
        "_chunks",
        "_error_event",
        "_rest",
        "counted_by",
        "done",
        "error",
        "finished",
        "first_answer",
        "message",
        "prompt_tokens",
        "token_times",
        "total",
    )

    def __init__(self) -> None:
        self.token_times: list[float] = []  # one entry a token, on the clock of `feed`
        self.first_answer: float | None = None  # first token that is not reasoning
        self.prompt_tokens: int | None = None  # from usage
        self.total: int | None = None  # completion tokens of the last usage seen
        self.counted_by: str | None = None  # usage, chunk, tokenizer, bytes
        self.done = False  # [DONE] was read
        self.finished = False  # a finish_reason was read
        self.error: str | None = None  # code of an error event inside the stream
        self.message: str | None = None  # what that event says in words
        self._rest = b""
        self._chunks: list[tuple[float, bytes]] = []  # chunks with text while no running usage is known
        self._error_event = False

    @property
    def complete(self) -> bool:
        """Whether the server said that the answer is over."""
        return self.done or self.finished

    def feed(self, data: bytes, now: float) -> None:
        """Take the bytes of one read that arrived at `now` (seconds on the caller's clock)."""
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MOST_BYTES:
            self.error, self._rest = "line_too_long", b""
        for line in lines:
            self._line(line, now)

    def finish(self, now: float, count: Callable[[str], int] | None = None) -> None:
        """End of the body at `now`: settle the number of tokens; `count` gives the tokens of a text."""
        if self._rest:
            self._line(self._rest, now)
            self._rest = b""
        if self.counted_by == "chunk":
            self._settle_chunks(count)
        elif self.counted_by == "usage" and self.total is not None and self.total > len(self.token_times):
            # Tokens that never showed (a stop token): they came with the last one that did.
            self.token_times.extend([self.token_times[-1]] * (self.total - len(self.token_times)))
        self._chunks = []

    def whole(self, body: bytes, now: float) -> None:
        """Take a response that was not streamed: every token arrived at `now`."""
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            self.error = "malformed_body"
            return
        if not isinstance(answer, dict):
            self.error = "malformed_body"
            return
        if answer.get("error"):
            self.error, self.message = error_code(answer, "error_in_body"), error_message(answer)
            return
        usage = answer.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        self.prompt_tokens, self.total = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        self.counted_by = "usage" if self.total else "chunk"
        self.token_times = [now] * (self.total or (1 if answer.get("choices") else 0))
        self.first_answer = now if self.token_times else None
        self.done = True

    def _line(self, line: bytes, now: float) -> None:
        if not line.startswith(b"data:"):
            # Comments (": ping"), ids, retries and blank lines carry no token.
            if line.startswith(b"event:"):
                self._error_event = line[6:].strip() == b"error"
            return
        if self._error_event or b'"error"' in line:
            self._error_event = False
            if self._read_error(line):
                return
        at = line.rfind(_USAGE)
        number = _NUMBER.match(line, at + len(_USAGE)) if at >= 0 else None
        if number is None:
            if line[5:].strip() == b"[DONE]":
                self.done = True
                return
            if not line.rstrip().endswith(b"}"):
                self.error = self.error or "malformed_stream"  # half a JSON object, or none
                return
            self._text_chunk(line, now)
            return
        used = int(number[1])
        if used > MOST_TOKENS:
            self.error = "malformed_usage"
            return
        self.total = used
        if self.prompt_tokens is None and (prompt := _PROMPT_TOKENS.search(line)):
            self.prompt_tokens = int(prompt[1])
        if _NO_CHOICES.search(line):
            return  # usage-only: not a token, and its time ends nothing
        if self.counted_by == "chunk" or used == 0:
            self._text_chunk(line, now)
            return
        grown = used - len(self.token_times)
        if grown > 0:
            self.counted_by = "usage"
            self.token_times.extend([now] * grown)
            # An empty delta with growing usage is a token nobody sees: not yet the answer.
            if self.first_answer is None and _ANSWER.search(line):
                self.first_answer = now
        if not self.finished and _FINISH.search(line):
            self.finished = True

    def _text_chunk(self, line: bytes, now: float) -> None:
        answer = _ANSWER.search(line)
        if answer or _REASONING.search(line):
            self.counted_by = "chunk"
            self.token_times.append(now)
            self._chunks.append((now, line))
            if answer and self.first_answer is None:
                self.first_answer = now
        if not self.finished and _FINISH.search(line):
            self.finished = True

    def _read_error(self, line: bytes) -> bool:
        try:
            event = json.loads(line[5:])
        except (ValueError, RecursionError):
            self.error = "malformed_error"
            return True
        if not isinstance(event, dict) or not (event.get("error") or event.get("object") == "error"):
            return False
        self.error, self.message = error_code(event, "error_in_stream"), error_message(event)
        return True

    def _settle_chunks(self, count: Callable[[str], int] | None) -> None:
        try:
            self._share_out(count)
        except (ValueError, AttributeError, TypeError, LookupError, RecursionError):
            self.error = "malformed_stream"  # not the JSON of a completion chunk

    def _share_out(self, count: Callable[[str], int] | None) -> None:
        chunks, total = self._chunks, self.total
        texts = None
        if total is None and count is not None:
            texts = [chunk_text(line) for _, line in chunks]
            total = count("".join(texts))
        if not total or total == len(chunks):
            return
        if total < len(chunks):
            # Fewer tokens than chunks (text of one token split over chunks): the first chunks begin one each.
            self.token_times = [time for time, _ in chunks[:total]]
            self.token_times[-1] = chunks[-1][0]
            return
        texts = texts or [chunk_text(line) for _, line in chunks]
        weights = [max(1, count(text) if count else len(text.encode())) for text in texts]
        self.counted_by = "tokenizer" if count else "bytes"
        shares = share_out(total, weights)
        self.token_times = [time for (time, _), m in zip(chunks, shares, strict=True) for _ in range(m)]


def _count(value: object) -> int | None:
    """Return a number of tokens, None for what is none."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def share_out(total: int, weights: list[int]) -> list[int]:
    """Share `total` >= len(weights) out in proportion to `weights`: at least one each, largest remainder."""
    shares = [0] * len(weights)
    rest, others = total, list(range(len(weights)))
    while True:
        whole = sum(weights[i] for i in others)
        small = {i for i in others if rest * weights[i] < whole}
        if not small:
            break
        for i in small:
            shares[i] = 1
        rest -= len(small)
        others = [i for i in others if i not in small]
    for i in others:
        shares[i] = rest * weights[i] // whole
    by_remainder = sorted(others, key=lambda i: (-(rest * weights[i] % whole), i))
    for i in by_remainder[: rest - sum(shares[i] for i in others)]:
        shares[i] += 1
    return shares


def chunk_text(line: bytes) -> str:
    """Return the text of one `data:` line: answer, reasoning and tool call arguments together."""
    choice = (json.loads(line[5:]).get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    parts = [choice.get("text"), delta.get("content"), delta.get("refusal")]
    parts += [delta.get("reasoning") or delta.get("reasoning_content")]
    for call in delta.get("tool_calls") or []:
        function = call.get("function") or {}
        parts += [function.get("name"), function.get("arguments")]
    return "".join(part for part in parts if part)


def error_code(body: dict, default: str) -> str:
    """Return the most telling code of an OpenAI error body: `code` unless it is a bare number, then `type`."""
    error = body.get("error", body)
    if isinstance(error, str):
        return error
    if isinstance(error, dict):
        for key in ("code", "type"):
            value = error.get(key)
            if isinstance(value, str) and value and not value.isdigit():
                return value
    return default


def error_message(body: dict) -> str | None:
    """Return what an error body says in words (`message`, or FastAPI's `detail`); None when it only has a code."""
    error = body.get("error", body)
    if not isinstance(error, dict):
        return None
    found = error.get("message") or error.get("detail")
    return str(found) if found else None
