"""The step log: what an engine did, one JSON object a line (`HEADWAY_STEP_LOG`).

Lines without `event` are executed steps, which the twin fits the step cost to: `q`, `n`, `K`, `X` (core/cost.py),
`seconds`, and beside them

    planned_s  when the step was planned      chunks   {request: prompt tokens} of its prefills
    t_s        when it ended                  decodes  requests that decoded

Lines with `event` tell the rest, so that the twin can be held against every decision (twin/decisions.py):

    started    what the engine is: settings, versions, configuration, the step cost that it believed in
    arrived    a request: `id` of the engine, `r` (its number in all other lines), lengths, targets; `same`, a salted
               digest that a request sent again has again (bookings)
    refused    reason and the bound that could have been promised
    preempted, finished

Times are seconds on the engine's monotonic clock, unrounded: a deadline decides by its last digit.
Requests are numbered to keep the lines short.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from headway.core import Reject, RequestState, Step

logger = logging.getLogger("headway")


class StepLog:
    """Appends to a step log. Ids that never arrived here (pooling, open sessions) are left out of its lines.

    A disk that fills up ends the log, not the engine.
    """

    def __init__(self, path: str | Path) -> None:
        self._file: TextIO | None = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._numbers: dict[str, int] = {}

    def started(self, facts: Mapping[str, Any]) -> None:
        """An engine started."""
        self._write({"event": "started", **facts})
        self.flush()

    def arrived(self, state: RequestState, now_s: float) -> None:
        """A request reached the engine."""
        self._numbers[state.id] = state.seq
        slo = state.slo
        targets = {key: getattr(slo, key) for key in ("ttft_s", "tpot_s", "tbt_s")}
        self._write(
            {
                "event": "arrived",
                "t_s": now_s,
                "r": state.seq,
                "id": state.id,
                "arrival_s": state.arrival_s,
                "due_s": state.due_s,
                "prompt_tokens": state.prompt_tokens,
                "max_output_tokens": state.max_output_tokens,
                "cached_tokens": state.computed_tokens,
                "class": slo.name,
                **{key: value for key, value in targets.items() if value is not None},
                "weight": slo.weight,
                "on_miss": slo.on_miss,
                "same": state.fingerprint[:12],
            }
        )

    def refused(self, request_id: str, now_s: float, reject: Reject) -> None:
        """A request was refused."""
        self._about(request_id, "refused", now_s, reason=reject.reason.value, bound_s=reject.bound_s)

    def preempted(self, request_id: str, now_s: float) -> None:
        """The engine took the KV of a request away."""
        self._about(request_id, "preempted", now_s)

    def finished(self, state: RequestState, now_s: float, *, aborted: bool) -> None:
        """A request ended."""
        self._about(state.id, "finished", now_s, output_tokens=state.output_tokens, aborted=aborted)
        self._numbers.pop(state.id, None)
        if not self._numbers:
            self.flush()  # the engine is idle: a reader sees all of it

    def step(
        self, step: Step, *, ended_s: float, planned_s: float, chunks: Mapping[str, int], ids: Sequence[str]
    ) -> None:
        """A step ended that worked on `ids`, on those in `chunks` as prefill."""
        numbers = self._numbers
        self._write(
            {
                "t_s": ended_s,
                "q": step.q,
                "n": step.n,
                "K": step.K,
                "X": step.X,
                "seconds": step.seconds,
                "planned_s": planned_s,
                "chunks": {numbers[key]: tokens for key, tokens in chunks.items() if key in numbers},
                "decodes": [numbers[key] for key in ids if key in numbers and key not in chunks],
            }
        )

    def flush(self) -> None:
        """Hand over what is buffered."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _about(self, request_id: str, event: str, now_s: float, **fields: Any) -> None:
        if request_id in self._numbers:
            line = {"event": event, "t_s": now_s, "r": self._numbers[request_id]}
            self._write({**line, **{key: value for key, value in fields.items() if value is not None}})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("headway: the step log ends here: %s", error)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()  # tries once more to write what is buffered
        self._file = None
