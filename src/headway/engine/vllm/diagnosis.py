"""Why a vLLM server ended early: its output turned into one clear error.

vLLM reports one failure several times, from the process where it happened up to the API server, each with a
traceback. The first exception line is the cause; the later ones only say that a child failed.
"""

from __future__ import annotations

import re
import signal

from headway.engine.vllm.launch import Command, suggestion
from headway.errors import EngineError, HeadwayError, InputError

#: Options that a mistyped one is compared with.
SERVE_OPTIONS = ("--admission", "--policy", "--config", "--stock", "--host", "--port")

LAST_LINES = 15

# "(EngineCore pid=1) ERROR 11-29 14:24:59 [core.py:1510] " in front of a line
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:(?:ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]+\] )?")
_EXCEPTION = re.compile(r"^(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|NotFound\w*|Interrupt|Exit): .+")
_PYDANTIC = re.compile(r"^\s*Value error, (.+?)(?: \[type=.*)?$")
_ARGPARSE = re.compile(r"^[\w.]+: error: (.+)$")

_MODEL_MISSING = (
    "LocalEntryNotFoundError",
    "RepositoryNotFoundError",
    "GatedRepoError",
    "couldn't find them in the cached files",
    "is not a valid model identifier",
    "Repo id must be",
    "Invalid repository ID or local directory",
    "Unrecognized model in",
    "does not appear to have a file named",
    "Cannot find any model weights",
)
_NO_MEMORY = (
    "CUDA out of memory",
    "OutOfMemoryError",
    "HIP out of memory",
    "MemoryError",
    "can't allocate memory",
    "not enough GPU memory",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "is less than requested memory for kv",
    "less than desired GPU memory utilization",
    "Cannot allocate memory",
    "No space left on device",  # shared memory between vLLM's processes
)
_POINTERS = ("See root cause above", "please check the stack trace above")
_PORT_TAKEN = ("Address already in use", "address already in use")


def diagnose(output: str, code: int, command: Command) -> HeadwayError:
    """Return the error that explains why the server `command` ended with exit code `code`.

    `output` is the end of what it printed. A refused option is the caller's (InputError), the rest are
    EngineErrors; an unknown cause is shown as the last lines of the output.
    """
    lines = [_PREFIX.sub("", line).rstrip() for line in output.splitlines()]
    if refused := _first(_ARGPARSE, lines):
        return InputError(f"vLLM refused its options: {refused}{_hint(refused)}")
    cause = _cause(lines)
    if _any(_PORT_TAKEN, lines):
        return EngineError(f"port {command.port} on {command.host} was taken while vLLM started")
    if found := _any(_NO_MEMORY, lines):
        return EngineError(
            f"not enough memory to serve {command.model}: {_shorten(cause or found)} (lower --max-model-len, "
            "--max-num-seqs or --gpu-memory-utilization, on a CPU VLLM_CPU_KVCACHE_SPACE, in GiB)"
        )
    if found := _any(_MODEL_MISSING, lines):
        return EngineError(
            f"model {command.model} was not found or cannot be read: {_shorten(cause or found)} (expected a folder "
            "with config.json and weights, or a name that the Hugging Face hub knows and this machine can reach)"
        )
    if code == 128 + signal.SIGKILL:
        return EngineError(
            f"vLLM was killed while it served {command.model}; when the system did that, memory ran out (see `dmesg`)"
        )
    if cause:
        return EngineError(f"vLLM ended with exit code {code}: {_shorten(cause)}")
    last = "\n".join(f"  {line}" for line in output.splitlines()[-LAST_LINES:])
    return EngineError(f"vLLM ended with exit code {code}; its last lines:\n{last}")


def _cause(lines: list[str]) -> str | None:
    """Return the first exception that says something, without the ones that only point at another."""
    telling = [line for line in lines if not any(phrase in line for phrase in _POINTERS)]
    return _first(_PYDANTIC, telling) or _first(_EXCEPTION, telling)


def _first(pattern: re.Pattern[str], lines: list[str]) -> str | None:
    for line in lines:
        if match := pattern.match(line):
            return match.group(match.lastindex or 0)
    return None


def _any(phrases: tuple[str, ...], lines: list[str]) -> str | None:
    return next((line.strip() for line in lines if any(phrase in line for phrase in phrases)), None)


def _shorten(line: str, limit: int = 300) -> str:
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _hint(message: str) -> str:
    unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
    meant = suggestion(unknown.group(1), SERVE_OPTIONS) if unknown else None
    return f" (did you mean {meant}?)" if meant else ""
