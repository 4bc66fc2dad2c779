"""Pool, noise, profiles, roofline, calibration."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import CostCoefficients
from headway.core.envelope import FACTOR_LIMIT
from headway.core.stretch import RATES
from headway.errors import InputError
from headway.twin import Noise, NoiseModel, Profile, builtin
from headway.twin.calibration import calibrate, read_steps
from headway.twin.kv import KvPool
from headway.twin.price import Correction, Price
from headway.twin.profile import TwinError, load


def test_freed_blocks_keep_their_content_until_taken() -> None:
    """Least recently freed goes first, a request's tail before its head, and a block in use stays."""
    pool = KvPool(total=4, block_size=8, caching=True)
    pool.take(2)
    assert pool.register("a")
    assert pool.register("b")
    pool.release(["a", "b"], 0)
    assert pool.hits(["a", "b", "c"]) == 2
    pool.take(2)  # the two blocks that never held anything
    pool.take(1)  # the tail: b
    assert pool.hits(["a", "b"]) == 1
    pool.acquire(["a"])
    assert pool.free == 0
    pool.check()


def test_content_that_is_cached_already_stays_plain() -> None:
    """The second block of the same content is not registered, so the count of free blocks stays right."""
    pool = KvPool(total=2, block_size=8, caching=True)
    pool.take(2)
    assert pool.register("a")
    assert not pool.register("a")
    pool.release(["a"], 1)
    assert pool.free == 2
    pool.check()


@given(st.lists(st.integers(1, 9000), max_size=8))
def test_noise_is_one_stream(sizes: list[int]) -> None:
    """Peeked at in any pieces or taken one by one, the factors are the same."""
    model = NoiseModel(sigma=0.1, stall_share=0.02, cap=1.3, drift=0.05, keep=0.3, ref_s=0.05)
    prices = np.exp(np.random.default_rng(6).uniform(-5.0, 2.0, max(sum(sizes), 1)))
    whole = Noise(model, np.random.default_rng(5)).peek(prices).tolist()
    pieces: list[float] = []
    noise = Noise(model, np.random.default_rng(5))
    for size in sizes:
        at = len(pieces)
        pieces += noise.peek(prices[at : at + size - 1]).tolist()
        noise.skip(size - 1)
        pieces.append(noise.next(float(prices[at + size - 1])))
    assert whole[: len(pieces)] == pieces
    assert max(whole) <= 1.3


def test_profile_survives_the_disk(tmp_path: Path) -> None:
    """TOML and JSON give back the same profile."""
    profile = builtin.CPU_SMOLLM2
    error = TwinError(load="1x", busy_max=0.9, errors={"ttft_p50": 0.03})
    profile = Profile(**{name: getattr(profile, name) for name in profile.__slots__} | {"twin_error": (error,)})
    for name in ("p.toml", "p.json"):
        profile.save(tmp_path / name)
        assert profile == load(tmp_path / name)
    assert error == profile.error_for(0.5)
    assert profile.error_for(0.95) is None


def test_step_cost_kept_by_a_server_is_a_profile(tmp_path: Path) -> None:
    """The file that `headway serve` keeps between starts can be simulated with."""
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"g": 0.03, "a": 0.001, "b": 0.0005, "k": 0.0, "x": 0.0, "steps": 900}))
    assert load(path).cost.g == 0.03


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("format = 1\nlabel = 'guessed'", "label"),
        ("format = 2\nlabel = 'measured'", "format"),
        ("format = 1\nlabel = 'measured'\n[cost]\ng_s = -1", "cost.g_s"),
        ("format = 1\nlabel = 'measured'\n[cost]\ng_s = 1\na_s = 0\nb_s = 0\nz_s = 1", "cost.z_s"),
        ("format = 1\nlabel = 'measured'\n[cost]\ng_s = 1\na_s = 0\nb_s = 0\n[engine]\nkv_blocks = 1.5", "kv_blocks"),
        ("format = ", "not a profile"),
    ],
)
def test_broken_profile_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    """The error tells the file and what is wrong in it."""
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=named) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_part_of_the_noise_wanders() -> None:
    """With a drift of 0.1 over 20 steps: correlation exp(-lag / 20) of that part, and the variances add up."""
    model = NoiseModel(sigma=0.1, drift=0.1, drift_steps=20.0)
    noise = Noise(model, np.random.default_rng(3))
    logs = np.log(noise.peek(np.zeros(200_000)))
    assert math.isclose(float(logs.std()), math.sqrt(0.02), rel_tol=0.03)
    for lag in (5, 20):
        found = float(np.corrcoef(logs[:-lag], logs[lag:])[0, 1])
        assert math.isclose(found, 0.5 * math.exp(-lag / 20), abs_tol=0.03)


def test_calibration_tells_what_wanders_from_what_scatters(tmp_path: Path) -> None:
    """A host that is slow for about 15 steps at a time; without it no drift is found."""
    noise = Noise(NoiseModel(sigma=0.03, drift=0.08, drift_steps=15.0), np.random.default_rng(8))
    path = tmp_path / "steps.jsonl"
    with path.open("w") as file:
        for i in range(6000):
            q, n = (0, 1 + i % 20) if i % 3 else (10 + i % 90, 0)
            seconds = (0.03 + 0.0014 * q + 0.0006 * n) * noise.next()
            file.write(json.dumps({"q": q, "n": n, "K": 0, "X": q * q / 2, "seconds": seconds}) + "\n")
    found = calibrate(read_steps(path), name="slow at times").noise
    assert math.isclose(found.drift, 0.08, rel_tol=0.15)
    assert math.isclose(found.drift_steps, 15.0, rel_tol=0.3)
    assert math.isclose(found.sigma, 0.03, rel_tol=0.2)
    assert calibrate(read_steps(step_log(tmp_path / "b", scatter=0.05)), name="steady").noise.drift == 0.0


def test_a_long_step_keeps_a_part_of_the_scatter() -> None:
    """keep = 0.2, ref_s = 0.05: 0.2 + 0.8 sqrt(0.05 / 5) = 0.28 of it at 5 s, all of it up to 0.05 s."""
    model = NoiseModel(sigma=0.1, keep=0.2, ref_s=0.05)
    whole, long, edge = (Noise(model, np.random.default_rng(1)).next(price) for price in (0.0, 5.0, 0.05))
    assert edge == whole
    assert math.isclose(long - 1.0, 0.28 * (whole - 1.0))


@pytest.mark.parametrize("keep", [0.3, 1.0])
def test_calibration_finds_what_long_steps_keep(tmp_path: Path, keep: float) -> None:
    """Steps of 35 ms to 3 s: the share comes back, and with it the scatter of a short step."""
    noise = Noise(NoiseModel(sigma=0.08, keep=keep, ref_s=0.04), np.random.default_rng(4))
    path = tmp_path / "steps.jsonl"
    with path.open("w") as file:
        for i in range(6000):
            q, n = (0, 1 + i % 20) if i % 3 else (20 * (1 + i % 97), 0)
            price = 0.03 + 0.0014 * q + 0.0006 * n
            row = {"q": q, "n": n, "K": 0, "X": q * q / 2, "seconds": price * noise.next(price)}
            file.write(json.dumps(row) + "\n")
    found = calibrate(read_steps(path), name="long steps").noise
    assert math.isclose(found.keep, keep, abs_tol=0.12)
    assert math.isclose(found.sigma, 0.08, rel_tol=0.1)
    assert math.isclose(found.ref_s, 0.0363, rel_tol=0.02)


def test_steps_of_a_calibrated_twin_take_as_long_in_total_as_those_measured(tmp_path: Path) -> None:
    """Scatter and stalls lengthen the average step, and long steps take 0.9 of what a line through all would say."""
    noise = Noise(NoiseModel(sigma=0.15, stall_share=0.03, stall_factor=1.6), np.random.default_rng(6))
    path = tmp_path / "steps.jsonl"
    measured = []
    with path.open("w") as file:
        for i in range(6000):
            q = 20 * (1 + i % 97) if i % 3 == 0 else 0
            price = (0.03 + 0.0014 * q) * (0.9 if q > 512 else 1.0)
            measured.append((q, price * noise.next(price)))
            file.write(json.dumps({"q": q, "n": int(q == 0), "K": 0, "X": 0, "seconds": measured[-1][1]}) + "\n")
    profile = calibrate(read_steps(path), name="in total")
    again = Noise(profile.noise, np.random.default_rng(7))
    for long in (False, True):
        kind = [(q, seconds) for q, seconds in measured if (q > 512) == long]
        prices = np.array([profile.price.seconds(q, int(q == 0), 0, 0.0) for q, _ in kind])
        total = sum(seconds for _, seconds in kind)
        assert float(prices @ profile.noise.mean(prices)) == pytest.approx(total, rel=0.003)
        assert sum(price * again.next(price) for price in prices.tolist()) == pytest.approx(total, rel=0.02)


def test_a_kind_of_step_has_its_own_factor() -> None:
    """Rows by prompt tokens, columns by decodes, an edge belongs to what is below it; the price is multiplied by it."""
    correction = Correction(q_up_to=(0,), n_up_to=(2, 5), factors=((1.1, 0.9, 1.3), (0.8, 1.0, 1.2)))
    assert [correction.factor(0, n) for n in (1, 2, 3, 5, 6)] == [1.1, 1.1, 0.9, 0.9, 1.3]
    assert [correction.factor(q, 3) for q in (1, 900)] == [1.0, 1.0]
    terms = np.array([(0, 2, 0, 0), (0, 6, 0, 0), (7, 0, 0, 0)], dtype=float)
    assert correction.of(terms).tolist() == [1.1, 1.3, 0.8]
    price = Price(cost=CostCoefficients(g=0.010, a=0.001, b=0.002, k=1e-5), correction=correction)
    assert price.seconds(7, 0, 0, 0.0) == pytest.approx(0.017 * 0.8)
    assert price.decode_only(6, np.array([0.0, 100.0])).tolist() == pytest.approx([0.022 * 1.3, 0.023 * 1.3])


def test_a_calibration_learns_what_is_not_linear(tmp_path: Path) -> None:
    """Steps of 21 to 29 decodes and nothing else take 1.3 times what a line says: their kind is told."""
    path = step_log(tmp_path / "steps", scatter=0.02)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["seconds"] *= 1.3 if line["q"] == 0 and line["n"] > 20 else 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    profile = calibrate(read_steps(path), name="uneven")
    assert profile.noise.sigma < 0.04
    taken = profile.price.seconds(0, 25, 5000, 0.0)
    assert taken == pytest.approx(1.3 * (0.03 + 0.0006 * 25 + 2e-7 * 5000), rel=0.03)
    profile.save(tmp_path / "uneven.toml")
    assert load(tmp_path / "uneven.toml").correction == profile.correction


def test_a_calibration_tells_what_steps_in_a_row_take(tmp_path: Path) -> None:
    """Twenty steps of 1.4 times their mean among 1,500: what they take is in every burst, and a file keeps it."""
    path = step_log(tmp_path / "steps", scatter=0.02)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[700:720]:
        line["seconds"] *= 1.4
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    profile = calibrate(read_steps(path), name="slow", eps=0.001)
    assert [line.rate for line in profile.lines] == list(RATES)
    spell = sum(line["seconds"] for line in lines[700:720])
    for line in profile.lines:
        assert line.burst_s == pytest.approx(spell * (1 - line.rate / 1.4), rel=0.1, abs=0.02 * spell)
    for name in ("slow.toml", "slow.json"):
        profile.save(tmp_path / name)
        assert load(tmp_path / name).lines == profile.lines
    steady = calibrate(read_steps(step_log(tmp_path / "steady", scatter=0.02)), name="steady", eps=0.001)
    assert all(one.burst_s < other.burst_s / 4 for one, other in zip(steady.lines, profile.lines, strict=True))


def test_the_envelope_of_a_calibration_is_capped_as_in_the_engine(tmp_path: Path) -> None:
    """Stalls of three times a step, one in fifty: at an eps of 0.001 the factor is 2, or nothing could be promised."""
    log = read_steps(step_log(tmp_path / "steps", scatter=0.02, stalls=0.02))
    assert calibrate(log, name="stalls", eps=0.001).envelope_factor == FACTOR_LIMIT == 2.0
    assert calibrate(log, name="stalls", eps=0.1).envelope_factor < 1.1


@pytest.mark.parametrize(
    ("stretches", "expected"),
    [
        ("stretches = 1", "envelope.stretches"),
        ("stretches = [1]", "rate and burst_s"),
        ("[[envelope.stretches]]\nrate = 0.9\nburst_s = 0.1", "at least 1"),
        ("[[envelope.stretches]]\nrate = 1.1\nburst_s = -1", "burst_s"),
        ("[[envelope.stretches]]\nrate = 1.1", "burst_s"),
        ("[[envelope.stretches]]\nrate = 1.1\nburst_s = 0.1\nsigma = 2", "sigma"),
    ],
)
def test_broken_envelopes_of_stretches_are_named(tmp_path: Path, stretches: str, expected: str) -> None:
    """Tables of a rate of at least 1 and a burst, nothing else."""
    path = tmp_path / "p.toml"
    path.write_text(
        f'format = 1\nlabel = "measured"\n[cost]\ng_s = 0.01\na_s = 0.001\nb_s = 0.001\n[envelope]\n{stretches}\n'
    )
    with pytest.raises(InputError, match=expected):
        load(path)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ("[correction.q_0]\nn_more = 1.0", "q_more"),
        ("[correction.q_5]\nn_more = 1.0\n[correction.q_2]\nn_more = 1.0\n[correction.q_more]\nn_more = 1.0", "order"),
        ("[correction.q_0]\nn_2 = 1.0\nn_more = 1.0\n[correction.q_more]\nn_more = 1.0", "correction.q_more"),
        ("[correction.q_more]\nn_more = 0", "above 0"),
        ("[correction.q_more]\nn_more = 'x'", "n_more"),
    ],
)
def test_a_broken_correction_is_named(tmp_path: Path, tables: str, expected: str) -> None:
    """Rows and columns in order, the same in each row, factors above 0."""
    path = tmp_path / "p.toml"
    path.write_text(f'format = 1\nlabel = "measured"\n[cost]\ng_s = 0.01\na_s = 0.001\nb_s = 0.001\n{tables}\n')
    with pytest.raises(InputError, match=expected):
        load(path)


def test_estimate_follows_the_datasheet() -> None:
    """8.03e9 bf16 weights over 2.039 TB/s x 0.75 take 10.5 ms a step; the label says that it is no measurement."""
    profile = builtin.find("estimated:a100-80g/llama-3.1-8b")
    assert profile.label == "estimated"
    assert math.isclose(profile.cost.g, 16.06e9 / (2.039e12 * 0.75) + 0.002, rel_tol=1e-3)
    two = builtin.find("estimated:a100-80g/llama-3.1-8bx2")
    assert two.cost.a < profile.cost.a
    with pytest.raises(InputError, match="KV blocks"):
        builtin.find("estimated:l4/llama-3.1-70b")
    with pytest.raises(InputError, match="no such file"):
        builtin.find("nowhere.toml")


@pytest.mark.parametrize(
    "name", ["rtx4090/foo", "H100/Foo", "b100/llama-3.1-8b", "l4/llama-3.1-8bx", "l4/mixtral-8x7b", "l4", "", "l4/x2"]
)
def test_unknown_estimate_lists_what_is_known(name: str) -> None:
    """Whatever the name looks like, the devices and models that there are stand in the error."""
    with pytest.raises(InputError, match=r"DEVICE one of a100-80g, .* MODEL one of smollm2-135m, .*llama-3.1-70b"):
        builtin.find(f"estimated:{name}")


def step_log(path: Path, *, scatter: float, stalls: float = 0.0) -> Path:
    """Write 1,500 steps of a known cost."""
    random = np.random.default_rng(1)
    with path.open("w") as file:
        for _ in range(1500):
            n = int(random.integers(0, 30))
            q = 0 if n and random.random() < 0.5 else int(random.integers(1, 200))
            K, X = n * int(random.integers(50, 400)), q * float(random.integers(0, 500)) + q * q / 2
            seconds = 0.03 + 0.0014 * q + 0.0006 * n + 2e-7 * K + 7e-7 * X
            seconds *= math.exp(scatter * random.standard_normal()) * (3.0 if random.random() < stalls else 1.0)
            file.write(json.dumps({"q": q, "n": n, "K": K, "X": X, "seconds": seconds, "t_s": 0.0}) + "\n")
    return path


def test_calibration_finds_the_coefficients(tmp_path: Path) -> None:
    """Exact steps give back the exact cost and no error; with scatter and stalls it stays within a few percent."""
    exact = calibrate(read_steps(step_log(tmp_path / "a", scatter=0.0)), name="exact")
    for found, true in zip(
        (exact.cost.g, exact.cost.a, exact.cost.b, exact.cost.k, exact.cost.x),
        (0.03, 0.0014, 0.0006, 2e-7, 7e-7),
        strict=True,
    ):
        assert math.isclose(found, true, rel_tol=1e-4)
    assert exact.fit_error["all"]["p90"] == 0.0
    noisy = calibrate(read_steps(step_log(tmp_path / "b", scatter=0.05, stalls=0.02)), name="noisy", eps=0.05)
    assert math.isclose(noisy.cost.a, 0.0014, rel_tol=0.03)
    assert math.isclose(noisy.noise.sigma, 0.05, rel_tol=0.15)
    assert math.isclose(noisy.noise.stall_share, 0.02, abs_tol=0.01)
    assert 1.05 < noisy.envelope_factor < 1.2
    assert {"n", "p50", "p90", "bias"} == set(noisy.fit_error["all"])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"q": 1, "n": 0, "K": 0, "X": 0}', "seconds"),
        ('{"q": -1, "n": 0, "K": 0, "X": 0, "seconds": 1}', "q"),
        ('{"q": 0, "n": 0, "K": 0, "X": 0, "seconds": 1}', "computes something"),
        ("nonsense", "not JSON"),
    ],
)
def test_bad_step_log_names_the_line(tmp_path: Path, line: str, named: str) -> None:
    """Line 2 is bad and the error says so."""
    path = tmp_path / "steps.jsonl"
    path.write_text('{"q": 1, "n": 0, "K": 0, "X": 0, "seconds": 1}\n' + line + "\n")
    with pytest.raises(InputError, match=named) as caught:
        read_steps(path)
    assert f"{path}:2:" in str(caught.value)


def test_short_step_log_is_refused(tmp_path: Path) -> None:
    """A handful of steps cannot fix five coefficients."""
    path = tmp_path / "steps.jsonl"
    path.write_text('{"q": 1, "n": 0, "K": 0, "X": 0, "seconds": 1}\n' * 3)
    with pytest.raises(InputError, match="at least 50"):
        read_steps(path)


def test_a_log_tells_what_its_engine_is(tmp_path: Path) -> None:
    """Lines with `event` are no steps; what the engine said at its start is in the profile, the newest start last."""
    path = step_log(tmp_path / "steps.jsonl", scatter=0.01)
    begun = {
        "event": "started",
        "unix_s": 1_700_000_000.0,
        "model": "/models/tiny",
        "device": "cpu",
        "versions": {"vllm": "9"},
        "engine": {"kv_blocks": 77, "token_budget": 512, "unknown": 1},
        "config": {"front_ms": 15.0},
    }
    steps = path.read_text()
    path.write_text(json.dumps(begun) + "\n" + '{"event": "arrived", "r": 0}\n' + steps)
    profile = calibrate(read_steps(path), name="told", engine={"token_budget": 256})
    assert profile.engine == {"kv_blocks": 77, "token_budget": 256, "front_s": 0.015}
    told = {key: profile.provenance[key] for key in ("model", "device", "vllm_version", "date", "steps")}
    assert told == {"model": "tiny", "device": "cpu", "vllm_version": "9", "date": "2023-11-14", "steps": 1500}


def test_a_part_of_a_log_can_be_read(tmp_path: Path) -> None:
    """From a byte on; what the engine said before it still counts."""
    path = step_log(tmp_path / "steps.jsonl", scatter=0.01)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b'{"event": "started", "model": "m"}\n' + b"".join(lines))
    log = read_steps(path, start=path.stat().st_size - len(b"".join(lines[-100:])))
    assert len(log) == 100
    assert log.about["model"] == "m"
