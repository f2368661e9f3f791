"""Mismatches with a resumed run are refused by name, and harmless differences cause a warning."""

import warnings

import pytest
import torch

from lightning_fed.checkpoints.restoring import check_optimizer_states, compare_work, restored_from
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.origin import CHECKPOINT, EARLIER_FIT
from tests.helpers.training import data, fit, seeded, trainer


@pytest.mark.parametrize("cause", ["the sizes differ", "the sizes differ."])
def test_mismatch_errors_are_full_sentences(cause: str) -> None:
    with (
        pytest.raises(FederatedError, match=r"the model ended in RuntimeError: the sizes differ\. Resume with"),
        restored_from("last.ckpt", "the model"),
    ):
        raise RuntimeError(cause)


@pytest.mark.parametrize("origin", [CHECKPOINT, EARLIER_FIT])
def test_changed_work_warns_and_changed_parameters_or_data_raise(origin: object) -> None:
    saved = {"parameters": "a", "sizes": "b", "local_epochs": "1", "optimizer": "SGD", "gone": "x"}
    compare_work(saved, {**saved, "optimizer": "Adam"}, True, origin)  # loading its state raises instead
    with pytest.warns(UserWarning, match=r"local_epochs=1 \(.* has 2\). The run continues with"):
        compare_work(saved, {"local_epochs": "2"}, True, origin)
    with pytest.warns(UserWarning, match="other numbers of examples per client. The run continues with"):
        compare_work(saved, {"sizes": "c"}, False, origin)
    with pytest.raises(FederatedError, match="what its clients keep belongs to their data"):
        compare_work(saved, {"sizes": "c"}, True, origin)
    with pytest.raises(FederatedError, match="other trained parameters"):
        compare_work(saved, {"parameters": "c"}, False, origin)


@pytest.mark.parametrize(("change", "message"), [("lr", "has the learning rate 'x'"), ("state", "for a parameter")])
def test_invalid_optimizer_state_is_rejected(change: str, message: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state["k"] = torch.ones(1)  # of all parameters, as in MADGRAD
    check_optimizer_states(optimizer, "the server's optimizer")
    if change == "lr":
        optimizer.param_groups[0]["lr"] = "x"
    else:
        optimizer.state[weight] = 3
    with pytest.raises(FederatedError, match=f"the server's optimizer .*{message}"):
        check_optimizer_states(optimizer, "the server's optimizer")


def test_edited_weights_in_a_checkpoint_warn() -> None:
    made = trainer(max_rounds=1)
    made.fit(seeded(), data())
    made.save_checkpoint("whole.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The state_dict of")
        whole = fit(max_rounds=2, ckpt_path="whole.ckpt")
    checkpoint = torch.load("whole.ckpt", weights_only=True)
    checkpoint["state_dict"]["head.weight"] *= 2
    torch.save(checkpoint, "edited.ckpt")
    with pytest.warns(UserWarning, match=r"The state_dict of edited.ckpt is not the server's model after 1 round"):
        edited = fit(max_rounds=2, ckpt_path="edited.ckpt")
    assert torch.equal(edited, whole)
