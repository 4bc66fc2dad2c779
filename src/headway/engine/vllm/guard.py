"""A small process between Headway and vLLM that leaves nothing behind.

vLLM is a tree: the API server, an EngineCore, workers. When whoever started it is killed (even by SIGKILL),
this process notices, asks the tree to stop, and kills what is still there after a while. Run as a script, on
the standard library alone, so that it starts in milliseconds:

    python guard.py OWNER_PID GRACE_S COMMAND...

The owner must be the direct parent: a parent of another id means that the owner is gone. SIGTERM, SIGINT and
SIGHUP stop the tree as well, a second SIGINT at once, SIGUSR1 soon: nothing is served yet that could end in order. It
leaves with the command's exit code (128 + n after signal n).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1

#: What vLLM gets to clean up when it is stopped while it starts; it would first finish starting.
SOON_S = 2.0


def main(argv: list[str]) -> int:
    """Run the command `argv[2:]` until it ends or must be stopped; return its exit code."""
    owner, grace_s, command = int(argv[0]), float(argv[1]), argv[2:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # Orphans of the tree become our children, so that /proc still shows them as ours.
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, ask)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # Should this process be killed by SIGKILL, the API server still stops and takes its children along.
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
    )
    while child.poll() is None and not asked:
        time.sleep(POLL_S)
        if os.getppid() != owner:
            asked.append(signal.SIGTERM)
    if asked:
        stop(child, asked, grace_s)
    sweep()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def stop(child: subprocess.Popen[bytes], asked: list[int], grace_s: float) -> None:
    """Forward the first signal and wait up to `grace_s` seconds for the command to end by itself.

    After SIGUSR1 it has `SOON_S` at most; a second Ctrl-C does not wait.
    """
    if child.poll() is None:
        child.send_signal(signal.SIGTERM if asked[0] == signal.SIGUSR1 else asked[0])
    began = time.monotonic()
    while child.poll() is None:
        waits_s = min(grace_s, SOON_S) if signal.SIGUSR1 in asked else grace_s
        if time.monotonic() >= began + waits_s or asked.count(signal.SIGINT) > 1:
            child.kill()
            child.wait()
            return
        time.sleep(POLL_S)


def sweep() -> None:
    """Kill every descendant that is left, again until none is (killing one hands its children to us)."""
    while left := descendants(os.getpid()):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def descendants(root: int) -> list[int]:
    """Return the process ids of all living descendants of `root`, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                # The name in parentheses may hold spaces: fields are counted from the last parenthesis.
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
