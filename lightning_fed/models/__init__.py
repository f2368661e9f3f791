"""Ordinary LightningModules for the quickstart, the examples and the papers' experiments."""

from lightning_fed.models.classifier import MLPClassifier

__all__ = ["MLPClassifier"]
