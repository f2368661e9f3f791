"""The rounds of a run: cohorts, the clients' work, and the server's step."""
