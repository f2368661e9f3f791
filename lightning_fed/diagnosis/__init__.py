"""Why a configuration does not converge, and what suits its clients: ``lightning-fed diagnose``."""

from lightning_fed.diagnosis.command import diagnose

__all__ = ["diagnose"]
