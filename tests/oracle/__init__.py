"""Runs folders of oracle cases through the real trainer; see :mod:`test_oracle`."""
