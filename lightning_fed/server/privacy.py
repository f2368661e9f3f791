"""Differential privacy of clients (a noisy mean) and of single records (noisy local steps), and its accounting."""

import importlib
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import ArgumentsRepr, check_count, check_number, check_one_of
from lightning_fed.core.devices import accumulation, narrowed
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import KeyedStream, Purpose
from lightning_fed.core.types import ClientId, State, Vector, Weighting
from lightning_fed.server.aggregation.mean import Aggregation, Aggregator, Collectives, averaged_points
from lightning_fed.server.aggregation.robust import ClippedAggregation
from lightning_fed.server.sampling import BernoulliSampler, Sampler

_BLOCK = 2**20  # pairs of numbers per block
ORDERS = [1 + i / 10 for i in range(1, 100)] + [*range(12, 64), 64, 80, 96, 128, 192, 256, 512, 1024]


class SetOnce:
    """Privacy options that can be set only once, since the accounting assumes the same noise for all sums."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a new attribute; raise if it is set already."""
        if name in vars(self):
            raise FederatedError(
                f"{self!r}.{name} cannot change: the privacy spent is accounted for with one noise. Make another"
                f" {type(self).__name__}, and start a new run."
            )
        super().__setattr__(name, value)


class DifferentialPrivacy(SetOnce, Aggregator):
    r"""The mean of clipped messages with Gaussian noise (DP-FedAvg).

    McMahan et al., *Learning Differentially Private Recurrent Language Models*, ICLR 2018
    (https://arxiv.org/abs/1710.06963), Algorithm 1 with the estimator :math:`\tilde f_f` and uniform weights. Every
    client participates independently with probability q. For any cohort S,

    .. math::
        m \leftarrow \frac{1}{q N} \left( \sum_{i \in S} \frac{m_i}{\max(1, \lVert m_i \rVert / C)}
        + \mathcal{N}(0, z^2 C^2 I) \right)

    The models are then :math:`(\varepsilon, \delta)`-differentially private with respect to adding or removing a client
    with all of its data; N is assumed to be public. Opacus' accountant of the subsampled Gaussian mechanism (Rényi
    differential privacy) gives :math:`\varepsilon` after each round, logged as ``privacy/epsilon``. Cohorts and noise
    come from the operating system's entropy, not from the run's seed, which would reveal both. Such a run is not
    reproducible and does not resume exactly.

    Requires ``sampler=BernoulliSampler(q)`` and the extra ``privacy``.

    Args:
        max_norm: C, the largest norm of a client's message.
        noise_multiplier: z, the standard deviation of the noise on the sum in units of C.
        delta: :math:`\delta`, in (0, 1). It should be well below 1/N.

    Raises:
        FederatedError: If a number is out of range.

    Example:
        >>> DifferentialPrivacy(max_norm=0.5, noise_multiplier=1.0, delta=1e-6)
        DifferentialPrivacy(max_norm=0.5, noise_multiplier=1.0, delta=1e-06)
    """

    weighted = False

    def __init__(self, max_norm: float, noise_multiplier: float, delta: float) -> None:
        self.max_norm = check_number(self, "max_norm", max_norm, "(0, inf)")
        self.noise_multiplier = check_number(self, "noise_multiplier", noise_multiplier, "(0, inf)")
        self.delta = check_number(self, "delta", delta, "(0, 1)")
        self._account: tuple[float, Any] | None = None  # in a run: q, and the Rényi divergences of a round

    def for_run(self, algorithm: Algorithm, weighting: Weighting | None, sampler: Sampler) -> Aggregator:
        """Return the aggregator with the sampler's probability and an accountant.

        Raises:
            FederatedError: If the settings would void the guarantee, or Opacus is missing.
        """
        bound = super().for_run(algorithm, weighting, sampler)
        assert isinstance(bound, DifferentialPrivacy)
        flaw = None
        if averaged_points(algorithm):
            flaw = "whose clients send full-batch gradients as well, which the noise is not made for"
        elif len(algorithm.reduces) != 1:
            flaw = f"whose clients send {sorted(algorithm.reduces)}: clipping and noise are made for a single message"
        elif algorithm.uses_mean_examples:
            flaw = "which uses the mean number of examples"
        elif "population" in algorithm.reduces.values():
            flaw = "which uses a sum over the population"
        if flaw is not None:
            raise FederatedError(
                f"aggregator={self!r} cannot be combined with {type(algorithm).__name__}, {flaw}. Use a method that"
                " sends one message, such as FedAvg or FedProx."
            )
        # refuse subclasses too: they may draw differently
        if type(sampler) is not BernoulliSampler or not isinstance(sampler.probability, int | float):
            raise FederatedError(
                f"aggregator={self!r} needs clients that take part independently with one probability, found"
                f" {sampler!r}. Pass sampler=BernoulliSampler(0.1), and leave clients_per_round unset."
            )
        q, analysis = float(sampler.probability), accountant(type(self).__name__)
        rdp = analysis.compute_rdp(q=q, noise_multiplier=self.noise_multiplier, steps=1, orders=ORDERS)
        vars(bound)["_account"] = q, rdp
        return bound

    def cohort(self, secret: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the clients of a round, each drawn independently, for the aggregator of a run.

        It does not use a generator: anyone could try all of its 32-bit seeds, and find the cohort.
        """
        assert self._account is not None
        drawn = KeyedStream(secret, Purpose.COHORT, round).uniform(len(population)) < self._account[0]
        return [population[place] for place in drawn.nonzero()[:, 0].tolist()]

    def epsilon(self, rounds: int) -> float:
        r"""Return :math:`\varepsilon` after a number of rounds, for the aggregator of a run.

        Raises:
            FederatedError: If the aggregator has no run, or ``rounds`` is not a count.
        """
        if self._account is None:
            raise FederatedError(
                f"{self!r} belongs to no run: how much is spent depends on the sampler. Ask"
                " trainer.fit_loop.settings.aggregator.epsilon(rounds=...)."
            )
        rounds = check_count(type(self).__name__ + ".epsilon", "rounds", rounds, least=0)
        return spent(rounds * self._account[1], self.delta) if rounds else 0.0

    def of_round(self, *arguments: Any, **named: Any) -> Aggregation:
        """Return an object that clips a cohort's messages, sums them and adds noise."""
        assert self._account is not None
        std = self.noise_multiplier * self.max_norm
        return PrivateAggregation(std, self._account[0], self.max_norm, *arguments, **named)


class PrivateAggregation(ClippedAggregation):
    """The noisy sum of clipped messages, divided by the expected number of clients."""

    needs_clients = False

    def __init__(self, std: float, probability: float, bound: float, *arguments: Any, **named: Any) -> None:
        super().__init__(bound, *arguments, **named)
        self._std, self._expected = std, probability * self.population
        (self._name,) = self.reduces
        self._is_noisy = False

    def update(self, steps: Mapping[int, int], send: State, models: Tensor | None = None) -> None:
        """Clip the messages of some clients and add them."""
        self._check_names(send)
        for value, index in zip(send[self._name], steps, strict=True):
            clipped, total = self._clipped(self._name, value, index), self._sums.get(self._name)
            self._sums[self._name] = clipped.clone() if total is None else total.add_(clipped)
        self._note_steps(steps)
        self._added += steps

    def merge(self, partials: Sequence[Mapping[str, Any]], ranks: Collectives, x: Vector) -> None:
        """Sum over all processes; only the first one adds noise."""
        self._noisy_sum(x, ranks.rank)
        super().merge(partials, ranks, x)

    def _noisy_sum(self, x: Vector, rank: int) -> Tensor:
        """Return the sum; the first process adds noise to it once."""
        total = self._sums.setdefault(self._name, torch.zeros(x.shape, **accumulation(x.device)))
        if rank == 0 and not self._is_noisy:
            total.add_(gaussian_noise(total.numel(), self._std).to(total).view(total.shape))
        self._is_noisy = True
        return total

    def compute(self, x: Vector) -> tuple[State, Vector | None]:
        """Return the noisy sum divided by the expected number of clients, even for an empty cohort."""
        return {self._name: narrowed(self._noisy_sum(x, 0) / self._expected, x)}, None


def gaussian_noise(count: int, std: float, entropy: Callable[[int], bytes] = os.urandom) -> Tensor:
    """Return independent Gaussian numbers [count] (Box and Muller, 1958).

    ``entropy`` returns a given number of random bytes, by default from the operating system.
    """
    parts = []
    for start in range(0, (count + 1) // 2, _BLOCK):
        pairs = min(_BLOCK, (count + 1) // 2 - start)
        bits = torch.frombuffer(bytearray(entropy(16 * pairs)), dtype=torch.int64)
        uniform = (((bits >> 11) & (2**53 - 1)).to(torch.float64) + 0.5) * 2.0**-53  # never zero
        radius, angle = (-2 * uniform[:pairs].log()).sqrt(), 2 * math.pi * uniform[pairs:]
        parts += [radius * angle.cos(), radius * angle.sin()]
    return torch.cat(parts)[:count] * std if parts else torch.zeros(0, dtype=torch.float64)


def spent(rdp: Any, delta: float) -> float:
    r"""Return :math:`\varepsilon` for the Rényi divergences at :data:`ORDERS`; a negative bound becomes zero."""
    with warnings.catch_warnings():  # at the first or last order the result is still a valid bound
        warnings.simplefilter("ignore")
        found, _ = accountant("Privacy").get_privacy_spent(orders=ORDERS, rdp=rdp, delta=delta)
    return max(0.0, float(found))


def accountant(owner: str) -> Any:
    """Return Opacus' functions of Rényi differential privacy; raise if Opacus is missing."""
    try:
        return importlib.import_module("opacus.accountants.analysis.rdp")
    except ImportError as error:
        raise FederatedError(
            f'{owner} needs Opacus to account for the privacy spent. Install it: pip install "lightning_fed[privacy]".'
        ) from error


class ClientPrivacy(SetOnce, ArgumentsRepr):
    r"""Local steps on clipped gradients of single examples with Gaussian noise (DP-SGD).

    Abadi et al., *Deep Learning with Differential Privacy*, CCS 2016 (https://arxiv.org/abs/1607.00133), Algorithm 1,
    in every local step of every client. The gradients :math:`g_j` of the examples in a batch give

    .. math::
        g \leftarrow \frac{1}{B} \left( \sum_j \frac{g_j}{\max(1, \lVert g_j \rVert / C)}
        + \mathcal{N}(0, z^2 C^2 I) \right)

    The method and the local optimizer only see g. Everything that a client sends in the run is then
    :math:`(\varepsilon_i, \delta)`-differentially private with respect to one of its examples. The client's number of
    examples is assumed to be public. Opacus' accountant (Rényi differential privacy) gives :math:`\varepsilon_i`, which
    depends on the client's batches and on how often it took part.

    - ``sampling="poisson"``: every example is in a batch independently with probability q = 1 / (batches in an epoch),
      and B is the expected batch size. :math:`\varepsilon` is for the subsampled Gaussian mechanism, with respect
      to adding or removing an example.
    - ``sampling="shuffle"``: clients use the batches of an ordinary local epoch, and B is the batch size. Each epoch
      uses each example at most once, so it counts as one Gaussian mechanism. Sampling does not amplify privacy here.
      :math:`\varepsilon` is with respect to replacing an example by one without a gradient.

    SHAKE-256 derives noise and Poisson batches from the run's seed, the round and the client. Runs resume exactly.
    The guarantee holds against anyone who does not know the seed: pass ``seed=secrets.randbits(128)``. Real sites
    derive them from the site's secret and the task, so the guarantee holds against the server too.

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
        self.examples_at_once = (
            None if examples_at_once is None else check_count(self, "examples_at_once", examples_at_once)
        )

    def epsilon(self, counts: Mapping[int, int]) -> float:
        r"""Return :math:`\varepsilon` after some noisy sums over samples of a data set.

        Args:
            counts: The number of sums, by 1/q. "shuffle" counts epochs, with q = 1.
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
    """Return the Rényi divergences of one noisy sum over a sample with q = 1 / batches; cached, as it takes 0.1 s."""
    analysis = accountant("ClientPrivacy")
    return analysis.compute_rdp(q=1.0 / batches, noise_multiplier=noise_multiplier, steps=1, orders=ORDERS)


class PrivacyLedger:
    """The noisy sums of every client so far, which determine its privacy.

    ``batches_of`` returns the batches in a client's epoch, given its stored index and number of examples. ``steps_of``
    returns the local steps in a local epoch, given its number of batches.
    """

    def __init__(
        self, privacy: ClientPrivacy, batches_of: Callable[[int, int], int], steps_of: Callable[[int], int]
    ) -> None:
        self.privacy, self._batches_of, self._steps_of = privacy, batches_of, steps_of
        self._counts: dict[int, dict[int, int]] = {}  # by stored index, then by 1/q
        self._epsilons: dict[int, float] = {}

    def add(self, index: int, size: int, steps: int) -> None:
        """Add the local steps planned in one round for a client with ``size`` examples."""
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
        """Replace the counts with the result of :meth:`saved`; raise a ValueError for anything else."""
        if not isinstance(saved, Tensor) or saved.dtype != torch.int64 or saved.ndim != 2 or saved.shape[1] != 3:
            raise ValueError("the privacy that clients have spent is not an int64 tensor [n, 3]")
        if len(saved) and (int(saved[:, 0].min()) < 0 or int(saved[:, 1:].min()) < 1):
            raise ValueError("the privacy that clients have spent has numbers out of range")
        self._counts, self._epsilons = {}, {}
        for index, batches, count in saved.tolist():
            self._counts.setdefault(index, {})[batches] = count
