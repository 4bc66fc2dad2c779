"""Decisions of Headway. Pure: no clock, no I/O, no randomness, no engine, no logging.

`Ledger` holds the state of every request, `StepCost` the learned price of a step, `EngineView` what a decision may
look at, `StepPlan` and `Verdict` what it answers.
"""

from headway.core.bookings import Bookings
from headway.core.cost import CostCoefficients, Step, StepCost
from headway.core.demand import DemandWindow
from headway.core.desk import Answer, Desk
from headway.core.ledger import Ledger
from headway.core.request import Phase, RequestState
from headway.core.slo import Slo
from headway.core.stretch import Line, Stretches
from headway.core.tenants import FairShares
from headway.core.verdict import Accept, Admission, Defer, Reason, Reject, Verdict
from headway.core.view import EngineView, KvView, Policy, StepPlan

__all__ = [
    "Accept",
    "Admission",
    "Answer",
    "Bookings",
    "CostCoefficients",
    "Defer",
    "DemandWindow",
    "Desk",
    "EngineView",
    "FairShares",
    "KvView",
    "Ledger",
    "Line",
    "Phase",
    "Policy",
    "Reason",
    "Reject",
    "RequestState",
    "Slo",
    "Step",
    "StepCost",
    "StepPlan",
    "Stretches",
    "Verdict",
]
