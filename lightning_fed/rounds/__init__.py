"""The rounds of a run: cohorts, the clients' work, and what the server makes of it."""
