"""What server and sites must have in common."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedSite
from lightning_fed.deploy.facts import check_facts
from tests.deploy.site_models import Net, model
from tests.deploy.wire import Wire, make_data, make_trainer

MAKE = partial(make_trainer, "Scaffold ii")


DIFFERENT: dict[str, tuple[dict[str, Any], Callable[[], Any], str]] = {
    "method": ({"method": "FedAvg"}, model, "its method is FedAvg, the server's is Scaffold"),
    "options": ({"method": "Scaffold i"}, model, "its method options is .*'i'"),
    "seed": ({"seed": 3}, model, "its seed is 3"),
    "work": ({"local_epochs": 3}, model, "its local_epochs is 3, the server's is 2"),
    "precision": ({"precision": "64-true"}, model, "its precision is 64-true"),
    "model": ({}, lambda: torch.nn.Module.register_buffer(m := model(), "more", torch.ones(1)) or m, "buffers at"),
}


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_a_site_that_runs_something_else_refuses_to_say_hello(name: str, tmp_path: Path) -> None:
    options, make_model, why = DIFFERENT[name]
    own, wire = make_trainer(**{"method": "Scaffold ii", **options}), Wire(tmp_path, MAKE)
    said = f"'hello': 2.*Client 2: The site of client 2 does not run what the server runs: .*{why}"
    with FederatedSite(own, make_model(), make_data([2]), 2, tmp_path / "2") as site:
        wire.sites[2] = site
        with pytest.raises(FederatedError, match=said):
            wire.run()


def test_a_site_whose_personal_parameters_begin_elsewhere_is_refused(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg", personal=["net.3.*"]), Net)
    with pytest.raises(FederatedError, match="its parameters at the start that stay with"):
        wire.run()


def test_local_work_that_a_callback_changes_is_refused(tmp_path: Path) -> None:
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 2: 2})
    with pytest.raises(FederatedError, match="GradientAccumulationScheduler changes the local work"):
        Wire(tmp_path, partial(make_trainer, "FedAvg", callbacks=[scheduler])).run()


def test_facts_that_differ_are_named_with_both_values() -> None:
    check_facts({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, 3)
    with pytest.raises(FederatedError, match="The site of client 3 .* its b is 2, the server's is 4"):
        check_facts({"a": "1", "b": "2"}, {"a": "1", "b": "4"}, 3)
    with pytest.raises(FederatedError, match="its c is None, the server's is 5"):
        check_facts({"a": "1"}, {"a": "1", "c": "5"}, 3)
