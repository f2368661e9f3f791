"""Checkpoints: files, folders, search, what they hold, and how a run is restored from one."""
