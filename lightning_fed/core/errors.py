"""Errors that name what was found, what was expected and what to change."""

__all__ = ["ClientError", "FederatedError"]


class FederatedError(ValueError):
    """A setting, model, data set or checkpoint that federated training cannot take; the message says what to change."""


class ClientError(FederatedError):
    """A client that could not be trained; the message names the client, the round and the cause.

    A user's own exception stays reachable as ``__cause__``.
    """
