"""The stream reader against the zoo of OpenAI-compatible servers: bytes in, token times out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.replay.stream import TokenStream, error_code, share_out


def event(payload: object) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def chat(delta: dict, *, used: int | None = None, finish: str | None = None, **more: object) -> bytes:
    """Return a chat chunk with `delta`, and running usage where `used` is given."""
    chunk = {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    if used is not None:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": used, "total_tokens": 7 + used}
    return event(chunk | more)


def text(piece: str, *, used: int | None = None, finish: str | None = None) -> bytes:
    """Return a completions chunk."""
    chunk = {"object": "text_completion", "choices": [{"index": 0, "text": piece, "finish_reason": finish}]}
    if used is not None:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": used, "total_tokens": 7 + used}
    return event(chunk)


def usage_only(used: int, choices: object = ()) -> bytes:
    """Return the last chunk that carries nothing but usage."""
    choices = list(choices) if isinstance(choices, tuple) else choices
    return event({"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": used}})


DONE = b"data: [DONE]\n\n"


def read(*parts: tuple[float, bytes], count=None) -> TokenStream:
    """Feed (time, bytes) parts and finish at the time of the last."""
    stream = TokenStream()
    for now, data in parts:
        stream.feed(data, now)
    stream.finish(parts[-1][0], count)
    return stream


def test_role_only_first_delta_is_no_token():
    """TTFT is the first delta that carries a token, not the role chunk that opens the stream."""
    stream = read((0.005, chat({"role": "assistant", "content": ""})), (0.214, chat({"content": "Hi"})), (0.3, DONE))
    assert stream.token_times == [0.214]


def test_role_chunk_with_running_usage_of_zero_is_no_token():
    """The same where the server reports usage in every chunk."""
    stream = read(
        (0.005, chat({"role": "assistant"}, used=0)),
        (0.2, chat({"content": "Hi"}, used=1)),
        (0.3, chat({"content": "!"}, used=2, finish="stop")),
        (0.3, DONE),
    )
    assert stream.token_times == [0.2, 0.3]
    assert stream.counted_by == "usage"
    assert stream.complete


def test_null_and_empty_deltas_are_no_tokens():
    """`content: null`, `content: ""` and a bare delta carry nothing."""
    stream = read(
        (0.1, chat({"role": "assistant", "content": None})),
        (0.2, chat({})),
        (0.3, chat({"content": ""})),
        (0.4, chat({"content": "a"})),
        (0.5, chat({}, finish="stop")),
        (0.5, DONE),
    )
    assert stream.token_times == [0.4]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_deltas_are_tokens_but_not_the_answer(key):
    """Reasoning counts for TTFT; the first answer token is told apart."""
    stream = read(
        (0.1, chat({"role": "assistant", "content": ""})),
        (0.2, chat({key: "hm"})),
        (0.3, chat({key: "so", "content": None})),
        (0.9, chat({"content": "42"})),
        (1.0, DONE),
    )
    assert stream.token_times == [0.2, 0.3, 0.9]
    assert stream.first_answer == 0.9


def test_empty_delta_with_growing_usage_is_a_token_arrival():
    """A parser that holds text back still shows its tokens through usage."""
    stream = read(
        (0.1, chat({}, used=1)),
        (0.2, chat({}, used=2)),
        (0.3, chat({"content": "all at once"}, used=3, finish="stop")),
        (0.3, DONE),
    )
    assert stream.token_times == [0.1, 0.2, 0.3]
    assert stream.first_answer == 0.3


def test_several_tokens_in_a_chunk_count_by_usage():
    """Speculation: 4 tokens every 10 ms are 4 tokens at the same moment."""
    stream = read((0.01, text(" a b c d", used=4)), (0.02, text(" e f g h", used=8, finish="length")), (0.02, DONE))
    assert stream.token_times == [0.01] * 4 + [0.02] * 4


@pytest.mark.parametrize("choices", [(), None])
def test_usage_only_last_chunk_ends_nothing(choices):
    """`choices` empty or null, 300 ms after the last token: no crash, no token, count taken from it."""
    stream = read((0.1, text("a")), (0.2, text("b", finish="length")), (0.5, usage_only(2, choices)), (0.5, DONE))
    assert stream.token_times == [0.1, 0.2]
    assert stream.prompt_tokens == 7
    assert stream.total == 2


def test_tokens_are_shared_out_by_text_length_when_only_the_total_is_told():
    """Without running usage, 6 tokens over chunks of 1 and 5 letters fall 1 and 5."""
    stream = read((0.1, text("a")), (0.2, text("bcdef", finish="length")), (0.3, usage_only(6)), (0.3, DONE))
    assert stream.token_times == [0.1] + [0.2] * 5
    assert stream.counted_by == "bytes"


def test_the_tokenizer_tells_how_many_tokens_a_chunk_held():
    """With the tokenizer, words and not letters weigh; it also counts when no usage comes at all."""
    words = lambda piece: len(piece.split())  # noqa: E731
    parts = ((0.1, text("extraordinarily ")), (0.2, text("a b c", finish="length")), (0.3, DONE))
    assert read(*parts, count=words).token_times == [0.1, 0.2, 0.2, 0.2]
    assert read(*parts, count=words).counted_by == "tokenizer"


def test_more_chunks_than_tokens_keep_first_and_last_time():
    """A token whose text came in two pieces: the total rules, the last piece ends the answer."""
    stream = read((0.1, text("a")), (0.2, text("b")), (0.3, text("c")), (0.4, usage_only(2)), (0.4, DONE))
    assert stream.token_times == [0.1, 0.3]


def test_a_hidden_stop_token_came_with_the_last_visible_one():
    """Usage counts one token more than ever showed: it is no arrival of its own."""
    stream = read((0.1, text("a", used=1)), (0.2, text("b", used=2)), (0.5, usage_only(3)), (0.5, DONE))
    assert stream.token_times == [0.1, 0.2, 0.2]


def test_usage_that_stays_zero_does_not_hide_tokens():
    """A server that fills usage only at the end: chunks count."""
    stream = read((0.1, text("a", used=0)), (0.2, text("b", used=0)), (0.3, usage_only(2)), (0.3, DONE))
    assert stream.token_times == [0.1, 0.2]


def test_error_inside_a_200_stream():
    """The error code is kept, and what came before it."""
    stream = read((0.1, text("a")), (0.2, event({"error": {"message": "no", "type": "EngineDead", "code": 500}})))
    assert stream.error == "EngineDead"
    assert stream.token_times == [0.1]


def test_error_event_by_name():
    """`event: error` marks its data as an error whatever it looks like."""
    stream = read((0.1, b'event: error\ndata: {"object": "error", "message": "boom", "type": "Boom"}\n\n'))
    assert stream.error == "Boom"


def test_a_null_error_is_no_error():
    """Some servers put `error: null` in every chunk."""
    stream = read((0.1, chat({"content": "a"}, error=None)), (0.2, DONE))
    assert stream.error is None
    assert stream.token_times == [0.1]


def test_generated_text_cannot_pose_as_fields():
    """Quotes inside generated text are escaped, so it can fake neither usage, error nor an end."""
    spoof = '","usage":{"completion_tokens":99},"error":{"code":"x"},"finish_reason":"stop"'
    stream = read((0.1, text(spoof)), (0.2, text("b")), (0.3, DONE))
    assert stream.token_times == [0.1, 0.2]
    assert stream.error is None


def test_generated_text_that_looks_like_the_end_is_text():
    """`[DONE]` inside text does not end the stream."""
    stream = read((0.1, text("[DONE]")), (0.2, text("data: [DONE]")))
    assert not stream.done
    assert stream.token_times == [0.1, 0.2]


def test_comments_and_other_fields_carry_no_token():
    """Pings, ids and retries are allowed anywhere."""
    noise = b": ping\n\nid: 3\nretry: 1000\nevent: message\n"
    stream = read((0.1, noise + text("a")), (0.2, noise + DONE))
    assert stream.token_times == [0.1]
    assert stream.done


def test_data_without_a_space_and_compact_json():
    """`data:{...}` without a space, JSON without spaces."""
    raw = b'data:{"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\ndata:[DONE]\n\n'
    stream = read((0.1, raw))
    assert stream.token_times == [0.1]
    assert stream.done


def test_tool_calls_are_tokens():
    """Name and arguments of a tool call are generated tokens and part of the answer."""
    call = lambda **function: {"tool_calls": [{"index": 0, "function": function}]}  # noqa: E731
    stream = read(
        (0.1, chat({"role": "assistant", "content": None})),
        (0.2, chat(call(name="weather", arguments=""))),
        (0.3, chat(call(arguments='{"city'))),
        (0.4, chat({}, finish="tool_calls")),
        (0.4, DONE),
    )
    assert stream.token_times == [0.2, 0.3]
    assert stream.first_answer == 0.2


def test_a_buffered_server_gives_every_token_the_same_time():
    """All events in one read: the moment of the read is all that is known."""
    stream = read((0.9, text("a", used=1) + text("b", used=2) + text("c", used=3, finish="length") + DONE))
    assert stream.token_times == [0.9] * 3


def test_an_answer_that_was_not_streamed():
    """A plain JSON body: every token at the moment it was whole."""
    stream = TokenStream()
    body = {"choices": [{"text": "a b"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    stream.whole(json.dumps(body).encode(), 1.5)
    assert stream.token_times == [1.5, 1.5]
    assert stream.complete


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]"])
def test_a_body_that_is_no_answer_is_an_error(body):
    """HTML of a proxy with status 200 is not an answer without tokens."""
    stream = TokenStream()
    stream.whole(body, 1.0)
    assert stream.error == "malformed_body"


def test_a_finish_reason_without_done_is_complete():
    """Some servers never send [DONE]."""
    assert read((0.1, text("a", finish="length"))).complete
    assert not read((0.1, text("a"))).complete


STREAM = (
    b": hello\r\n\r\n"
    + chat({"role": "assistant", "content": ""}, used=0)
    + chat({"content": "né"}, used=1)
    + chat({"content": "日本"}, used=3).replace(b"\n\n", b"\r\n\r\n")
    + 'data: {"choices": [{"delta": {"content": "ü😀"}, "finish_reason": "stop"}], '
    '"usage": {"completion_tokens": 4}}\n\n'.encode()
    + usage_only(4)
    + DONE
)


@given(st.lists(st.integers(1, len(STREAM) - 1), unique=True, max_size=12).map(sorted))
def test_any_cut_of_the_bytes_gives_the_same_tokens(cuts):
    """CRLF, split UTF-8, half lines: however TCP cuts the stream, the tokens are the same."""
    stream = TokenStream()
    for i, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(STREAM)], strict=True)):
        stream.feed(STREAM[start:end], float(i))
    stream.finish(99.0)
    assert len(stream.token_times) == 4
    assert stream.token_times == sorted(stream.token_times)
    assert stream.done
    assert stream.error is None


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 200))
def test_shares_add_up_and_leave_nobody_out(weights, spare):
    """The whole total, at least one each, and a longer text never gets fewer than a shorter one."""
    total = len(weights) + spare
    shares = share_out(total, weights)
    assert sum(shares) == total
    assert min(shares) >= 1
    for share, weight in zip(shares, weights, strict=True):
        assert all(share >= other for other, lighter in zip(shares, weights, strict=True) if lighter < weight)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"error": {"code": "ttft_unattainable", "type": "slo"}}, "ttft_unattainable"),
        ({"error": {"code": 503, "type": "ServiceUnavailableError"}}, "ServiceUnavailableError"),
        ({"error": {"code": "429"}}, "fallback"),
        ({"error": "queue full"}, "queue full"),
        ({"object": "error", "type": "BadRequestError", "code": 400}, "BadRequestError"),
        ({"detail": "x"}, "fallback"),
    ],
)
def test_error_codes_of_the_bodies_in_use(body, code):
    """The most telling word of the error body is kept."""
    assert error_code(body, "fallback") == code


def test_a_count_that_no_answer_has_is_not_believed():
    """A million times a million tokens would fill the memory; as many digits would stop the parser."""
    stream = TokenStream()
    stream.feed(event({"choices": [{"text": "a"}], "usage": {"completion_tokens": 999_999_999}}), 1.0)
    assert (stream.error, len(stream.token_times)) == ("malformed_usage", 0)
    stream = TokenStream()
    stream.feed(event({"choices": [{"text": "a"}], "usage": {"completion_tokens": int("9" * 4000)}}), 1.0)
    assert (stream.error, len(stream.token_times)) == (None, 1)


def test_a_line_without_an_end_is_given_up(monkeypatch):
    """What is kept of an unfinished line has a limit."""
    monkeypatch.setattr("headway.replay.stream.MOST_BYTES", 10)
    stream = TokenStream()
    stream.feed(b"data: " + b"x" * 20, 1.0)
    assert stream.error == "line_too_long"


@pytest.mark.parametrize("line", [b'data: {"choices":[{"text":"a" nope', b"data: null", b"data: {", b"data: <html>"])
def test_half_an_object_is_an_error(line):
    """A data line that does not end as an object does is not counted as a token."""
    stream = TokenStream()
    stream.feed(line + b"\n\n", 1.0)
    assert (stream.error, stream.token_times) == ("malformed_stream", [])


def test_json_nested_beyond_reason_is_an_error():
    """The parser's own limit is no fault of ours."""
    deep = b"[" * 100_000 + b"]" * 100_000
    stream = TokenStream()
    stream.feed(b'data: {"error":' + deep + b"}\n\n", 1.0)
    assert stream.error == "malformed_error"
    stream = TokenStream()
    stream.whole(deep, 1.0)
    assert stream.error == "malformed_body"
