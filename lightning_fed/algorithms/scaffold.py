"""SCAFFOLD: control variates take the client drift out of the local steps."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm, path_gradient, update_with_path
from lightning_fed.core.arguments import check_one_of
from lightning_fed.core.rounds import Cohort, Run, Step, Update
from lightning_fed.core.types import State, Vector


class Scaffold(Algorithm):
    r"""Stochastic controlled averaging.

    Karimireddy et al., *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*, ICML 2020
    (https://arxiv.org/abs/1910.06378), Algorithm 1, options I and II.

    .. math::
        y_i &\leftarrow y_i - \eta_l \left( g_i(y_i) - c_i + c \right) \\
        c_i^+ &= \nabla F_i(x) \;\text{(i)} \quad\text{or}\quad
        c_i - c + \tfrac{1}{K_i \eta_l} (x - y_i) \;\text{(ii)} \\
        x &\leftarrow x + \tfrac{\eta_g}{|S|} \sum_{i \in S} (y_i - x), \qquad
        c \leftarrow c + \tfrac{1}{N} \sum_{i \in S} (c_i^+ - c_i)

    Note:
        Algorithm 1 leaves :math:`c^0` and :math:`c_i^0` open. With ``initial="gradient"`` they are
        :math:`c_i^0 = \nabla F_i(x^0)` for the clients of the first round, and
        :math:`c^0 = \tfrac{1}{N} \sum_{i \in S} c_i^0`. Later clients start at zero, so :math:`c` is the mean of all
        :math:`c_i` with either start. The gradient of option i is full-batch. Option ii divides by the sum of the rates
        of the client's own steps, which is :math:`K_i \eta_l` at a constant rate. With a local solver other than SGD it
        takes the mean corrected gradient along the path. With plain SGD the client sends only one vector and that sum:
        :math:`c_i^+ - c_i = (x - y_i) / (K_i \eta_l) - c`. There is no weighted form: all clients have the same weight,
        for any ``weighting`` of the run. :math:`\eta_g` is the server optimizer's rate.

    Args:
        option: The update of the client's control variate: "ii" costs nothing more, "i" one pass over the client's data
            per round.
        initial: The control variates of the first round's clients: "zero", or "gradient", their full-batch gradients,
            which cost one more pass over their data and one more exchange of vectors in that round.

    Raises:
        FederatedError: If ``option`` or ``initial`` is unknown.

    Example:
        >>> Scaffold(option="i").full_grad_at
        ('x',)
    """

    reduces: Mapping[str, str] = {"delta": "uniform", "delta_c": "population"}

    aside = ("lr_sum",)
    full_grad_mean = "population"

    def __init__(self, option: Literal["ii", "i"] = "ii", initial: Literal["zero", "gradient"] = "zero") -> None:
        self.option = check_one_of(self, "option", option, ("ii", "i"))
        self.initial = check_one_of(self, "initial", initial, ("zero", "gradient"))
        self.full_grad_at = ("x",) if option == "i" or initial == "gradient" else ()
        self.full_grad_for = "both" if initial == "gradient" else "client"
        self.uses_path_gradient = option == "ii"

    def options(self) -> dict[str, Any]:
        """Return the hyper-parameters without ``initial="zero"``: checkpoints from before this option lack it."""
        return {name: value for name, value in super().options().items() if (name, value) != ("initial", "zero")}

    def full_grad_readers(self, round: int) -> str:
        """Return "both" if control variates begin with gradients now, else "client" if option i needs its gradient."""
        if self.initial == "gradient" and round == 0:
            return "both"
        return "client" if self.option == "i" else "nobody"

    def init_server(self, x: Vector) -> State:
        """Return c = 0."""
        return {"c": torch.zeros_like(x)}

    def init_client(self, x: Vector) -> State:
        """Return c_i = 0."""
        return {"c_i": torch.zeros_like(x)}

    def begin_round(self, x: Vector, server: State, cohort: Cohort) -> State:
        """Set c to the sum of the cohort's first c_i, divided by N, if these are gradients."""
        return {"c": cohort.grad["x"]} if self.initial == "gradient" and cohort.round == 0 else server

    def begin_client(self, client: State, full_grad: State) -> State:
        """Return c_i = the client's full-batch gradient; called in the first round only."""
        return {"c_i": full_grad["x"]}

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return g - c_i + c."""
        return g - step.client["c_i"] + step.server["c"]

    def finish(self, y: Vector, run: Run) -> Update:
        """Send the changes of the model and of c_i, and keep the new c_i."""
        old = run.client["c_i"]
        if self.option == "i":
            new = run.full_grad["x"]
            return Update({"delta": run.delta, "delta_c": new - old}, {"c_i": new})
        change = run.path_gradient - run.server["c"]
        send = {"delta": run.delta, "delta_c": change}
        return update_with_path(run, send, {"c_i": old + change}, of_path="delta_c")

    def implied(self, send: State, server: State) -> State:
        """Return the change of c_i; c_i itself cancels."""
        return {"delta_c": path_gradient(send) - server["c"]}

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Move c by |S|/N times the cohort's mean change of c_i."""
        return mean["delta"], {"c": server["c"] + mean["delta_c"]}
