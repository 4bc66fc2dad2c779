"""Salted block hashes of prompts: equal prefixes stay recognisable, text does not.

Block i is hashed together with everything before it (BLAKE2b, keyed with a random salt that is never
written), so one id stands for a whole prefix, and nobody can test a guessed text against a recording.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

BLOCK_TOKENS = 16
#: Without a tokenizer this many bytes of text stand for one block: about four bytes a token in English.
BLOCK_BYTES = 64

#: Turns text into token ids.
Encode = Callable[[str], list[int]]


def chained_ids(blocks: list[bytes], salt: bytes) -> list[int]:
    """Return one 64-bit id a block; id i depends on blocks 0 to i and on `salt`."""
    ids = []
    before = b""
    for block in blocks:
        before = hashlib.blake2b(before + block, key=salt, digest_size=16).digest()
        ids.append(int.from_bytes(before[:8], "big"))
    return ids


def prompt_ids(text: str, salt: bytes, encode: Encode | None = None) -> list[int]:
    """Return the ids of the whole blocks of `text`: of tokens with `encode`, else of bytes."""
    if encode is None:
        data = text.encode("utf-8", "surrogatepass")  # JSON may hold half a surrogate pair
        width = BLOCK_BYTES
    else:
        data = b"".join(token.to_bytes(4, "big") for token in encode(text))
        width = 4 * BLOCK_TOKENS
    return chained_ids([data[at : at + width] for at in range(0, len(data) - width + 1, width)], salt)


def prompt_text(body: dict[str, Any]) -> str | None:
    """Return what a request of the OpenAI API puts in front of the model; None when it holds several prompts."""
    if "messages" in body:
        parts = [json.dumps(body["tools"])] if body.get("tools") else []
        messages = body["messages"]
        for message in messages if isinstance(messages, list) else []:
            if isinstance(message, dict):
                content = message.get("content")
                parts.append(f"\x1e{message.get('role')}\x1f")
                parts.append(content if isinstance(content, str) else json.dumps(content))
        return "".join(parts)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return " ".join(map(str, prompt))
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    return None
