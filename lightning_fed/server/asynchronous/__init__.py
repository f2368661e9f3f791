"""Servers that do not wait for all clients of a round."""
