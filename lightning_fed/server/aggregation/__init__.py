"""Aggregation of the clients' messages: means, robust rules, privacy and compression."""
