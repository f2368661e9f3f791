"""Clients from folders and tables."""
