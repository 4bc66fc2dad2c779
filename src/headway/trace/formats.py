"""The table of trace formats, and `read`, the one way in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headway.errors import InputError
from headway.trace.assemble import Rows, assemble
from headway.trace.readers import (
    azure,
    bailian,
    burstgpt,
    flight_log,
    headway_jsonl,
    llmservingsim,
    load_tools,
    mooncake,
    otel,
    servegen,
)
from headway.trace.record import Trace
from headway.trace.source import Source


class Format(NamedTuple):
    """One line of the table: what the format is, whether a source is one, how its rows are read."""

    help: str
    fits: Callable[[Source], bool]
    read: Callable[..., Rows]
    profile: bool = False  # requests are drawn, so `read` takes a seed and a part


#: Name -> format. `fits` looks at header AND first row; exactly one may fit a file.
FORMATS: dict[str, Format] = {
    "headway-jsonl": Format("Headway's own JSON lines", headway_jsonl.fits, headway_jsonl.read),
    "headway-run": Format("requests.parquet of a Headway run", flight_log.fits, flight_log.read),
    "azure2023": Format("Azure LLM inference trace 2023, CSV", azure.fits_2023, azure.read_2023),
    "azure2024": Format("Azure LLM inference trace 2024, CSV", azure.fits_2024, azure.read_2024),
    "burstgpt": Format("BurstGPT, CSV with six or eight columns", burstgpt.fits, burstgpt.read),
    "mooncake": Format("Mooncake JSON lines, 512-token hash ids", mooncake.fits, mooncake.read),
    "qwen-bailian": Format("Qwen-Bailian JSON lines, 16-token hash ids", bailian.fits, bailian.read),
    "llmservingsim": Format(
        "LLMServingSim workload or measured run, JSON lines", llmservingsim.fits, llmservingsim.read
    ),
    "servegen": Format("ServeGen client profiles, a folder", servegen.fits, servegen.read, profile=True),
    "vllm-bench": Format("vllm bench serve --save-detailed", load_tools.fits_vllm_bench, load_tools.read_vllm_bench),
    "aiperf": Format("AIPerf profile_export.jsonl", load_tools.fits_aiperf, load_tools.read_aiperf),
    "guidellm": Format("GuideLLM benchmarks.json", load_tools.fits_guidellm, load_tools.read_guidellm),
    "inference-perf": Format(
        "inference-perf per_request_lifecycle_metrics.json",
        load_tools.fits_inference_perf,
        load_tools.read_inference_perf,
    ),
    "otel-genai": Format("OpenTelemetry GenAI spans, JSON", otel.fits, otel.read),
}


def read(
    path: str | Path,
    format: str | None = None,
    *,
    zero_output: str = "drop",
    seed: int = 0,
    start_s: float = 0.0,
    duration_s: float | None = None,
) -> Trace:
    """Return the trace in the file (or folder) `path`.

    `format` is a name of `FORMATS`; None finds it from the content and refuses unless exactly one fits.
    `zero_output` says what becomes of requests that generated nothing: "drop" (counted in the report) or
    "one" (kept with one output token, so that the load of their prompts stays). `seed`, `start_s` and
    `duration_s` concern profiles only (ServeGen), from which requests are drawn: the seed, and the part of
    the profile in seconds; of a recorded trace take a part with `select`. Raises `InputError`, naming file,
    line and value.
    """
    source = Source(Path(path))
    name = format if format is not None else detect(source)
    if name not in FORMATS:
        raise InputError(f"format = {name!r}: expected one of {', '.join(FORMATS)}")
    known = FORMATS[name]
    if source.is_folder and not known.fits(source):
        raise InputError(f"{source.path}: a folder: expected a {name} file")
    if known.profile:
        rows = known.read(source, seed=seed, start_s=start_s, duration_s=duration_s)
    elif start_s or duration_s is not None:
        raise InputError(f"{source.path}: {name} is a recorded trace: expected a part to be taken with select")
    else:
        rows = known.read(source)
    return assemble(source, name, rows, zero_output=zero_output)


def detect(source: Source) -> str:
    """Return the name of the only format that fits; `InputError` when none or several do."""
    names = [name for name, format in FORMATS.items() if format.fits(source)]
    if len(names) == 1:
        return names[0]
    if names:
        raise InputError(f"{source.path}: fits several trace formats ({', '.join(names)}): name one")
    if not source.is_folder and (why := azure.explain(source)):
        raise why
    what = "a folder" if source.is_folder else repr(next(iter(source.head_lines()), "")[:120])
    where = source.path if source.is_folder else f"{source.path}:1"
    raise InputError(f"{where}: {what}: expected a request trace in one of the formats {', '.join(FORMATS)}")
