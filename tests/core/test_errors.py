"""Errors keep their culprit, and survive the transfer to another process."""

import pickle

from lightning_fed.core.errors import ClientError, FederatedError


def test_client_error_is_a_federated_error_and_a_value_error() -> None:
    error = ClientError("Client 3 has failed.", 3)
    assert isinstance(error, FederatedError)
    assert isinstance(error, ValueError)
    assert (str(error), error.culprit, ClientError("x").culprit) == ("Client 3 has failed.", 3, None)


def test_errors_round_trip_through_pickle() -> None:
    for error in (FederatedError("no"), ClientError("Client 'a' has failed.", "a")):
        found = pickle.loads(pickle.dumps(error))
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
