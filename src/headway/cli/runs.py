"""`headway runs`: list recorded runs, show one."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    """Add `headway runs list|show`."""
    group = typer.Typer(help="List and show recorded runs.", no_args_is_help=True)
    group.command("list")(list_runs)
    group.command("show")(show)
    app.add_typer(group, name="runs")


def list_runs(
    root: Path = typer.Argument(Path("runs"), help="Folder that holds run folders."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a line."),
) -> None:
    """List the runs in a folder, oldest first."""
    from rich.table import Table

    from headway.errors import InputError
    from headway.printable import plain, wide_console
    from headway.replay import store
    from headway.replay.summary import summarise

    if not root.is_dir():
        raise InputError(f"{root}: expected a folder that holds runs")
    lines = []
    for path in store.find(root):
        try:
            run = store.load(path)
        except InputError as error:
            typer.echo(f"headway: not listed: {error}", err=True)
            continue
        total = summarise(run.frame)["total"]
        lines.append(
            {
                "path": str(path),
                "label": run.meta.get("label"),
                "started_unix_s": run.meta.get("clock", {}).get("started_unix_s"),
                "kind": run.meta.get("kind"),
                "state": run.meta.get("state"),
                "valid": run.meta.get("valid"),
                "trace": run.meta.get("trace", {}).get("source"),
                "n": total["n"],
                "attainment": total["attainment"],
                "goodput_req_s": total["goodput_req_s"],
            }
        )
    lines.sort(key=lambda line: (line["started_unix_s"] or 0, line["path"]))
    if as_json:
        for line in lines:
            typer.echo(json.dumps(line))
        return
    view = Table(caption=f"{len(lines)} runs in {plain(root)}; attained = share of all offered requests")
    for name in ("run", "label", "kind", "state", "valid", "trace", "n", "attained", "goodput req/s"):
        view.add_column(name, overflow="fold")  # a path cut short names no run
    for line in lines:
        share, goodput = line["attainment"], line["goodput_req_s"]
        view.add_row(
            plain(line["path"]),
            plain(line["label"] or ""),
            plain(line["kind"] or "?"),
            plain(line["state"] or "?"),
            {True: "yes", False: "NO"}.get(line["valid"], "?"),
            plain(line["trace"] or "?"),
            str(line["n"]),
            "-" if share is None else f"{share * 100:.1f} %",
            "-" if goodput is None else f"{goodput:.2f}",
        )
    wide_console().print(view)


def show(
    path: Path = typer.Argument(..., help="Folder of the run."),
    as_json: bool = typer.Option(False, "--json", help="Summary and run.json as one JSON object."),
) -> None:
    """Show one run: its table and how it was made."""
    from headway.printable import plain, wide_console
    from headway.replay import store
    from headway.replay.summary import summarise, table

    run = store.load(path)
    if as_json:
        typer.echo(json.dumps({"meta": run.meta, "summary": summarise(run.frame)}, indent=2))
        return
    console = wide_console()
    console.print(table(run))
    trace, server = run.meta.get("trace", {}), run.meta.get("server", {})
    words = (
        f"trace {trace.get('source')} ({trace.get('format')}, sha256 {str(trace.get('sha256'))[:16]}), "
        f"seed {run.meta.get('seed')}; model {server.get('model')} on {server.get('version')}; "
        f"state {run.meta.get('state')}"
    )
    console.print(plain(words), highlight=False)
    for step in trace.get("selection") or []:
        console.print(f"  {plain(step)}", highlight=False)
