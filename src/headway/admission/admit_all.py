"""Accept everything, promise nothing: stock behaviour without a valve."""

from __future__ import annotations

from headway.core import Accept, EngineView, RequestState, Verdict


class AdmitAll:
    """The reference without admission control."""

    name = "admit_all"

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return Accept without a bound."""
        return Accept()
