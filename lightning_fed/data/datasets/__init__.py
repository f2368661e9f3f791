"""The data sets of the papers."""
