"""The training script of ``with_nvflare``, as NVFlare's examples write one. Each client notes the models it receives."""

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

from conformance.adapters.torch_client import network, train
from conformance.cases import load

case_id, way, notes = sys.argv[1:4]
case = next(case for case in load() if case.id == case_id.replace("+", " "))


def main() -> None:
    """Train whenever the server asks."""
    torch.set_num_threads(1)
    flare.init()
    client = int(flare.get_site_name().rpartition("-")[2]) - 1
    net = network(case.problem)
    helper = PTScaffoldHelper()
    if case.method == "scaffold":
        helper.init(model=net)
    while flare.is_running():
        task = flare.receive()
        if task is None:
            break
        received = {name: torch.as_tensor(value) for name, value in task.params.items()}
        torch.save(received, Path(notes) / f"{client}-{task.current_round}.pt")
        net.load_state_dict({name: value.to(net.state_dict()[name]) for name, value in received.items()})
        flare.send(work(client, net, helper, task, received))


def work(client: int, net: Any, helper: Any, task: Any, received: Any) -> Any:
    """Return what the client sends."""
    lr, meta, steps = case.options["client_lr"], {}, len(case.batches(client))
    anchor = copy.deepcopy(net)
    if case.method == "scaffold":
        helper.load_global_controls(weights=task.meta[AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL])
        c_global, c_local = helper.get_params()

        def after_step() -> None:
            helper.model_update(model=net, curr_lr=lr, c_global_para=c_global, c_local_para=c_local)

        train(net, case, client, after_step=after_step)
        helper.terms_update(
            model=net, curr_lr=lr, c_global_para=c_global, c_local_para=c_local, model_global=anchor
        )
        meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF] = helper.get_delta_controls()
    elif case.method == "fedprox":
        criterion = PTFedProxLoss(mu=case.options["mu"])
        train(net, case, client, penalty=lambda: criterion(net, anchor))
    else:
        train(net, case, client)
    if way != "without":
        weight = case.problem.sizes[client] if way == "examples" else steps
        meta[FLMetaKey.NUM_STEPS_CURRENT_ROUND] = weight
    state = {name: value.cpu() for name, value in net.state_dict().items()}
    if case.method == "fedopt":
        state = {name: value - received[name] for name, value in state.items()}
        return flare.FLModel(params_type=flare.ParamsType.DIFF, params=state, meta=meta)
    return flare.FLModel(params=state, meta=meta)


if __name__ == "__main__":
    main()
