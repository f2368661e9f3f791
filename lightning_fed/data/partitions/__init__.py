"""Partitions of a data set among clients, and how much they skew it."""
