"""Tags to the engine, and what the environment says to both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.base import RequestTag
from headway.engine.vllm import messages
from headway.engine.vllm.messages import XARG, config_from_environment, decode_tag, encode_tag
from headway.engine.vllm.middleware import tag_body
from headway.errors import InputError

TAG = RequestTag(group="g", ttft_ms=250.0, slo_class="chat", arrival_unix_s=1e9)

targets = st.none() | st.floats(min_value=1e-3, max_value=86_400_000)


@given(
    size=st.integers(1, 1000),
    slo_class=st.none() | st.text(max_size=20),
    ttft=targets,
    tpot=targets,
    tbt=targets,
    explicit=st.booleans(),
)
def test_a_tag_survives_the_way(
    size: int, slo_class: str | None, ttft: float | None, tpot: float | None, tbt: float | None, explicit: bool
) -> None:
    """Decoding is the inverse of encoding."""
    tag = RequestTag(
        group="g",
        size=size,
        slo_class=slo_class,
        ttft_ms=ttft,
        tpot_ms=tpot,
        tbt_ms=tbt,
        explicit_max_tokens=explicit,
    )
    assert decode_tag(encode_tag(tag)) == tag


def test_an_encoded_tag_is_compact() -> None:
    """It travels with every request: no spaces, no empty fields."""
    assert encode_tag(RequestTag(group="g")) == '{"group":"g","size":1,"explicit_max_tokens":true}'


@pytest.mark.parametrize(
    "text",
    [
        None,
        5,
        ["x"],
        "",
        "x",
        "[1]",
        "null",
        "{}",
        '{"group":""}',
        '{"group":5}',
        '{"group":"g","unknown":1}',
        '{"group":"g","size":0}',
        '{"group":"g","size":1.5}',
        '{"group":"g","size":true}',
        '{"group":"g","size":1e99}',
        '{"group":"g","size":99999999999}',
        '{"group":"g","ttft_ms":"soon"}',
        '{"group":"g","ttft_ms":NaN}',
        '{"group":"g","ttft_ms":Infinity}',
        '{"group":"g","ttft_ms":-1}',
        '{"group":"g","ttft_ms":0}',
        '{"group":"g","tbt_ms":86400001}',
        '{"group":"g","tpot_ms":true}',
        '{"group":"g","slo_class":5}',
        '{"group":"g","arrival_unix_s":NaN}',
        '{"group":"g","front_ms":-5}',
        '{"group":"g","explicit_max_tokens":"yes"}',
        '{"group":' * 100_000,
    ],
)
def test_what_is_no_tag_is_none(text: object) -> None:
    """Endpoints beside the middleware let clients write anything here; the engine must not fall over it."""
    assert decode_tag(text) is None


@given(st.text(max_size=100))
def test_any_text_is_a_tag_or_none(text: str) -> None:
    """Never an exception."""
    decode_tag(text)


# In the body


def tagged(body: Any, tag: RequestTag = TAG) -> dict[str, Any]:
    """Tag a body and return it."""
    request: dict[str, Any] = json.loads(tag_body(json.dumps(body).encode(), tag))
    return request


def tag_in(body: Any) -> RequestTag:
    """Tag a body and return the tag in it."""
    found = decode_tag(tagged(body)["vllm_xargs"][XARG])
    assert found is not None
    return found


def test_the_body_is_kept_and_the_tag_added() -> None:
    """Every other field is as it was, other xargs too."""
    body = {"prompt": "h\u00e4 \u4f60\u597d", "max_tokens": 5, "vllm_xargs": {"mine": [1, 2]}}
    request = tagged(body)
    del request["vllm_xargs"][XARG]
    assert request == body


def test_a_client_cannot_write_the_tag() -> None:
    """What it sends under the reserved name is overwritten."""
    forged = encode_tag(RequestTag(group="someone else's", ttft_ms=1.0))
    assert tag_in({"prompt": "x", "vllm_xargs": {XARG: forged}}).group == "g"


@pytest.mark.parametrize("xargs", [[], "x", 5, [["headway", "x"]]])
def test_xargs_of_another_type_are_left_to_vllm(xargs: Any) -> None:
    """vLLM refuses them with its own message."""
    body = json.dumps({"prompt": "x", "vllm_xargs": xargs}).encode()
    assert tag_body(body, TAG) is body


@pytest.mark.parametrize(
    "body",
    [b"", b"x", b"[1]", b"5", b"null", b'{"prompt":', b"\xff\xff", b'{"a":' + b"9" * 5000 + b"}", b"[" * 1_000_000],
)
def test_what_is_no_json_object_is_left_to_vllm(body: bytes) -> None:
    """Unchanged, and without an exception, also a megabyte of brackets."""
    assert tag_body(body, TAG) is body


@pytest.mark.parametrize("depth", [10, 900, 990, 5_000])
def test_deep_nesting_is_tagged_or_left_alone(depth: int) -> None:
    """What can be read but not written again goes to vLLM as it came."""
    body = b'{"x":' + b"[" * depth + b"]" * depth + b"}"
    made = tag_body(body, TAG)
    assert made is body or XARG.encode() in made


def test_a_long_body_is_kept() -> None:
    """A megabyte of prompt."""
    assert tagged({"prompt": "x" * 1_000_000})["prompt"] == "x" * 1_000_000


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": "x", "n": 3}, 3),
        ({"prompt": ["x", "y"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
        ({"messages": [{}, {}], "n": 2}, 2),
        ({"prompt": "x", "n": "2"}, 2),
        ({"prompt": "x", "n": 2.0}, 2),
        ({"prompt": "x", "n": 2.5}, 1),
        ({"prompt": "x", "n": 0}, 1),
        ({"prompt": "x", "n": -4}, 1),
        ({"prompt": "x", "n": None}, 1),
        ({"prompt": "x", "n": True}, 1),
        ({"prompt": "x", "n": "many"}, 1),
        ({"prompt": "x", "n": [2]}, 1),
        ({"prompt": "x", "n": 10**400}, 1),
        ({"prompt": "x", "n": 10**7}, 1_000_000),
        ({"prompt": "x", "n": float("inf")}, 1),
        ({"prompt": "x", "n": float("nan")}, 1),
    ],
)
def test_the_group_has_the_size_that_vllm_makes_of_it(body: dict[str, Any], size: int) -> None:
    """n for each prompt, read as leniently as vLLM reads it."""
    assert tag_in(body).size == size


@pytest.mark.parametrize(
    ("body", "explicit"),
    [({}, False), ({"max_tokens": None}, False), ({"max_tokens": 5}, True), ({"max_completion_tokens": 5}, True)],
)
def test_the_tag_tells_whether_the_client_limited_its_output(body: dict[str, Any], explicit: bool) -> None:
    """Without a limit the class's assumption is reserved."""
    assert tag_in(body).explicit_max_tokens is explicit


# The environment


def test_without_environment_everything_is_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, no names."""
    for name in (messages.ENV_CONFIG, messages.ENV_POLICY, messages.ENV_ADMISSION):
        monkeypatch.delenv(name, raising=False)
    assert config_from_environment().policy == "headway"


def test_flags_override_the_file_and_drop_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters belong to the file's choice; those of what is not overridden stay."""
    path = tmp_path / "headway.toml"
    path.write_text("policy_parameters = {min_chunk = 8}\nadmission_parameters = {foresight = 0.5}\n")
    monkeypatch.setenv(messages.ENV_CONFIG, str(path))
    monkeypatch.setenv(messages.ENV_POLICY, "fcfs")
    monkeypatch.delenv(messages.ENV_ADMISSION, raising=False)
    config = config_from_environment()
    assert (config.policy, config.policy_parameters) == ("fcfs", {})
    assert (config.admission, config.admission_parameters) == ("response_time", {"foresight": 0.5})


def test_a_flag_that_repeats_the_file_keeps_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is overridden."""
    path = tmp_path / "headway.toml"
    path.write_text("policy_parameters = {min_chunk = 8}\n")
    monkeypatch.setenv(messages.ENV_CONFIG, str(path))
    monkeypatch.setenv(messages.ENV_POLICY, "headway")
    assert config_from_environment().policy_parameters == {"min_chunk": 8}


def test_a_bad_file_is_the_callers_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named as everywhere."""
    monkeypatch.setenv(messages.ENV_CONFIG, str(tmp_path / "none.toml"))
    with pytest.raises(InputError, match=r"none\.toml"):
        config_from_environment()
