"""Checkpoints: files, folders, search, contents, and restoring a run."""
