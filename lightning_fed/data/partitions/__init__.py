"""Partitions of a data set into clients."""
