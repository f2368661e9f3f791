"""The controller of a job: its arguments, and its reading of FLARE's results."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import flare, saved_run


def test_missing_nvflare_raises_an_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [f"lightning_fed.deploy.flare.{name}" for name in ("controller", "site")]
    for name in [name for name in sys.modules if name.startswith("nvflare.") or name in own]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nvflare", None)
    for name in ("RoundsController", "serve_site"):
        with pytest.raises(ModuleNotFoundError, match='NVFlare 2.9 is missing: pip install "lightning_fed'):
            getattr(flare, name)
    assert flare.FlareTransport.__name__ == "FlareTransport"


@pytest.fixture
def controller() -> Any:
    pytest.importorskip("nvflare", reason='no NVFlare: pip install "lightning_fed[nvflare]"')
    return importlib.import_module("lightning_fed.deploy.flare.controller")


MAKERS = ("tests.deploy.task:make_trainer", "tests.deploy.task:make_model")


@pytest.mark.parametrize("name", ["phase_timeout", "absent_after"])
@pytest.mark.parametrize("timeout", [0, -1.0, "5", True, float("nan")])
def test_deadline_must_be_a_finite_number_of_seconds(controller: Any, timeout: Any, name: str) -> None:
    with pytest.raises(FederatedError, match=f"{name}=.*: {name} must be a finite number in .0, inf"):
        controller.RoundsController(*MAKERS, [1], "last.ckpt", **{name: timeout})


def test_controller_records_when_flare_last_heard_from_a_site(controller: Any, monkeypatch: Any) -> None:
    from nvflare.apis.impl.wf_comm_server import WFCommServer

    told = list[Any]()
    monkeypatch.setattr(WFCommServer, "client_is_active", lambda self, *given: told.append(given))
    clock, found = SimpleNamespace(now=100.0), list[Any]()
    monkeypatch.setattr(controller, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(saved_run, "fit", lambda trainer, module, clients, *rest: found.append(clients.transport))
    monkeypatch.setenv("METHOD", "FedAvg")
    made = controller.RoundsController(*MAKERS, ["north", "south"], "last.ckpt", absent_after=60)
    made.set_communicator(WFCommServer())
    made.control_flow(SimpleNamespace(triggered=False), None)
    assert found[0]._silent_for("south") == 0.0
    clock.now = 150.0
    made.communicator.client_is_active("north", "getTask", None)
    clock.now = 170.0
    assert [found[0]._silent_for(site) for site in ("north", "south")] == [20.0, 70.0]
    assert told == [("north", "getTask", None)]


def test_every_client_requires_a_site(controller: Any) -> None:
    made = controller.RoundsController(*MAKERS, ["north", "south"], "last.ckpt", sites={"site-1": ["north", "east"]})
    with pytest.raises(FederatedError, match="do not name the same clients: .*'east'.*'south'"):
        made.control_flow(None, None)


def test_run_with_agreed_words_builds_its_validation_set_from_them(controller: Any, monkeypatch: Any) -> None:
    from tests.deploy import words

    found = []
    monkeypatch.setattr(saved_run, "fit", lambda trainer, module, clients, *rest: found.append(clients))
    for agree_on, val in (((), None), (["ward"], words.VAL)):
        made = controller.RoundsController(*MAKERS, ["north"], "last.ckpt", make_val=val, agree_on=agree_on)
        monkeypatch.setenv("METHOD", "FedAvg")
        made.control_flow(SimpleNamespace(triggered=False), None)
    assert [(clients._agree_on, clients._make_val) for clients in found] == [([], None), (["ward"], words.make_val)]


def test_task_result_is_its_arrays_or_the_failure_reason(controller: Any) -> None:
    from nvflare.apis.client import Client
    from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
    from nvflare.apis.shareable import Shareable, make_reply
    from nvflare.app_common.abstract.fl_model import FLModel
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils

    arrays = {"0": np.arange(3, dtype=np.uint8)}

    def result(status: Any, *results: Any) -> Any:
        task = Task(name="train", data=Shareable())
        task.completion_status = status
        for one in results:
            task.client_tasks.append(ClientTask(Client("site-1", "token"), task))
            task.client_tasks[-1].result = one
        return controller._result_of(task)

    good = FLModelUtils.to_shareable(FLModel(params=arrays))
    assert np.array_equal(result(TaskCompletionStatus.OK, good)["0"], arrays["0"])
    assert result(TaskCompletionStatus.CLIENT_DEAD) == "FLARE says that its job process has ended"
    assert "has ended as" in result(TaskCompletionStatus.TIMEOUT)
    assert "has ended as" in result(TaskCompletionStatus.OK, None)
    assert result(TaskCompletionStatus.OK, make_reply("EXECUTION_EXCEPTION")).startswith("EXECUTION_EXCEPTION; the log")
    assert "is not a model" in result(TaskCompletionStatus.OK, Shareable())
    headless = Shareable()
    headless["__headers__"] = "none"
    assert "is not a model" in result(TaskCompletionStatus.OK, headless)
