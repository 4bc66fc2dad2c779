"""headway.toml: what is accepted, and that every mistake is named with line, key, value and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.admission import REGISTRY as ADMISSIONS
from headway.config import CALIBRATION_CLASS, Config, load
from headway.errors import InputError
from headway.policies import REGISTRY as POLICIES

TOP = (
    "admission, admission_parameters, blocking_ms, bookings, class, default_class, eps, fair_share, front_ms, "
    "patience_s, policy, policy_parameters, tenant, tenant_reserve"
)
TENANT = "keys_sha256, weight"
KEY = "0" * 64
CLASS = "assumed_output_tokens, on_miss, tbt_ms, tpot_ms, ttft_ms, weight"


def read(tmp_path: Path, text: str) -> Config:
    """Load a file with this text."""
    path = tmp_path / "headway.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def test_an_empty_file_promises_nothing(tmp_path: Path) -> None:
    """Defaults: the class `default` without targets, beside that of the start-up sweep."""
    config = read(tmp_path, "")
    assert config == Config()
    assert list(config.classes) == ["default", CALIBRATION_CLASS]
    assert (config.policy, config.admission) == ("headway", "response_time")


def test_a_class_becomes_an_slo_in_seconds(tmp_path: Path) -> None:
    """Milliseconds in the file, seconds in the code; integers are numbers too."""
    config = read(tmp_path, 'default_class = "chat"\n[class.chat]\nttft_ms = 1000\ntbt_ms = 120.5\nweight = 2\n')
    slo = config.classes["chat"].slo("chat")
    assert (slo.name, slo.ttft_s, slo.tpot_s, slo.tbt_s, slo.weight, slo.on_miss) == (
        "chat",
        1.0,
        None,
        0.1205,
        2.0,
        "reject",
    )


@pytest.mark.parametrize(
    "text",
    [
        'default_class = "a.b c"\n[class."a.b c"]\nttft_ms = 5\n',
        "default_class = 'a.b c'\n[ class . 'a.b c' ]\nttft_ms = 5\n",
        "default_class = 'a.b c'\nclass.'a.b c'.ttft_ms = 5\n",
        "default_class = 'a.b c'\nclass = { 'a.b c' = { ttft_ms = 5 } }\n",
        "default_class = 'a.b c'\n[class]\n'a.b c' = { ttft_ms = 5 }\n",
    ],
)
def test_a_class_may_be_written_in_every_way_of_toml(tmp_path: Path, text: str) -> None:
    """Quoted names with dots and spaces, dotted keys, inline tables."""
    assert read(tmp_path, text).classes["a.b c"].ttft_ms == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # a bad value, wherever its key is written
        ("eps = 2", ":1: eps = 2: expected less than 1"),
        ("\n\npatience_s = 0", ":3: patience_s = 0: expected greater than 0"),
        ("front_ms = -1", ":1: front_ms = -1: expected greater than or equal to 0"),
        ("front_ms = 9\n[class.default]\nttft_ms = 9", ":3: class.default.ttft_ms = 9.0: expected more than front_ms"),
        ("blocking_ms = inf", ":1: blocking_ms = inf: expected "),
        ("[class.default]\nttft_ms = nan", ":2: class.default.ttft_ms = nan: expected "),
        ("[class.default]\nttft_ms = 86400001", ":2: class.default.ttft_ms = 86400001: expected less than or equal to"),
        ('[class.default]\nttft_ms = "5"', ":2: class.default.ttft_ms = '5': expected a valid number"),
        ("[class.default]\nweight = true", ":2: class.default.weight = True: expected a valid number"),
        ("[class.default]\nassumed_output_tokens = 1.5", ":2: class.default.assumed_output_tokens = 1.5: expected a"),
        ("[class.default]\non_miss = 'drop'", ":2: class.default.on_miss = 'drop': expected 'reject', 'defer' or"),
        ("# x\n[class]\ndefault.ttft_ms = 0", ":3: class.default.ttft_ms = 0: expected greater than 0"),
        ("class.default.ttft_ms = 0", ":1: class.default.ttft_ms = 0: expected greater than 0"),
        ("\n[class]\ndefault = {ttft_ms = 0}", ":3: class.default.ttft_ms = 0: expected greater than 0"),
        ("\nclass = {default = {ttft_ms = 0}}", ":2: class.default.ttft_ms = 0: expected greater than 0"),
        ('[class."a.b"]\n"tbt_ms" = 0', ":2: class.a.b.tbt_ms = 0: expected greater than 0"),
        ("[class.default]\nttft_ms = 9\n[class.x]\nttft_ms = 0", ":4: class.x.ttft_ms = 0: expected greater than 0"),
        ("class = 3", ":1: class = 3: expected a table"),
        ("[class]\nx = 3", ":2: class.x = 3: expected a table"),
        # a key that nobody knows
        ("polcy = 'edf'", f":1: polcy = 'edf': expected one of {TOP}"),
        ("class_ = {}", f":1: class_ = {{}}: expected one of {TOP}"),
        ("[class.default]\nttft = 1", f":2: class.default.ttft = 1: expected one of {CLASS}"),
        # tenants
        ("tenant_reserve = 1", ":1: tenant_reserve = 1: expected less than 1"),
        ("[tenant.a]\nweight = 2", ":1: tenant.a.keys_sha256 = {'weight': 2}: expected "),
        ("[tenant.a]\nkeys_sha256 = ['sk-1']", ":2: tenant.a.keys_sha256.0 = 'sk-1': expected "),
        (f"[tenant.a]\nkeys_sha256 = ['{KEY}']\nkey = 1", f":3: tenant.a.key = 1: expected one of {TENANT}"),
        (f"[tenant.'~a']\nkeys_sha256 = ['{KEY}']", ":1: tenant = '~a': expected 1 to 64 printable ASCII"),
        (
            f"[tenant.a]\nkeys_sha256 = ['{KEY}']\n[tenant.b]\nkeys_sha256 = ['{KEY}']",
            f":4: tenant.b.keys_sha256 = '{KEY}': expected a key of one tenant: it is a's already",
        ),
        # names
        ("policy = 'lifo'", f":1: policy = 'lifo': expected one of {', '.join(POLICIES)}"),
        ("\nadmission = 'none'", f":2: admission = 'none': expected one of {', '.join(ADMISSIONS)}"),
        ("[class.gold]\nttft_ms = 1", ": default_class = 'default': expected one of the classes of the file: gold (or"),
        ("default_class = 'x'\n[class.gold]", ":1: default_class = 'x': expected one of the classes of the file: gold"),
        ("default_class = 'x'", ":1: default_class = 'x': expected one of the classes of the file: there are none"),
        ("[class.calibration]\nttft_ms = 1", ":1: class = 'calibration': expected another name"),
        ("[class.' x']", ":1: class = ' x': expected 1 to 64 printable ASCII"),
        ("[class.'caf\u00e9']", ":1: class = 'caf\u00e9': expected 1 to 64 printable ASCII"),
        ("[class.'']", ":1: class = '': expected 1 to 64 printable ASCII"),
        # parameters
        ("[policy_parameters]\nmin_chunk = 'a'", ":2: policy_parameters.min_chunk = 'a': expected a valid integer"),
        ("[policy_parameters]\nchunk = 1", ":2: policy_parameters.chunk = 1: expected one of min_chunk, window, jump"),
        ("policy = 'fcfs'\npolicy_parameters.x = 1", ":2: policy_parameters.x = 1: expected nothing: fcfs has no"),
        ("admission_parameters = {method = 'run'}", ":1: admission_parameters.method = 'run': expected 'walk' or"),
        ("[admission_parameters]\n\nforesight = 3", ":3: admission_parameters.foresight = 3: expected a share in"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    """File, line, key, value, and what was expected instead."""
    with pytest.raises(InputError) as found:
        read(tmp_path, text)
    assert str(found.value).startswith(f"{tmp_path / 'headway.toml'}{message}")


def test_broken_toml_is_named_with_its_line(tmp_path: Path) -> None:
    """Also when it breaks at the very end."""
    with pytest.raises(InputError, match=r"headway\.toml:2: not valid TOML"):
        read(tmp_path, "eps = 0.1\npolicy = = 3\n")
    with pytest.raises(InputError, match=r"headway\.toml:2: not valid TOML"):
        read(tmp_path, "eps = 0.1\npolicy =")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, a folder, or no text."""
    with pytest.raises(InputError, match=r"nowhere\.toml: cannot read the configuration"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(InputError, match="cannot read the configuration"):
        load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.toml: cannot read the configuration"):
        load(tmp_path / "binary.toml")
