"""Prompts: exact lengths, recorded prefix sharing, nothing shared by accident."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from headway.replay import corpus
from headway.replay.bodies import Bodies
from headway.replay.prompts import Prompts, Vocabulary, find_tokenizer, vocabulary_of
from headway.trace.tokenizer import TokenizersMissingError

RANDOM = Vocabulary.of_random_ids()


def prompts(lengths: list[int], hashes: list | None = None, *, seed: int = 0, block: int | None = None) -> Prompts:
    """Return the prompts of a table with these lengths and hash ids."""
    frame = pl.DataFrame(
        {"input_tokens": lengths, "hash_ids": hashes or [None] * len(lengths)},
        schema={"input_tokens": pl.Int32, "hash_ids": pl.List(pl.UInt64)},
    )
    return Prompts(frame, vocabulary=RANDOM, seed=seed, block_size=block)


@given(st.integers(1, 5000), st.lists(st.integers(0, 2**64 - 1), max_size=4), st.integers(1, 600))
def test_the_length_is_exact(length, hashes, block):
    """Whatever hash ids say: too few, too many or none, the prompt has its recorded length in safe ids."""
    ids = prompts([length], [hashes or None], block=block if hashes else None).ids(0)
    assert len(ids) == length
    assert ids.min() >= 1000
    assert ids.max() < 20000


def test_equal_hash_ids_give_equal_blocks():
    """Two prompts share exactly the blocks whose ids they share; a last part is the beginning of its block."""
    made = prompts([8, 7, 8], [[1, 2], [1, 2], [1, 3]], block=4)
    first, shorter, other = (made.ids(i) for i in range(3))
    assert np.array_equal(first[:7], shorter)
    assert np.array_equal(first[:4], other[:4])
    assert not np.array_equal(first[4:], other[4:])


def test_what_no_hash_id_covers_is_unique():
    """Tokens behind the last hash id belong to the row alone."""
    made = prompts([12, 12], [[1], [1]], block=4)
    assert np.array_equal(made.ids(0)[:4], made.ids(1)[:4])
    assert not np.array_equal(made.ids(0)[4:8], made.ids(1)[4:8])


def test_no_prefix_is_shared_by_accident():
    """Of 2,000 prompts no two begin with the same four tokens, and neither does another seed."""
    heads = {tuple(prompts([16] * 2000, seed=seed).ids(i)[:4]) for seed in (0, 1) for i in range(2000)}
    assert len(heads) == 4000


def test_the_same_seed_gives_the_same_bytes():
    """A prompt is a pure function of table, vocabulary, seed and row."""
    assert np.array_equal(prompts([300]).ids(0), prompts([300]).ids(0))
    assert corpus.text(50, seed=3) == corpus.text(50, seed=3)
    assert corpus.text(50, seed=3) != corpus.text(50, seed=4)


@pytest.fixture
def tokenizer_json(tmp_path):
    """A word tokenizer over the vocabulary of our own prose."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({w for w, _ in pre_tokenizers.Whitespace().pre_tokenize_str(corpus.text(40_000))})
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_text_comes_from_the_served_models_tokenizer(tokenizer_json):
    """With a tokenizer.json the ids are those of real words, and counting is exact."""
    vocabulary = Vocabulary.of_text(tokenizer_json)
    assert vocabulary.has_tokenizer
    assert vocabulary.source.startswith("text, tokenizer.json sha256 ")
    assert vocabulary.count("the engineer measured the bridge") == 5
    assert 0 not in vocabulary.pool
    frame = pl.DataFrame({"input_tokens": [40]}).with_columns(hash_ids=pl.lit(None, dtype=pl.List(pl.UInt64)))
    ids = Prompts(frame, vocabulary=vocabulary, seed=0, block_size=None).ids(0)
    assert vocabulary.count(vocabulary.decode(ids)) == 40


def test_a_broken_tokenizer_is_an_input_error(tmp_path):
    """The error names the file."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        Vocabulary.of_text(tmp_path / "tokenizer.json")


def test_the_tokenizer_is_found_in_a_local_folder(tokenizer_json):
    """The `root` that a server reports may be a folder here; unknown names are looked up in the cache only."""
    assert find_tokenizer(str(tokenizer_json.parent)) == tokenizer_json
    assert find_tokenizer("nobody/has-this-model") is None
    assert find_tokenizer(None) is None


def test_bodies_are_the_same_ahead_and_on_the_spot():
    """Building early changes nothing but the moment, and late builds are counted."""
    make = lambda: Bodies(  # noqa: E731
        prompts=prompts([5, 6]),
        vocabulary=RANDOM,
        max_tokens=[1, 2],
        fields={"stream": True},
        endpoint="completions",
    )
    early, late = make(), make()
    while early.fill():
        pass
    for i in (1, 0):
        assert early.take(i) == late.take(i)
    assert (early.built_late, late.built_late) == (0, 2)
    body = json.loads(make().take(1))
    assert (len(body["prompt"]), body["max_tokens"], body["stream"]) == (6, 2, True)


def test_without_the_library_a_found_tokenizer_is_noted_and_a_given_one_refused(tokenizer_json, monkeypatch):
    """The package without extras replays random ids, and says why; what was asked for is not dropped in silence."""
    root = str(tokenizer_json.parent)
    found, note = vocabulary_of(root, prompts="text", tokenizer_json=None)
    assert (found.has_tokenizer, note) == (True, None)
    monkeypatch.setattr("headway.trace.tokenizer.find_spec", lambda name: None)
    found, note = vocabulary_of(root, prompts="text", tokenizer_json=None)
    assert not found.has_tokenizer
    assert "extra `text` is not installed" in note
    with pytest.raises(TokenizersMissingError, match=r"\.\[text\]"):
        vocabulary_of(root, prompts="text", tokenizer_json=tokenizer_json)


@pytest.mark.parametrize("root", [None, "", "no/such-model", "x" * 5000, "a\0b"])
def test_a_root_that_leads_nowhere_is_no_error(root):
    """Whatever a server says of its weights."""
    found, note = vocabulary_of(root, prompts="text", tokenizer_json=None)
    assert not found.has_tokenizer
    assert "not found" in note
