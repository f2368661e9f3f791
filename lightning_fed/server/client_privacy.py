"""Record-level differential privacy on each client: its settings, and the privacy that each client has spent."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.core.arguments import ArgumentsRepr, check_count, check_number, check_one_of
from lightning_fed.server.aggregation.privacy import ORDERS, SetOnce, accountant, spent


class ClientPrivacy(SetOnce, ArgumentsRepr):
    r"""Local steps on clipped gradients of single examples with Gaussian noise (DP-SGD).

    Abadi et al., *Deep Learning with Differential Privacy*, CCS 2016 (https://arxiv.org/abs/1607.00133), Algorithm 1,
    in every local step of every client: from the gradients :math:`g_j` of the examples of a batch,

    .. math::
        g \leftarrow \frac{1}{B} \left( \sum_j \frac{g_j}{\max(1, \lVert g_j \rVert / C)}
        + \mathcal{N}(0, z^2 C^2 I) \right)

    and the method and the local optimizer see only g. All that a client sends in the run is then
    :math:`(\varepsilon_i, \delta)`-differentially private with respect to one of its examples. The client's number of
    examples is assumed to be public. Opacus' accountant (Rényi differential privacy) gives :math:`\varepsilon_i`, which
    depends on the client's batches and on how often it took part.

    - ``sampling="poisson"``: every example is in a batch independently with probability q = 1 / (batches in an epoch),
      and B is the expected batch size. :math:`\varepsilon` is that of the subsampled Gaussian mechanism, with respect
      to adding or removing an example.
    - ``sampling="shuffle"``: the batches of an ordinary local epoch, and B is the size of the batch. Every local epoch
      uses each example at most once, so it counts as one Gaussian mechanism. Sampling does not amplify privacy here.
      :math:`\varepsilon` is with respect to replacing an example by one without a gradient.

    Noise and Poisson batches follow from the run's seed, the round and the client, by SHAKE-256. Runs resume exactly.
    The guarantee holds against anyone who does not know the seed: pass ``seed=secrets.randbits(128)``. On real sites
    they follow from a secret of each site and from the task, so the guarantee holds against the server too.

    Requires the extra ``privacy``.

    Args:
        noise_multiplier: z, the standard deviation of the noise on the sum in units of C, at least 0. With 0,
            :math:`\varepsilon` is infinite.
        max_grad_norm: C, the largest norm of an example's gradient, over all trained parameters.
        delta: :math:`\delta`, in (0, 1). It should be well below one over the largest client's number of examples.
        sampling: "poisson" or "shuffle".
        examples_at_once: The number of examples whose gradients are computed at once; None for all of a batch. 1 runs
            any module, one example after another.

    Raises:
        FederatedError: If an argument is out of range.

    Example:
        >>> privacy = ClientPrivacy(
        ...     noise_multiplier=1.0,
        ...     max_grad_norm=1.0,
        ...     delta=1e-4,
        ...     sampling="shuffle",
        ... )
        >>> privacy.sampling
        'shuffle'
    """

    def __init__(
        self,
        noise_multiplier: float,
        max_grad_norm: float,
        delta: float = 1e-5,
        sampling: Literal["poisson", "shuffle"] = "poisson",
        examples_at_once: int | None = None,
    ) -> None:
        self.noise_multiplier = check_number(self, "noise_multiplier", noise_multiplier, "[0, inf)")
        self.max_grad_norm = check_number(self, "max_grad_norm", max_grad_norm, "(0, inf)")
        self.delta = check_number(self, "delta", delta, "(0, 1)")
        self.sampling = check_one_of(self, "sampling", sampling, ("poisson", "shuffle"))
        if examples_at_once is not None:
            examples_at_once = check_count(self, "examples_at_once", examples_at_once)
        self.examples_at_once = examples_at_once

    def epsilon(self, counts: Mapping[int, int]) -> float:
        r"""Return :math:`\varepsilon` after some noisy sums over samples of a data set.

        Args:
            counts: How many sums there were, by 1/q. "shuffle" counts epochs, with q = 1.
        """
        sums = {(self.noise_multiplier, batches): count for batches, count in counts.items()}
        return epsilon_of(sums, self.delta)

    def sums(self, batches: int, steps: int, per_epoch: int) -> tuple[int, int]:
        """Return 1/q and the number of noisy sums of some local steps.

        Args:
            batches: The batches in an epoch.
            steps: The local steps.
            per_epoch: The most steps in a local epoch.
        """
        return (batches, steps) if self.sampling == "poisson" else (1, -(-steps // max(1, per_epoch)))


def epsilon_of(sums: Mapping[tuple[float, int], int], delta: float) -> float:
    r"""Return :math:`\varepsilon` after some noisy sums, counted by noise multiplier and 1/q."""
    if not any(sums.values()):
        return 0.0
    if any(count and z == 0 for (z, _), count in sums.items()):
        return math.inf
    return spent(sum(count * _rdp_of_one(batches, z) for (z, batches), count in sums.items()), delta)


@cache
def _rdp_of_one(batches: int, noise_multiplier: float) -> Any:
    """Return the Rényi divergences of one noisy sum over a sample with q = 1 / batches, in 0.1 seconds."""
    analysis = accountant("ClientPrivacy")
    return analysis.compute_rdp(q=1.0 / batches, noise_multiplier=noise_multiplier, steps=1, orders=ORDERS)


class PrivacyLedger:
    """The noisy sums that every client has taken part with so far, from which its privacy follows.

    ``batches_of`` returns the batches in an epoch of a client by stored index and number of examples, ``steps_of`` the
    local steps in a local epoch of a number of batches.
    """

    def __init__(
        self, privacy: ClientPrivacy, batches_of: Callable[[int, int], int], steps_of: Callable[[int], int]
    ) -> None:
        self.privacy, self._batches_of, self._steps_of = privacy, batches_of, steps_of
        self._counts: dict[int, dict[int, int]] = {}  # by stored index, then by 1/q
        self._epsilons: dict[int, float] = {}

    def add(self, index: int, size: int, steps: int) -> None:
        """Add the planned local steps of a client of a number of examples in one round."""
        batches = self._batches_of(index, size)
        batches, count = self.privacy.sums(batches, steps, self._steps_of(batches))
        if count:
            own = self._counts.setdefault(index, {})
            own[batches] = own.get(batches, 0) + count
            self._epsilons.pop(index, None)

    def epsilons(self) -> dict[int, float]:
        """Return the privacy spent by each client that has taken part, by stored index."""
        of_counts: dict[tuple[tuple[int, int], ...], float] = {}
        for index, counts in self._counts.items():
            if index not in self._epsilons:
                key = tuple(sorted(counts.items()))
                if key not in of_counts:
                    of_counts[key] = self.privacy.epsilon(counts)
                self._epsilons[index] = of_counts[key]
        return {index: self._epsilons[index] for index in sorted(self._counts)}

    def saved(self) -> Tensor:
        """Return the counts, int64 [n, 3]: stored index, 1/q, and count."""
        rows = [(i, *pair) for i, counts in sorted(self._counts.items()) for pair in sorted(counts.items())]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3)

    def load(self, saved: Any) -> None:
        """Replace the counts with those that :meth:`saved` returned; anything else is a ValueError."""
        if not isinstance(saved, Tensor) or saved.dtype != torch.int64 or saved.ndim != 2 or saved.shape[1] != 3:
            raise ValueError("the privacy that clients have spent is not an int64 tensor [n, 3]")
        if len(saved) and (int(saved[:, 0].min()) < 0 or int(saved[:, 1:].min()) < 1):
            raise ValueError("the privacy that clients have spent has numbers out of range")
        self._counts, self._epsilons = {}, {}
        for index, batches, count in saved.tolist():
            self._counts.setdefault(index, {})[batches] = count
