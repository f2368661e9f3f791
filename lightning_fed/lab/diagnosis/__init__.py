"""Find why a configuration does not converge, and settings that suit its clients: ``lightning-fed diagnose``."""

from lightning_fed.lab.diagnosis.command import diagnose
from lightning_fed.lab.diagnosis.theory import mime_mvr

__all__ = ["diagnose", "mime_mvr"]
