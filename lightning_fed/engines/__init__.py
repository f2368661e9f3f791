"""Engines that run the clients of a cohort; formulas of methods are elsewhere."""
