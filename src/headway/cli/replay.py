"""`headway replay`: replay a trace against an OpenAI-compatible server and score SLOs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from headway.replay.ledger import Progress
    from headway.replay.store import Run
    from headway.trace.record import Trace

#: Exit codes beside 0 and those of `headway.errors`: the run is invalid (`Run.valid`); Ctrl-C.
INVALID, INTERRUPTED = 4, 130


def register(app: typer.Typer) -> None:
    """Add `headway replay`."""
    app.command("replay", help="Replay a trace against an OpenAI-compatible server and score SLOs.")(command)


def command(
    context: typer.Context,
    trace: Path | None = typer.Argument(
        None,
        help="Trace file of any format that `headway trace inspect` reads, or `demo` for a generated one.",
    ),
    url: str | None = typer.Option(None, help="Address of the server, http://host:port."),
    model: str | None = typer.Option(None, help="Served model; default: the first one the server lists."),
    slo: list[str] = typer.Option(
        [],
        "--slo",
        help="Targets of a class in seconds, `chat:ttft=1,tpot=0.12` (also tbt; `500ms`); repeatable.",
    ),
    out: Path | None = typer.Option(None, help="Folder of the run; default: runs/<UTC time>."),
    label: str = typer.Option("", help="Name of the run in tables."),
    format: str | None = typer.Option(None, help="Trace format, when it can't be told from the file."),
    rate: float | None = typer.Option(None, help="Scale time so that this many requests arrive a second."),
    time_scale: float = typer.Option(1.0, help="Speed: 2 plays the trace twice as fast."),
    start: float = typer.Option(0.0, help="Leave out what arrives before this second of the trace."),
    duration: float | None = typer.Option(None, help="Seconds of the trace to replay."),
    limit: int | None = typer.Option(None, help="At most so many requests."),
    max_input: int | None = typer.Option(None, help="Cap on prompt tokens."),
    max_output: int | None = typer.Option(None, help="Cap on output tokens."),
    class_rule: list[str] = typer.Option(
        [],
        "--class-rule",
        help="Class by prompt length, `chat<=400` or `document`; first match wins; repeatable.",
    ),
    seed: int = typer.Option(0, help="Seed of the prompts (and of a generated trace)."),
    prompts: str = typer.Option("text", help="`text`: real tokens of the served model; `tokens`: random ids."),
    tokenizer: Path | None = typer.Option(None, help="tokenizer.json of the served model, when it isn't found."),
    endpoint: str = typer.Option("completions", help="completions (exact prompts) or chat."),
    api_key: str | None = typer.Option(None, envvar="OPENAI_API_KEY", help="Bearer token.", show_envvar=True),
    slo_headers: bool = typer.Option(True, help="Tell the server each request's class and targets."),
    closed_loop: bool = typer.Option(False, help="Send later turns of a session after the previous one ended."),
    max_in_flight: int | None = typer.Option(
        None, help="Cap on open requests of this client; latency still counts from the schedule."
    ),
    timeout: float = typer.Option(600.0, help="Seconds from the send until a request counts as failed."),
    grace: float = typer.Option(60.0, help="Seconds after the last arrival until open requests are cut off."),
    find_capacity: float | None = typer.Option(
        None,
        "--find-capacity",
        metavar="SHARE",
        help="Search the highest rate with at least this attainment, 0.9 for capacity@90; a run a rate under --out.",
    ),
    self_test: bool = typer.Option(False, "--self-test", help="Measure this client against a scripted server."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Replay a trace; exit 2: bad input, 3: no server, 4: invalid (client slow, all failed, server gone), 130: ^C."""
    from headway.errors import InputError

    if self_test:
        _only_self_test(context)
        _self_test(as_json)
        return
    if trace is None or url is None:
        raise InputError("replay: expected TRACE and --url (or --self-test)")

    from rich.console import Console

    from headway.cli.given import read_trace
    from headway.printable import wide_console
    from headway.replay.client import replay
    from headway.replay.summary import summarise, table
    from headway.replay.targets import parse_slo

    def load(rate: float | None, seed: int) -> Trace:
        return read_trace(
            trace, format, seed, generated=100,
            start_s=start, duration_s=duration, limit=limit, time_scale=time_scale, rate=rate,
            max_input=max_input, max_output=max_output, classes=_class_rules(class_rule),
        )  # fmt: skip

    folder = out or Path("runs") / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    console = Console(stderr=True)

    def play(selected: Trace, folder: Path, seed: int) -> Run:
        with _Bar(console) as bar:
            return replay(
                selected, url=url, model=model, targets=parse_slo(slo), run_dir=folder, seed=seed, prompts=prompts,
                tokenizer=tokenizer, endpoint=endpoint, api_key=api_key, send_slo_headers=slo_headers,
                closed_loop=closed_loop, max_in_flight=max_in_flight, timeout_s=timeout, grace_s=grace, label=label,
                on_progress=bar.update,
            )  # fmt: skip

    if find_capacity is not None:
        if not slo:
            raise InputError("--find-capacity: no --slo: expected targets, without which everything attains")
        if time_scale != 1.0:
            raise InputError("--find-capacity and --time-scale: expected only one; --rate says where to start")
        _find_capacity(find_capacity, load, play, rate, seed, folder, as_json)
        return
    run = play(load(rate, seed), folder, seed)
    if as_json:
        typer.echo(json.dumps({"run": str(run.path), "meta": run.meta, "summary": summarise(run.frame)}, indent=2))
    else:
        wide_console().print(table(run))
    console.print(f"run kept in {run.path}", highlight=False)
    if run.meta["state"] == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if not run.valid:
        raise typer.Exit(INVALID)


def _find_capacity(
    share: float,
    load: Callable[[float | None, int], Trace],
    play: Callable[[Trace, Path, int], Run],
    start: float | None,
    seed: int,
    folder: Path,
    as_json: bool,
) -> None:
    """Search the rate; stop at once when the client was the bottleneck or was interrupted."""
    from dataclasses import asdict

    from headway.replay.capacity import search

    def measure(rate: float, number: int) -> tuple[int, int]:
        run = play(load(rate, seed + number), folder / f"{number:02d}-{rate:.4g}-per-s", seed + number)
        if run.meta["state"] == "interrupted":
            raise typer.Exit(INTERRUPTED)
        if not run.valid:
            typer.echo(f"headway: {run.path}: invalid: {'; '.join(run.meta['invalid_reasons'])}", err=True)
            raise typer.Exit(INVALID)
        attained = int(run.frame["attained"].sum())
        typer.echo(f"{rate:.4g} req/s: {attained} of {run.frame.height} attained", err=True)
        return attained, run.frame.height

    if start is None:
        first = load(None, seed)
        start = (len(first) - 1) / first.span_s if first.span_s > 0 else 1.0
    found = search(measure, target=share, start=start)
    if as_json:
        # Infinity is not JSON: an open end is null.
        high = found.high if found.high < float("inf") else None
        typer.echo(json.dumps({**asdict(found), "high": high}, indent=2))
        return
    runs = sum(probe.runs for probe in found.probes)
    typer.echo(
        f"capacity@{share * 100:g}: {found.rate:.4g} req/s, {found.confidence:.0%} interval {found.low:.4g} to "
        f"{found.high:.4g} (Wilson, each rate by itself), {runs} runs at {len(found.probes)} rates: {found.reason}"
    )


def _class_rules(texts: list[str]) -> list[tuple[str, int | None]] | None:
    from headway.errors import InputError

    rules: list[tuple[str, int | None]] = []
    for text in texts:
        name, bounded, raw = (part.strip() for part in text.partition("<="))
        # A sign in the name is a mistyped bound (`chat<400`), never the name of a class.
        if not name or set(name) & set("<>=:") or (bounded and not (raw.isdigit() and int(raw) > 0)):
            raise InputError(f"--class-rule {text!r}: expected CLASS or CLASS<=TOKENS, such as 'chat<=400'")
        rules.append((name, int(raw) if bounded else None))
    return rules or None


class _Bar:
    """Progress bar on stderr."""

    def __init__(self, console: object) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,  # type: ignore[arg-type]
            # Redrawn by `update` alone: a refresh thread would take time from the client it reports on.
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=None, state="asking the server")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, seen: Progress) -> None:
        """Show how far the replay is."""
        self._progress.update(
            self._task,
            total=seen.total,
            completed=seen.finished,
            state=f"{seen.in_flight} open, {seen.attained} in time, {seen.refused} refused, {seen.failed} failed",
        )
        self._progress.refresh()


def _only_self_test(context: typer.Context) -> None:
    """Raise `InputError` for anything on the command line that `--self-test` would not look at."""
    from headway.cli.given import on_command_line
    from headway.errors import InputError

    for parameter in context.command.params:
        if parameter.name in ("self_test", "as_json") or not on_command_line(context, parameter.name or ""):
            continue
        shown = max(parameter.opts, key=len) if parameter.param_type_name == "option" else "TRACE"
        raise InputError(
            f"{shown} {context.params[parameter.name]!s:.80} with --self-test: expected at most --json beside it: "
            "the self-test brings its own server and load"
        )


def _self_test(as_json: bool) -> None:
    from rich.console import Console

    from headway.replay.selftest import self_test

    report = self_test()
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        Console().print(report.table())
    if not report.passed:
        raise typer.Exit(INVALID)
