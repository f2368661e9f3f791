"""Base optimizers as two pure formulas: a direction U(g, s) and statistics V(g, s).

A server optimizer uses the direction and advances the statistics with the same gradient. Mime needs the two separately:
it freezes the statistics during local steps and advances them once a round.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.core.arguments import ArgumentsRepr, check_number, check_one_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State, Vector


class BaseOptimizer(ArgumentsRepr):
    r"""An optimizer as pure elementwise formulas, plain SGD by default.

    .. math::
        x \leftarrow x - \eta\, U(g, s), \qquad s \leftarrow V(g, s)

    Formulas change nothing in place and stay on the device. So they work on a vector [P], on a parameter's view of it,
    and on a cohort [S, P] with scalar statistics [S, 1]. A subclass's attributes must hold only hyper-parameters.
    """

    def init(self, x: Vector) -> State:
        """Return the statistics s before the first gradient."""
        return {}

    def warm_start(self, g: Vector, s: State) -> State:
        """Return the initial statistics, given the first gradient; later statistics are unchanged."""
        return s

    def direction(self, g: Tensor, s: State) -> Tensor:
        """Return U(g, s), the direction of descent."""
        return g

    def track(self, g: Tensor, s: State) -> State:
        """Return V(g, s), the statistics after gradient ``g``."""
        return s

    def options(self) -> dict[str, Any]:
        """Return the class name and the hyper-parameters as plain values."""
        return {"name": type(self).__name__, **{k: v for k, v in vars(self).items() if not k.startswith("_")}}


class SGD(BaseOptimizer):
    r"""Gradient descent, :math:`U = g`, without statistics.

    Example:
        >>> SGD().options()
        {'name': 'SGD'}
    """


class SGDm(BaseOptimizer):
    r"""Gradient descent with momentum.

    .. math::
        U = V_m = (1 - \beta) g + \beta m \;\text{(ema)} \qquad\text{or}\qquad g + \beta m \;\text{(heavy ball)}

    Args:
        beta: The momentum :math:`\beta` in [0, 1).
        momentum_form: "ema" as in Table 4 of Mime (https://arxiv.org/abs/2008.03606), or "heavy_ball" as in
            ``torch.optim.SGD``, with :math:`1 / (1 - \beta)` times longer steps in the long run.
            (``torch.optim.SGD(dampening=beta)`` is neither: its first step is undamped.)

    Raises:
        FederatedError: If a hyper-parameter is out of range.

    Example:
        >>> import torch
        >>> SGDm(beta=0.5).direction(torch.tensor([2.0]), {"m": torch.tensor([4.0])})
        tensor([3.])
    """

    def __init__(self, beta: float = 0.9, momentum_form: Literal["ema", "heavy_ball"] = "ema") -> None:
        self.beta = check_number(self, "beta", beta, "[0, 1)")
        self.momentum_form = check_one_of(self, "momentum_form", momentum_form, ("ema", "heavy_ball"))

    def init(self, x: Vector) -> State:
        """Return m = 0."""
        return {"m": torch.zeros_like(x)}

    def direction(self, g: Tensor, s: State) -> Tensor:
        """Return the new momentum."""
        weight = 1.0 - self.beta if self.momentum_form == "ema" else 1.0
        return weight * g + self.beta * s["m"]

    def track(self, g: Tensor, s: State) -> State:
        """Return the new momentum."""
        return {"m": self.direction(g, s)}


class _Adaptive(BaseOptimizer):
    """The base of adaptive optimizers: a numerator over ``eps + sqrt(v*)``.

    ``step`` counts the gradients so far, t - 1 in the formulas. ``torch.optim`` keeps the dtype of a state with this
    name.
    """

    def __init__(self, eps: float, v0: float | Literal["grad"], stats: str) -> None:
        self.eps = check_number(self, "eps", eps, "(0, inf)")
        if isinstance(v0, str) and v0 != "grad":
            raise FederatedError(f"{type(self).__name__}(v0={v0!r}): v0 must be a finite number in [0, inf) or 'grad'.")
        self.v0 = v0 if isinstance(v0, str) else check_number(self, "v0", v0, "[0, inf)")
        self.stats = check_one_of(self, "stats", stats, ("new", "old"))

    def init(self, x: Vector) -> State:
        """Return v = v0 and a step count of zero."""
        v = torch.full_like(x, 0.0 if isinstance(self.v0, str) else self.v0)
        return {"v": v, "step": torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)}

    def warm_start(self, g: Vector, s: State) -> State:
        """Return the statistics with v = g^2 before the first gradient if ``v0`` is "grad"."""
        if self.v0 != "grad":
            return s
        return {**s, "v": torch.where((s["step"] == 0).to(g.device), g * g, s["v"])}

    def direction(self, g: Tensor, s: State) -> Tensor:
        """Return the (new) momentum, or g, over eps + sqrt(v*)."""
        v = self._second(g, s["v"]) if self.stats == "new" else s["v"]
        m, v = self._unbiased(self._first(g, s), v, s["step"] + 1)
        return m / (self.eps + v.sqrt())

    def track(self, g: Tensor, s: State) -> State:
        """Return the new v and the step count."""
        return {"v": self._second(g, s["v"]), "step": s["step"] + 1}

    def _first(self, g: Tensor, s: State) -> Tensor:
        return g

    def _second(self, g: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def _unbiased(self, m: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return m, v


class RMSProp(_Adaptive):
    r"""RMSProp with eps outside the root.

    .. math::
        U = \frac{g}{\epsilon + \sqrt{v^*}}, \qquad V_v = (1 - \beta) g^2 + \beta v

    Args:
        beta: The decay :math:`\beta` of v, in [0, 1).
        eps: :math:`\epsilon`, positive.
        v0: The initial v: a number, or "grad" for the square of the first gradient (a warm start).
        stats: The divisor :math:`v^*`: "new" is V's v after this g, "old" the stored one. "old" follows Table 4 of Mime
            (https://arxiv.org/abs/2008.03606) literally: with ``v0=0`` it divides by eps alone in the first round, so
            set ``v0``.
        bias_correction: Has no effect; all adaptive optimizers accept the same options.

    Raises:
        FederatedError: If a hyper-parameter is out of range.

    Example:
        >>> RMSProp(stats="old", v0="grad")
        RMSProp(beta=0.99, eps=0.001, v0='grad', stats='old')
    """

    def __init__(
        self,
        beta: float = 0.99,
        eps: float = 1e-3,
        v0: float | Literal["grad"] = 0.0,
        stats: Literal["new", "old"] = "new",
        bias_correction: bool = False,
    ) -> None:
        self.beta = check_number(self, "beta", beta, "[0, 1)")
        super().__init__(eps, v0, stats)
        check_one_of(self, "bias_correction", bias_correction, (True, False))

    def _second(self, g: Tensor, v: Tensor) -> Tensor:
        return (1.0 - self.beta) * g * g + self.beta * v


class Adam(_Adaptive):
    r"""Adam with eps outside the root.

    .. math::
        U = \frac{(1 - \beta_1) g + \beta_1 m}{\epsilon + \sqrt{v^*}}, \qquad
        V_m = (1 - \beta_1) g + \beta_1 m, \quad V_v = (1 - \beta_2) g^2 + \beta_2 v

    With bias correction, the numerator is divided by :math:`1 - \beta_1^t` and :math:`v^*` by :math:`1 - \beta_2^t`.
    Here, t counts the gradients that the statistics have seen, including this one.

    Args:
        beta1: The decay :math:`\beta_1` of m, in [0, 1).
        beta2: The decay :math:`\beta_2` of v, in [0, 1).
        eps: :math:`\epsilon`, positive.
        v0: The initial v: a number, or "grad" for the square of the first gradient (a warm start).
        stats: The divisor :math:`v^*`: "new" is V's v after this g, "old" the stored one. "old" follows Table 4 of Mime
            (https://arxiv.org/abs/2008.03606) literally: with ``v0=0`` it divides by eps alone in the first round, so
            set ``v0``.
        bias_correction: Whether to correct the bias of m and v towards zero. The default is True if the correction is
            defined: with ``stats="new"`` and without a warm start.

    Raises:
        FederatedError: If a hyper-parameter is out of range, or bias correction is set but not defined.

    Example:
        >>> Adam(stats="old", v0=1e-4)
        Adam(beta1=0.9, beta2=0.99, eps=0.001, v0=0.0001, stats='old', bias_correction=False)
    """

    def __init__(
        self,
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-3,
        v0: float | Literal["grad"] = 0.0,
        stats: Literal["new", "old"] = "new",
        bias_correction: bool | None = None,
    ) -> None:
        self.beta1 = check_number(self, "beta1", beta1, "[0, 1)")
        self.beta2 = check_number(self, "beta2", beta2, "[0, 1)")
        super().__init__(eps, v0, stats)
        wanted = stats == "new" and v0 != "grad" if bias_correction is None else bias_correction
        self.bias_correction = check_one_of(self, "bias_correction", wanted, (True, False))
        if self.bias_correction and self.stats == "old":
            raise FederatedError(
                f"{type(self).__name__}(stats='old', bias_correction=True): the stored v has seen no gradient in the"
                " first round, so there is nothing to correct. Choose stats='new' or bias_correction=False."
            )
        if self.bias_correction and self.v0 == "grad":
            raise FederatedError(
                f"{type(self).__name__}(v0='grad', bias_correction=True): a warm start is not biased towards zero."
                " Choose v0=0 or bias_correction=False."
            )

    def init(self, x: Vector) -> State:
        """Return m = 0, v = v0 and a step count of zero."""
        return {"m": torch.zeros_like(x), **super().init(x)}

    def track(self, g: Tensor, s: State) -> State:
        """Return the new m and v and the step count."""
        return {"m": self._first(g, s), **super().track(g, s)}

    def _first(self, g: Tensor, s: State) -> Tensor:
        return (1.0 - self.beta1) * g + self.beta1 * s["m"]

    def _second(self, g: Tensor, v: Tensor) -> Tensor:
        return (1.0 - self.beta2) * g * g + self.beta2 * v

    def _unbiased(self, m: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        if not self.bias_correction:
            return m, v
        # the casts preserve half precision if t is a count per client [S, 1]
        return m / (1.0 - self.beta1**t).to(m.dtype), v / (1.0 - self.beta2**t).to(v.dtype)


class Adagrad(Adam):
    r"""Adagrad with momentum: Adam's formulas, but v is the sum of all squared gradients.

    .. math::
        U = \frac{(1 - \beta_1) g + \beta_1 m}{\epsilon + \sqrt{v^*}}, \qquad
        V_m = (1 - \beta_1) g + \beta_1 m, \quad V_v = v + g^2

    Args:
        beta1: The decay :math:`\beta_1` of m, in [0, 1). 0 is Adagrad.
        beta2: Has no effect, since v is a sum; all adaptive optimizers accept the same options.
        eps: :math:`\epsilon`, positive.
        v0: The initial v: a number, or "grad" for the square of the first gradient.
        stats: As in :class:`Adam`.
        bias_correction: Must be False: a sum is not biased towards its initial value.

    Raises:
        FederatedError: If a hyper-parameter is out of range or ``bias_correction`` is set.

    Example:
        >>> import torch
        >>> Adagrad(eps=1.0).direction(torch.tensor([3.0]), Adagrad().init(torch.zeros(1)))
        tensor([0.7500])
    """

    def __init__(
        self,
        beta1: float = 0.0,
        beta2: float = 0.99,
        eps: float = 1e-3,
        v0: float | Literal["grad"] = 0.0,
        stats: Literal["new", "old"] = "new",
        bias_correction: bool = False,
    ) -> None:
        check_one_of(self, "bias_correction", bias_correction, (False,))
        super().__init__(beta1, beta2, eps, v0, stats, bias_correction)

    def _second(self, g: Tensor, v: Tensor) -> Tensor:
        return v + g * g


class Yogi(Adam):
    r"""Yogi: Adam's formulas, but v moves by a bounded amount.

    .. math::
        U = \frac{(1 - \beta_1) g + \beta_1 m}{\epsilon + \sqrt{v^*}}, \qquad
        V_m = (1 - \beta_1) g + \beta_1 m, \quad V_v = v - (1 - \beta_2) g^2 \operatorname{sign}(v - g^2)

    If v and :math:`g^2` differ only by rounding, the sign is 0 and v does not change. The bound of the difference is
    :math:`u^{2/3} v` with the machine epsilon u of the dtype.

    Args:
        beta1: The decay :math:`\beta_1` of m, in [0, 1).
        beta2: :math:`\beta_2` in [0, 1).
        eps: :math:`\epsilon`, positive.
        v0: The initial v: a number, or "grad" for the square of the first gradient.
        stats: As in :class:`Adam`.
        bias_correction: As in :class:`Adam`; off by default, since v is not a moving average.

    Raises:
        FederatedError: If a hyper-parameter is out of range.

    Example:
        >>> Yogi(beta2=0.5).options()["beta2"]
        0.5
    """

    def __init__(
        self,
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-3,
        v0: float | Literal["grad"] = 0.0,
        stats: Literal["new", "old"] = "new",
        bias_correction: bool = False,
    ) -> None:
        check_one_of(self, "bias_correction", bias_correction, (True, False))
        super().__init__(beta1, beta2, eps, v0, stats, bias_correction)

    def _second(self, g: Tensor, v: Tensor) -> Tensor:
        # After a warm start v = c^2, and Mime's first local gradient is c up to rounding. The sign of the difference is
        # then noise that depends on the order of summation. The bound is 2e-5 v in float32 and 4e-11 v in float64. It
        # also covers rounding of the vector that Mime adds to c and subtracts again, which may be much longer than c.
        gap = v - g * g
        is_noise = gap.abs() <= torch.finfo(v.dtype).eps ** (2 / 3) * v
        return v - (1.0 - self.beta2) * g * g * torch.sign(gap).masked_fill(is_noise, 0.0)
