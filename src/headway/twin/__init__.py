"""The twin: a discrete-event simulator that drives the same policies and admission tests as the engine."""

from headway.twin.builtin import find as find_profile
from headway.twin.config import EngineConfig
from headway.twin.noise import Noise, NoiseModel
from headway.twin.profile import Profile
from headway.twin.scenario import Outcome, Scenario, save, simulate

__all__ = [
    "EngineConfig",
    "Noise",
    "NoiseModel",
    "Outcome",
    "Profile",
    "Scenario",
    "find_profile",
    "save",
    "simulate",
]
