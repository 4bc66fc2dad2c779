"""Prompts of exactly the recorded token count, with the recorded prefix sharing.

A prompt is a list of token ids cut from one long pool: real text through the served model's tokenizer, or seeded random
ids where no tokenizer is at hand. Blocks with the same `hash_id` get the same ids; everything else begins with a
few ids drawn from a hash of (seed, row), so that no two prompts share a prefix by accident and another seed
never hits a prefix cache that an earlier run has warmed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import polars as pl

from headway.errors import InputError
from headway.replay import corpus
from headway.trace import tokenizer

_POOL_WORDS = 40_000
_POOL_RANDOM = 1 << 16
#: Ids that are ordinary tokens in every vocabulary of more than 20,000 entries (special ones sit at both ends).
_SAFE_IDS = (1_000, 20_000)
_HEAD = 4


class Vocabulary:
    """The pool that prompts are cut from, and the tokenizer behind it where one is known."""

    def __init__(self, pool: np.ndarray, source: str, tokenizer: object | None = None) -> None:
        self.pool = pool
        self.source = source  # for run.json
        self._tokenizer = tokenizer

    @classmethod
    def of_text(cls, tokenizer_json: Path) -> Vocabulary:
        """Return the pool of text encoded by the tokenizer in that file; raises as `tokenizer.load`."""
        reader = tokenizer.load(tokenizer_json)
        ids = reader.encode(corpus.text(_POOL_WORDS), add_special_tokens=False).ids
        if not ids:
            raise InputError(f"{tokenizer_json}: makes no token of English text: expected the tokenizer of the model")
        digest = hashlib.sha256(tokenizer_json.read_bytes()).hexdigest()
        return cls(np.asarray(ids), f"text, tokenizer.json sha256 {digest[:16]}", reader)

    @classmethod
    def of_random_ids(cls, low: int = _SAFE_IDS[0], high: int = _SAFE_IDS[1]) -> Vocabulary:
        """Return a pool of random ids in [low, high)."""
        pool = np.random.default_rng(0).integers(low, high, _POOL_RANDOM)
        return cls(pool, f"random token ids in [{low}, {high})")

    @property
    def has_tokenizer(self) -> bool:
        """Whether `count` and `decode` are exact for the served model."""
        return self._tokenizer is not None

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`; only with a tokenizer."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)  # type: ignore[attr-defined]

    def decode(self, ids: np.ndarray) -> str:
        """Return a text for `ids`: exact with a tokenizer, else as many words as there are ids."""
        if self._tokenizer is not None:
            return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)  # type: ignore[attr-defined]
        words = _words()
        return " ".join(words[i % len(words)] for i in ids.tolist())


class Prompts:
    """The prompts of a trace table; `ids(row)` is a pure function of (table, vocabulary, seed, row)."""

    def __init__(self, frame: pl.DataFrame, *, vocabulary: Vocabulary, seed: int, block_size: int | None) -> None:
        self._lengths = frame["input_tokens"].to_list()
        hashed = block_size is not None and frame["hash_ids"].null_count() < frame.height
        self._hash_ids = frame["hash_ids"] if hashed else None
        self._block_size = block_size or 0
        self._pool = vocabulary.pool
        self._seed = seed
        self.shared_prefixes = hashed

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of one row, `input_tokens` of them."""
        length = self._lengths[row]
        hashes = self._hash_ids[row] if self._hash_ids is not None else None
        if hashes is None or not len(hashes):
            return self._block("row", row, length)
        parts = []
        for hash_id in hashes.to_list():
            if length <= 0:
                break
            size = min(length, self._block_size)
            # A part of a block is its beginning: equal ids stay equal up to the shorter one.
            parts.append(self._block("hash", hash_id, self._block_size)[:size])
            length -= size
        if length > 0:
            parts.append(self._block("row", row, length))
        return np.concatenate(parts)

    def _block(self, kind: str, key: int, size: int) -> np.ndarray:
        digest = hashlib.blake2b(f"{self._seed}:{kind}:{key}".encode(), digest_size=24).digest()
        head = [int.from_bytes(digest[4 * i : 4 * i + 4]) for i in range(_HEAD)]
        start = int.from_bytes(digest[16:])
        n = len(self._pool)
        at = np.empty(size, dtype=np.int64)
        at[:_HEAD] = head[:size]
        if size > _HEAD:
            at[_HEAD:] = np.arange(start % n, start % n + size - _HEAD)
        return self._pool[at % n]


def vocabulary_of(root: str | None, *, prompts: str, tokenizer_json: Path | None) -> tuple[Vocabulary, str | None]:
    """Return the vocabulary for `prompts` (`text` or `tokens`) to a model with this `root`, and what to note about it.

    Text needs the model's tokenizer: the given file, which must be readable, or one found by `root`.
    """
    if prompts == "tokens":
        return Vocabulary.of_random_ids(), None
    if tokenizer_json is not None:
        return Vocabulary.of_text(Path(tokenizer_json)), None
    path = find_tokenizer(root)
    if path is not None and tokenizer.available():
        return Vocabulary.of_text(path), None
    why = "of the served model not found" if path is None else "found, but the extra `text` is not installed"
    return Vocabulary.of_random_ids(), f"tokenizer {why}: prompts are random token ids"


def find_tokenizer(root: str | None) -> Path | None:
    """Return the tokenizer.json of a served model by its reported `root`: a folder, or a name in the local cache.

    Never asks the network.
    """
    if not root:
        return None
    local = Path(root) / "tokenizer.json"
    try:
        if local.is_file():
            return local
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(root, "tokenizer.json")
    except Exception:  # not a repository name, or no such package
        return None
    return Path(found) if isinstance(found, str) else None


def _words() -> list[str]:
    return corpus.text(400).replace(".", "").replace(",", "").split()
