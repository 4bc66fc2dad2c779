"""`headway serve`: vLLM's OpenAI-compatible server with SLOs, in the foreground."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from headway.errors import EngineError, HeadwayError, InputError

if TYPE_CHECKING:
    from headway.engine.vllm.server import Server

HELP = """Serve MODEL with SLOs through vLLM's OpenAI-compatible server; without MODEL the embedded SmolLM2.

MODEL comes first. Every option that is not listed here goes to vLLM unchanged: see vLLM's documentation of
`vllm serve`. After `--` everything does, also an option of the same name (`-- --config vllm.yaml`).
"""


_CLAIRVOYANT = "knows what is still to come, so it is for the twin: expected another admission test"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command(
        name="serve",
        help=HELP,
        options_metavar="[MODEL] [OPTIONS] [VLLM OPTIONS]",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def serve(
        ctx: typer.Context,
        host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
        config: Annotated[Path | None, typer.Option(metavar="headway.toml", help="SLO classes and settings.")] = None,
        policy: Annotated[str | None, typer.Option(help="Ordering and step size, over the config's.")] = None,
        admission: Annotated[str | None, typer.Option(help="Admission test, over the config's.")] = None,
        stock: Annotated[bool, typer.Option("--stock", help="Plain vLLM, without Headway.")] = False,
        calibrate: Annotated[
            bool, typer.Option(help="Learn the step cost from a short sweep at the start, beside what comes.")
        ] = True,
    ) -> None:
        words = list(ctx.args)
        model = words.pop(0) if words and not words[0].startswith("-") else None
        # What can be wrong without an engine is found before the seconds that an engine takes.
        _check_names(policy, admission)
        if config is not None:
            from headway import config as settings

            named = settings.load(config).admission
            if admission is None and _clairvoyant(named):
                raise InputError(f"{config}: admission = {named!r}: {_CLAIRVOYANT}")

        from headway.engine.vllm import launch, versions
        from headway.engine.vllm import model as models
        from headway.engine.vllm.server import Server

        version = versions.check()
        if port:
            launch.check_port(host, port)
        if model is None and "--model" not in launch.option_names(words):
            models.embedded_model(progress=_say)
        command = launch.command(
            model=model,
            host=host,
            port=port,
            stock=stock,
            config=config,
            policy=policy,
            admission=admission,
            extra=words,
        )
        _say(f"starting vLLM {version}{'' if stock else ' with Headway'} for {command.model}")
        raise typer.Exit(run(Server(command), calibrate=calibrate and not stock))


def run(server: Server, *, calibrate: bool = False) -> int:
    """Serve (after a calibration sweep) until the server ends or is asked to stop; return the exit code.

    SIGINT, SIGTERM and SIGHUP are passed on. Raises the explaining HeadwayError when the server ends by itself
    with a failure.
    """
    asked: list[int] = []
    ready = False

    def forward(number: int, _frame: FrameType | None) -> None:
        if not asked and ready and server.command.drain_s:
            # Not through a stream: a signal may come in the middle of another line.
            text = f"headway: stopping; streams have {server.command.drain_s:g} s to end (Ctrl-C twice: at once)\n"
            os.write(1, text.encode())
        asked.append(number)
        server.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        server.start()
        try:
            seconds = server.wait_ready()
        except HeadwayError:
            if asked:
                return 128 + asked[0]
            raise
        ready = True
        if calibrate:
            from headway.engine.vllm import calibrate as calibration

            _say("calibrating: a few prompts teach the step cost")
            try:
                calibration.sweep(server.url, server.model, headway=True, api_key=server.command.api_key)
            except EngineError as error:
                # It serves all the same, and learns from the requests that come.
                _say(f"not calibrated: {error}")
        _say(f"serving {server.model} on {server.url}/v1 (ready after {seconds:.0f} s)")
        code = server.wait()
        if code and not asked:
            raise server.explain(code)
        return code
    finally:
        server.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_names(policy: str | None, admission: str | None) -> None:
    """Raise InputError listing the known names when one is unknown."""
    from headway.admission import REGISTRY as ADMISSIONS
    from headway.policies import REGISTRY as POLICIES

    for option, name, known in (("--policy", policy, POLICIES), ("--admission", admission, ADMISSIONS)):
        if name is not None and _clairvoyant(name):
            raise InputError(f"{option} {name}: {_CLAIRVOYANT}")
        if name is not None and name not in known:
            possible = [each for each in known if not _clairvoyant(each)]
            raise InputError(f"{option} {name}: expected one of {', '.join(possible)}")


def _clairvoyant(admission: str) -> bool:
    """Whether an admission test must be told what is still to come, as only the twin can."""
    from headway.admission import REGISTRY

    return getattr(REGISTRY.get(admission), "clairvoyant", False)


def _say(line: str) -> None:
    typer.echo(f"headway: {line}")
