"""The small core that everything else stands on; imports torch and nothing of Lightning."""

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
