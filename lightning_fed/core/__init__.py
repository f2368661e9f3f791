"""The core that all other packages use; imports torch but not Lightning."""

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport, Cohort, RoundReport, Run, Step, Update
from lightning_fed.core.types import ClientId, State, Vector

__all__ = [
    "ClientError",
    "ClientId",
    "ClientReport",
    "Cohort",
    "FederatedError",
    "RoundReport",
    "Run",
    "State",
    "Step",
    "Update",
    "Vector",
]
