"""Generated data sets: FedProx's synthetic classification, and problems with a known optimum."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.core.arguments import check_count, check_flags, check_number, check_numbers, check_one_of, check_seed
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.partitions import Floats, random_state

_MAX_CLIENTS = 100_000  # drawn eagerly and kept in memory: half a minute, and gigabytes


class Synthetic(FederatedDataModule):
    r"""Synthetic(alpha, beta) and Synthetic-IID of Li et al., MLSys 2020 (arXiv:1812.06127), section 5.1.

    Client k has inputs of 60 features and labels of 10 classes,

    .. math::
        y = \arg\max \mathrm{softmax}(W_k x + b_k), \qquad
        W_k, b_k \sim N(u_k, 1), \qquad u_k \sim N(0, \alpha), \qquad
        x \sim N(v_k, \Sigma), \qquad v_k \sim N(B_k, 1), \qquad B_k \sim N(0, \beta),

    where Sigma is diagonal with :math:`\Sigma_{jj} = j^{-1.2}`, and :math:`50 + \lfloor z \rfloor` examples, with
    log z ~ N(4, 2^2). With ``iid`` all clients share one W and b, drawn from N(0, 1), and v_k = 0.

    Note three properties. Alpha and beta are variances in the paper's notation but standard deviations in the authors'
    code; ``spread`` selects one. Since u_k is added to every entry of W_k and b_k, it shifts all logits of an example
    equally, so alpha never changes a label: clients differ, even at (0, 0), because each draws its own W_k, b_k and
    v_k. There is no validation set: ``val`` and ``test`` are both the clients' pooled test parts, and ``client_val``
    holds each client's part.

    Inputs are float32 and labels int64. A client depends only on the seed and its index. The random numbers come from
    NumPy's ``RandomState``, whose streams are frozen.

    Args:
        alpha: The spread of u_k over the clients.
        beta: The spread of B_k, the mean of v_k, over the clients.
        iid: Whether the clients share W, b and the distribution of x; then leave alpha and beta at 0.
        num_clients: The number of clients N.
        spread: The meaning of alpha and beta: "std" as in the authors' code, or "variance" as in the paper.
        test_fraction: The share of each client's examples in its test part, in (0, 0.9): 0.2 as in the paper (0.1 in
            the authors' code), rounded up to at least one example.
        batch_size: Examples in a client's training batch.
        seed: The seed of the clients.

    Raises:
        FederatedError: If an argument is not allowed.

    Example:
        >>> data = Synthetic(alpha=1.0, beta=1.0, num_clients=3)
        >>> x, y = data.client_dataset(0).tensors
        >>> list(x.shape[1:]), x.dtype, y.dtype
        ([60], torch.float32, torch.int64)
    """

    num_features = 60
    num_classes = 10

    def __init__(
        self,
        alpha: float = 0.0,
        beta: float = 0.0,
        iid: bool = False,
        num_clients: int = 30,
        spread: Literal["std", "variance"] = "std",
        test_fraction: float = 0.2,
        batch_size: int = 10,
        seed: int = 0,
    ) -> None:
        self.alpha = check_number("Synthetic", "alpha", alpha, "[0, inf)")
        self.beta = check_number("Synthetic", "beta", beta, "[0, inf)")
        check_flags("Synthetic", iid=iid)
        if iid and (alpha or beta):
            raise FederatedError(
                f"Synthetic(alpha={alpha!r}, beta={beta!r}, iid=True): clients that share one distribution have no"
                " spread. Leave alpha and beta at 0, or drop iid."
            )
        self.iid = iid
        self.spread = check_one_of("Synthetic", "spread", spread, ("std", "variance"))
        self.test_fraction = check_number("Synthetic", "test_fraction", test_fraction, "(0, 0.9)")
        self.seed = check_seed("Synthetic", seed)
        numbers = range(check_count("Synthetic", "num_clients", num_clients, most=_MAX_CLIENTS))
        train, test = zip(*map(self._draw, numbers), strict=True)
        pooled = TensorDataset(*(torch.cat(parts) for parts in zip(*(part.tensors for part in test), strict=True)))
        super().__init__(
            clients=train, val=pooled, test=pooled, client_val=dict(enumerate(test)), batch_size=batch_size
        )

    def _draw(self, k: int) -> tuple[TensorDataset, TensorDataset]:
        """Return the training and the test part of client k: independent draws, inputs [n, 60] and labels [n]."""
        random = random_state(self.seed, k)
        size = int(random.lognormal(4, 2)) + 50
        alpha, beta = (value if self.spread == "std" else math.sqrt(value) for value in (self.alpha, self.beta))
        if self.iid:
            v = np.zeros(self.num_features)
            weight, bias = self._labelling(random_state(self.seed), 0.0)
        else:
            u, v_mean = alpha * random.standard_normal(), beta * random.standard_normal()
            v = v_mean + random.standard_normal(self.num_features)
            weight, bias = self._labelling(random, u)
        deviation = np.arange(1, self.num_features + 1) ** (-1.2 / 2)
        x = v + deviation * random.standard_normal((size, self.num_features))
        y = (x @ weight + bias).argmax(axis=1)  # softmax preserves the order of the logits
        num_train = int((1 - self.test_fraction) * size)
        whole = TensorDataset(torch.from_numpy(x).float(), torch.from_numpy(y))
        return TensorDataset(*whole[:num_train]), TensorDataset(*whole[num_train:])

    def _labelling(self, random: np.random.RandomState, u: float) -> tuple[Floats, Floats]:
        weight = u + random.standard_normal((self.num_features, self.num_classes))
        return weight, u + random.standard_normal(self.num_classes)


_MAX_NUMBERS = 10**8  # maximum count of float64 numbers in memory


class Quadratics(FederatedDataModule):
    r"""Quadratics with a chosen dissimilarity of gradients and Hessians.

    Client i, counted from 0, minimizes

    .. math:: f_i(x) = \tfrac12 a_i x^2 + b_i x, \qquad b_i = (-1)^i\, G,

    so the mean f over the clients has its minimum at 0. In d dimensions, :math:`a_i` lists the d second derivatives of
    a diagonal Hessian, and each coordinate of :math:`b_i` is :math:`(-1)^i\, G / \sqrt d`. With ``a=(2, 0)`` these are
    the two functions behind the lower bound for FedAvg in SCAFFOLD (Karimireddy et al., ICML 2020, arXiv:1910.06378,
    theorem II); ``a=(3, 1)`` has the same dissimilarities, and f itself the smoothness 2 (Mime, Karimireddy et al.,
    NeurIPS 2021, arXiv:2008.03606).

    An example is a row (a_i, b_ij) of two float64 numbers, or vectors [d], as :class:`lightning_fed.models.Quadratic`
    takes them. In half of a client's rows, ``noise`` is added to G; in the other half, it is subtracted. So their mean
    is exactly f_i, and the gradient of one row has the standard deviation ``noise``. ``val`` and ``test`` are all rows;
    their mean loss is f.

    Args:
        a: The second derivatives, a number or a list per client, with a positive mean; the number of clients is even.
        G: The norm of each client's gradient at the optimum.
        rows: The number of rows per client.
        noise: The standard deviation of a row's gradient; needs an even number of rows.
        batch_size: Rows in a batch, by default all rows of a client, so that gradients are exact.

    Attributes:
        optimum: The minimizer of f: 0 in every coordinate.
        G: The gradient dissimilarity: the root mean square of the clients' gradients at the optimum.
        delta: The Hessian dissimilarity: the largest distance of a second derivative from its mean over clients.

    Raises:
        FederatedError: If an argument is not allowed.

    Example:
        >>> data = Quadratics(a=(2.0, 0.0), G=10.0)
        >>> data.client_dataset(1).tensors
        (tensor([0.], dtype=torch.float64), tensor([-10.], dtype=torch.float64))
        >>> data.optimum, data.G, data.delta
        (0.0, 10.0, 1.0)
    """

    def __init__(
        self,
        a: Sequence[float] | Sequence[Sequence[float]] = (2.0, 0.0),
        G: float = 10.0,  # noqa: N803
        rows: int = 1,
        noise: float = 0.0,
        batch_size: int | None = None,
    ) -> None:
        hessians = _second_derivatives(a)
        self.a = hessians.tolist()
        self.G = check_number("Quadratics", "G", G, "[0, inf)")
        self.noise = check_number("Quadratics", "noise", noise, "[0, inf)")
        self.rows = check_count("Quadratics", "rows", rows, most=_MAX_NUMBERS)
        if self.noise and self.rows % 2:
            raise FederatedError(
                f"Quadratics(rows={rows!r}, noise={noise!r}): noise needs an even number of rows, half above the"
                " client's own b and half below."
            )
        self.optimum = 0.0
        self.delta = float((hessians - hessians.mean(0)).abs().max())
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(self.rows)[: self.rows]
        clients = []
        for i, a_i in enumerate(hessians):
            rows_of_a = a_i.expand(self.rows, *a_i.shape).contiguous()
            slopes = ((-1) ** i * self.G + self.noise * signs) / a_i.numel() ** 0.5  # norm G before noise
            b = slopes.reshape(-1, *[1] * a_i.ndim).expand_as(rows_of_a)
            clients.append(TensorDataset(rows_of_a, b.contiguous()))
        pooled = TensorDataset(*map(torch.cat, zip(*(client.tensors for client in clients), strict=True)))
        super().__init__(
            clients=clients, val=pooled, test=pooled, batch_size=self.rows if batch_size is None else batch_size
        )


class LeastSquares(FederatedDataModule):
    r"""Linear regression on clients that differ, with a known joint optimum.

    Client i minimizes :math:`f_i(w) = \frac{1}{2n} \lVert X_i w - y_i \rVert^2` over its n examples, where

    .. math::
        y_i = X_i w_i + \text{noise}\; \varepsilon, \qquad w_i = \bar w + d z_i, \qquad
        (X_i)_{\cdot j} \sim N(0, s_{ij}^2), \qquad s_{ij} \sim U\!\left[\tfrac{1}{1 + d}, 1\right],

    everything else is standard normal, and d is the ``dissimilarity`` of the clients' optima and Hessians. With d = 0,
    the clients are samples of one distribution. All clients have equally many examples, so weighting by examples and
    uniform weighting are the same. ``val`` and ``test`` are the examples of all clients; their mean loss is the
    objective.

    All data are float64: train :class:`lightning_fed.models.LinearRegression` with ``bias=False`` and
    ``FederatedTrainer(precision="64-true")``.

    Args:
        num_clients: The number of clients N.
        dim: The number of features.
        samples: n, the number of examples per client.
        dissimilarity: d, at least 0.
        noise: The standard deviation of the noise in the targets.
        batch_size: Examples in a batch; by default all examples of a client, so that gradients are exact.
        seed: The seed of the clients. A client depends only on the seed and its index.

    Attributes:
        optimum: The minimizer [dim] of the mean of the f_i, float64, from one least-squares solve over all examples.

    Raises:
        FederatedError: If an argument is not allowed, or there are too few examples for a single optimum.

    Example:
        >>> data = LeastSquares(num_clients=3, dim=2, samples=5)
        >>> [tuple(t.shape) for t in data.client_dataset(0).tensors], data.optimum.dtype
        ([(5, 2), (5, 1)], torch.float64)
    """

    def __init__(
        self,
        num_clients: int = 10,
        dim: int = 5,
        samples: int = 20,
        dissimilarity: float = 1.0,
        noise: float = 0.1,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        numbers = range(check_count(self, "num_clients", num_clients, least=1))
        self.dim = check_count(self, "dim", dim, least=1)
        self.samples = check_count(self, "samples", samples, least=1)
        self.dissimilarity = check_number(self, "dissimilarity", dissimilarity, "[0, inf)")
        self.noise = check_number(self, "noise", noise, "[0, inf)")
        self.seed = check_seed(self, seed)
        given = f"LeastSquares(num_clients={num_clients}, dim={dim}, samples={samples})"
        examples = num_clients * samples
        if examples * (dim + 1) > _MAX_NUMBERS:
            raise FederatedError(
                f"{given}: that makes {examples * (dim + 1):,} numbers, more than the {_MAX_NUMBERS:,} that this data"
                " set keeps in memory. Lower num_clients, dim or samples."
            )
        if examples < dim:
            raise FederatedError(
                f"{given}: {examples:,} examples leave the optimum open. Have at least as many examples as features."
            )
        clients = [self._draw(i) for i in numbers]
        pooled = TensorDataset(*map(torch.cat, zip(*(client.tensors for client in clients), strict=True)))
        inputs, targets = pooled.tensors
        self.optimum = torch.linalg.lstsq(inputs, targets, driver="gelsd").solution.flatten()
        super().__init__(
            clients=clients, val=pooled, test=pooled, batch_size=self.samples if batch_size is None else batch_size
        )

    def _draw(self, i: int) -> TensorDataset:
        """Return the inputs [n, dim] and targets [n, 1] of client i."""
        shared, random = random_state(self.seed), random_state(self.seed, i)
        d = self.dissimilarity
        w_i = shared.standard_normal((self.dim, 1)) + d * random.standard_normal((self.dim, 1))
        x = random.uniform(1 / (1 + d), 1, self.dim) * random.standard_normal((self.samples, self.dim))
        y = x @ w_i + self.noise * random.standard_normal((self.samples, 1))
        return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def _second_derivatives(a: Any) -> Tensor:
    """Return the clients' second derivatives [N] or [N, d], float64."""
    check = partial(check_numbers, "Quadratics", "a")
    are_lists = isinstance(a, Sequence) and all(isinstance(row, Sequence) and not isinstance(row, str) for row in a)
    rows: list[Any] = [check(row) for row in a] if are_lists else check(a)
    if not rows or len(rows) % 2 or len({len(row) if isinstance(row, list) else 0 for row in rows}) > 1:
        raise FederatedError(
            f"Quadratics(a={a!r}): a must hold an even number of second derivatives, one per client, such as"
            " (2.0, 0.0), or equally many for each client, such as [[2.0, 1.0], [0.0, 1.0]]."
        )
    found = torch.tensor(rows, dtype=torch.float64)
    if not found.numel() or not (found.mean(0) > 0).all():
        raise FederatedError(
            f"Quadratics(a={a!r}): the mean of a over the clients must be positive, in each coordinate."
        )
    return found
