"""Asynchronous servers, which step before all clients of a round have replied."""
