"""Fit the step cost to a step log and say how wrong it is, regime by regime.

A step log has one JSON object a line: `q`, `n`, `K`, `X`, `seconds` of every executed step (core/cost.py), as the
engine adapter writes it; other keys are allowed. Of the lines with `event` only `started` is read: it says what the
engine is. The fit is non-negative least squares on relative errors, repeated
with weights 1 / max(1, |residual| / 2 MAD) (Huber's weights) so that host stalls do not bend it. Errors are those of
the last 30 % of the log under a fit of the first 70 %; the coefficients that are saved are fitted to all of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core import CostCoefficients, Line, Stretches
from headway.core.envelope import FACTOR_LIMIT
from headway.errors import InputError
from headway.twin.noise import NoiseModel
from headway.twin.price import correct
from headway.twin.profile import ENGINE_KEYS, Profile

Floats = NDArray[np.float64]

_KEYS = ("q", "n", "K", "X", "seconds")
_WANTED = f"an object with {', '.join(_KEYS)}"
_HELD_OUT = 0.3
_LEAST_STEPS = 50
#: A step this much longer than its prediction counts as a host stall, not as scatter.
_STALL = 1.4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """Executed steps: one row each of q, n, K, X (shape: steps x 4), and their seconds (shape: steps).

    `about` is what the engine said of itself when it started, empty when it said nothing.
    """

    source: str
    sha256: str
    terms: Floats
    seconds: Floats
    about: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seconds)


def read_steps(path: Path, *, start: int = 0) -> StepLog:
    """Return the steps of a step log; `InputError` names file, line, key, value and what was expected.

    Steps before byte `start` (the beginning of a line) are left out. `sha256` is that of the steps that are read.
    """
    rows: list[tuple[float, ...]] = []
    about: dict[str, Any] = {}
    digest = hashlib.sha256()
    at = 0
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                try:
                    entry = parse_line(path, line, raw, wanted=_WANTED) if raw.strip() else None
                except InputError:
                    if raw.endswith(b"\n"):
                        raise
                    break  # its engine is still writing
                if entry is not None and entry.get("event") == "started":
                    about = entry
                elif entry is not None and "event" not in entry and at >= start:
                    digest.update(raw)
                    rows.append(_row(path, line, entry))
                at += len(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(rows) < _LEAST_STEPS:
        raise InputError(f"{path}: {len(rows)} steps: expected at least {_LEAST_STEPS} to fit five coefficients")
    table = np.array(rows)
    return StepLog(source=path.name, sha256=digest.hexdigest(), terms=table[:, :4], seconds=table[:, 4], about=about)


def parse_line(path: Path, line: int, raw: bytes, *, wanted: str = "an object") -> dict[str, Any]:
    """Return the JSON object of one line of a step log; `InputError` names the line and what was `wanted`."""
    try:
        entry = json.loads(raw)
    except ValueError as error:
        raise InputError(f"{path}:{line}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise InputError(f"{path}:{line}: expected {wanted}")
    return entry


def _row(path: Path, line: int, entry: Mapping[str, Any]) -> tuple[float, ...]:
    values = []
    for key in _KEYS:
        value = entry.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise InputError.at(path, line, key, value, "a finite number of at least 0")
        values.append(float(value))
    if values[4] <= 0:
        raise InputError.at(path, line, "seconds", values[4], "a time above 0")
    if not (values[0] or values[1]):
        raise InputError.at(path, line, "q, n", (0, 0), "a step that computes something")
    return tuple(values)


def fit(terms: Floats, seconds: Floats) -> CostCoefficients:
    """Return the coefficients that fit steps (terms: steps x (q, n, K, X)) best in relative error."""
    design = np.column_stack([np.ones(len(terms)), terms])
    scale = np.maximum(design.max(axis=0), 1e-12)
    weights = np.ones(len(terms))
    theta = np.zeros(5)
    for _ in range(6):
        root = np.sqrt(weights) / seconds
        theta = _non_negative(design / scale * root[:, None], seconds * root) / scale
        relative = np.abs(design @ theta / seconds - 1.0)
        spread = max(2.0 * float(np.median(relative)), 1e-9)
        weights = 1.0 / np.maximum(1.0, relative / spread)
    g, a, b, k, x = theta.tolist()
    return CostCoefficients(g=g, a=a, b=b, k=k, x=x)


def _non_negative(design: Floats, wanted: Floats) -> Floats:
    """Return the least-squares solution without negative entries: with five unknowns, the best of all 31 subsets."""
    q, r = np.linalg.qr(design)
    aim = q.T @ wanted
    best, least = np.zeros(design.shape[1]), float(aim @ aim)
    for size in range(1, design.shape[1] + 1):
        for subset in itertools.combinations(range(design.shape[1]), size):
            columns = r[:, subset]
            solved, *_ = np.linalg.lstsq(columns, aim)
            rest = aim - columns @ solved
            if (solved >= 0).all() and float(rest @ rest) < least:
                least = float(rest @ rest)
                best = np.zeros(design.shape[1])
                best[list(subset)] = solved
    return best


def predict(cost: CostCoefficients, terms: Floats) -> Floats:
    """Return tau of every row of `terms` (shape: steps)."""
    return cost.g + terms @ np.array([cost.a, cost.b, cost.k, cost.x])


def regimes(terms: Floats) -> dict[str, NDArray[np.bool_]]:
    """Return regime -> which steps belong to it: by what a step carries, and by how much."""
    q, n = terms[:, 0], terms[:, 1]
    many = np.median(n[n > 0]) if (n > 0).any() else 0.0
    large = np.median(q[q > 0]) if (q > 0).any() else 0.0
    found = {
        f"decode_only_n_le_{many:.0f}": (q == 0) & (n <= many),
        f"decode_only_n_gt_{many:.0f}": (q == 0) & (n > many),
        f"prefill_only_q_le_{large:.0f}": (q > 0) & (n == 0) & (q <= large),
        f"prefill_only_q_gt_{large:.0f}": (q > 0) & (n == 0) & (q > large),
        f"mixed_q_le_{large:.0f}": (q > 0) & (n > 0) & (q <= large),
        f"mixed_q_gt_{large:.0f}": (q > 0) & (n > 0) & (q > large),
    }
    return {name: which for name, which in found.items() if which.any()}


def errors(cost: CostCoefficients, terms: Floats, seconds: Floats) -> dict[str, dict[str, float]]:
    """Return regime -> {n, p50, p90, bias}: quantiles of |predicted / measured - 1|, bias of the total time."""
    predicted = predict(cost, terms)
    relative = np.abs(predicted / seconds - 1.0)
    everything = {"all": np.ones(len(seconds), dtype=bool)} | regimes(terms)
    return {
        name: {
            "n": int(which.sum()),
            "p50": round(float(np.quantile(relative[which], 0.5)), 5),
            "p90": round(float(np.quantile(relative[which], 0.9)), 5),
            "bias": round(float(predicted[which].sum() / seconds[which].sum() - 1.0), 5),
        }
        for name, which in everything.items()
    }


def calibrate(
    log: StepLog, *, name: str, eps: float = 0.05, engine: Mapping[str, Any] | None = None, note: str = ""
) -> Profile:
    """Return the measured profile of a step log.

    The envelope factor is the ceil((m + 1)(1 - eps))-th smallest ratio measured / predicted of the held-out steps
    that carry prefill (split conformal), of all held-out steps when those are fewer than 20; capped as in the engine.
    """
    if not 0 < eps < 1:
        raise InputError(f"eps = {eps!r}: expected a share in (0, 1)")
    cut = int(len(log) * (1 - _HELD_OUT))
    trial = fit(log.terms[:cut], log.seconds[:cut])
    later, measured = log.terms[cut:], log.seconds[cut:]
    ratios = measured / predict(trial, later)
    judged = ratios[later[:, 0] > 0] if (later[:, 0] > 0).sum() >= 20 else ratios
    rank = min(math.ceil((len(judged) + 1) * (1 - eps)), len(judged))
    cost = fit(log.terms, log.seconds)
    # Both quantiles from the fit of everything, so that the twin's steps scatter around what it predicts.
    predicted = predict(cost, log.terms)
    spread = log.seconds / predicted
    stalled = spread > _STALL * np.median(spread)
    calm_steps = log.terms[~stalled]
    factors = correct(calm_steps, predicted[~stalled], log.seconds[~stalled]).of(log.terms)
    spread, lengths = spread / factors, predicted * factors
    noise = _noise(np.log(spread[~stalled]), lengths[~stalled], calm_steps[:, 0] == 0, spread, stalled)
    return Profile(
        name=name,
        label="measured",
        cost=cost,
        correction=correct(log.terms, predicted * noise.mean(lengths), log.seconds),
        envelope_factor=min(max(1.0, round(float(np.sort(judged)[rank - 1]), 5)), FACTOR_LIMIT),
        eps=eps,
        lines=stretches(log.seconds, (predicted, predict(trial, log.terms)), eps=eps),
        noise=noise,
        engine=_engine(log) | dict(engine or {}),
        provenance={
            "source": log.source,
            "sha256": log.sha256,
            "steps": len(log),
            "held_out": len(measured),
            "busy_s": round(float(log.seconds.sum()), 3),
            **_origin(log),
            **({"note": note} if note else {}),
        },
        fit_error=errors(trial, later, measured),
    )


def stretches(seconds: Floats, predictions: Sequence[Floats], *, eps: float) -> tuple[Line, ...]:
    """Return the envelopes of steps in a row (core/stretch.py), given what steps took and what was predicted.

    Of several predictions the worst burst: errors of a fit to all of the steps add up to about nothing.
    """
    found: dict[float, float] = {}
    for predicted in predictions:
        seen = Stretches(eps, len(seconds))
        for taken, mean in zip(seconds.tolist(), predicted.tolist(), strict=True):
            seen.add(taken, mean)
        for rate, burst in seen.known:
            found[rate] = max(found.get(rate, 0.0), math.ceil(burst * 1e5) / 1e5)
    return tuple([Line(rate, burst) for rate, burst in found.items()])


#: So many steps of more than four times the usual length tell how their scatter differs.
_LONG, _LEAST_LONG = 0.5, 20

#: Lags, in steps, whose autocorrelation tells the part of the scatter that wanders; it counts above this much.
_LAGS = (3, 30)
_LEAST_DRIFT = 0.1


def _noise(
    calm: Floats, lengths: Floats, alone: NDArray[np.bool_], spread: Floats, stalled: NDArray[np.bool_]
) -> NoiseModel:
    """Return the noise of steps.

    Correlation r(lag) = share exp(-lag / steps) through two lags gives the share of the variance that wanders.

    Args:
        calm: logarithms of measured / predicted of the steps that did not stall.
        lengths: what those were predicted to take, seconds.
        alone: which of them carry decodes only.
        spread: measured / predicted of all steps.
        stalled: which of all stalled.
    """
    ref = float(np.median(lengths[alone] if alone.any() else lengths))
    keep, calm = _averaged(calm, lengths, ref)
    sigma = min(float(np.std(calm)), 2.0)
    drift, steps = 0.0, 20.0
    if len(calm) > 10 * _LAGS[1] and sigma > 0:
        near, far = (float(np.corrcoef(calm[:-lag], calm[lag:])[0, 1]) for lag in _LAGS)
        if near > _LEAST_DRIFT:
            decay = math.log(near / min(max(far, near / 50), near * 0.98)) / (_LAGS[1] - _LAGS[0])
            share = min(near * math.exp(_LAGS[0] * decay), 0.95)
            drift, steps = sigma * math.sqrt(share), 1.0 / decay
            sigma *= math.sqrt(1.0 - share)
    return NoiseModel(
        sigma=round(sigma, 5),
        stall_share=round(min(float(stalled.mean()), 0.99), 5),
        stall_factor=round(max(1.0, float(np.median(spread[stalled]))), 4) if stalled.any() else 1.5,
        drift=round(drift, 5),
        drift_steps=round(steps, 2),
        keep=round(keep, 4),
        ref_s=round(ref, 5),
    )


def _averaged(calm: Floats, lengths: Floats, ref_s: float) -> tuple[float, Floats]:
    """Return the share of the scatter that long steps keep, and `calm` as if all steps were short.

    A line through mean |logarithm| over sqrt(ref / length), by least squares; its value where that is 0, over 1.
    """
    short = np.sqrt(ref_s / np.maximum(lengths, ref_s))
    if (short < _LONG).sum() < _LEAST_LONG:
        return 1.0, calm
    slope, floor = np.polyfit(short, np.abs(calm), 1)
    keep = min(max(float(floor) / max(float(slope + floor), 1e-9), 0.0), 1.0)
    return keep, calm / (keep + (1.0 - keep) * short)


def _engine(log: StepLog) -> dict[str, Any]:
    """Return the settings that the engine named when it started, as far as a profile knows them."""
    named = {key: value for key, value in log.about.get("engine", {}).items() if key in ENGINE_KEYS}
    front_ms = log.about.get("config", {}).get("front_ms")
    return named | ({} if front_ms is None else {"front_s": front_ms / 1e3})


def _origin(log: StepLog) -> dict[str, Any]:
    """Return model, device, versions and date of the engine that wrote the log."""
    about = log.about
    found = {key: about[key] for key in ("model", "dtype", "device") if key in about}
    if "model" in found:  # a path of one machine says nothing on another
        found["model"] = str(found["model"]).rstrip("/").rpartition("/")[2]
    found |= {f"{name}_version": version for name, version in about.get("versions", {}).items()}
    if "unix_s" in about:
        found["date"] = datetime.fromtimestamp(about["unix_s"], UTC).date().isoformat()
    return found
