"""Ordinary LightningModules for the quickstart, the examples and the papers' experiments."""

from lightning_fed.models.classifier import MLPClassifier
from lightning_fed.models.regression import LinearRegression, Quadratic

__all__ = ["LinearRegression", "MLPClassifier", "Quadratic"]
