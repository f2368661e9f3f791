"""Errors that name what was found, what was expected and what to change."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fed.core.types import ClientId

__all__ = ["ClientError", "FederatedError", "refusal_in"]


class FederatedError(ValueError):
    """A setting, model, data set or checkpoint that federated training cannot take; the message says what to change."""


class ClientError(FederatedError):
    """A client could not be trained; the message names the client, the round and the cause.

    A user's own exception stays reachable as ``__cause__``.

    Args:
        message: The message.
        culprit: The client that caused the error, which ``on_client_error="drop"`` drops; None if it may not be the
            client's fault.
    """

    def __init__(self, message: str, culprit: "ClientId | None" = None) -> None:
        super().__init__(message)
        self.culprit = culprit


def refusal_in(error: BaseException | None) -> FederatedError | None:
    """Find our own error in the chain of another one: the parser wraps what a class raises when it is made."""
    while error is not None and not isinstance(error, FederatedError):
        error = error.__cause__ or error.__context__
    return error
