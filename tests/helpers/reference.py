"""Every method as a plain NumPy loop, written from its formulas: slow, and independent of the package.

A case has the fields and the arrays (format 1) of the stored oracle cases. :func:`make_case` draws a random case and
fills in the expected values with :func:`run_reference`. So tests can cover options without a stored case.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """Data, cohorts, minibatches and hyper-parameters of one run. Nothing in it is random.

    Attributes:
        id: A name.
        algorithm: The method's name, a key of :data:`METHODS`.
        hp: Hyper-parameters.
        kind: "softmax", "least_squares" or "quadratic".
        l2: The coefficient of ``0.5 * ||x||^2`` in every loss.
        shape: ``(n_out, n_in)``; empty for the quadratic.
        n_rounds: R.
        sizes: The rows of every client.
        arrays: ``X_i, y_i`` (``a_i, b_i``), ``init_*``, ``cohort``, ``grad_cohort``, ``batch_idx``, ``expected_*``,
            ``arrivals``, ``arrival_batch_idx``.
    """

    id: str
    algorithm: str
    hp: Mapping[str, Any]
    kind: str
    l2: float
    shape: tuple[int, ...]
    n_rounds: int
    sizes: tuple[int, ...]
    arrays: Mapping[str, Array]


class Problem:
    """Losses and gradients by hand, and the schedule of a case."""

    def __init__(self, case: Any) -> None:
        self.hp, self.kind, self.l2, self.shape, self.arrays = case.hp, case.kind, case.l2, case.shape, case.arrays
        self.rounds, self.n, self.N = range(case.n_rounds), np.array(case.sizes, float), len(case.sizes)
        if self.kind == "quadratic":
            self.x0, names = np.asarray(self.arrays["init_x"], float), "ab"
        else:
            parts = [np.asarray(self.arrays[f"init_{k}"], float).ravel() for k in ("weight", "bias")]
            self.x0, names = np.concatenate(parts), "Xy"
        self.rows = [tuple(np.asarray(self.arrays[f"{k}_{i}"]) for k in names) for i in range(self.N)]

    def cohort(self, r: int, name: str = "cohort") -> list[int]:
        return [int(i) for i in self.arrays[name][r] if i >= 0]

    def batches(self, r: int, i: int) -> list[Array]:
        return [b[b >= 0] for b in self.arrays["batch_idx"][r, i] if (b >= 0).any()]

    def arrivals(self, r: int) -> list[tuple[int, int, list[Array]]]:
        padded = self.arrays["arrival_batch_idx"][r]
        batches = [[b[b >= 0] for b in own if (b >= 0).any()] for own in padded]
        return [(int(i), int(u), own) for (i, u), own in zip(self.arrays["arrivals"][r], batches, strict=True)]

    def lr(self, r: int) -> float:
        return self.hp["client_lr"] * self.hp.get("client_lr_decay", 1.0) ** r

    def loss_and_grad(self, x: Array, i: int, batch: Array | None = None) -> tuple[float, Array]:
        first, second = self.rows[i] if batch is None else (rows[batch] for rows in self.rows[i])
        first = first.astype(float)
        if self.kind == "quadratic":
            loss, grad = np.mean(0.5 * first * x**2 + second * x), np.array([np.mean(first * x + second)])
        else:
            split = self.shape[0] * self.shape[1]
            out = first @ x[:split].reshape(self.shape).T + x[split:]
            if self.kind == "softmax":
                out = out - out.max(axis=1, keepdims=True)
                total, hot = np.exp(out).sum(axis=1, keepdims=True), np.eye(self.shape[0])[second]
                loss = np.mean(np.log(total[:, 0]) - (out * hot).sum(axis=1))
                error = (np.exp(out) / total - hot) / len(first)
            else:
                loss, error = 0.5 * np.mean((out - second) ** 2), (out - second) / out.size
            grad = np.concatenate([(error.T @ first).ravel(), error.sum(axis=0)])
        return float(loss + 0.5 * self.l2 * x @ x), grad + self.l2 * x

    def grad(self, x: Array, i: int, batch: Array | None = None) -> Array:
        return self.loss_and_grad(x, i, batch)[1]

    def loss(self, x: Array) -> float:
        return sum(self.n[i] / self.n.sum() * self.loss_and_grad(x, i)[0] for i in range(self.N))

    def avg(self, clients: list[int], vectors: list[Array]) -> Array:
        w = self.n[clients] if self.hp["weighting"] == "examples" else np.ones(len(clients))
        return sum(wi * v for wi, v in zip(w / w.sum(), vectors, strict=True))

    def gbar(self, x: Array, clients: list[int]) -> Array:
        return self.avg(clients, [self.grad(x, i) for i in clients])

    def train(self, r: int, i: int, x: Array, direction: Callable[[Array, Array], Array]) -> Array:
        """Run client i's local steps from x. ``direction`` takes y and the batch."""
        y = x
        for batch in self.batches(r, i):
            y = y - self.lr(r) * direction(y, batch)
        return y


class Base:
    """A base optimizer: direction U and statistics V as in the table."""

    def __init__(self, options: Mapping[str, Any], x: Array) -> None:
        self.o = {"v0": 0.0, "stats": "old", "bias_correction": False, **options}
        self.m, self.v, self.t = np.zeros_like(x), np.full_like(x, self.o["v0"]), 1

    def copy(self) -> "Base":
        other = Base(self.o, self.m)
        other.m, other.v, other.t = self.m.copy(), self.v.copy(), self.t
        return other

    def new_m(self, g: Array) -> Array:
        if self.o["name"] == "sgdm":
            weight = 1 if self.o["momentum_form"] == "heavy_ball" else 1 - self.o["beta"]
            return weight * g + self.o["beta"] * self.m
        return (1 - self.o["beta1"]) * g + self.o["beta1"] * self.m if "beta1" in self.o else g

    def new_v(self, g: Array) -> Array:
        name, beta = self.o["name"], self.o.get("beta2", self.o.get("beta"))
        if name == "adagrad":
            return self.v + g**2
        if name == "yogi":
            return self.v - (1 - beta) * g**2 * np.sign(self.v - g**2)
        return (1 - beta) * g**2 + beta * self.v

    def U(self, g: Array) -> Array:  # noqa: N802
        if self.o["name"] in ("sgd", "sgdm"):
            return g if self.o["name"] == "sgd" else self.new_m(g)
        m, v = self.new_m(g), self.new_v(g) if self.o["stats"] == "new" else self.v
        if self.o["bias_correction"] and self.o["name"] != "rmsprop":
            m, v = m / (1 - self.o["beta1"] ** self.t), v / (1 - self.o["beta2"] ** self.t)
        return m / (self.o["eps"] + np.sqrt(v))

    def V(self, g: Array) -> None:  # noqa: N802
        if self.o["name"] != "sgd":
            self.m, self.v = self.new_m(g), self.v if self.o["name"] == "sgdm" else self.new_v(g)
        self.t += 1


def server_step(p: Problem, x: Array, base: Base, g: Array) -> Array:
    x = x - p.hp.get("server_lr", 1.0) * base.U(g)
    base.V(g)
    return x


def server_only(p: Problem) -> list[Array]:
    x, base, out = p.x0, Base(p.hp["base"], p.x0), []
    for r in p.rounds:
        x = server_step(p, x, base, p.gbar(x, p.cohort(r)))
        out.append(x)
    return out


def fedavg(p: Problem) -> list[Array]:
    x, base, out = p.x0, Base(p.hp.get("base", {"name": "sgd"}), p.x0), []
    for r in p.rounds:
        ids, moved = p.cohort(r), []
        for i in ids:
            y = p.train(r, i, x, lambda y, b, i=i: p.grad(y, i, b))
            scale = p.lr(r) * len(p.batches(r, i)) if p.hp.get("pseudo_grad") == "normalized" else 1.0
            moved.append((x - y) / scale)
        x = server_step(p, x, base, p.avg(ids, moved))
        out.append(x)
    return out


def fedprox(p: Problem) -> list[Array]:
    x, mu, rule, falls, last, out = p.x0, p.hp["mu"], p.hp.get("adaptive"), 0, p.loss(p.x0), []
    for r in p.rounds:
        ids = p.cohort(r)
        ys = [p.train(r, i, x, lambda y, b, i=i, x=x, mu=mu: p.grad(y, i, b) + mu * (y - x)) for i in ids]
        x = p.avg(ids, ys)
        out.append(x)
        now = p.loss(x)
        if rule and now > last:
            mu, falls = mu + rule["step"], 0
        elif rule and now < last:
            falls += 1
            if falls == rule["patience"]:
                mu, falls = max(0.0, mu - rule["step"]), 0
        else:
            falls = 0
        last = now
    return out


def feddane(p: Problem) -> list[Array]:
    x, mu, out = p.x0, p.hp["mu"], []
    for r in p.rounds:
        ids, g = p.cohort(r), p.gbar(x, p.cohort(r, "grad_cohort"))

        def direction(y: Array, b: Array, i: int, x: Array = x, g: Array = g) -> Array:
            return p.grad(y, i, b) + g - p.grad(x, i) + mu * (y - x)

        x = p.avg(ids, [p.train(r, i, x, lambda y, b, i=i, d=direction: d(y, b, i)) for i in ids])
        out.append(x)
    return out


def scaffold(p: Problem) -> list[Array]:
    x, c, cs, out = p.x0, np.zeros_like(p.x0), np.zeros((p.N, len(p.x0))), []
    if p.hp.get("initial") == "gradient":
        for i in p.cohort(0):
            cs[i] = p.grad(x, i)
        c = cs.mean(0)
    for r in p.rounds:
        ids, dx, dc = p.cohort(r), [], []
        for i in ids:
            y = p.train(r, i, x, lambda y, b, i=i, c=c: p.grad(y, i, b) - cs[i] + c)
            seen = (x - y) / (len(p.batches(r, i)) * p.lr(r))
            new = p.grad(x, i) if p.hp["option"] == "i" else cs[i] - c + seen
            dx.append(y - x)
            dc.append(new - cs[i])
            cs[i] = new
        x = x + p.hp.get("server_lr", 1.0) * sum(dx) / len(ids)
        c = c + sum(dc) / p.N
        out.append(x)
    return out


def mime(p: Problem, svrg: bool = True, moving: bool = False) -> list[Array]:
    x, s, out = p.x0, Base(p.hp["base"], p.x0), []
    for r in p.rounds:
        ids = p.cohort(r)
        c, ys = p.gbar(x, ids), []
        for i in ids:
            y, s_i = x, s.copy()
            for b in p.batches(r, i):
                g = p.grad(y, i, b) - p.grad(x, i, b) + c if svrg else p.grad(y, i, b)
                y = y - p.lr(r) * s_i.U(g)
                if moving:
                    s_i.V(g)
            ys.append(y - x)
        s.V(c)
        x = x + p.hp.get("server_lr", 1.0) * p.avg(ids, ys)
        out.append(x)
    return out


def mime_mvr(p: Problem) -> list[Array]:
    x, prev, a, m, out = p.x0, p.x0, p.hp["a"], np.zeros_like(p.x0), []
    if p.hp["m0"] == "grad":
        m = p.gbar(x, p.cohort(0))
    for r in p.rounds:
        ids = p.cohort(r)
        at, center = {"eq15": (x, prev), "lemma9": (prev, prev), "current": (x, x)}[p.hp["anchor"]]
        fixed = a * p.gbar(center, ids) + (1 - a) * m

        def direction(y: Array, b: Array, i: int, at: Array = at, fixed: Array = fixed) -> Array:
            return p.grad(y, i, b) - p.grad(at, i, b) + fixed

        ys = [p.train(r, i, x, lambda y, b, i=i, d=direction: d(y, b, i)) for i in ids]
        g, h = p.gbar(x, ids), p.gbar(prev, ids)
        m, prev, x = a * g + (1 - a) * m + (1 - a) * (g - h), x, p.avg(ids, ys)
        out.append(x)
    return out


def fedcm(p: Problem) -> list[Array]:
    x, delta, alpha, eta_g, out = p.x0, np.zeros_like(p.x0), p.hp["alpha"], p.hp["eta_g"], []
    for r in p.rounds:
        ids = p.cohort(r)
        ys = [p.train(r, i, x, lambda y, b, i=i, d=delta: alpha * p.grad(y, i, b) + (1 - alpha) * d) for i in ids]
        delta = p.avg(ids, [(x - y) / (p.lr(r) * len(p.batches(r, i))) for i, y in zip(ids, ys, strict=True)])
        x = x - eta_g * delta if p.hp["eta_g_mode"] == "paper" else x + eta_g * p.avg(ids, [y - x for y in ys])
        out.append(x)
    return out


def feddyn(p: Problem) -> list[Array]:
    x, d, out = p.x0, np.zeros((p.N, len(p.x0))), []
    scaled = p.hp["alpha_scaling"] == "inverse_size"
    for r in p.rounds:
        ids, ys = p.cohort(r), []
        for i in ids:
            alpha = p.hp["alpha"] * (p.n.mean() / p.n[i] if scaled else 1.0)
            ys.append(p.train(r, i, x, lambda y, b, i=i, x=x, al=alpha: p.grad(y, i, b) + al * (y - x + d[i])))
        for i, y in zip(ids, ys, strict=True):
            d[i] = d[i] + y - x
        x = sum(ys) / len(ids) + d.sum(axis=0) / p.N
        out.append(x)
    return out


def fednova(p: Problem) -> list[Array]:
    x, out = p.x0, []
    for r in p.rounds:
        ids = p.cohort(r)
        tau = [len(p.batches(r, i)) for i in ids]
        ys = [p.train(r, i, x, lambda y, b, i=i: p.grad(y, i, b)) for i in ids]
        d = p.avg(ids, [(x - y) / (p.lr(r) * t) for y, t in zip(ys, tau, strict=True)])
        x = x - p.lr(r) * p.avg(ids, tau) * d
        out.append(x)
    return out


def fedbuff(p: Problem) -> list[Array]:
    """FedBuff over FedAvg as in the format, or over FedProx (with ``mu``) or FedCM (with ``alpha``)."""
    xs, deltas, lr = [p.x0], [np.zeros_like(p.x0)], p.hp["client_lr"]
    mu, alpha = p.hp.get("mu", 0.0), p.hp.get("alpha", 1.0)
    for r in p.rounds:
        moved, directions, arrivals = np.zeros_like(p.x0), np.zeros_like(p.x0), p.arrivals(r)
        for i, u, batches in arrivals:
            y = xs[u]
            for b in batches:
                y = y - lr * (alpha * p.grad(y, i, b) + (1 - alpha) * deltas[u] + mu * (y - xs[u]))
            weight = (1 + r - u) ** -p.hp.get("staleness_exponent", 0.5) / len(arrivals)
            moved = moved + weight * (xs[u] - y)
            directions = directions + weight * (xs[u] - y) / (lr * len(batches))
        xs.append(xs[-1] - p.hp.get("server_lr", 1.0) * moved)
        deltas.append(directions)
    return xs[1:]


METHODS: dict[str, Callable[[Problem], list[Array]]] = {
    "server_only": server_only,
    "fedavg": fedavg,
    "fedprox": fedprox,
    "feddane": feddane,
    "scaffold": scaffold,
    "mime": mime,
    "mimelite": lambda p: mime(p, svrg=False),
    "c-mime": lambda p: mime(p, moving=True),
    "mime_mvr": mime_mvr,
    "fedcm": fedcm,
    "feddyn": feddyn,
    "fednova": fednova,
    "fedbuff": fedbuff,
}


def write_case(folder: Path, case: Case) -> None:
    """Write a folder of stored cases, in format 1, with only this one."""
    problem = {"kind": case.kind, "l2": case.l2}
    if case.kind != "quadratic":
        problem |= {"n_out": case.shape[0], "n_in": case.shape[1]}
    meta = {"id": case.id, "algorithm": case.algorithm, "hp": dict(case.hp), "problem": problem}
    meta |= {"n_clients": len(case.sizes), "n_rounds": case.n_rounds, "sizes": list(case.sizes)}
    meta |= {"reference": "", "note": "", "format": 1}
    np.savez(folder / f"{case.id}.npz", meta_json=np.array(json.dumps(meta)), **case.arrays)
    (folder / "cases.json").write_text(json.dumps([{**meta, "file": f"{case.id}.npz"}]))


def run_reference(case: Any) -> Array:
    """Return the server parameters [R, P] after every round of a case, from this module or from a file."""
    return np.stack(METHODS[case.algorithm](Problem(case)))


def make_case(
    algorithm: str,
    hp: Mapping[str, Any],
    seed: int = 0,
    kind: str = "softmax",
    l2: float = 0.0,
    n_clients: int = 4,
    n_rounds: int = 4,
    equal_sizes: bool = False,
) -> Case:
    """Draw a case: unequal clients, partial cohorts, one or two local epochs in batches of up to three rows.

    Args:
        algorithm: A key of :data:`METHODS`.
        hp: Its hyper-parameters.
        seed: The seed of the draw.
        kind: "softmax", "least_squares" or "quadratic".
        l2: The coefficient of ``0.5 * ||x||^2``.
        n_clients: N.
        n_rounds: R.
        equal_sizes: Give all clients six rows and two local epochs.
    """
    rng = np.random.default_rng(seed)
    n_in, n_out, width = 3, 2 + (kind == "softmax"), 3
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32).astype(float)  # noqa: E731
    sizes = [6] * n_clients if equal_sizes else [int(n) for n in rng.integers(4, 9, n_clients)]
    arrays: dict[str, Array] = {}
    for i, n in enumerate(sizes):
        if kind == "quadratic":
            arrays |= {f"a_{i}": np.abs(draw(n)), f"b_{i}": draw(n)}
        else:
            labels = rng.integers(0, n_out, n) if kind == "softmax" else draw(n, n_out)
            arrays |= {f"X_{i}": draw(n, n_in) + 0.25 * i, f"y_{i}": labels}
    steps = 2 * -(-max(sizes) // width)

    def local_batches(i: int) -> Array:
        padded, epochs = np.full((steps, width), -1), 2 if equal_sizes else int(rng.integers(1, 3))
        orders = [rng.permutation(sizes[i]) for _ in range(epochs)]
        batches = [order[start : start + width] for order in orders for start in range(0, sizes[i], width)]
        for k, batch in enumerate(batches):
            padded[k, : len(batch)] = batch
        return padded

    cohorts = np.full((2, n_rounds, n_clients), -1)
    batch_idx = np.full((n_rounds, n_clients, steps, width), -1)
    for r in range(n_rounds):
        for cohort in cohorts[:, r]:
            size = int(rng.integers(2, n_clients + 1))
            cohort[:size] = rng.permutation(n_clients)[:size]
        for i in cohorts[0, r][cohorts[0, r] >= 0]:
            batch_idx[r, i] = local_batches(i)
    start = {"x": draw(1)} if kind == "quadratic" else {"weight": draw(n_out, n_in), "bias": draw(n_out)}
    arrays |= {f"init_{k}": v for k, v in start.items()} | {"cohort": cohorts[0], "batch_idx": batch_idx}
    if algorithm == "feddane":
        arrays["grad_cohort"] = cohorts[1]
    if algorithm == "fedbuff":  # three arrivals a round, some of one client; up to three steps late
        arrivals = [
            [(rng.integers(n_clients), rng.integers(max(0, r - 3), r + 1)) for _ in "abc"] for r in range(n_rounds)
        ]
        arrays["arrivals"] = np.array(arrivals)
        arrays["arrival_batch_idx"] = np.array([[local_batches(i) for i, _ in of_round] for of_round in arrivals])
        arrays["cohort"], arrays["batch_idx"] = np.full((n_rounds, 3), -1), batch_idx[:, :, :0, :1]
        for cohort, of_round in zip(arrays["cohort"], arrivals, strict=True):
            distinct = sorted({i for i, _ in of_round})
            cohort[: len(distinct)] = distinct
    shape = () if kind == "quadratic" else (n_out, n_in)
    case = Case(f"{algorithm}-{kind}-{seed}", algorithm, hp, kind, l2, shape, n_rounds, tuple(sizes), arrays)
    parts = np.split(run_reference(case), np.cumsum([v.size for v in start.values()])[:-1], axis=1)
    arrays |= {f"expected_{k}": p.reshape(n_rounds, *start[k].shape) for k, p in zip(start, parts, strict=True)}
    return case
