"""Runs of oracle cases with the real trainer; see :mod:`test_oracle`."""
