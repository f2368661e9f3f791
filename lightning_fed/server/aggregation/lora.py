"""The exact mean of LoRA adapters: the base weight gets the mean of the products minus the product of the means."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.devices import accumulation, narrowed, widened
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.origin import CHECKPOINT, Origin
from lightning_fed.core.rounds import Cohort, Run
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.core.types import State, Vector
from lightning_fed.server.aggregation.mean import Collectives


def lora_needs_mean(reason: str) -> str:
    """Return the error for a server that does not take the mean of the clients' models, with the reason."""
    return (
        f"lora='exact' needs a server that only takes the mean of the clients' models, and {reason}. Use FedAvg() or"
        " another method that takes it, such as FedProx(mu=0.1), with the default server optimizer; or set"
        " lora='separate' or 'frozen_a'."
    )


def takes_mean_model(algorithm: Algorithm) -> bool:
    """Return whether the server takes the mean of the clients' models, and no hook uses other models of all layers.

    It tries the hooks on a few numbers. If they fail, it returns True.
    """
    has_others = algorithm.overrides("evaluate_at") or algorithm.overrides("evaluate_client_at")
    if has_others or algorithm.reduces.get("delta") == "population" or not algorithm.local_work:
        return False
    x = torch.linspace(0.5, 1.0, 6, dtype=torch.float64)
    delta, gradients = x.flip(0).square(), dict.fromkeys(algorithm.full_grad_at, x.square())
    try:
        with preserved_random_state(), torch.no_grad():
            server, client = algorithm.init_server(x.clone()), algorithm.init_client(x.clone())
            local = algorithm.init_local(x, server, client)
            run = Run(
                x, delta, server, client, local, gradients, gradients, 5.0, 4.0, 2, 0.2, lambda: -delta / 0.2, True
            )
            send = algorithm.finish(x + delta, run).send
            # other messages are larger, as if clients differed: FedExP then extrapolates
            mean = {name: value.clone() if name == "delta" else 100 * value for name, value in send.items()}
            direction, _ = algorithm.update_server(x, server, mean, Cohort(3, 10, 0, gradients, x.sum()))
    except Exception:  # a hook may need the data of a real round; the first round then raises
        return True
    return send.get("delta") is delta and direction is mean["delta"]


@dataclass(frozen=True)
class LoraPair:
    """The matrices A [r, n] and B [m, r] of an adapter: its layer's weight is ``base + scaling * B @ A``."""

    base: nn.Parameter  # the frozen weight [m, n], or [n, m] if `is_transposed`
    a: slice  # the place of A in the server parameters [P]
    b: slice  # the place of B
    rank: int
    scaling: float  # the factor of the product
    is_transposed: bool  # whether the base weight is stored as [n, m]

    def cut(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts A [S, r, n] and B [S, m, r] of vectors [S, P], as views."""
        count = len(vectors)
        return vectors[:, self.a].view(count, self.rank, -1), vectors[:, self.b].view(count, -1, self.rank)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (m, n) of the product."""
        first, second = self.base.shape
        return (second, first) if self.is_transposed else (first, second)


class ProductSums:
    """The weighted sum over a round's clients of the products of their changes of B and A.

    The products of changes give the same residual as the products of the matrices, since a covariance does not depend
    on the origin. Changes are small, so it has less rounding.
    """

    def __init__(self, pairs: Sequence[LoraPair]) -> None:
        self.pairs = pairs
        self.weight, self.clients = 0.0, 0  # over clients with positive weight
        self.sums = [torch.zeros(pair.shape, **accumulation(pair.base.device)) for pair in pairs]

    @torch.no_grad()
    def update(self, changes: Tensor, weights: Sequence[float]) -> None:
        """Add several clients' changes [S, P]."""
        self.weight += sum(weights)
        self.clients += sum(weight > 0 for weight in weights)
        for pair, total in zip(self.pairs, self.sums, strict=True):
            a, b = (widened(part).to(total.device) for part in pair.cut(changes))
            b = b * total.new_tensor(weights)[:, None, None]
            total.addmm_(b.transpose(0, 1).flatten(1), a.flatten(0, 1))

    def partial(self) -> tuple[float, int]:
        """Return the numbers that other processes need."""
        return self.weight, self.clients

    def merge(self, partials: Sequence[tuple[float, int]], ranks: Collectives) -> None:
        """Combine the sums of all processes, given each one's :meth:`partial`."""
        self.weight, self.clients = sum(weight for weight, _ in partials), sum(count for _, count in partials)
        ranks.sum(self.sums)


class ExactLora:
    r"""The part of a server that keeps merged weights exact, FedEx-LoRA.

    Singhal, Ponkshe and Vepakomma, *FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large
    Language Models*, ACL 2025 (https://arxiv.org/abs/2410.09432). The server takes the means of A and B, and all base
    weights get the residual:

    .. math::
        W_0 \leftarrow W_0 + s \Big(\sum_i p_i B_i A_i - \bar B \bar A\Big), \qquad
        \bar B = \sum_i p_i B_i, \quad \bar A = \sum_i p_i A_i

    so that :math:`W_0 + s \bar B \bar A` is the mean of the clients' merged weights. It changes the module's own base
    weights. They are part of the module's ``state_dict``, so a checkpoint only adds their checksum.
    """

    def __init__(self, pairs: Sequence[LoraPair]) -> None:
        self.pairs = pairs
        self._columns = 0  # columns in the factors of all residuals so far, in units of the adapter's rank
        self._held: dict[int, int] = {}  # `_columns` when a client last got the base weights, by stored index

    @torch.no_grad()
    def close_round(self, before: Vector, after: Vector, products: ProductSums) -> None:
        """Add a round's residual to the base weights, given the server parameters [P] before and after its step."""
        if products.clients < 2:
            return  # there is no residual, and the base weights keep their bits
        moved = widened(after) - widened(before)
        for pair, total in zip(self.pairs, products.sums, strict=True):
            (a,), (b,) = (part.to(total.device) for part in pair.cut(moved[None]))
            residual = pair.scaling * (total / products.weight - b @ a)
            residual = residual.t() if pair.is_transposed else residual
            pair.base.copy_(narrowed(widened(pair.base) + residual, pair.base))
        self._columns += products.clients - 1

    def send(self, clients: Iterable[int], x: Vector) -> int:
        """Return the bytes of the residuals that these clients, by stored index, lack, and mark them as sent.

        The residuals of a round with k clients are k - 1 products of rank r. Residuals of several rounds are sent as
        their factors, or as a dense matrix if that is smaller. A new client has the initial base weights.
        """
        size = 0
        for index in clients:
            missing = self._columns - self._held.get(index, 0)
            for pair in self.pairs if missing else ():
                (m, n), item = pair.shape, x.element_size()
                size += min(missing * pair.rank * (m + n) * item, m * n * pair.base.element_size())
            self._held[index] = self._columns
        return size

    @property
    def weights(self) -> State:
        """The base weights by number."""
        return {str(number): pair.base.detach() for number, pair in enumerate(self.pairs)}

    @property
    def moved_weights(self) -> State:
        """The base weights by number; empty before the first residual."""
        return self.weights if self._columns else {}

    def _checksum(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for pair in self.pairs:
            digest.update(pair.base.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the checksum of the base weights, and the number of columns sent to each client."""
        return {"base": self._checksum(), "columns": self._columns, "held": dict(self._held)}

    def load_state_dict(self, saved: Mapping[str, Any], origin: Origin = CHECKPOINT) -> None:
        """Load the result of :meth:`state_dict`; raise if the module's base weights differ."""
        if saved["base"] != self._checksum():
            raise FederatedError(
                f"{origin.name} {origin.ran} lora='exact' on other base weights than the model has, which hold a part"
                f" of what was trained. {origin.remedy('the base weights, and keep them in checkpoints')}"
            )
        self._columns = int(saved["columns"])
        self._held = {int(index): int(columns) for index, columns in saved["held"].items()}
