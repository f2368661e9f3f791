"""Server optimizers from the federated literature, as torch optimizers that use the base optimizers."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.algorithms.base_optimizers import Adagrad, Adam, BaseOptimizer, RMSProp, SGDm, Yogi
from lightning_fed.core.arguments import check_number, check_one_of
from lightning_fed.core.errors import FederatedError

Params: TypeAlias = Any
"""The input of a torch optimizer: parameters, named parameters or parameter groups."""


class _ServerOptimizer(Optimizer):
    """Base class of torch optimizers that apply the formulas of a base optimizer.

    Every step builds the rule from the parameter group, so schedulers and loaded state dicts may change any option.
    Statistics are in ``state`` by parameter, under the names of the formulas.
    """

    _formulas: type[Any]

    def __init__(self, params: Params, lr: float | Tensor, **options: Any) -> None:
        try:
            super().__init__(params, {"lr": lr, **options})
        except (TypeError, ValueError) as error:
            if isinstance(error, FederatedError):
                raise
            raise FederatedError(f"{type(self).__name__}(params=...): params must be tensors ({error}).") from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group and check its hyper-parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_number(self, "lr", group["lr"].item() if isinstance(group["lr"], Tensor) else group["lr"], "[0, inf)")
        if "tau" in group:
            check_number(self, "tau", group["tau"], "(0, 1e150]")  # so its square is finite too
        if "bias_correction" in group:
            check_one_of(self, "bias_correction", group["bias_correction"], (True, False))
        try:
            self._rule(group)
        except FederatedError as error:
            raise FederatedError(f"{type(self).__name__}: {error}") from None

    def _rule(self, group: dict[str, Any]) -> BaseOptimizer:
        """Return the formulas with a group's hyper-parameters; raise if they are invalid."""
        options = {name: group[name] for name in inspect.signature(self._formulas).parameters if name in group}
        v0 = group["tau"] ** 2 if group["v0"] is None else group["v0"]
        rule: BaseOptimizer = self._formulas(**{**options, "eps": group["tau"], "v0": v0})
        return rule

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step: x <- x - lr U(g, s), then s <- V(g, s); the closure is unused in rounds."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = self._rule(group)
            for p in group["params"]:
                if p.grad is not None:
                    s = rule.warm_start(p.grad, self.state[p] or rule.init(p))
                    p.sub_(group["lr"] * rule.direction(p.grad, s))
                    self.state[p] = rule.track(p.grad, s)
        return loss


class FedAvgM(_ServerOptimizer):
    r"""FedAvg with server momentum.

    Hsu et al., *Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification*, 2019
    (https://arxiv.org/abs/1909.06335). With :math:`\Delta = \sum_i p_i (x - y_i)`:

    .. math::
        m \leftarrow \beta m + \Delta \;\text{(heavy ball)} \quad\text{or}\quad
        \beta m + (1 - \beta) \Delta \;\text{(ema)}, \qquad
        x \leftarrow x - \eta\, m

    Args:
        params: The server's parameters.
        lr: The server's step size :math:`\eta`.
        momentum: :math:`\beta` in [0, 1).
        momentum_form: "heavy_ball" as in that paper, or "ema" as in Table 4 of Mime
            (https://arxiv.org/abs/2008.03606).

    Raises:
        FederatedError: If a hyper-parameter is out of range.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([1.0]))
        >>> x.grad = torch.tensor([0.25])
        >>> FedAvgM([x]).step()
        >>> x.data
        tensor([0.7500])
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        momentum_form: Literal["heavy_ball", "ema"] = "heavy_ball",
    ) -> None:
        super().__init__(params, lr, momentum=momentum, momentum_form=momentum_form)

    def _rule(self, group: dict[str, Any]) -> BaseOptimizer:
        check_number(self, "momentum", group["momentum"], "[0, 1)")
        return SGDm(group["momentum"], group["momentum_form"])


class FedAdam(_ServerOptimizer):
    r"""Adam on the server.

    Reddi et al., *Adaptive Federated Optimization*, ICLR 2021 (https://arxiv.org/abs/2003.00295), Algorithm 2. With
    :math:`\Delta = \sum_i p_i (x - y_i)`:

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) \Delta, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2, \qquad
        x \leftarrow x - \eta \frac{m}{\sqrt{v} + \tau}

    Args:
        params: The server's parameters.
        lr: The server's step size :math:`\eta`.
        beta1: The decay :math:`\beta_1` of m, in [0, 1).
        beta2: The decay :math:`\beta_2` of v, in [0, 1).
        tau: The degree of adaptivity :math:`\tau`, positive.
        v0: The initial v: a number, "grad" for the square of the first :math:`\Delta`, or None for :math:`\tau^2`, the
            smallest value that the paper allows.
        stats: Divide by the "new" v, as in the paper, or by the "old" one, from before this :math:`\Delta`.
        bias_correction: Whether to correct m and v as Kingma and Ba do; the paper does not.

    Raises:
        FederatedError: If a hyper-parameter is out of range.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([1.0]))
        >>> x.grad = torch.tensor([0.5])
        >>> FedAdam([x], lr=0.1, beta1=0.0, beta2=0.0, tau=0.5).step()
        >>> x.data
        tensor([0.9500])
    """

    _formulas: type[Any] = Adam

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        v0: float | Literal["grad"] | None = None,
        stats: Literal["new", "old"] = "new",
        bias_correction: bool = False,
    ) -> None:
        options = {"beta1": beta1, "beta2": beta2, "tau": tau, "v0": v0, "stats": stats}
        super().__init__(params, lr, **options, bias_correction=bias_correction)


class FedYogi(FedAdam):
    r"""Yogi on the server.

    Reddi et al., *Adaptive Federated Optimization*, ICLR 2021 (https://arxiv.org/abs/2003.00295), Algorithm 2. Like
    :class:`FedAdam`, with the same arguments, but

    .. math::
        v \leftarrow v - (1 - \beta_2) \Delta^2 \operatorname{sign}(v - \Delta^2)
    """

    _formulas = Yogi


class FedAdagrad(_ServerOptimizer):
    r"""Adagrad on the server.

    Reddi et al., *Adaptive Federated Optimization*, ICLR 2021 (https://arxiv.org/abs/2003.00295), Algorithm 2. Like
    :class:`FedAdam`, but

    .. math::
        v \leftarrow v + \Delta^2

    Args:
        params: The server's parameters.
        lr: The server's step size :math:`\eta`.
        beta1: The decay :math:`\beta_1` of m, in [0, 1), 0 as in the paper's experiments.
        tau: The degree of adaptivity :math:`\tau`, positive.
        v0: The initial v; see :class:`FedAdam`.
        stats: The "new" or "old" v; see :class:`FedAdam`.

    Raises:
        FederatedError: If a hyper-parameter is out of range.
    """

    _formulas = Adagrad

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-3,
        v0: float | Literal["grad"] | None = None,
        stats: Literal["new", "old"] = "new",
    ) -> None:
        super().__init__(params, lr, beta1=beta1, tau=tau, v0=v0, stats=stats)


class FedRMSProp(_ServerOptimizer):
    r"""RMSProp on the server, the base optimizer of Table 4 of Mime (https://arxiv.org/abs/2008.03606).

    .. math::
        v \leftarrow \beta v + (1 - \beta) \Delta^2, \qquad x \leftarrow x - \eta \frac{\Delta}{\sqrt{v} + \tau}

    Args:
        params: The server's parameters.
        lr: The server's step size :math:`\eta`. Without bias correction, the first steps are up to
            :math:`1 / \sqrt{1 - \beta}` times longer.
        beta: The decay :math:`\beta` of v, in [0, 1).
        tau: The constant :math:`\tau` added to the root, positive.
        v0: The initial v, see :class:`FedAdam`.
        stats: The "new" or "old" v; see :class:`FedAdam`. "old" follows the table literally.

    Raises:
        FederatedError: If a hyper-parameter is out of range.
    """

    _formulas = RMSProp

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        beta: float = 0.99,
        tau: float = 1e-3,
        v0: float | Literal["grad"] | None = None,
        stats: Literal["new", "old"] = "new",
    ) -> None:
        super().__init__(params, lr, beta=beta, tau=tau, v0=v0, stats=stats)
