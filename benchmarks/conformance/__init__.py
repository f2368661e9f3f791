"""Measures how exactly federated frameworks compute the methods of the papers. See README.md; needs NumPy only."""
