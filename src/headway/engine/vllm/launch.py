"""The command line and the environment of vLLM's API server, with Headway plugged in or without."""

from __future__ import annotations

import difflib
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.engine.vllm import versions
from headway.engine.vllm.messages import ENV_EVENT_LOG, ENV_STEP_LOG, config_from_environment
from headway.engine.vllm.model import SERVED_NAME, embedded_model
from headway.errors import EngineError, InputError

SCHEDULER = "headway.engine.vllm.scheduler.HeadwayScheduler"
MIDDLEWARE = "headway.engine.vllm.middleware.SloMiddleware"

#: Context length of the embedded model: half of what it was trained for, enough and quick to set up.
EMBEDDED_MAX_MODEL_LEN = 4096

#: Seconds in which streams in flight may end when the server is asked to stop; vLLM's default is to abort them.
DRAIN_S = 30

#: vLLM options that Headway sets itself and the user therefore may not -> what to do instead.
_OURS = {
    "--scheduler-cls": "leave it out, or use --stock for a vLLM without Headway",
    "--host": "use --host before the pass-through options",
    "--port": "use --port before the pass-through options",
    "--uds": "Headway serves on a host and port",
    "--headless": "Headway starts the API server",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run: arguments, whole environment, and where the server will answer."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    host: str
    port: int
    model: str  # name under which requests address the model
    scheme: str = "http"
    api_key: str | None = field(default=None, repr=False)  # one that the server accepts, None when it asks for none
    drain_s: float = 0.0  # how long it lets streams run on when it is asked to stop

    @property
    def url(self) -> str:
        """Base URL a client on this machine can use, without a trailing slash."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


def command(
    *,
    model: str | Path | None = None,
    port: int,
    host: str = "127.0.0.1",
    stock: bool = False,
    config: Path | None = None,
    policy: str | None = None,
    admission: str | None = None,
    extra: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    cpu: bool | None = None,
) -> Command:
    """Return the command that serves `model` (None: the embedded one, converted first when need be).

    `port` 0 takes a free one. `stock` leaves Headway out; `config` (headway.toml), `policy` and `admission`
    reach Headway through the environment. `extra` goes to vLLM unchanged and wins over our defaults;
    `environ` (default: this process's) is what the child inherits. `cpu` (default: by the installed vLLM)
    chooses the CPU defaults.

    Raises InputError when `extra` contradicts what Headway sets, EngineError when the model's folder does not
    exist or the embedded model cannot be prepared.
    """
    given = option_names(extra)
    _refuse_contradictions(given, model=model, stock=stock, config=config, policy=policy, admission=admission)
    env = dict(os.environ if environ is None else environ)
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    defaults: list[list[str]] = []
    named = _value(extra, "--model")
    if model is None and named is None:
        embedded = embedded_model()
        env["HF_HUB_OFFLINE"] = "1"
        source: str | None = str(embedded.path)
        defaults += [
            ["--served-model-name", SERVED_NAME],
            ["--max-model-len", str(EMBEDDED_MAX_MODEL_LEN)],
        ]
        served = SERVED_NAME
    else:
        source = None if model is None else str(model)
        _check_folder(source or str(named))
        served = named if source is None and named is not None else str(source)
    served = _value(extra, "--served-model-name") or served
    if versions.is_cpu() if cpu is None else cpu:
        defaults.append(["--dtype", "bfloat16"])
        # Compiling takes minutes on a CPU and its cache does not survive a restart (vLLM 0.32).
        if not given & {"--no-enforce-eager", "--optimization-level", "--compilation-config"}:
            defaults.append(["--enforce-eager"])
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "auto")

    # `python -m`, not the `vllm` script: the CPU wheel's script fails in its own version look-up.
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    # The module reads --model and ignores its positional; filling that makes vLLM refuse a stray word
    # ("--enforce-eager NAME") instead of serving another model than the one that was meant.
    argv += [source if source is not None else str(named)]
    if source is not None:
        argv += ["--model", source]
    port = port or free_port(host)
    argv += ["--host", host, "--port", str(port)]
    for option in defaults:
        if option[0] not in given:
            argv += option
    if not stock:
        for name in (ENV_STEP_LOG, ENV_EVENT_LOG):
            _check_log(name, env.get(name))
        if "--shutdown-timeout" not in given:
            argv += ["--shutdown-timeout", str(DRAIN_S)]
        argv += ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
        settings = {
            "HEADWAY_CONFIG": None if config is None else str(config.resolve()),
            "HEADWAY_POLICY": policy,
            "HEADWAY_ADMISSION": admission,
        }
        env |= {name: value for name, value in settings.items() if value is not None}
        if name := _written(given, "--scheduling-policy"):
            value, chosen = _value(extra, name), config_from_environment(env).policy
            if value not in (None, "fcfs") and chosen != "fcfs":  # what is missing vLLM tells
                raise InputError(f"{name} {value}: expected fcfs, because Headway's policy {chosen} orders the queue")
        # One for all API processes, so that a key is the same tenant in each of them.
        env.setdefault("HEADWAY_TENANT_SALT", secrets.token_hex(16))
    argv += extra
    scheme = "https" if "--ssl-certfile" in given else "http"
    key = _value(extra, "--api-key") or env.get("VLLM_API_KEY") or None
    drain = _value(argv, "--shutdown-timeout") or ""
    return Command(
        argv=tuple(argv),
        env=env,
        host=host,
        port=port,
        model=served,
        scheme=scheme,
        api_key=key,
        drain_s=float(drain) if drain.isascii() and drain.isdigit() else 0.0,  # what else vLLM refuses
    )


def _refuse_contradictions(
    given: set[str],
    *,
    model: str | Path | None,
    stock: bool,
    config: Path | None,
    policy: str | None,
    admission: str | None,
) -> None:
    if stock:
        ours = {"--config": config, "--policy": policy, "--admission": admission}
        for option, value in ours.items():
            if value is not None:
                raise InputError(f"{option} {value} has no effect with --stock, which leaves Headway out")
    for option, instead in _OURS.items():
        written = _written(given, option)
        if written and not (stock and option == "--scheduler-cls"):
            raise InputError(f"{written} contradicts Headway, which sets it: {instead}")
    if "--config" in given and model is None and "--model" not in given:
        raise InputError("a vLLM --config file does not choose the model here: name it before the options")
    if model is not None and "--model" in given:
        raise InputError(f"--model contradicts the model {model} named before it")


def _check_log(name: str, path: str | None) -> None:
    """Raise InputError when the file that a variable of the environment names cannot be written."""
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise InputError(f"{name}={path}: cannot be written ({error.strerror}): expected a file") from None


def _check_folder(model: str) -> None:
    """Raise EngineError when `model` is written as a path and nothing is there (vLLM would ask a hub for it)."""
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists():
        raise EngineError(f"model not found: the folder {model} does not exist")


#: Short and second spellings of vLLM options that matter here.
_ALIASES = {"-O": "--optimization-level", "-cc": "--compilation-config"}


def option_names(args: Sequence[str]) -> set[str]:
    """Return the options in `args` as vLLM reads them: dashes for underscores, no values, no `.key` parts."""
    names = set()
    for arg in args:
        if re.fullmatch(r"-O(=?\d+)?", arg):
            names.add(_ALIASES["-O"])
        elif arg.startswith("-") and not re.fullmatch(r"-[\d.]+", arg):
            name = re.split(r"[=.]", arg, maxsplit=1)[0].replace("_", "-")
            names.add(_ALIASES.get(name, name))
    return names


def _written(given: set[str], option: str) -> str | None:
    """Return how `option` is spelled in `given`, None when it isn't there; vLLM takes abbreviations (--scheduler-c)."""
    return next((name for name in sorted(given) if len(name) > 4 and option.startswith(name)), None)


def _value(args: Sequence[str], option: str) -> str | None:
    """Return the value that `args` gives to `option` (the last one, as argparse takes it), or None."""
    found = None
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == option:
            if equals:
                found = value
            elif i + 1 < len(args):
                found = args[i + 1]
    return found


def suggestion(unknown: str, known: Sequence[str]) -> str | None:
    """Return the known option that a mistyped one most likely means, or None."""
    close = difflib.get_close_matches(unknown.split("=")[0], known, n=1, cutoff=0.8)
    return close[0] if close else None


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of `host` that is free now (someone may take it before it is used)."""
    with _listening(host, 0) as sock:
        return int(sock.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raise EngineError naming the port when a server could not listen on it now."""
    try:
        _listening(host, port).close()
    except PermissionError:
        raise EngineError(f"port {port} on {host} needs more rights; use one above 1023") from None
    except OSError as error:
        raise EngineError(
            f"port {port} on {host} is taken or cannot be used ({error.strerror}); choose another with --port"
        ) from None


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise EngineError(f"host {host!r} cannot be resolved: {error.strerror}") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        sock.bind(address)
        sock.listen(1)
    except BaseException:
        sock.close()
        raise
    return sock
