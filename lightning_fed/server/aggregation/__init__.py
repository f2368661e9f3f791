"""Averages and other aggregates of the clients' messages."""
