"""`headway trace`: inspect, convert, synthesize and record request traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headway.trace import Trace
    from headway.trace.shape import TraceShape

Format = Annotated[str | None, typer.Option(help="Format of the file; found from its content when left out.")]
Start = Annotated[float, typer.Option(help="Begin of the window, seconds of the trace.")]
Duration = Annotated[float | None, typer.Option(help="Length of the window, seconds of the trace.")]
Limit = Annotated[int | None, typer.Option(help="Most requests, the first of the window.")]
Spread = Annotated[float | None, typer.Option(help="Spread arrivals rounded to ticks of this many seconds.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
ZeroOutput = Annotated[str, typer.Option(help="Requests with no output: drop them, or keep them with one token (one).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Quiet = Annotated[bool, typer.Option("--no-chart", help="Leave out the chart.")]


def register(app: typer.Typer) -> None:
    """Add the `trace` command and its four parts."""
    trace = typer.Typer(help="Inspect, convert, synthesize or record request traces.", no_args_is_help=True)
    trace.command("inspect")(inspect)
    trace.command("convert")(convert)
    trace.command("synthesize")(synthesize)
    trace.command("record")(record)
    app.add_typer(trace, name="trace")


def inspect(
    path: Annotated[Path, typer.Argument(help="Trace file, or folder of a run or of ServeGen profiles.")],
    format: Format = None,
    start: Start = 0.0,
    duration: Duration = None,
    limit: Limit = None,
    spread: Spread = None,
    seed: Seed = 0,
    zero_output: ZeroOutput = "drop",
    html: Annotated[Path | None, typer.Option(help="Write a page with charts; it needs no network.")] = None,
    json: AsJson = False,
    no_chart: Quiet = False,
) -> None:
    """Print the shape of a trace: rates, burstiness, lengths, shared prefixes, sessions."""
    from headway.cli.given import write_named
    from headway.trace.charts import html_page
    from headway.trace.shape import shape

    trace = _load(path, format, zero_output, seed, start, duration, limit=limit, spread_s=spread)
    found = shape(trace)
    if json:
        _print_json(_as_dict(trace, found))
    else:
        _print_shape(trace, found, chart=not no_chart)
    if html is not None:
        write_named(html, html_page(trace, found))
        typer.echo(f"wrote {html}", err=True)


def convert(
    source: Annotated[Path, typer.Argument(help="Trace in any known format.")],
    target: Annotated[Path, typer.Argument(help="Headway JSONL file to write.")],
    format: Format = None,
    start: Start = 0.0,
    duration: Duration = None,
    limit: Limit = None,
    time_scale: Annotated[float, typer.Option(help="2 is twice as fast.")] = 1.0,
    rate: Annotated[float | None, typer.Option(help="Mean requests/s instead of a time scale.")] = None,
    max_input: Annotated[int | None, typer.Option(help="Clip prompts to this many tokens.")] = None,
    max_output: Annotated[int | None, typer.Option(help="Clip outputs to this many tokens.")] = None,
    input_scale: Annotated[float, typer.Option(help="Factor for prompt lengths.")] = 1.0,
    output_scale: Annotated[float, typer.Option(help="Factor for output lengths.")] = 1.0,
    classes: Annotated[
        str | None,
        typer.Option(help="Rules NAME=LARGEST_PROMPT, first that covers wins: chat=400,document=any."),
    ] = None,
    spread: Spread = None,
    seed: Seed = 0,
    zero_output: ZeroOutput = "drop",
) -> None:
    """Read a trace, cut and scale it as asked, and write it as Headway JSONL."""
    from dataclasses import replace

    from headway.errors import InputError
    from headway.trace import write

    trace = _load(
        source,
        format,
        zero_output,
        seed,
        start,
        duration,
        limit=limit,
        time_scale=time_scale,
        rate=rate,
        max_input=max_input,
        max_output=max_output,
        input_scale=input_scale,
        output_scale=output_scale,
        classes=None if classes is None else _rules(classes),
        spread_s=spread,
    )
    if trace.format != "headway-jsonl":
        origin = f"from {trace.source} ({trace.format}, sha256 {trace.sha256})"
        trace = replace(trace, history=(origin, *trace.history))
    if target.resolve() == source.resolve():
        raise InputError(f"{target}: is the source itself: expected another file")
    write(trace, target)
    _print_written(trace, target)


def synthesize(
    context: typer.Context,
    target: Annotated[Path, typer.Argument(help="Headway JSONL file to write.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Trace whose shape is fitted; none of its rows is written.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Write the demo trace instead of fitting one.")] = False,
    kind: Annotated[
        str | None,
        typer.Option(help="Kind of the demo trace: mixed, chat, documents, single.", show_default="mixed"),
    ] = None,
    n: Annotated[int | None, typer.Option(help="Requests; as many as the source when left out.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of the demo trace, instead of --n.")] = None,
    rate: Annotated[float | None, typer.Option(help="Mean requests/s; that of the source when left out.")] = None,
    seed: Seed = 0,
    format: Format = None,
    zero_output: ZeroOutput = "drop",
) -> None:
    """Fit a trace and write one of the same shape that holds nothing of it; or write the demo trace."""
    from headway.cli.given import on_command_line
    from headway.errors import InputError
    from headway.trace import write
    from headway.trace.shape import shape
    from headway.trace.synthesis import synthesize as draw
    from headway.trace.synthetic import demo_trace

    if demo == (source is not None):
        raise InputError("synthesize: expected exactly one of --from FILE and --demo")
    if demo:
        if rate is None:
            raise InputError("--demo: expected --rate, the mean requests/s")
        if format is not None:
            raise InputError(f"--format {format}: only for --from: expected no format with --demo")
        if on_command_line(context, "zero_output"):
            raise InputError(
                f"--zero-output {zero_output}: only for --from: every request of the demo trace has output"
            )
        if (n is None) == (duration is None):
            raise InputError("--demo: expected exactly one of --n and --duration")
        made = demo_trace(rate=rate, seed=seed, n=n, duration_s=duration, kind="mixed" if kind is None else kind)
    else:
        assert source is not None
        if target.resolve() == source.resolve():
            raise InputError(f"{target}: is the source itself: expected another file")
        if duration is not None:
            raise InputError(f"--duration = {duration:g}: only for --demo: expected --n")
        if kind is not None:
            raise InputError(f"--kind {kind}: only for --demo: with --from the kind is that of the source")
        trace = _load(source, format, zero_output, seed, 0.0, None)
        made = draw(trace, n=n, rate=rate, seed=seed)
        _print_fit(shape(trace), shape(made))
    write(made, target)
    _print_written(made, target)


def record(
    target: Annotated[Path, typer.Argument(help="New recording to write (Headway JSONL).")],
    upstream: Annotated[str, typer.Option(help="OpenAI-compatible server to stand in front of, http://host:port.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8001,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json of the model, for exact token blocks in the hashes.")
    ] = None,
    session_header: Annotated[
        str | None, typer.Option(help="Header that names the conversation; only its salted hash is kept.")
    ] = None,
) -> None:
    """Stand in front of a server and record its traffic as lengths, times and salted hashes: never text."""
    import asyncio

    from headway.trace.capture import serve

    def ready(address: str) -> None:
        typer.echo(f"recording {address} -> {upstream} into {target}; stop with Ctrl-C", err=True)

    kept, dropped = asyncio.run(
        serve(
            target,
            upstream=upstream,
            host=host,
            port=port,
            tokenizer=tokenizer,
            session_header=session_header,
            ready=ready,
        )
    )
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
    typer.echo(f"{target}: {kept:,} requests; without lengths: {reasons}", err=True)


def _load(
    path: Path,
    format: str | None,
    zero_output: str,
    seed: int,
    start: float,
    duration: float | None,
    **settings: Any,
) -> Trace:
    """Read `path` and take the part asked for: from a profile as it is drawn, from a recorded trace afterwards."""
    from headway.trace import FORMATS, read, select
    from headway.trace.formats import detect
    from headway.trace.source import Source

    name = format if format is not None else detect(Source(path))
    if name in FORMATS and FORMATS[name].profile:
        trace = read(path, name, zero_output=zero_output, seed=seed, start_s=start, duration_s=duration)
        return select(trace, seed=seed, **settings)
    trace = read(path, name, zero_output=zero_output)
    return select(trace, start_s=start, duration_s=duration, seed=seed, **settings)


def _rules(text: str) -> list[tuple[str, int | None]]:
    from headway.errors import InputError

    rules: list[tuple[str, int | None]] = []
    for part in text.split(","):
        # `chat<=400`, as in `replay --class-rule`, is `chat=400`.
        name, sign, cap = (piece.strip() for piece in part.replace("<=", "=", 1).partition("="))
        if not name or not sign or not (cap == "any" or cap.isdecimal()):
            raise InputError(f"--classes: {part!r}: expected NAME=TOKENS or NAME=any, separated by commas")
        rules.append((name, None if cap == "any" else int(cap)))
    return rules


def _as_dict(trace: Trace, found: TraceShape) -> dict[str, Any]:
    from headway.trace.shape import PERCENTILE_METHOD

    report = {"read": trace.report.read, "kept": trace.report.kept, "dropped": trace.report.dropped}
    origin = {"source": trace.source, "format": trace.format, "sha256": trace.sha256, "report": report}
    return {**origin, "history": trace.history, "percentiles": PERCENTILE_METHOD, **found.as_dict()}


def _print_json(value: dict[str, Any]) -> None:
    import json

    typer.echo(json.dumps(value, indent=2))


def _print_shape(trace: Trace, found: TraceShape, *, chart: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from headway.printable import plain
    from headway.trace.charts import facts, terminal_lines
    from headway.trace.shape import PERCENTILE_METHOD

    console = Console(highlight=False)
    console.print(plain(trace.source))
    names = Table(box=None, show_header=False)
    names.add_column()
    names.add_column(overflow="fold")
    for name, text in facts(trace, found):
        names.add_row(name, plain(text))
    console.print(names)
    lengths = Table(box=None)
    for column in ("", "mean", "p50", "p90", "p99", "max"):
        lengths.add_column(column, justify="right" if column else "left")
    for name in ("input_tokens", "output_tokens", "context_tokens"):
        row = getattr(found, name)
        lengths.add_row(
            name.removesuffix("_tokens"),
            f"{row.mean:,.1f}",
            *(f"{getattr(row, column):,.0f}" for column in ("p50", "p90", "p99", "max")),
        )
    console.print(f"\ntokens a request, as recorded (n = {found.n:,}, {PERCENTILE_METHOD})", soft_wrap=True)
    console.print(lengths)
    if chart:
        console.print()
        for line in terminal_lines(trace, min(100, max(20, console.width - 2))):
            console.print(line, markup=False, no_wrap=True, overflow="ignore", crop=False)
    for text in found.warnings:
        console.print(f"\nwarning: {plain(text)}")
    if trace.history:
        console.print()
    for text in trace.history:
        console.print(f"note: {plain(text)}")


def _print_fit(source: TraceShape, made: TraceShape) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in ("", "source", "synthesized"):
        table.add_column(column, justify="right" if column else "left")
    pairs: list[tuple[str, float | None, float | None]] = [
        ("requests", source.n, made.n),
        ("requests/s", source.rate, made.rate),
        ("CV of gaps", source.gap_cv, made.gap_cv),
        ("index of dispersion, 1 s", source.dispersion, made.dispersion),
    ]
    for name in ("input_tokens", "output_tokens"):
        for point in ("p50", "p90", "p99"):
            pair = (getattr(getattr(side, name), point) for side in (source, made))
            pairs.append((f"{name} {point}", *pair))
    if source.prefixes is not None:
        share = None if made.prefixes is None else made.prefixes.hit_block_share
        pairs.append(("blocks seen before", source.prefixes.hit_block_share, share))
    if source.sessions is not None:
        pairs.append(("sessions", source.sessions.sessions, made.sessions and made.sessions.sessions))
    for name, first, second in pairs:
        table.add_row(name, *("-" if value is None else f"{value:,.4g}" for value in (first, second)))
    Console(highlight=False).print(table)


def _print_written(trace: Trace, target: Path) -> None:
    from headway.printable import printable

    for note in trace.history:
        typer.echo(f"note: {printable(note)}", err=True)
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in trace.report.dropped.items()) or "none"
    typer.echo(
        f"{target}: {len(trace):,} requests over {trace.span_s:.6g} s "
        f"(source: {trace.report.read:,} rows read, dropped: {dropped})",
        err=True,
    )
