"""The points of a sweep on a Ray cluster: same results in the same order as in one process.

Every node needs the same version of Headway, which is checked. The trace is shipped once; at most two points for each
processor of the cluster are under way, so a sweep of thousands does not fill the object store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from headway import __version__
from headway.errors import EngineError, HeadwayError
from headway.trace.record import Trace
from headway.twin.scenario import Outcome, Scenario, simulate


class RayPool:
    """A connection to a Ray cluster for `headway.twin.sweep.run`.

    Args:
        address: `ray://HOST:PORT`, `HOST:PORT`, `auto` for the cluster of this machine, `local` for one that is
            started here and ends with the sweep.

    Raises:
        EngineError: Ray is not installed, or nothing answers there.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise EngineError(
                f"--ray {address}: Ray is not installed: pip install '.[ray]' in a clone, here and on its nodes"
            ) from error
        self._ray = ray
        self.address = address
        try:
            # log_to_driver: results come back as values, and what a worker prints is not the sweep's output.
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=_dashboard(address))
        except Exception as error:
            # ConnectionError, ValueError and RuntimeError alike, by the kind of address.
            raise EngineError(f"--ray {address}: cannot connect: {error}") from error

    def __call__(self, trace: Trace, scenarios: Sequence[Scenario]) -> Iterator[Outcome]:
        """Yield the outcome of each scenario, in order."""
        ray = self._ray
        task = ray.remote(_one)
        shipped = ray.put(trace)
        most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        coming: deque[Any] = deque()
        for scenario in scenarios:
            coming.append(task.remote(shipped, scenario))
            if len(coming) >= most:
                yield self._take(coming.popleft())
        while coming:
            yield self._take(coming.popleft())

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()

    def _take(self, reference: Any) -> Outcome:
        try:
            version, outcome = self._ray.get(reference)
        except Exception as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, HeadwayError):
                raise cause from None
            raise EngineError(f"--ray {self.address}: a point failed: {error}") from error
        if version != __version__:
            raise EngineError(f"--ray {self.address}: a node runs headway {version}: expected {__version__} as here")
        return outcome


def _dashboard(address: str) -> bool | None:
    """A cluster started for one sweep needs none; that of another cluster is not ours to say."""
    return False if address == "local" else None


def _one(trace: Trace, scenario: Scenario) -> tuple[str, Outcome]:
    return __version__, simulate(trace, scenario)
