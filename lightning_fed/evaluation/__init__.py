"""Evaluation of the server model, on shared data and on single clients."""
