"""Simulated attacks: bad clients that send false messages or train on false labels, to try robust rules."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.arguments import ArgumentsRepr, check_count, check_number, finite, format_value, kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.plain import place_of
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.server.participation import Population

_LABEL_NAMES = ("targets", "labels", "target", "label")


class Attack(ArgumentsRepr):
    """Bad clients of a simulation, the same in every round; see the subclasses.

    A subclass overrides :meth:`message` to change the messages of bad clients, or :meth:`batch` to change the batches
    that they train on. Their reports (losses, norms, numbers of steps) and their client states still come from their
    own training.

    Args:
        clients: The bad clients: a list of ids, or a share of the population in [0, 1], drawn from the run's seed.

    Raises:
        FederatedError: If this is neither a share nor a list of ids.
    """

    def __init__(self, clients: int | float | Sequence[ClientId]) -> None:
        ids = clients if isinstance(clients, Sequence) and not isinstance(clients, str | bytes) else [None]
        is_list = all(type(client_id) in (int, str) for client_id in ids)
        if not is_list and not (isinstance(clients, float) and 0 <= finite(clients) <= 1):
            hint = f" Write [{clients}] for the client {clients}." if type(clients) is int else ""
            raise FederatedError(
                f"{type(self).__name__}(clients={format_value(clients)}): clients must be a share in [0.0, 1.0], or a"
                f" list of client ids.{hint}"
            )
        self.clients: float | Sequence[ClientId] = clients

    @property
    def changes_messages(self) -> bool:
        """True if bad clients send other messages than their own."""
        return type(self).message is not Attack.message

    @property
    def changes_batches(self) -> bool:
        """True if bad clients train on other batches than their own."""
        return type(self).batch is not Attack.batch

    def attackers(self, seed: int, population: Population) -> frozenset[int]:
        """Return the stored indices of the bad clients of a run.

        Args:
            seed: The run's seed.
            population: The clients of the run.

        Raises:
            FederatedError: If an id is unknown.
        """
        if isinstance(self.clients, float):
            number = len(population.ids)
            order = torch.randperm(number, generator=generator(seed, Purpose.ATTACKERS))
            return frozenset(order[: math.floor(self.clients * number + 0.5)].tolist())
        known = set(population.ids)
        if unexpected := [client_id for client_id in self.clients if client_id not in known]:
            raise FederatedError(
                f"attack={self!r} has {', '.join(map(repr, unexpected))}, not ids of the data module's {len(known)}"
                f" clients, such as {population.ids[0]!r}."
            )
        return frozenset(map(population.index_of, self.clients))

    def message(self, message: Vector, stream: torch.Generator) -> Vector:
        """Return the message of the same shape that a bad client sends instead.

        Args:
            message: The honest message.
            stream: The client's random generator for this round, on the CPU.
        """
        return message

    def batch(self, batch: Any) -> Any:
        """Return the batch that a bad client trains on instead."""
        return batch


class SignFlipAttack(Attack):
    """Bad clients send their messages with the opposite sign, times a factor.

    Li et al., *RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from Heterogeneous
    Datasets*, AAAI 2019 (https://arxiv.org/abs/1811.03761). Its experiments flip signs and multiply by a constant.

    Args:
        clients: The bad clients: a list of ids, or a share of the population in [0, 1], drawn from the run's seed.
        scale: The factor, positive.

    Raises:
        FederatedError: If an argument is out of range.

    Example:
        >>> SignFlipAttack(clients=[3, 8], scale=10.0).message(
        ...     torch.ones(2), torch.Generator()
        ... )
        tensor([-10., -10.])
    """

    def __init__(self, clients: int | float | Sequence[ClientId], scale: float = 1.0) -> None:
        super().__init__(clients)
        self.scale = check_number(self, "scale", scale, "(0, inf)")

    def message(self, message: Vector, stream: torch.Generator) -> Vector:
        """Return the message times -scale."""
        return -self.scale * message


class NoiseAttack(Attack):
    """Bad clients send Gaussian noise.

    The "Gaussian" clients of Blanchard et al., *Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent*, NeurIPS 2017 (https://arxiv.org/abs/1703.02757), Section 5. Their noise has the standard deviation 200.

    Args:
        clients: The bad clients: a list of ids, or a share of the population in [0, 1], drawn from the run's seed.
        std: The standard deviation of every entry, positive.

    Raises:
        FederatedError: If an argument is out of range.

    Example:
        >>> NoiseAttack(clients=0.2, std=200.0)
        NoiseAttack(clients=0.2, std=200.0)
    """

    def __init__(self, clients: int | float | Sequence[ClientId], std: float) -> None:
        super().__init__(clients)
        self.std = check_number(self, "std", std, "(0, inf)")

    def message(self, message: Vector, stream: torch.Generator) -> Vector:
        """Return noise of the message's shape."""
        return self.std * torch.randn(message.shape, generator=stream, dtype=message.dtype).to(message.device)


class LabelFlipAttack(Attack):
    """Bad clients train on labels C - 1 - y in place of y.

    Fang et al., *Local Model Poisoning Attacks to Byzantine-Robust Federated Learning*, USENIX Security 2020
    (https://arxiv.org/abs/1911.11815), compare their attacks with this label flipping.

    The labels of a batch are the last entry of a tuple or list, or the entry "targets", "labels", "target" or "label"
    of a mapping. For other batches, flip the labels in the clients' data sets.

    Args:
        clients: The bad clients: a list of ids, or a share of the population in [0, 1], drawn from the run's seed.
        num_classes: C, the number of classes.

    Raises:
        FederatedError: If an argument is out of range, or a batch has no such labels.

    Example:
        >>> inputs, labels = torch.zeros(3, 2), torch.tensor([0, 1, 9])
        >>> LabelFlipAttack(clients=0.2, num_classes=10).batch([inputs, labels])[1]
        tensor([9, 8, 0])
    """

    def __init__(self, clients: int | float | Sequence[ClientId], num_classes: int) -> None:
        super().__init__(clients)
        self.num_classes = check_count(self, "num_classes", num_classes, least=2)

    def batch(self, batch: Any) -> Any:
        """Return the batch with flipped labels."""
        if isinstance(batch, Mapping):
            for name in _LABEL_NAMES:
                if name in batch:
                    return {**batch, name: self._flipped(batch[name])}
        elif type(batch) in (tuple, list) and len(batch) > 1:
            return type(batch)([*batch[:-1], self._flipped(batch[-1])])
        raise FederatedError(
            f"{self!r} finds no labels in a batch, {kind_of(batch)}: it must be a pair of inputs and labels, or a"
            f" mapping with {', '.join(map(repr, _LABEL_NAMES))}. Flip the labels in the clients' data sets instead."
        )

    def _flipped(self, labels: Any) -> Tensor:
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
            found = labels.dtype if isinstance(labels, Tensor) else kind_of(labels)
            raise FederatedError(f"{self!r} flips classes, integers of a tensor; the labels of a batch are {found}.")
        classes = labels.long()  # booleans do not support subtraction, nor unsigned types min()
        if labels.numel() and not 0 <= int(classes.min()) <= int(classes.max()) < self.num_classes:
            raise FederatedError(
                f"{self!r} found the labels {int(classes.min())} to {int(classes.max())} in a batch: they must be"
                f" classes from 0 to {self.num_classes - 1}."
            )
        flipped = self.num_classes - 1 - classes
        result = flipped.to(labels.dtype)
        if not torch.equal(result.long(), flipped):
            raise FederatedError(
                f"{self!r} makes the label {int(flipped.max())}, which the labels' type {labels.dtype} cannot hold. Use"
                " labels of torch.int64, or correct num_classes."
            )
        return result


def attacked(attack: Attack, send: State, stream: torch.Generator) -> State:
    """Return one client's messages after an attack; a tensor sent under two names is changed once."""
    changed: dict[tuple[Any, ...], Tensor] = {}
    keys = {name: place_of(value) for name, value in send.items()}
    for name in sorted(send):
        if keys[name] not in changed:
            message: Any = attack.message(send[name], stream)
            if not isinstance(message, Tensor) or message.shape != send[name].shape:
                found = f"of shape {list(message.shape)}" if isinstance(message, Tensor) else f"as {kind_of(message)}"
                raise FederatedError(
                    f"{type(attack).__name__}.message returned a message {found}, in place of {name!r} of shape"
                    f" {list(send[name].shape)}: it must be a tensor of the same shape."
                )
            changed[keys[name]] = message
    return {name: changed[key] for name, key in keys.items()}
