"""The replay client: sends a trace on its schedule, reads the streams, keeps the run.

Open loop by default: a request is sent when it is due, however many are still open, and every latency counts from
the moment it was due. No task is made for a request or a token: an answer is a chain of callbacks
from the socket, so the time of a token is the read of its chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from headway.errors import InputError
from headway.replay import facts, honesty, machine, server, server_metrics
from headway.replay.alarm import Alarm
from headway.replay.bodies import Bodies
from headway.replay.http1 import Connection, Pool
from headway.replay.ledger import Ledger, Progress
from headway.replay.options import ENDPOINTS, Options, check_header_values
from headway.replay.prompts import Prompts, vocabulary_of
from headway.replay.request import Call
from headway.replay.schedule import Schedule
from headway.replay.store import Run, RunWriter
from headway.replay.targets import DEFAULT_CLASS, Targets
from headway.trace.record import Trace

__all__ = ["Options", "Progress", "replay", "replay_async"]

_LEAD_S = 0.05  # from the last preparation to the scheduled time 0
_IDLE_S = 0.005  # a gap in which a body may be built
_PROGRESS_S = 0.5


def replay(
    trace: Trace,
    *,
    url: str,
    targets: Mapping[str, Targets],
    run_dir: Path,
    model: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **options: object,
) -> Run:
    """Replay `trace` against the OpenAI-compatible server at `url`, write the run into `run_dir` and return it.

    `targets`: class -> SLO targets; a request of a class without targets takes those of `default`, else none.
    `model`: None for the first one the server lists. `options` (fields of `Options`): `seed` of the prompts; `prompts`
    `text` (real tokens where the served model's tokenizer is at hand, `tokenizer` names its file) or `tokens`
    (random ids); `send_slo_headers` tells the server each request's class and targets; `closed_loop` sends
    later turns of a session after the previous one; `max_in_flight` caps the client (latency still counts from
    the schedule); `timeout_s` from the send of a request; `grace_s` after the last due time, then what is open
    is cut off; `endpoint` `completions` or `chat`; `api_key`; `extra_body` more fields for every request; `label`
    a name for tables. SIGINT ends the run early; what finished is kept and `meta["state"]` is `interrupted`.

    Raises `InputError` for bad arguments and `EngineError` when the server does not answer.
    """
    settings = Options(url=url, model=model, **options)  # type: ignore[arg-type]
    replayer = _Replay(trace, settings, targets, run_dir, on_progress)

    async def main() -> Run:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(signal.SIGINT, replayer.interrupt)
        return await replayer.run()

    # A request leaves no reference cycle behind, so the collector would find nothing and only stop the client.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(main())
    finally:
        if collecting:
            gc.enable()


async def replay_async(
    trace: Trace,
    *,
    url: str,
    targets: Mapping[str, Targets],
    run_dir: Path,
    model: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **options: object,
) -> Run:
    """Replay inside a running event loop; see `replay`. Cancelling it writes what finished, then raises."""
    settings = Options(url=url, model=model, **options)  # type: ignore[arg-type]
    return await _Replay(trace, settings, targets, run_dir, on_progress).run()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Replay:
    """One replay from the first look at the server to the closed run folder."""

    def __init__(
        self,
        trace: Trace,
        options: Options,
        targets: Mapping[str, Targets],
        run_dir: Path,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        if not len(trace):
            raise InputError(f"{trace.source}: no request to replay")
        if options.send_slo_headers:
            check_header_values(trace.frame["slo_class"].drop_nulls().unique().sort())
        self.trace = trace
        self.options = options
        self.targets = dict(targets)
        self.writer = RunWriter(run_dir)
        self.on_progress = on_progress
        frame = trace.frame
        self.input_tokens: list[int] = frame["input_tokens"].to_list()
        self.max_tokens: list[int] = frame["output_tokens"].to_list()
        self.classes: list[str | None] = frame["slo_class"].to_list()
        self.sessions: list[str | None] = frame["session_id"].to_list()
        self.schedule = Schedule(frame, closed_loop=options.closed_loop)
        facts.check_loop(trace, self.schedule, options)
        self.ledger = Ledger(len(trace), trace.span_s)
        self.calls: dict[Call, Connection | asyncio.Task] = {}  # open ones, and what carries them
        self.capped: deque[Call] = deque()  # due, held back by the client's own cap
        self.cutting: str | None = None  # why open requests are being cut off
        self.interrupted = False
        self.gone = False  # the server, at the end
        self.zero = 0.0  # `time.perf_counter()` at the scheduled time 0
        self._grace: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None

    # -- the run from outside ---------------------------------------------------------------------------------

    async def run(self) -> Run:
        self.loop = asyncio.get_running_loop()
        self.done = self.loop.create_future()
        url = server.base_url(self.options.url)
        facts.check_targets(self.trace, self.targets)
        told = await server.inspect(
            url, model=self.options.model, endpoint=self.options.endpoint, api_key=self.options.api_key
        )
        self._prepare(url, told)
        before = await server.metrics(url, model=told.model, api_key=self.options.api_key)
        machine.allow_many_sockets()
        await self.pool.open()
        meta = facts.at_start(
            trace=self.trace,
            options=self.options,
            targets=self.targets,
            told=told,
            prompts={"source": self.vocabulary.source, "shared_prefixes": self.bodies.shares_prefixes},
            event_loop=type(self.loop).__module__.split(".")[0],
        )
        self.run_id = meta["run_id"]
        self.writer.open(meta)
        lag = honesty.LoopLag(self.loop)
        self.alarm = Alarm(self.loop, self._tick)
        self.loop.set_exception_handler(self._fault)
        # What exists by now stays out of the collector's sight: a full pass over it would stop the client.
        gc.freeze()
        used = honesty.CpuUse.now()
        self.zero = time.perf_counter() + _LEAD_S
        meta["clock"]["zero_s"] = self.zero  # of the scheduled time 0, on the clock named beside it
        try:
            lag.start()
            self._report()
            self._arm()
            if not self.interrupted:
                await asyncio.shield(self.done)
            if not self.interrupted:
                lag.stop()
                self._cut_open()
                if self.ledger.counts["failed"]:
                    self.gone = not await server.reachable(url)
            if before is not None and not self.interrupted:
                after = await server.metrics(url, model=told.model, api_key=self.options.api_key)
                meta["server"]["metrics"] = server_metrics.growth(before, after) if after is not None else {}
        except asyncio.CancelledError:
            self.interrupt()
            raise
        finally:
            self._finish()
            self._stop_timers()
            self._cut_open()
            lag.stop()
            gc.unfreeze()
            self.pool.close()
            self.loop.set_exception_handler(None)
            limit = honesty.lateness_limit_s(self.targets.values())
            meta |= self.ledger.facts(lag=lag.samples, used=self.used.since(used), limit_s=limit, gone=self.gone)
            meta |= {
                "state": "interrupted" if self.interrupted else "finished",
                "wall_s": round(max(0.0, self.ended - self.zero), 3),
                "bodies_built_late": self.bodies.built_late,
            }
            run = self.writer.close(meta)
            self._tell()
        return run

    def interrupt(self) -> None:
        """End the run now; requests in flight are cut off."""
        self.interrupted = True
        self.cutting = "interrupted"
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            self.loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends the process
        self._finish()

    def _prepare(self, url: str, told: server.ServerFacts) -> None:
        options, frame = self.options, self.trace.frame
        self.vocabulary, note = vocabulary_of(told.root, prompts=options.prompts, tokenizer_json=options.tokenizer)
        told.notes += [note] if note else []
        self.bodies = Bodies(
            prompts=Prompts(frame, vocabulary=self.vocabulary, seed=options.seed, block_size=self.trace.block_size),
            vocabulary=self.vocabulary,
            max_tokens=self.max_tokens,
            fields={"model": told.model, "temperature": 0, "stream": True}
            | told.fields()
            | dict(options.extra_body or {}),
            endpoint=options.endpoint,
        )
        while self.bodies.fill():
            pass
        headers = {"Content-Type": "application/json"}
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self.pool = Pool(url + ENDPOINTS[options.endpoint], headers)

    # -- sending ----------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Set the alarm for the next due request, or the grace period when none is left."""
        due = self.schedule.next_due
        if due is None:
            self.alarm.clear()
            if self._grace is None:
                self._grace = self.loop.call_later(self.options.grace_s, self._end_of_grace)
            self._maybe_done()
            return
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self.zero + due - time.perf_counter() > _IDLE_S:
            self.bodies.fill()
        self.alarm.set(self.zero + due)

    def _tick(self) -> None:
        while (due := self.schedule.pop(time.perf_counter() - self.zero)) is not None:
            self._start(*due)
        self._arm()

    def _start(self, due: float, index: int) -> None:
        name = self.classes[index]
        call = Call(
            index=index,
            trace_row=self.trace.first_row + index,
            due=self.zero + due,
            input_tokens=self.input_tokens[index],
            max_tokens=self.max_tokens[index],
            slo_class=name,
            session_id=self.sessions[index],
            targets=self.targets.get(name or DEFAULT_CLASS) or self.targets.get(DEFAULT_CLASS) or Targets(),
            done=self._finished,
            count=self.vocabulary.count if self.vocabulary.has_tokenizer else None,
        )
        cap = self.options.max_in_flight
        if cap is not None and len(self.calls) >= cap:
            self.capped.append(call)
        else:
            self._launch(call)

    def _launch(self, call: Call) -> None:
        request = self.pool.request(self._headers(call), self.bodies.take(call.index))
        connection = self.pool.take()
        if connection is not None:
            self.calls[call] = connection
            connection.send(request, call)
        else:
            self.calls[call] = self.loop.create_task(self._connect(call, request))

    async def _connect(self, call: Call, request: bytes) -> None:
        try:
            connection = await self.pool.connect()
        except OSError as error:
            call.close("failed", f"connection:{type(error).__name__}", time.perf_counter())
            self._finished(call)
            return
        if call.status is not None:  # ended while the connection was being made
            connection.abandon()
            return
        self.calls[call] = connection
        connection.send(request, call)

    def _headers(self, call: Call) -> dict[str, str]:
        headers = {"x-request-id": f"{self.run_id}-{call.index}"}
        return headers | call.slo_headers() if self.options.send_slo_headers else headers

    # -- ending -----------------------------------------------------------------------------------------------

    def _finished(self, call: Call) -> None:
        """Keep the row of a call that is over and start what waited for it."""
        del self.calls[call]
        try:
            self._keep(call)
        except Exception as error:  # a full disk, say: no fault of the server, so it ends the run
            self._finish(error)
            return
        if self.cutting is not None:
            return
        again = self.schedule.ended(call.index, call.end - self.zero)
        while self.capped and len(self.calls) < self.options.max_in_flight:
            waiting = self.capped.popleft()
            waiting.released = time.perf_counter()
            self._launch(waiting)
        if again:
            self._arm()
        self._maybe_done()

    def _give_up(self, call: Call, status: str, reason: str) -> None:
        """End a call that is still open from our side."""
        call.close(status, reason, time.perf_counter())
        handle = self.calls[call]
        if isinstance(handle, asyncio.Task):
            handle.cancel()
        else:
            handle.abandon()
        self._finished(call)

    def _keep(self, call: Call) -> None:
        row = call.row(self.zero)
        self.writer.append(row)
        self.ledger.keep(call, row)

    def _maybe_done(self) -> None:
        if self.schedule.next_due is None and not self.calls and not self.capped:
            self._finish()

    def _finish(self, error: BaseException | None = None) -> None:
        if self.done.done():
            return
        self.ended, self.used = time.perf_counter(), honesty.CpuUse.now()
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict) -> None:
        """End the run on an exception in a callback: a fault of ours must not pass as a fault of the server."""
        error = context.get("exception")
        if error is None or isinstance(error, OSError):
            loop.default_exception_handler(context)
        else:
            self._finish(error)

    def _end_overdue(self) -> None:
        limit = time.perf_counter() - self.options.timeout_s
        for call in [call for call in self.calls if (call.sent or call.released) < limit]:
            self._give_up(call, "failed", "timeout")

    def _end_of_grace(self) -> None:
        self.cutting = "end_of_run"
        self._finish()

    def _stop_timers(self) -> None:
        self.alarm.close()
        for timer in (self._grace, self._ticker):
            if timer is not None:
                timer.cancel()

    def _cut_open(self) -> None:
        """Cut off what is open or still held back by the client's own cap; every one leaves its row."""
        self.cutting = self.cutting or "end_of_run"
        for call in list(self.calls):
            self._give_up(call, "cut_off", self.cutting)
        while self.capped:
            call = self.capped.popleft()
            call.close("cut_off", self.cutting, time.perf_counter())
            self._keep(call)

    def _report(self) -> None:
        self._end_overdue()
        self._tell()
        self._ticker = self.loop.call_later(_PROGRESS_S, self._report)

    def _tell(self) -> None:
        if self.on_progress is not None:
            self.on_progress(self.ledger.progress(len(self.calls), self.zero))
