"""The run store: a run is a folder with `run.json` and `requests.parquet`.

While a run is going on, finished requests are appended to `requests.jsonl.part`, a line each, flushed at once; the
Parquet file is written at the end. A killed run keeps every request that finished: `load` reads the part file.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from headway.errors import InputError
from headway.replay.record import SCHEMA, STATUSES

META, TABLE, PART = "run.json", "requests.parquet", "requests.jsonl.part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A recorded run: its folder, what is known about it, and one row a request (`record.SCHEMA`)."""

    path: Path
    meta: dict
    frame: pl.DataFrame

    @property
    def valid(self) -> bool:
        """Whether the numbers mean anything: the client was fast enough and the server served or refused something."""
        return bool(self.meta.get("valid", False))


class RunWriter:
    """Writes one run folder. `open`, then `append` for each finished request, then `close`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if any((self.path / name).exists() for name in (META, TABLE, PART)):
            raise InputError(f"{self.path}: holds a run already: expected a new folder")
        self._part = None

    def open(self, meta: dict) -> None:
        """Create the folder and write `run.json` as far as it is known; `InputError` where that can't be done."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_meta(self.path, meta)
            self._part = open(self.path / PART, "wb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror}: expected a new folder") from None

    def append(self, row: dict) -> None:
        """Add one finished request."""
        self._part.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        self._part.flush()

    def close(self, meta: dict) -> Run:
        """Write the Parquet file and the final `run.json`, remove the part file, and return the run."""
        self._part.close()
        return save(self.path, meta, read_part(self.path / PART))


def save(path: Path, meta: dict, frame: pl.DataFrame) -> Run:
    """Write a whole run into the folder `path` and return it; the frame must have the columns of `SCHEMA`."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    frame = frame.select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items()).sort("index")
    scratch = path / (TABLE + ".tmp")
    frame.write_parquet(scratch)
    os.replace(scratch, path / TABLE)
    write_meta(path, meta)
    (path / PART).unlink(missing_ok=True)
    return Run(path=path, meta=meta, frame=frame)


def load(path: Path) -> Run:
    """Return the run in the folder `path`, a killed one too (`meta["state"]` is then `running`).

    Raises `InputError` when the folder holds no run or a file of it can't be read.
    """
    path = Path(path)
    try:
        meta = json.loads((path / META).read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: no {META} in it: expected the folder of a run") from None
    except OSError as error:
        raise InputError(f"{path / META}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path / META}: not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise InputError(f"{path / META}: {meta!r:.80}: expected the JSON object of a run")
    for key in ("client", "clock", "load", "machine", "server", "targets", "trace"):
        if not isinstance(meta.get(key, {}), dict):
            raise InputError.at(path / META, None, key, meta[key], "an object")
    try:
        frame = pl.read_parquet(path / TABLE) if (path / TABLE).exists() else read_part(path / PART)
        # A run of an older version may lack columns added since.
        missing = [pl.lit(None, dtype=dtype).alias(name) for name, dtype in SCHEMA.items() if name not in frame.columns]
        frame = frame.with_columns(missing).select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
    except FileNotFoundError:
        raise InputError(f"{path}: neither {TABLE} nor {PART} in it: expected the folder of a run") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise InputError(f"{path}: the table of requests can't be read: {str(error).splitlines()[0]}") from None
    if not frame.select(
        (pl.col("status").is_in(STATUSES) & pl.col("scheduled_s").is_finite()).fill_null(False).all()
    ).item():
        raise InputError(
            f"{path}: a request without one of the statuses {', '.join(STATUSES)} or without scheduled_s: expected the "
            "requests of a run"
        )
    return Run(path=path, meta=meta, frame=frame)


def read_part(path: Path) -> pl.DataFrame:
    """Return the rows of a part file ordered by index; a last line cut short by a kill is left out."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:
        return pl.DataFrame(schema=SCHEMA)
    return pl.read_ndjson(whole, schema=SCHEMA).sort("index")


def write_meta(path: Path, meta: dict) -> None:
    """Write `run.json` in one move, so that a reader never sees half of it."""
    scratch = Path(path) / (META + ".tmp")
    scratch.write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
    os.replace(scratch, Path(path) / META)


def find(root: Path) -> list[Path]:
    """Return the run folders under `root` (itself included, two levels deep), in order of name."""
    root = Path(root)
    return sorted(file.parent for depth in ("", "*/", "*/*/") for file in root.glob(depth + META))
