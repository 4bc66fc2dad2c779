"""The demo's table and the two sentences that say what it means."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from headway.demo.duel import Cell, spread
from headway.demo.systems import System


def table(cells: Sequence[Cell], systems: Sequence[System], capacity: float) -> Table:
    """Return the comparison: a row a load and system; medians over seeds, with [least, greatest] of attainment."""
    seeds = sorted({c.seed for c in cells})
    classes = sorted({name for c in cells for name in c.summary["classes"]})
    flags = "; ".join(f"{s.title}: {s.flags}" for s in systems if s.flags)
    view = Table(
        title=f"Capacity of stock vLLM with defaults on this trace: {capacity:.2f} requests/s",
        caption=(
            f"n = requests offered a run; {len(seeds)} seed(s), medians"
            + (" and \\[least, greatest]" if len(seeds) > 1 else "")
            + ". attained = share of ALL offered requests that met every target; refused, failed and cut-off ones did "
            "not. missed = share of the accepted that broke a target. TTFT from the scheduled arrival; P50/P99 by "
            f"nearest rank over requests served. {flags}"
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    view.add_column("load", justify="right", no_wrap=True)
    view.add_column("system", no_wrap=True)
    columns = ["n", "attained", *(classes if len(classes) > 1 else ()), "refused", "missed", "TTFT s", "TPOT ms"]
    for name in columns:
        view.add_column(name, justify="right", no_wrap=True)
    for load in sorted({c.load for c in cells}):
        for i, system in enumerate(systems):
            mine = [c for c in cells if c.load == load and c.system.name == system.name]
            if not mine:
                continue

            def median(value, system=system, load=load):
                found = spread(cells, system, load, value)
                return None if found is None else found.median

            attained = spread(cells, system, load, lambda s: s["total"]["attainment"])
            assert attained is not None
            text = _percent(attained.median)
            if len(mine) > 1:
                text += f" [{100 * attained.low:.0f}, {100 * attained.high:.0f}]"
            row = [f"{load:g}x" if i == 0 else "", system.title, str(mine[0].summary["total"]["n"]), text]
            if len(classes) > 1:
                row += [
                    _percent(median(lambda s, name=name: s["classes"].get(name, {}).get("attainment")))
                    for name in classes
                ]
            row += [
                _percent(median(lambda s: s["total"]["refused"] / s["total"]["n"])),
                _percent(median(lambda s: s["total"]["miss_share"])),
                f"{_number(median(lambda s: s['total']['ttft']['p50_s']), 1)}/"
                f"{_number(median(lambda s: s['total']['ttft']['p99_s']), 1)}",
                f"{_number(median(lambda s: s['total']['tpot']['p50_s']), 0, 1e3)}/"
                f"{_number(median(lambda s: s['total']['tpot']['p99_s']), 0, 1e3)}",
            ]
            view.add_row(*row, end_section=i == len(systems) - 1)
    return view


def meaning(cells: Sequence[Cell], systems: Sequence[System]) -> str:
    """Return two sentences: what happened above capacity, and whether the numbers can be trusted."""
    load = max(c.load for c in cells)
    share = {
        s.name: found.median
        for s in systems
        if (found := spread(cells, s, load, lambda x: x["total"]["attainment"])) is not None
    }
    missed = spread(cells, systems[-1], load, lambda x: x["total"]["miss_share"])
    others = ", ".join(f"{s.title} {_percent(share[s.name])}" for s in systems[:-1])
    own = share[systems[-1].name]
    # A reason for being ahead, not for being behind.
    ahead = own is not None and all(own > (share[s.name] or 0.0) for s in systems[:-1])
    first = (
        f"At {load:g}x capacity Headway met every target for {_percent(own)} of all requests "
        f"({others}){', because' if ahead else ';'} it refused at once what it could not serve in time"
        + (f" and broke {_percent(missed.median)} of the promises it made." if missed is not None else ".")
    )
    bad = [c for c in cells if not c.run.valid]
    second = (
        f"{len(bad)} of {len(cells)} runs are marked invalid (the load generator was late, or nothing was served; "
        "`headway runs show` says which), so repeat them on a quieter machine before quoting a number."
        if bad
        else f"In all {len(cells)} runs the load generator kept its schedule, so the numbers are the servers'."
    )
    return f"{first} {second}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%" if share >= 0.0995 or share == 0 else f"{100 * share:.1f}%"


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"
