"""Mime, MimeLite and C-Mime: clients mimic a centralized optimizer whose statistics the server keeps."""

from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.algorithms.base_optimizers import SGD, BaseOptimizer
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Cohort, Step
from lightning_fed.core.types import State, Vector


class MimeLite(Algorithm):
    r"""Mime without its control variate.

    Karimireddy et al., *Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning*, 2020
    (https://arxiv.org/abs/2008.03606), Algorithm 1, the line marked MimeLite.

    .. math::
        y_i \leftarrow y_i - \eta\, U(g_i(y_i), s), \qquad
        s \leftarrow V\left( \sum_i p_i \nabla F_i(x), s \right), \qquad
        x \leftarrow \sum_i p_i y_i

    U and V are the direction and the statistics of the base optimizer. s is frozen during local steps and advances once
    a round, with the cohort's full-batch gradient at the old x.

    Note:
        All averages use the run's ``weighting``, :math:`n_i` by default. The server's step size is its optimizer's, 1
        by default. The paper's table of base optimizers divides by the stored second moment without bias correction, as
        ``base=Adam(stats="old")`` does.

    Args:
        base: The optimizer to mimic, such as ``SGDm()`` or ``Adam()`` of this package; the local optimizer must then be
            SGD without momentum, which gives the learning rate :math:`\eta`. None mimics the optimizer that
            ``configure_optimizers`` returns: its statistics are loaded before every local step and discarded after it,
            and the server keeps them as ``solver.<parameter>.<name>``.

    Raises:
        FederatedError: If ``base`` is not a base optimizer.

    Example:
        >>> from lightning_fed.algorithms import SGDm
        >>> MimeLite(base=SGDm(beta=0.5))
        MimeLite(base=SGDm(beta=0.5, momentum_form='ema'))
    """

    full_grad_at = ("x",)
    full_grad_for = "cohort"

    def __init__(self, base: BaseOptimizer | None = None) -> None:
        if base is not None and not isinstance(base, BaseOptimizer):
            raise FederatedError(
                f"{type(self).__name__}(base={base!r}): base must be an instance of SGD, SGDm, RMSProp, Adam, Adagrad"
                " or Yogi of lightning_fed.algorithms, such as base=Adam(). To mimic a torch optimizer, leave base out"
                " and return it from configure_optimizers()."
            )
        self.base = base
        self.uses_solver_state = base is None
        self._rule = SGD() if base is None else base  # the user's optimizer gets the plain gradient

    def init_server(self, x: Vector) -> State:
        """Return the statistics s before the first gradient; none yet for the user's optimizer."""
        return self._rule.init(x)

    def begin_round(self, x: Vector, server: State, cohort: Cohort) -> State:
        """Warm-start the statistics if the base optimizer does so."""
        return self._rule.warm_start(cohort.grad["x"], server)

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return U(g, s)."""
        return self._rule.direction(g, step.server)

    def solver_state(self, server: State, local: State) -> State:
        """Return the frozen statistics of the user's optimizer."""
        return server if self.uses_solver_state else {}

    def update_server(self, x: Vector, server: State, mean: State, cohort: Cohort) -> tuple[Vector, State]:
        """Advance s by V with the cohort's gradient at the old x."""
        c = cohort.grad["x"]
        if not self.uses_solver_state:
            return mean["delta"], self._rule.track(c, server)
        if cohort.advance_solver is None:
            raise FederatedError(
                f"{type(self).__name__}() mimics the optimizer of configure_optimizers(), which this engine does not"
                " offer. Pass base=SGDm(), base=Adam() or another base optimizer."
            )
        return mean["delta"], cohort.advance_solver(server, c, x)


class Mime(MimeLite):
    r"""Mime: a centralized optimizer mimicked on clients, with an SVRG correction.

    Karimireddy et al., *Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning*, 2020
    (https://arxiv.org/abs/2008.03606), Algorithm 1, the line marked Mime. The rest is as in :class:`MimeLite`.

    .. math::
        c = \sum_i p_i \nabla F_i(x), \qquad y_i \leftarrow y_i - \eta\, U(g_i(y_i) - g_i(x) + c,\, s)

    Note:
        Both gradients :math:`g_i` use the same batch, augmentation and dropout masks.

    Args:
        base: The optimizer to mimic; see :class:`MimeLite`.

    Raises:
        FederatedError: If ``base`` is not a base optimizer.

    Example:
        >>> Mime()
        Mime(base=None)
    """

    anchor_at = "x"

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return U(g - g(x) + c, s)."""
        return self._rule.direction(self._svrg(g, step), step.server)

    def _svrg(self, g: Tensor, step: Step) -> Tensor:
        """Return g with the batch's gradient at x replaced by the cohort's."""
        corrected: Tensor = g - step.anchor_grad + step.cohort_grad["x"]
        return corrected


class CMime(Mime):
    r"""C-Mime: Mime with clients that advance a copy of the statistics after every local step.

    Karimireddy et al., *Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning*, 2020
    (https://arxiv.org/abs/2008.03606), Appendix B.1. The rest is as in :class:`Mime`.

    .. math::
        g = g_i(y_i) - g_i(x) + c, \qquad y_i \leftarrow y_i - \eta\, U(g, s_i), \qquad s_i \leftarrow V(g, s_i)

    Each client starts with :math:`s_i = s` and discards its copy at the end; the server's s advances as in Mime.

    Note:
        The local statistics advance with the corrected gradient g.

    Args:
        base: The optimizer to mimic, such as ``SGDm()`` or ``Adam()`` of this package.

    Raises:
        FederatedError: If ``base`` is not a base optimizer.

    Example:
        >>> from lightning_fed.algorithms import SGDm
        >>> CMime(base=SGDm())
        CMime(base=SGDm(beta=0.9, momentum_form='ema'))
    """

    def __init__(self, base: BaseOptimizer | None = None) -> None:
        if base is None:
            raise FederatedError(
                "CMime(base=None): the statistics change during the local steps, and a torch optimizer has no pure form"
                " for that. Pass base=SGDm(), base=Adam() or another base optimizer, or use Mime()."
            )
        super().__init__(base)

    def init_local(self, x: Vector, server: State, client: State) -> State:
        """Return the client's copy of s."""
        return server

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return U(g - g(x) + c, s_i)."""
        return self._rule.direction(self._svrg(g, step), step.local)

    def advance(self, g: Tensor, y: Tensor, step: Step) -> State:
        """Return V(g - g(x) + c, s_i)."""
        return self._rule.track(self._svrg(g, step), step.local)
