"""Errors that state the found and the expected value, and how to fix them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fed.core.types import ClientId


class FederatedError(ValueError):
    """An unsupported setting, model, data set or checkpoint; the message explains how to fix it."""


class ClientError(FederatedError):
    """A client failed to train; the message names the client, the round and the cause.

    An exception in user code is available as ``__cause__``.

    Args:
        message: The message.
        culprit: The client that caused the error, which ``on_client_error="drop"`` drops; None if the cause is unclear.
    """

    def __init__(self, message: str, culprit: "ClientId | None" = None) -> None:
        super().__init__(message)
        self.culprit = culprit


def refusal_in(error: BaseException | None) -> FederatedError | None:
    """Return our own error in the chain of another one, or None: the parser wraps errors of constructors."""
    while error is not None and not isinstance(error, FederatedError):
        error = error.__cause__ or error.__context__
    return error
