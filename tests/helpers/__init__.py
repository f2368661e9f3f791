"""The smallest engine that can run every hook, for tests of methods without a trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.rounds import Cohort, Run, Step, Update
from lightning_fed.core.types import State

Gradient = Callable[[Tensor, int, Any], Tensor]
"""The gradient at a point of a client on a batch; on all its rows where the batch is None."""


@dataclass
class Round:
    """One round: each client's batches (in any form that the gradient accepts), and the clients that give gradients."""

    batches: Mapping[int, Sequence[Any]]
    grad_cohort: Sequence[int] | None = None


@dataclass
class Played:
    """The values on the server and the clients after every round."""

    x: list[Tensor] = field(default_factory=list)
    server: list[State] = field(default_factory=list)
    clients: list[dict[int, State]] = field(default_factory=list)


def quadratic(a: Sequence[float], b: Sequence[float]) -> Gradient:
    """Return the gradients of F_i(x) = a_i x^2 / 2 + b_i x, the same on every batch."""
    return lambda x, i, batch: a[i] * x + b[i]


def play(
    algorithm: Algorithm,
    grad: Gradient,
    sizes: Sequence[int],
    x: Tensor,
    rounds: Sequence[Round],
    lr: Callable[[int], float] | float = 0.25,
    weighting: str | None = None,
    server_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
) -> Played:
    """Run an algorithm, client after client, local steps ``y <- y - lr * direction``.

    Args:
        algorithm: The method.
        grad: The gradients.
        sizes: Every client's number of examples.
        x: The first server parameters [P].
        rounds: The cohorts and batches.
        lr: The local rate, or a function of the round.
        weighting: "examples" or "uniform"; the method's default if None.
        server_optimizer: As for the trainer; SGD(lr=1) if None.
        loss: The population loss.
    """
    weighting = weighting or algorithm.default_weighting
    x = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.SGD([x], lr=1.0) if server_optimizer is None else server_optimizer([x])
    server, clients, played = algorithm.init_server(x.detach().clone()), {}, Played()

    def mean(ids: list[int], rule: str, values: list[Tensor]) -> Tensor:
        rule = weighting if rule == "weighting" else rule
        w = [1.0 / len(sizes) if rule == "population" else sizes[i] if rule == "examples" else 1 for i in ids]
        total = 1.0 if rule == "population" else sum(w)
        return torch.stack([wi / total * v for wi, v in zip(w, values, strict=True)]).sum(0)

    for r, plan in enumerate(rounds):
        at, ids = x.detach().clone(), list(plan.batches)
        rate = lr(r) if callable(lr) else lr
        own = list(plan.grad_cohort) if algorithm.grad_cohort == "own" and plan.grad_cohort is not None else ids
        points = {p: at if p == "x" else server[p] for p in (*algorithm.full_grad_at, algorithm.anchor_at) if p}
        full = {i: {p: grad(points[p], i, None) for p in algorithm.full_grad_at} for i in {*ids, *own}}
        readers, rule = algorithm.full_grad_readers(r), algorithm.full_grad_mean
        centers = {p: mean(own, rule, [full[i][p] for i in own]) for p in algorithm.full_grad_at}
        cohort = Cohort(len(ids), len(sizes), r, centers, loss(at) if loss and algorithm.population_loss else None)
        server = algorithm.begin_round(at, server, cohort)
        updates = {}
        for i in ids:
            state = clients.get(i) or algorithm.init_client(at)
            state = algorithm.begin_client(state, full[i]) if readers == "both" else state
            shared = {"x": at, "server": server, "client": state, "full_grad": full[i], "cohort_grad": centers}
            shared |= {"num_examples": float(sizes[i]), "mean_examples": sum(sizes) / len(sizes)}
            client = SimpleNamespace(id=i, points=points, shared=shared, batches=plan.batches[i])
            updates[i] = _train(algorithm, grad, client, rate)
        means = {
            name: mean(ids, rule, [updates[i].send[name] for i in ids]) for name, rule in algorithm.reduces.items()
        }
        direction, server = algorithm.update_server(at, server, means, cohort)
        x.grad = -direction
        optimizer.step()
        clients = {**clients, **{i: update.keep for i, update in updates.items()}}
        played.x.append(x.detach().clone())
        played.server.append(server)
        played.clients.append(clients)
    return played


def _train(algorithm: Algorithm, grad: Gradient, client: SimpleNamespace, lr: float) -> Update:
    at, server, state = (client.shared[k] for k in ("x", "server", "client"))
    local, moved, steps = algorithm.init_local(at, server, state), torch.zeros_like(at), 0
    y = algorithm.start(at, Step(local=local, anchor_grad=None, lr=lr, **client.shared))
    for batch in client.batches if algorithm.local_work else ():
        g, step = grad(y, client.id, batch), Step(local=local, anchor_grad=None, lr=lr, **client.shared)
        if algorithm.anchor_at:
            step.anchor_grad = grad(client.points[algorithm.anchor_at], client.id, batch)
        elif algorithm.looks_ahead:
            step.anchor_grad = grad(algorithm.second_gradient_at(g, y, step), client.id, batch)
        v, local = algorithm.correct(g, y, step), algorithm.advance(g, y, step)
        y, moved, steps = y - lr * v, moved + lr * v, steps + 1
    path = moved / (lr * steps) if steps else torch.zeros_like(at)
    run = Run(delta=y - at, local=local, num_steps=steps, lr_sum=lr * steps, path=lambda: path, **client.shared)
    return algorithm.finish(y, run)
