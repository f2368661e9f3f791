"""FedPer and LG-FedAvg: the part that stays with the clients."""

import pytest
import torch

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedPer, LGFedAvg
from tests.helpers.personal import close, kept, run
from tests.helpers.training import Net, parameters, seeded


@pytest.mark.parametrize(
    ("algorithm", "part"), [(FedPer(["head.*"]), "head"), (LGFedAvg(["body.*"]), "body")], ids=repr
)
def test_named_part_stays_local_and_the_rest_is_shared(algorithm, part):
    model, start = seeded(dropout=0.0), seeded(dropout=0.0).double()
    fitted = run(algorithm, model=model, max_rounds=1)
    shared = "body" if part == "head" else "head"
    assert fitted.fit_loop.state.x.numel() == parameters(getattr(start, shared)).numel()
    assert not torch.equal(fitted.fit_loop.state.x, parameters(getattr(start, shared)))
    close(parameters(getattr(model, part)), parameters(getattr(start, part)))  # the server keeps the initial part
    heads = [state["personal.parameters"] for state in kept(fitted).values()]
    assert len(heads) == 3
    assert all(head.numel() == parameters(getattr(start, part)).numel() for head in heads)
    assert not torch.equal(heads[0], heads[1])


@pytest.mark.parametrize("cls", [FedPer, LGFedAvg])
def test_names_not_in_a_list_or_matching_nothing_are_rejected(cls):
    for wrong in ([], "head.*", [3]):
        with pytest.raises(FederatedError, match=cls.__name__):
            cls(wrong)
    with pytest.raises(FederatedError, match="tail"):
        run(cls(["tail.*"]))
    assert cls(("head.*",)).personal_names(Net()) == ["head.*"]
