"""FedProx's synthetic classification: each client draws its own linear labeling and inputs."""

import math
from typing import Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_fed.core.arguments import check_count, check_flags, check_number, check_one_of, check_seed
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.partitions.partition import Floats, random_state

_MAX_CLIENTS = 100_000  # drawn at once and kept: half a minute, and gigabytes


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

    Inputs are float32 and labels int64. A client only depends on the seed and its index. The random numbers come from
    NumPy's ``RandomState``, whose streams are frozen.

    Args:
        alpha: The spread of u_k over the clients.
        beta: The spread of B_k, the mean of v_k, over the clients.
        iid: Whether the clients share W, b and the distribution of x; leave alpha and beta at 0 then.
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
        check_number("Synthetic", "test_fraction", test_fraction, "(0, 0.9)")
        self.test_fraction = test_fraction
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
