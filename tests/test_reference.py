"""docs/reference.md names everything that a user can set, send or scrape."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headway import admission, policies
from headway.config import Config, SloClass, Tenant
from headway.core import Reason
from headway.engine.vllm import headers, messages
from headway.engine.vllm.metrics import Metrics

PAGE = (Path(__file__).parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")


def series() -> list[str]:
    """Return the names of all series, without the step log's, which is there only when there is one."""
    registry = CollectorRegistry()
    Metrics(registry)
    counters = {"counter": "_total"}
    return [family.name + counters.get(family.type, "") for family in registry.collect()]


NAMES = {
    "keys": [field.alias or name for name, field in Config.model_fields.items()],
    "class keys": list(SloClass.model_fields),
    "tenant keys": list(Tenant.model_fields),
    "policies": list(policies.REGISTRY),
    "admission tests": list(admission.REGISTRY),
    "parameters": [
        name
        for registry in (policies.REGISTRY, admission.REGISTRY)
        for kind, factory in registry.items()
        if kind != "clairvoyant"
        for name in inspect.signature(factory).parameters
        if name not in ("args", "kwargs")
    ],
    "headers": [name.decode() for name in (headers.CLASS, *headers.TARGETS)],
    "reasons": [reason.value for reason in Reason],
    "series": series(),
    "environment": [messages.ENV_EVENT_LOG, messages.ENV_STEP_LOG, messages.ENV_PROFILE],
}


@pytest.mark.parametrize("kind", NAMES)
def test_the_reference_names_everything(kind: str) -> None:
    """Each name stands in backquotes, a table of the file in brackets; there is something to name."""
    assert NAMES[kind]
    tables = {"class": "`[class.NAME]`", "tenant": "`[tenant.NAME]`"}
    missing = [
        name
        for name in NAMES[kind]
        if tables.get(name, f"`{name}`") not in PAGE and f"`[{name}]`" not in PAGE and f'`"{name}"`' not in PAGE
    ]
    assert not missing
