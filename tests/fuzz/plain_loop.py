"""FedAvg, FedProx, SCAFFOLD, FedCM, Mime and MimeLite as plain PyTorch loops, written from the papers' formulas.

The loops take only the order of the data from the package: the cohorts (from a run's reports), and a client's batches
in a round. The trained parameters form one vector: ``x`` on the server, ``y`` on a client.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.core.seeds import Purpose, generator
from tests.fuzz.configuration import Configuration
from tests.fuzz.data import make_data
from tests.fuzz.modules import LR, OPTIMIZERS, factor, make_module, unpacked

__all__ = ["PlainRun", "applies", "plain_run"]

_SERVERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0),
    "half": lambda params: torch.optim.SGD(params, lr=0.5),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.5),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05, eps=0.1),
}


def applies(c: Configuration) -> bool:
    """Return whether this loop supports a configuration."""
    manual = c.optimizer in ("sgd", "decay")
    does = {
        "FedAvg": c.variant % 2 == 0,
        "FedProx": c.variant % 2 == 0,
        "Scaffold": manual,
        "FedCM": manual,
        "Mime": manual and c.variant < 3 and c.weighting != "steps",
        "MimeLite": manual and c.variant in (0, 2) and c.weighting != "steps",
    }
    takes_full = c.method in ("Mime", "MimeLite") or (c.method == "Scaffold" and c.variant % 2)
    is_usual = (
        c.precision == "64-true"
        and c.network not in ("dropout", "batchnorm", "sparse")
        and c.attribute != "epoch"
        and c.log not in ("step",)
        and c.server in _SERVERS
        and c.schedule not in ("plateau", "each step")
        and (c.steps == "trainer" or c.schedule == "none")  # Lightning then leaves schedules to the module
        and c.clients != "weighted"
        and c.clip in ("none", "gradient")
        and c.accumulate == 1
        and c.buffers != "local"
        and c.local_state == "reset"
        and (c.aggregator, c.asynchronous, c.compression) == ("none", "none", "none")
        and not (c.personal or c.fails)
        and not (c.output == "skip" and "step" in c.work)
    )
    full_is_usual = c.clip == "none" and c.heterogeneity == "none" and c.client_lr == "none" and c.output != "skip"
    full_is_usual = full_is_usual and not c.augment
    return does.get(c.method, False) and is_usual and (full_is_usual or not takes_full)


@dataclass
class PlainRun:
    """Results of the loop by round.

    Attributes:
        models: The server's parameters, by name.
        buffers: Its buffers.
        clients: Each client's number of steps, mean loss, logged values, and norm of its change.
        logged: The mean of the cohort's logged values.
    """

    models: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    clients: list[dict[Any, dict[str, Any]]] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)


class _Means:
    """Weighted means of values by name."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, value: float, weight: float) -> None:
        total, weights = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = total + weight * value, weights + weight

    def values(self) -> dict[str, float]:
        return {name: total / weights for name, (total, weights) in self.sums.items()}


class _Model:
    """The module with any parameters loaded. It collects the values that training_step logs."""

    def __init__(self, c: Configuration) -> None:
        self.module = make_module(replace(c, steps="trainer")).double().train()
        self.params = [p for p in self.module.parameters() if p.requires_grad]
        self.means = _Means()
        self.round_means = _Means()
        self.examples = 0
        self.silent = False
        self.module.log = self._log
        self.module.log_dict = lambda values, **options: [self._log(n, v, **options) for n, v in values.items()]

    def _log(self, name: str, value: Any, batch_size: int | None = None, **options: Any) -> None:
        if not self.silent:
            for means in (self.means, self.round_means):
                means.add(name, float(value), self.examples if batch_size is None else batch_size)

    def vector(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.params])

    def load(self, y: Tensor) -> None:
        for p, part in zip(self.params, y.split([p.numel() for p in self.params]), strict=True):
            p.data.copy_(part.view_as(p))

    def gradient(self, y: Tensor, batch: Any, batch_idx: int) -> tuple[float, list[Tensor | None]] | None:
        """Return the loss and gradient of a batch, or None if training_step skips it."""
        self.load(y)
        x, target = unpacked(batch)
        self.examples = len(target)
        double = x.double() if x.is_floating_point() else x
        target = target.double() if target.is_floating_point() else target
        batch = {"x": double, "y": target} if isinstance(batch, dict) else (double, target)
        out = self.module.training_step(batch, batch_idx)
        if out is None:
            return None
        loss = out["loss"] if isinstance(out, dict) else out
        grads = torch.autograd.grad(loss, self.params, allow_unused=True)
        return float(loss.detach()), list(grads)

    def silently(self, y: Tensor, batch: Any, batch_idx: int) -> Tensor:
        """Return the gradient of a batch as a vector, without changing buffers or logs."""
        buffers = self.buffers()
        self.silent = True
        found = self.gradient(y, batch, batch_idx)
        self.silent = False
        self.load_buffers(buffers)
        assert found is not None
        return self.joined(found[1])

    def joined(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return gradients as one vector; zero where there is none."""
        zipped = zip(grads, self.params, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zipped])

    def buffers(self) -> dict[str, Tensor]:
        return {name: b.detach().clone() for name, b in self.module.named_buffers()}

    def load_buffers(self, values: dict[str, Tensor]) -> None:
        for name, b in self.module.named_buffers():
            b.data.copy_(values[name])


class _Base:
    """Mime's base optimizers: the direction U and the statistics V."""

    def __init__(self, c: Configuration, x: Tensor) -> None:
        self.kind = {"Mime": ("sgd", "ema", "adam"), "MimeLite": ("heavy", "", "adam old")}[c.method][c.variant]
        self.m, self.v, self.t = torch.zeros_like(x), torch.zeros_like(x), 0

    def new_m(self, g: Tensor) -> Tensor:
        return g + 0.5 * self.m if self.kind == "heavy" else 0.5 * g + 0.5 * self.m

    def new_v(self, g: Tensor) -> Tensor:
        return 0.1 * g**2 + 0.9 * self.v

    def direction(self, g: Tensor) -> Tensor:
        if self.kind == "sgd":
            return g
        if not self.kind.startswith("adam"):
            return self.new_m(g)
        if self.kind == "adam old":  # divides by the stored v: its initial value is the first gradient's square
            return self.new_m(g) / (0.1 + self.v.sqrt())
        t = self.t + 1
        return self.new_m(g) / (1 - 0.5**t) / (0.1 + (self.new_v(g) / (1 - 0.9**t)).sqrt())

    def advance(self, g: Tensor) -> None:
        self.m, self.v, self.t = self.new_m(g), self.new_v(g), self.t + 1


def plain_run(c: Configuration, rounds: dict[int, Any]) -> PlainRun:
    """Run a configuration without the package.

    Args:
        c: The configuration.
        rounds: The reports of a run of the package: the source of cohorts, sizes and, for partial work, steps.
    """
    return _Loop(c).run(rounds)


class _Loop:
    def __init__(self, c: Configuration) -> None:
        self.c, self.data, self.model = c, make_data(c), _Model(c)
        self.ids = list(self.data.client_ids)
        self.sizes = [self.data.client_size(i) for i in self.ids]
        self.x, self.buffers = self.model.vector(), self.model.buffers()
        self.decay = 0.1 if c.optimizer == "decay" else 0.0
        shares = {id(p): 0.5 for p in self.model.module.head.parameters()} if c.groups else {}
        self.shares = torch.cat([torch.full((p.numel(),), shares.get(id(p), 1.0)) for p in self.model.params]).double()
        self.c_server = torch.zeros_like(self.x)  # SCAFFOLD's c; FedCM's Delta
        self.c_clients = {i: torch.zeros_like(self.x) for i in self.ids}
        self.base = _Base(c, self.x) if c.method.startswith("Mime") else None
        self.client: Any = None  # the one that trains now
        self.server_x = torch.nn.Parameter(self.x.clone())
        self.server = _SERVERS[c.server]([self.server_x])

    def run(self, rounds: dict[int, Any]) -> PlainRun:
        found = PlainRun()
        for r in sorted(rounds):
            self._round(r, rounds[r], found)
        return found

    def _round(self, r: int, report: dict[str, Any], found: PlainRun) -> None:
        c, model, cohort = self.c, self.model, report["cohort"]
        sizes = {i: self.data.client_size(i) for i in cohort}
        model.round_means = _Means()
        if c.attribute == "round":
            model.module.alpha = factor("round", 0, r)
        mean_gradient = None
        if self.base is not None and cohort:
            mean_gradient = self._mean(cohort, {i: self._full(i) for i in cohort}, sizes, {})
            if self.base.kind == "adam old" and self.base.t == 0:
                self.base.v = mean_gradient**2
        deltas, gradients, clients, steps = {}, {}, {}, {}
        changes, after = {}, {}
        for i in cohort:
            model.load_buffers(self.buffers)
            model.means = _Means()
            asked = report["steps"][i] if c.heterogeneity != "none" else None
            full = self._full(i) if c.method == "Scaffold" and c.variant % 2 else None
            y, losses, steps[i], lr = self._local(r, i, asked, mean_gradient)
            after[i] = model.buffers()
            deltas[i] = y - self.x
            if c.method in ("Scaffold", "FedCM"):
                gradients[i] = (self.x - y) / (steps[i] * lr)
            if c.method == "Scaffold":
                new = full if full is not None else self.c_clients[i] - self.c_server + gradients[i]
                changes[i], self.c_clients[i] = new - self.c_clients[i], new
            clients[i] = {
                "steps": steps[i],
                "size": sizes[i],
                "loss": losses,
                "metrics": model.means.values(),
                "update_norm": float(deltas[i].norm()),
            }
        if cohort:
            self._server_step(r, cohort, deltas, gradients, changes, sizes, steps, mean_gradient)
            if c.buffers == "average":
                self.buffers = self._mean_buffers(cohort, after, sizes)
        model.load(self.x)
        model.load_buffers(self.buffers)
        found.models.append({n: p.detach().clone() for n, p in model.module.named_parameters()})
        found.buffers.append(model.buffers())
        found.clients.append(clients)
        found.logged.append(model.round_means.values())

    def _server_step(
        self,
        r: int,
        cohort: Sequence[Any],
        deltas: dict[Any, Tensor],
        gradients: dict[Any, Tensor],
        changes: dict[Any, Tensor],
        sizes: dict[Any, int],
        steps: dict[Any, int],
        mean_gradient: Tensor | None,
    ) -> None:
        c = self.c
        if c.method == "Scaffold":
            direction = torch.stack(list(deltas.values())).mean(0)
            self.c_server = self.c_server + torch.stack(list(changes.values())).sum(0) / sum(n > 0 for n in self.sizes)
        else:
            direction = self._mean(cohort, deltas, sizes, steps)
        if c.method == "FedCM":
            self.c_server = self._mean(cohort, gradients, sizes, steps)
            direction = -0.1 * self.c_server if c.variant % 2 else direction
        if self.base is not None:
            assert mean_gradient is not None
            self.base.advance(mean_gradient)
        rates = [group["lr"] for group in self.server.param_groups]
        for group in self.server.param_groups:
            group["lr"] *= 0.5**r if c.server_schedule == "step" else 1.0
        self.server_x.grad = -direction
        self.server.step()
        for group, lr in zip(self.server.param_groups, rates, strict=True):
            group["lr"] = lr
        self.x = self.server_x.detach().clone()

    def _mean(
        self, cohort: Sequence[Any], values: dict[Any, Tensor], sizes: dict[Any, int], steps: dict[Any, int]
    ) -> Tensor:
        how = self.c.weighting or ("uniform" if self.c.method == "FedCM" else "examples")
        weights = {
            i: {"examples": sizes[i], "uniform": 1, "steps": steps.get(i, 1), "roots": sizes[i] ** 0.5}[how]
            for i in cohort
        }
        total = sum(weights.values())
        return torch.stack([weights[i] / total * values[i] for i in cohort]).sum(0)

    def _mean_buffers(
        self, cohort: Sequence[Any], after: dict[Any, dict[str, Tensor]], sizes: dict[Any, int]
    ) -> dict[str, Tensor]:
        total, mean = sum(sizes[i] for i in cohort), {}
        largest = max(cohort, key=lambda i: (sizes[i], -self.ids.index(i)))
        for name, old in self.buffers.items():
            if old.is_floating_point():
                mean[name] = torch.stack([sizes[i] / total * after[i][name] for i in cohort]).sum(0)
            else:
                mean[name] = after[largest][name]
        return mean

    def _full(self, i: Any) -> Tensor:
        """Return a client's full-batch gradient at x, weight decay included."""
        (batch, _), *more = self.data.client_batches(i).full(torch.Generator())
        assert not more
        self.model.load_buffers(self.buffers)
        self._set_attribute(i)
        return self.model.silently(self.x, batch, 0) + self.decay * self.x

    def _set_attribute(self, i: Any) -> None:
        if self.c.attribute in ("one", "distinct"):
            self.model.module.alpha = factor(self.c.attribute, self.ids.index(i))

    def _rates(self, r: int, i: Any) -> Tensor:
        schedule = self.c.schedule if self.c.client_lr == "none" else "none"  # a hook sets each client's rate anew
        decayed = {"none": 1.0, "step": 0.5**r, "lambda": 1 / (1 + r)}[schedule]
        return LR * self.shares * decayed * factor(self.c.client_lr, self.ids.index(i))

    def _local(
        self, r: int, i: Any, asked: int | None, mean_gradient: Tensor | None
    ) -> tuple[Tensor, float, int, Tensor]:
        """Return a client's final parameters, mean loss, steps, and rates by coordinate."""
        c, model, lr = self.c, self.model, self._rates(r, i)
        self._set_attribute(i)
        self.client = i
        losses, steps, y = _Means(), 0, self.x.clone()
        model.load(y)
        own = None if c.optimizer in ("sgd", "decay") else self._own_optimizer(lr)
        for batch, batch_idx in self._batches(r, i, asked):
            # before the gradient at y: its pass may update buffers that both passes read
            anchor = model.silently(self.x, batch, batch_idx) if c.method == "Mime" else None
            found = model.gradient(y, batch, batch_idx)
            if found is None:
                continue
            loss, grads = found
            losses.add("loss", loss, model.examples)
            if c.clip == "gradient":
                norm = torch.stack([g.norm() for g in grads if g is not None]).norm()
                grads = [None if g is None else g * min(1.0, 0.5 / (float(norm) + 1e-6)) for g in grads]
            y = self._step(y, grads, anchor, lr, own, mean_gradient)
            steps += 1
        return y, losses.values().get("loss", float("nan")), steps, lr

    def _batches(self, r: int, i: Any, asked: int | None) -> Iterator[tuple[Any, int]]:
        """Yield a client's batches, each with its index in the local epoch."""
        c, batches = self.c, self.data.client_batches(i)
        size = self.data.client_size(i)
        drops = c.drop_last and size >= c.batch
        length = size // c.batch if drops else -(-size // c.batch)
        length = min(length, c.limit) if isinstance(c.limit, int) else min(length, max(1, int(length * c.limit)))
        count, unit = c.work.split()
        left = int(count) * (length if unit.startswith("epoch") else 1) if asked is None else asked
        stream = generator(c.number, Purpose.BATCHES, r, self.ids.index(i))
        while left:
            for batch_idx, (batch, _) in enumerate(islice(batches.epoch(stream), min(length, left))):
                left -= 1
                yield batch, batch_idx

    def _own_optimizer(self, lr: Tensor) -> Optimizer:
        """Return the configuration's torch optimizer, with one group and rate for each parameter."""
        sizes = [p.numel() for p in self.model.params]
        rates = [float(part[0]) for part in lr.split(sizes)]
        return OPTIMIZERS[self.c.optimizer](
            [{"params": [p], "lr": rate} for p, rate in zip(self.model.params, rates, strict=True)]
        )

    def _step(
        self,
        y: Tensor,
        grads: list[Tensor | None],
        anchor: Tensor | None,
        lr: Tensor,
        own: Optimizer | None,
        mean_gradient: Tensor | None,
    ) -> Tensor:
        c, model = self.c, self.model
        g = model.joined(grads)
        if own is not None:  # FedAvg and FedProx: any torch optimizer, which applies the weight decay
            if c.method == "FedProx":
                g = g + 0.5 * (y - self.x)
            for p, part, had in zip(model.params, g.split([p.numel() for p in model.params]), grads, strict=True):
                p.grad = None if had is None and c.method == "FedAvg" else part.view_as(p).clone()
            own.step()
            return model.vector()
        decayed = torch.cat(
            [  # FedAvg: torch does not decay parameters without a gradient
                torch.full_like(p.detach().reshape(-1), 0.0 if had is None and c.method == "FedAvg" else self.decay)
                for p, had in zip(model.params, grads, strict=True)
            ]
        )
        g = g + decayed * y
        if c.method == "FedProx":
            g = g + 0.5 * (y - self.x)
        elif c.method == "Scaffold":
            g = g - self.c_clients[self.client] + self.c_server
        elif c.method == "FedCM":
            alpha = 0.7 if c.variant % 2 else 0.3
            g = alpha * g + (1 - alpha) * self.c_server
        elif self.base is not None:
            if anchor is not None:
                assert mean_gradient is not None
                g = g - (anchor + self.decay * self.x) + mean_gradient
            g = self.base.direction(g)
        return y - lr * g
