"""Clients from a user's own folders and tables."""
