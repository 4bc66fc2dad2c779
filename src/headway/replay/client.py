"""The replay client: sends a trace on its schedule, reads the streams, keeps the run.

Open loop by default: a request is sent when it is due, however many are still open, and every latency counts from
the moment it was due. One task a request, none a token; a token's time is the read of its chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from headway.errors import InputError
from headway.replay import honesty, machine, server
from headway.replay.alarm import Alarm
from headway.replay.bodies import Bodies
from headway.replay.prompts import Prompts, Vocabulary, find_tokenizer
from headway.replay.request import Call
from headway.replay.schedule import Schedule
from headway.replay.store import Run, RunWriter
from headway.replay.targets import DEFAULT_CLASS, Targets
from headway.trace.record import Trace

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

_LEAD_S = 0.2  # from the last preparation to the scheduled time 0
_IDLE_S = 0.005  # a gap in which a body may be built
_PROGRESS_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a replay is; counts of requests."""

    total: int
    sent: int
    in_flight: int
    ok: int
    attained: int
    refused: int
    failed: int
    cut_off: int
    elapsed_s: float
    span_s: float  # of the trace

    @property
    def finished(self) -> int:
        """Requests with an outcome."""
        return self.ok + self.refused + self.failed + self.cut_off


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to replay. See `replay` for the meaning of each."""

    url: str
    model: str | None = None
    endpoint: str = "completions"
    prompts: str = "text"
    tokenizer: Path | None = None
    seed: int = 0
    send_slo_headers: bool = True
    api_key: str | None = None
    extra_body: Mapping[str, object] | None = None
    closed_loop: bool = False
    max_in_flight: int | None = None
    timeout_s: float = 600.0
    grace_s: float = 60.0
    label: str = ""

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise InputError(f"endpoint {self.endpoint!r}: expected one of {', '.join(ENDPOINTS)}")
        if self.prompts not in ("text", "tokens"):
            raise InputError(f"prompts {self.prompts!r}: expected text or tokens")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise InputError(f"max_in_flight {self.max_in_flight}: expected at least 1")
        for name in ("timeout_s", "grace_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} = {value!r}: expected seconds above 0")


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
    the schedule);
    `timeout_s` from the send of a request; `grace_s` after the last due time, then what is open is cut off;
    `endpoint` `completions` or `chat`; `api_key`; `extra_body` more fields for every request; `label` a name for
    tables. SIGINT ends the run early; what finished is kept and `meta["state"]` is `interrupted`.

    Raises `InputError` for bad arguments and `EngineError` when the server does not answer.
    """
    settings = Options(url=url, model=model, **options)  # type: ignore[arg-type]
    recorder = _Replay(trace, settings, targets, run_dir, on_progress)

    async def main() -> Run:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(signal.SIGINT, recorder.interrupt)
        return await recorder.run()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main())


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
        self.counts = dict.fromkeys(("sent", "ok", "attained", "refused", "failed", "cut_off"), 0)
        self.lateness: list[float] = []
        self.counted_by: dict[str, int] = {}
        self.prompt_deltas: list[int] = []
        self.tokens = 0
        self.buffered = 0
        self.calls: dict[asyncio.Task, Call] = {}
        self.capped: deque[Call] = deque()
        self.cutting: str | None = None  # why open requests are being cut off
        self.interrupted = False
        self.zero = 0.0
        self.loop: asyncio.AbstractEventLoop
        self.done: asyncio.Future
        self.alarm: Alarm
        self._grace: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None

    # -- the run from outside ---------------------------------------------------------------------------------

    async def run(self) -> Run:
        self.loop = asyncio.get_running_loop()
        self.done = self.loop.create_future()
        _allow_many_sockets()
        url = server.base_url(self.options.url)
        async with self._session() as self.session:
            facts = await server.inspect(
                self.session, url, model=self.options.model, endpoint=self.options.endpoint
            )
            self.address = url + ENDPOINTS[self.options.endpoint]
            self.vocabulary = self._vocabulary(facts)
            self.bodies = Bodies(
                prompts=Prompts(
                    self.trace.frame,
                    vocabulary=self.vocabulary,
                    seed=self.options.seed,
                    block_size=self.trace.block_size,
                ),
                vocabulary=self.vocabulary,
                max_tokens=self.max_tokens,
                fields={"model": facts.model, "temperature": 0, "stream": True}
                | facts.fields()
                | dict(self.options.extra_body or {}),
                endpoint=self.options.endpoint,
            )
            while self.bodies.fill():
                pass
            meta = self._first_meta(facts)
            self.writer.open(meta)
            lag = honesty.LoopLag(self.loop)
            cpu = time.process_time()
            self.zero = time.perf_counter() + _LEAD_S
            lag.start()
            self.alarm = Alarm(self.loop, self._tick)
            self._report()
            self._arm()
            try:
                if not self.interrupted:
                    await asyncio.shield(self.done)
            except asyncio.CancelledError:
                self.interrupt()
                raise
            finally:
                self._stop_timers()
                await self._cut_open()
                lag.stop()
                meta |= self._last_meta(lag, time.process_time() - cpu)
                run = self.writer.close(meta)
                self._tell()
            return run

    def interrupt(self) -> None:
        """End the run now; requests in flight are cut off."""
        self.interrupted = True
        self.cutting = "interrupted"
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError, AttributeError):
            self.loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends the process
        if hasattr(self, "done") and not self.done.done():
            self.done.set_result(None)

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
            targets=self._targets_of(name),
        )
        cap = self.options.max_in_flight
        if cap is not None and len(self.calls) >= cap:
            self.capped.append(call)
            return
        self._launch(call)

    def _launch(self, call: Call) -> None:
        task = self.loop.create_task(self._exchange(call))
        self.calls[task] = call
        task.add_done_callback(self._finished)

    async def _exchange(self, call: Call) -> None:
        limit = self.loop.call_later(self.options.timeout_s, self._time_out, asyncio.current_task(), call)
        body = self.bodies.take(call.index)
        # aiohttp warns about raw bytes above 1 MiB because a plain write of them could block; here it is meant.
        data = body if len(body) < 1 << 20 else io.BytesIO(body)
        try:
            async with self.session.post(
                self.address, data=data, headers=self._headers(call), trace_request_ctx=call
            ) as response:
                call.http_status = response.status
                call.take_headers(response.headers)
                if response.status != 200:
                    call.close_http(await response.read(), time.perf_counter())
                    return
                await self._read(response, call)
                call.close_stream(time.perf_counter())
        except (aiohttp.ClientError, OSError) as error:
            reason = "dropped" if call.http_status is not None else f"connection:{type(error).__name__}"
            call.close("failed", call.stream.error or reason, time.perf_counter())
        except asyncio.CancelledError:
            # Ours: the time limit has set the outcome already, the end of the run cuts off.
            call.close("cut_off", self.cutting or "cancelled", time.perf_counter())
        finally:
            limit.cancel()

    async def _read(self, response: aiohttp.ClientResponse, call: Call) -> None:
        stream = call.stream
        if response.content_type == "application/json":
            body = await response.read()
            stream.whole(body, time.perf_counter())
            return
        read = response.content.readany
        clock = time.perf_counter
        while data := await read():
            stream.feed(data, clock())
        stream.finish(clock(), self.vocabulary.count if self.vocabulary.has_tokenizer else None)

    def _headers(self, call: Call) -> dict[str, str]:
        headers = {"x-request-id": f"{self.run_id}-{call.index}"}
        if self.options.send_slo_headers:
            if call.slo_class is not None:
                headers["x-slo-class"] = call.slo_class
            for key, value in call.targets.as_dict().items():
                if value is not None:
                    headers[f"x-slo-{key.removesuffix('_s')}-ms"] = f"{value * 1e3:.10g}"
        return headers

    def _finished(self, task: asyncio.Task) -> None:
        call = self.calls.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of ours must not pass as a fault of the server.
            if not self.done.done():
                self.done.set_exception(error)
            return
        if call.status is None:  # cancelled before its first step
            call.close("cut_off", self.cutting or "cancelled", time.perf_counter())
        self._keep(call)
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

    def _keep(self, call: Call) -> None:
        row = call.row(self.zero)
        self.writer.append(row)
        counts, stream = self.counts, call.stream
        counts[call.status] += 1
        counts["attained"] += row["attained"]
        self.tokens += len(stream.token_times)
        if call.sent is not None:
            counts["sent"] += 1
            self.lateness.append(call.sent - call.released)
        if call.status == "ok":
            self.counted_by[stream.counted_by] = self.counted_by.get(stream.counted_by, 0) + 1
            self.buffered += len(stream.token_times) >= 8 and stream.token_times[0] == stream.token_times[-1]
        if stream.prompt_tokens is not None:
            self.prompt_deltas.append(stream.prompt_tokens - call.input_tokens)

    # -- ending -----------------------------------------------------------------------------------------------

    def _maybe_done(self) -> None:
        idle = self.schedule.next_due is None and not self.calls and not self.capped
        if idle and not self.done.done():
            self.done.set_result(None)

    def _time_out(self, task: asyncio.Task, call: Call) -> None:
        call.close("failed", "timeout", time.perf_counter())
        task.cancel()

    def _end_of_grace(self) -> None:
        self.cutting = "end_of_run"
        if not self.done.done():
            self.done.set_result(None)

    def _stop_timers(self) -> None:
        self.alarm.close()
        for timer in (self._grace, self._ticker):
            if timer is not None:
                timer.cancel()

    async def _cut_open(self) -> None:
        """Cut off what is open or still held back by the client's own cap; every one leaves its row."""
        self.cutting = self.cutting or "end_of_run"
        tasks = list(self.calls)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # let the done callbacks write the rows
        while self.capped:
            call = self.capped.popleft()
            call.close("cut_off", self.cutting, time.perf_counter())
            self._keep(call)

    # -- about the run ----------------------------------------------------------------------------------------

    def _targets_of(self, name: str | None) -> Targets:
        return self.targets.get(name or DEFAULT_CLASS) or self.targets.get(DEFAULT_CLASS) or Targets()

    def _session(self) -> aiohttp.ClientSession:
        async def sent(_session, context, _params) -> None:
            call = context.trace_request_ctx
            if call is not None and call.sent is None:
                call.sent = time.perf_counter()

        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(sent)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.options.api_key:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        return aiohttp.ClientSession(
            # Common servers close an idle connection after 5 s; not reusing one near that age avoids a false failure.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0, ttl_dns_cache=3600),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            trace_configs=[trace],
        )

    def _vocabulary(self, facts: server.ServerFacts) -> Vocabulary:
        if self.options.prompts == "tokens":
            return Vocabulary.of_random_ids()
        path = self.options.tokenizer or find_tokenizer(facts.root)
        if path is not None:
            return Vocabulary.of_text(Path(path))
        facts.notes.append("tokenizer of the served model not found: prompts are random token ids")
        return Vocabulary.of_random_ids()

    def _first_meta(self, facts: server.ServerFacts) -> dict:
        clock = machine.clock()
        self.run_id = f"hw{int(clock['started_unix_s'] * 1e3):x}"
        notes = list(facts.notes)
        if facts.max_model_len is not None:
            sizes = zip(self.input_tokens, self.max_tokens, strict=True)
            if long := sum(a + b > facts.max_model_len for a, b in sizes):
                notes.append(f"{long} requests exceed the model length of {facts.max_model_len} tokens")
        known = {name or DEFAULT_CLASS for name in self.classes}
        if unused := sorted(set(self.targets) - known - {DEFAULT_CLASS}):
            notes.append(f"no request of class {', '.join(unused)} in the trace")
        return {
            "format": 1,
            "kind": "replay",
            "state": "running",
            "run_id": self.run_id,
            "label": self.options.label,
            "command": machine.command(),
            "versions": machine.versions(),
            "machine": machine.machine(),
            "clock": clock | {"event_loop": type(self.loop).__module__.split(".")[0]},
            "seed": self.options.seed,
            "trace": {
                "source": self.trace.source,
                "format": self.trace.format,
                "sha256": self.trace.sha256,
                "requests": len(self.trace),
                "span_s": self.trace.span_s,
                "block_size": self.trace.block_size,
                "selection": list(self.trace.history),
            },
            "server": {
                "url": facts.url,
                "model": facts.model,
                "version": facts.version,
                "models": facts.models,
                "fields_taken": facts.extras,
            },
            "prompts": {"source": self.vocabulary.source, "shared_prefixes": self.bodies.shares_prefixes},
            "load": {
                "loop": "closed" if self.options.closed_loop else "open",
                "max_in_flight": self.options.max_in_flight,
                "endpoint": self.options.endpoint,
                "slo_headers": self.options.send_slo_headers,
                "extra_body": dict(self.options.extra_body or {}),
                "timeout_s": self.options.timeout_s,
                "grace_s": self.options.grace_s,
            },
            "targets": {name: targets.as_dict() for name, targets in self.targets.items()},
            "notes": notes,
        }

    def _last_meta(self, lag: honesty.LoopLag, cpu_s: float) -> dict:
        lateness, loop_lag = honesty.spread(self.lateness), honesty.spread(lag.samples)
        limit = honesty.lateness_limit_s(self.targets.values())
        reasons = honesty.verdict(lateness=lateness, loop_lag=loop_lag, limit_s=limit)
        deltas = sorted(self.prompt_deltas)
        offered = sum(self.counts[status] for status in ("ok", "refused", "failed", "cut_off"))
        return {
            "state": "interrupted" if self.interrupted else "finished",
            "valid": not reasons,
            "invalid_reasons": reasons,
            "client": {
                "lateness": lateness,
                "lateness_limit_ms": limit * 1e3,
                "loop_lag": loop_lag,
                "cpu_s": round(cpu_s, 4),
                "tokens": self.tokens,
                "cpu_s_per_1000_tokens": round(cpu_s / self.tokens * 1e3, 5) if self.tokens else None,
                "bodies_built_late": self.bodies.built_late,
            },
            "tokens_counted_by": self.counted_by,
            "buffered_responses": self.buffered,
            "prompt_tokens_minus_asked": {
                "n": len(deltas),
                "min": deltas[0] if deltas else None,
                "max": deltas[-1] if deltas else None,
            },
            "not_offered": len(self.trace) - offered,
            "wall_s": round(time.perf_counter() - self.zero, 3),
        }

    def _report(self) -> None:
        self._tell()
        self._ticker = self.loop.call_later(_PROGRESS_S, self._report)

    def _tell(self) -> None:
        if self.on_progress is not None:
            counts = self.counts
            self.on_progress(
                Progress(
                    total=len(self.trace),
                    in_flight=len(self.calls),
                    elapsed_s=max(0.0, time.perf_counter() - self.zero),
                    span_s=self.trace.span_s,
                    **{k: counts[k] for k in ("ok", "attained", "refused", "failed", "cut_off")},
                    sent=counts["sent"] + len(self.calls),
                )
            )


def _allow_many_sockets() -> None:
    """Raise the soft limit of open files to the hard one: an open loop holds a socket for every open request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
