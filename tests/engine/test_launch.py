"""The command line and environment of the server."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.vllm import launch
from headway.engine.vllm.model import EmbeddedModel
from headway.errors import EngineError, InputError

EMBEDDED = Path("/cache/smollm2")


@pytest.fixture(autouse=True)
def embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the embedded model for prepared."""
    model = EmbeddedModel(path=EMBEDDED, name="smollm2", sha256="0" * 64)
    monkeypatch.setattr(launch, "embedded_model", lambda: model)


def command(**options: Any) -> launch.Command:
    """Build a command for a CPU with an empty environment, unless told otherwise."""
    return launch.command(**{"port": 8000, "environ": {}, "cpu": True} | options)


def test_stock_embedded_model_on_a_cpu() -> None:
    """The whole command and environment of the embedded default."""
    made = command(stock=True)
    assert made.argv == (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", str(EMBEDDED)),
        *("--model", str(EMBEDDED), "--host", "127.0.0.1", "--port", "8000"),
        *("--served-model-name", "smollm2", "--max-model-len", "4096"),
        *("--dtype", "bfloat16", "--enforce-eager"),
    )
    assert made.env == {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "auto",
    }
    assert (made.model, made.url) == ("smollm2", "http://127.0.0.1:8000")


def test_headway_adds_its_plug_points_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scheduler and middleware on the command line, settings in the environment, the path made absolute."""
    monkeypatch.chdir(tmp_path)
    made = command(config=Path("headway.toml"), policy="edf", admission="admit_all")
    drain = ("--shutdown-timeout", "30")
    assert made.argv[-6:] == (*drain, "--scheduler-cls", launch.SCHEDULER, "--middleware", launch.MIDDLEWARE)
    assert made.drain_s == 30.0
    assert made.env["HEADWAY_CONFIG"] == str(tmp_path / "headway.toml")
    assert (made.env["HEADWAY_POLICY"], made.env["HEADWAY_ADMISSION"]) == ("edf", "admit_all")


def test_named_model_on_a_gpu_gets_no_defaults() -> None:
    """A model of the user's on a GPU: vLLM decides everything that the user does not."""
    made = command(model="org/model", cpu=False, stock=True)
    assert made.argv[3:] == ("org/model", "--model", "org/model", "--host", "127.0.0.1", "--port", "8000")
    assert made.env == {"VLLM_NO_USAGE_STATS": "1"}
    assert made.model == "org/model"


@given(
    st.lists(
        st.one_of(
            st.from_regex(r"--x-[a-z]{1,8}(=[ -~]{0,8})?", fullmatch=True),
            st.text(st.characters(codec="ascii", exclude_characters="-"), max_size=8),
            st.sampled_from(["-O3", "-tp", "-cc.mode=3", "--kv-transfer-config", '{"a": 1}', "-1"]),
        ),
        max_size=8,
    )
)
def test_unknown_options_pass_unchanged(extra: list[str]) -> None:
    """Whatever vLLM may understand stands at the end of the command, as it was written."""
    made = launch.command(model="m", port=1, cpu=True, environ={}, extra=extra)
    assert list(made.argv[len(made.argv) - len(extra) :]) == extra


@pytest.mark.parametrize(
    ("extra", "gone"),
    [
        (["--max-model-len", "2048"], "4096"),
        (["--max_model_len=2048"], "4096"),
        (["--dtype=float32"], "bfloat16"),
        (["--served-model-name", "mine"], "smollm2"),
        (["--no-enforce-eager"], "--enforce-eager"),
        (["-O3"], "--enforce-eager"),
        (["-cc.mode=3"], "--enforce-eager"),
        (["--compilation-config.mode", "3"], "--enforce-eager"),
    ],
)
def test_users_option_replaces_our_default(extra: list[str], gone: str) -> None:
    """A default of ours is left out when the user decides the same thing, in any spelling."""
    assert gone not in command(extra=extra).argv


def test_users_environment_wins() -> None:
    """What is set in the environment stays."""
    mine = {"VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_NO_USAGE_STATS": "0"}
    mine["HEADWAY_TENANT_SALT"] = "of the user"
    made = command(environ=mine, model="m")
    assert made.env == mine
    other = {key: value for key, value in mine.items() if key != "HEADWAY_TENANT_SALT"}
    salts = {command(environ=other, model="m").env["HEADWAY_TENANT_SALT"] for _ in range(2)}
    assert len(salts) == 2  # drawn anew at each start
    assert "HEADWAY_TENANT_SALT" not in command(environ=other, model="m", stock=True).env


@pytest.mark.parametrize(
    ("options", "drain_s"),
    [
        ({"extra": ["--shutdown-timeout", "5"]}, 5.0),
        ({"extra": ["--shutdown_timeout=0"]}, 0.0),
        ({"stock": True}, 0.0),
        ({"stock": True, "extra": ["--shutdown-timeout=7"]}, 7.0),
        ({"extra": ["--shutdown-timeout", "soon"]}, 0.0),
    ],
)
def test_the_time_to_drain_is_the_users(options: dict[str, Any], drain_s: float) -> None:
    """Ours only where none is given; stock vLLM keeps its own; what is no number vLLM refuses."""
    made = command(**options)
    assert made.drain_s == drain_s
    assert sum(arg.replace("_", "-").startswith("--shutdown-timeout") for arg in made.argv) == len(
        [each for each in options.get("extra", ()) if each.startswith("--")]
    )


def test_served_name_follows_the_users_option() -> None:
    """Requests address the model by the name that the server knows."""
    assert command(extra=["--served-model-name=mine"]).model == "mine"
    assert command(model="m", extra=["--served-model-name", "a", "b"]).model == "a"


def test_model_as_an_option_is_taken() -> None:
    """`--model NAME`, as vLLM's users write it, serves NAME and not the embedded model."""
    made = command(extra=["--model", "org/model"], stock=True)
    assert made.model == "org/model"
    assert str(EMBEDDED) not in made.argv
    assert "HF_HUB_OFFLINE" not in made.env


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"extra": ["--scheduler-cls", "x.Y"]}, "--scheduler-cls"),
        ({"extra": ["--scheduler_cls=x.Y"]}, "--scheduler-cls"),
        ({"extra": ["--scheduler-c", "x.Y"]}, "--scheduler-c"),
        ({"extra": ["--port=1"]}, "--port"),
        ({"extra": ["--uds", "/tmp/s"]}, "--uds"),
        ({"extra": ["--model", "b"], "model": "a"}, "--model"),
        ({"extra": ["--config", "vllm.yaml"]}, "--config"),
        ({"extra": ["--scheduling-policy", "priority"]}, "--scheduling-policy priority: expected fcfs"),
        ({"extra": ["--scheduling_pol=priority"]}, "--scheduling-pol priority: expected fcfs"),
        ({"stock": True, "policy": "edf"}, "--policy edf"),
        ({"stock": True, "admission": "admit_all"}, "--admission admit_all"),
        ({"stock": True, "config": Path("h.toml")}, "--config h.toml"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], names: str) -> None:
    """An option that Headway sets itself, or that would have no effect, is an error naming it."""
    with pytest.raises(InputError, match=names):
        command(**options)


def test_own_scheduler_and_middleware_are_fine_where_they_fit() -> None:
    """Stock mode sets no scheduler; vLLM takes any number of middlewares."""
    assert command(stock=True, extra=["--scheduler-cls", "x.Y"]).argv[-1] == "x.Y"
    assert command(stock=True, extra=["--scheduling-policy", "priority"]).argv[-1] == "priority"
    assert command(extra=["--scheduling-policy=fcfs"]).argv[-1] == "--scheduling-policy=fcfs"
    assert command(policy="fcfs", extra=["--scheduling-policy", "priority"]).argv[-1] == "priority"
    assert command(extra=["--middleware", "x.Y"]).argv.count("--middleware") == 2


@pytest.mark.parametrize("name", ["HEADWAY_STEP_LOG", "HEADWAY_EVENT_LOG"])
def test_a_log_that_cannot_be_written_is_named_at_once(tmp_path: Path, name: str) -> None:
    """Not by a traceback of the engine after the model was loaded; plain vLLM writes neither."""
    path = str(tmp_path / "nowhere" / "x.jsonl")
    with pytest.raises(InputError, match=f"{name}={path}: cannot be written"):
        command(environ={name: path})
    assert command(stock=True, environ={name: path})
    assert command(environ={name: str(tmp_path / "x.jsonl")})


def test_missing_folder_is_named_at_once(tmp_path: Path) -> None:
    """A path that does not exist is not left to vLLM, which would ask a hub for it."""
    with pytest.raises(EngineError, match=rf"model not found: the folder {tmp_path}/nothing does not exist"):
        command(model=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("host", "extra", "url"),
    [
        ("0.0.0.0", [], "http://127.0.0.1:8000"),
        ("::", [], "http://[::1]:8000"),
        ("localhost", ["--ssl-certfile", "c.pem"], "https://localhost:8000"),
    ],
)
def test_url_is_one_a_client_here_can_use(host: str, extra: list[str], url: str) -> None:
    """A wildcard address becomes loopback; a certificate means https."""
    assert command(host=host, extra=extra).url == url


def test_port_zero_takes_a_free_one() -> None:
    """Port 0 becomes a real port that can be listened on."""
    port = command(port=0).port
    assert port > 0
    launch.check_port("127.0.0.1", port)


def test_taken_port_is_named() -> None:
    """A port that someone listens on is refused before anything starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=rf"port {port} on 127\.0\.0\.1 is taken"):
            launch.check_port("127.0.0.1", port)


def test_unknown_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that means nothing here is named."""

    def unknown(*_args: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EngineError, match=r"no\.such\.host\.invalid"):
        launch.check_port("no.such.host.invalid", 8000)


def test_option_names_as_vllm_reads_them() -> None:
    """Dashes for underscores, without values, sub-keys and plain words; negative numbers are no options."""
    args = ["--a_b", "1", "--c=2", "--d.e", "-1", "-0.5", "x", "-O", "-O2", "-cc.mode=3"]
    assert launch.option_names(args) == {
        "--a-b",
        "--c",
        "--d",
        "--optimization-level",
        "--compilation-config",
    }
