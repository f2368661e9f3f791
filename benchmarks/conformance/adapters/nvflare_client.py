"""The training script of ``with_nvflare``, as NVFlare's examples write one."""

import copy
import sys
from pathlib import Path
from typing import Any

import nvflare.client as flare
import torch
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_opt.pt.fedproxloss import PTFedProxLoss
from nvflare.app_opt.pt.scaffold import PTScaffoldHelper
from torch import nn

from conformance.adapters.torch_client import network, train
from conformance.cases import Case, load

__all__ = ["CaseNetwork", "Site"]


def _case(case_id: str) -> Case:
    return next(case for case in load() if case.id == case_id)


class CaseNetwork(nn.Module):
    """The server's model of a case, which a job builds from this class and its argument."""

    def __init__(self, case_id: str) -> None:
        super().__init__()
        self.case_id = case_id
        built = network(_case(case_id).problem)
        for name, child in built.named_children():
            self.add_module(name, child)
        for name, parameter in built.named_parameters(recurse=False):
            self.register_parameter(name, parameter)


class Site:
    """A client that answers the server's models.

    Args:
        case: The case.
        client: Which of its clients this is.
        way: What it reports as NUM_STEPS_CURRENT_ROUND: its "steps", its "examples", or nothing ("without").
    """

    def __init__(self, case: Case, client: int, way: str) -> None:
        self.case, self.client, self.way = case, client, way
        self.net = network(case.problem)
        self.helper = PTScaffoldHelper()
        if case.method == "scaffold":
            self.helper.init(model=self.net)

    def answer(self, task: Any) -> Any:
        """Return what the client sends for a model that it received."""
        case, net, helper, lr = self.case, self.net, self.helper, self.case.options["client_lr"]
        received = {name: torch.as_tensor(value) for name, value in task.params.items()}
        net.load_state_dict({name: value.to(net.state_dict()[name]) for name, value in received.items()})
        anchor, meta = copy.deepcopy(net), {}
        if case.method == "scaffold":
            helper.load_global_controls(weights=task.meta[AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL])
            c_global, c_local = helper.get_params()
            controls = {"c_global_para": c_global, "c_local_para": c_local}
            train(
                net, case, self.client, after_step=lambda: helper.model_update(model=net, curr_lr=lr, **controls)
            )
            helper.terms_update(model=net, curr_lr=lr, model_global=anchor, **controls)
            meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF] = helper.get_delta_controls()
        elif case.method == "fedprox":
            criterion = PTFedProxLoss(mu=case.options["mu"])
            train(net, case, self.client, penalty=lambda: criterion(net, anchor))
        else:
            train(net, case, self.client)
        if self.way != "without":
            steps, examples = len(case.batches(self.client)), case.problem.sizes[self.client]
            meta[FLMetaKey.NUM_STEPS_CURRENT_ROUND] = examples if self.way == "examples" else steps
        state = {name: value.detach().cpu().clone() for name, value in net.state_dict().items()}
        if case.method != "fedopt":
            return flare.FLModel(params=state, meta=meta)
        state = {name: value - received[name] for name, value in state.items()}
        return flare.FLModel(params_type=flare.ParamsType.DIFF, params=state, meta=meta)


def main() -> None:
    """Answer until the server is done, and note the models that come."""
    case_id, way, notes = sys.argv[1:4]
    torch.set_num_threads(1)
    flare.init()
    client = int(flare.get_site_name().rpartition("-")[2]) - 1
    site = Site(_case(case_id.replace("+", " ")), client, way)
    while flare.is_running():
        task = flare.receive()
        if task is None:
            break
        torch.save(dict(task.params), Path(notes) / f"{client}-{task.current_round}.pt")
        flare.send(site.answer(task))


if __name__ == "__main__":
    main()
