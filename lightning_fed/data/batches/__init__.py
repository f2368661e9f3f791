"""Batches of a client's examples."""
