"""The methods in plain NumPy: what the papers print, and the other rules that implementations are known to follow.

Every method is a generator of the server's parameters after each round. Its keyword arguments are the questions that
implementations answer differently; :data:`METHODS` lists the answers, the paper's first.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from conformance.cases import Array, Case, Problem, flat, named

__all__ = ["COUNTS", "METHODS", "Method", "Play", "Question", "buffers_of", "rounds_of"]

EPS = 1e-5  # of BatchNorm
Rounds = Iterator[Array]


class Play:
    """A case as the formulas need it: x is one vector of all parameters.

    Args:
        case: The case.
        lost: What a restart before round ``case.restart`` sets back to its first value.
    """

    def __init__(self, case: Case, lost: str = "") -> None:
        self.case, self.problem, self.lost = case, case.problem, lost
        self.x0 = flat(case.problem.start, case.problem.trained)
        self.clients = range(len(case.problem.sizes))
        self.lr: float = case.options["client_lr"]
        self.rounds = range(case.rounds)

    def steps(self, i: int) -> int:
        """Return K_i."""
        return len(self.case.batches(i))

    def loses(self, what: str, r: int) -> bool:
        """Return whether a state is lost before this round."""
        return r == self.case.restart and what in self.lost.split()

    def weights(self, kind: str, cohort: list[int]) -> dict[int, float]:
        """Return p_i of the clients of a round, whose sum is 1."""
        of = {"uniform": lambda i: 1, "examples": lambda i: self.problem.sizes[i], "steps": self.steps}[kind]
        total = sum(of(i) for i in cohort)
        return {i: of(i) / total for i in cohort}

    def mean(self, kind: str, vectors: Mapping[int, Array]) -> Array:
        """Return the weighted mean of the clients' vectors."""
        weights = self.weights(kind, list(vectors))
        total: Array = np.sum([weights[i] * vector for i, vector in vectors.items()], axis=0)
        return total

    def grad(self, x: Array, i: int, rows: slice = slice(None)) -> Array:
        """Return the gradient of client i's loss, the mean cross-entropy over the rows."""
        return gradient(self.problem, x, i, rows)

    def local(self, x: Array, i: int, direction: Callable[[Array, slice], Array]) -> Array:
        """Return y_i: from x, the local steps y <- y - lr * direction(y, rows)."""
        y = x
        for rows in self.case.batches(i):
            y = y - self.lr * direction(y, rows)
        return y

    def sgd(self, x: Array, i: int, add: Array | float = 0.0, pull: float = 0.0) -> Array:
        """Return y_i: from x, the local steps y <- y - lr (g_i(y) + add + pull (y - x))."""
        return self.local(x, i, lambda y, rows: self.grad(y, i, rows) + add + pull * (y - x))


def gradient(problem: Problem, x: Array, i: int, rows: slice) -> Array:
    """Return the gradient of the mean cross-entropy of client i's rows at the parameters x."""
    inputs, classes = problem.x[i][rows], problem.y[i][rows]
    features = hidden = inputs
    count, parts = inputs.shape[1], []
    if problem.kind == "batchnorm":
        scale, shift, x = x[:count], x[count : 2 * count], x[2 * count :]
        features = (inputs - inputs.mean(0)) / np.sqrt(inputs.var(0) + EPS)
        hidden = features * scale + shift
    outputs = len(x) // (count + 1)
    weight, bias = x[: outputs * count].reshape(outputs, count), x[outputs * count :]
    logits = hidden @ weight.T + bias
    share = np.exp(logits - logits.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    share[np.arange(len(classes)), classes] -= 1
    share /= len(classes)
    if problem.kind == "batchnorm":
        back = share @ weight
        parts = [(back * features).sum(0), back.sum(0)]
    return np.concatenate([*parts, (share.T @ hidden).ravel(), share.sum(0)])


def fedavg(play: Play, weights: str, momentum: str) -> Rounds:
    """McMahan et al., Algorithm 1: y_i <- y_i - lr g_i(y_i); x <- sum_i p_i y_i."""
    x, beta = play.x0, play.case.options.get("client_momentum", 0.0)
    kept: dict[int, Array] = {}
    for r in play.rounds:
        kept = {} if momentum == "restarted" or play.loses("momentum", r) else kept
        y = {}
        for i in play.case.cohorts[r]:

            def direction(y_i: Array, rows: slice, i: int = i, kept: dict[int, Array] = kept) -> Array:
                kept[i] = play.grad(y_i, i, rows) + beta * kept.get(i, 0.0)
                return kept[i]

            y[i] = play.local(x, i, direction)
        x = play.mean(weights, y)
        yield x


def fedprox(play: Play, weights: str, pull: str) -> Rounds:
    """Li et al., Algorithm 2: y_i <- y_i - lr (g_i(y_i) + mu (y_i - x)); x <- sum_i p_i y_i."""
    x = play.x0
    mu: float = play.case.options["mu"]
    for r in play.rounds:
        y = {}
        for i in play.case.cohorts[r]:

            def direction(y_i: Array, rows: slice, i: int = i, x: Array = x) -> Array:
                away = {"mu": 1.0, "2mu": 2.0, "norms": 0.5, "none": 0.0}[pull] * (y_i - x)
                if pull == "norms":
                    away = _unit(away, play.problem) / 2
                step: Array = play.grad(y_i, i, rows) + mu * away
                return step

            y[i] = play.local(x, i, direction)
        x = play.mean(weights, y)
        yield x


def _unit(x: Array, problem: Problem) -> Array:
    """Return a vector in which each tensor is divided by its norm."""
    parts = named(x, problem).values()
    return np.concatenate([part.ravel() / max(float(np.linalg.norm(part)), 1e-300) for part in parts])


def scaffold(play: Play, weights: str, c_weights: str, share: str, sign: str, server: str, old: str) -> Rounds:
    """Karimireddy et al., Algorithm 1: y_i <- y_i - lr (g_i(y_i) - c_i + c).

    c_i+ = grad F_i(x) (option i) or c_i - c + (x - y_i) / (K_i lr) (option ii);
    x <- x + mean_S(y_i - x); c <- c + (|S|/N) mean_S(c_i+ - c_i).
    """
    x, c = play.x0, np.zeros_like(play.x0)
    c_i = {i: np.zeros_like(x) for i in play.clients}
    known: set[int] = set()
    for r in play.rounds:
        c = c * (not play.loses("c", r))
        c_i = {i: value * (not play.loses("c_i", r)) for i, value in c_i.items()}
        y, change = {}, {}
        cohort = play.case.cohorts[r]
        for i in cohort:
            flip, is_first = 1.0 if sign == "paper" else -1.0, play.case.options["option"] == "i"
            gradient_at_x = flip * play.grad(x, i)
            if is_first and old == "overwritten" and i in known:
                c_i[i] = gradient_at_x
            known.add(i)
            y[i] = play.sgd(x, i, add=c - c_i[i])
            path = c_i[i] - c + flip * (x - y[i]) / (play.steps(i) * play.lr)
            plus = gradient_at_x if is_first else path
            change[i], c_i[i] = (plus - c_i[i]) * (server == "moves"), plus
        x = play.mean(weights, y)
        c = c + (len(cohort) / len(play.clients) if share == "|S|/N" else 1.0) * play.mean(c_weights, change)
        yield x


def fedopt(play: Play, weights: str, v0: str, correction: str, scale: str, root: str) -> Rounds:
    """Reddi et al., Algorithm 2: D = mean_S(y_i - x); m <- b1 m + (1 - b1) D; x <- x + lr m / (sqrt(v) + tau).

    Adagrad: v <- v + D^2; Adam: v <- b2 v + (1 - b2) D^2; Yogi: v <- v - (1 - b2) D^2 sign(v - D^2).
    """
    options = play.case.options
    kind, lr, tau = options["server"], options["server_lr"], options["tau"]
    b1, b2 = options["beta1"], options["beta2"]
    first = {"tau^2": tau**2, "0": 0.0, "m, v": 1e-6}[v0]
    x = play.x0
    m, v, t = np.full_like(x, -first if v0 == "m, v" else 0.0), np.full_like(x, first), 0
    for r in play.rounds:
        if play.loses("m,v", r):
            m, v, t = np.zeros_like(x), np.full_like(x, first), 0
        t += 1
        y = {i: play.sgd(x, i) for i in play.case.cohorts[r]}
        delta = (lr if scale == "lr D" else 1.0) * (play.mean(weights, y) - x)
        x = play.x0 if play.loses("x", r) else x
        m = b1 * m + (1 - b1) * delta
        square = delta**2
        v = {
            "adagrad": v + square,
            "adam": b2 * v + (1 - b2) * square,
            "yogi": v - (1 - b2) * square * np.sign(v - square),
        }[kind]
        big, second = 1 - b1**t, 1 - b2**t
        if correction == "rate, t+1":
            big, second = 1 - b1 ** (t + 1), 1 - b2 ** (t + 1)
        if correction == "none" or kind == "adagrad":
            x = x + lr * m / (np.sqrt(v + tau) if root == "inside" else np.sqrt(v) + tau)
        elif correction == "Adam":
            x = x + lr * (m / big) / (np.sqrt(v / second) + tau)
        else:
            x = x + lr * np.sqrt(second) / big * m / (np.sqrt(v) + tau)
        yield x


def mime(play: Play, weights: str, c_weights: str) -> Rounds:
    """Karimireddy et al. (Mime), Algorithm 1 with SGDm: c = mean_S(grad F_i(x)), full batches, m frozen in a round.

    y_i <- y_i - lr ((1 - b) h + b m), h = g_i(y_i) - g_i(x) + c (Mime) or g_i(y_i) (MimeLite);
    m <- (1 - b) c + b m; x <- mean_S(y_i).
    """
    x, m = play.x0, np.zeros_like(play.x0)
    beta: float = play.case.options["beta"]
    is_lite = play.case.method == "mimelite"
    for r in play.rounds:
        m = m * (not play.loses("m", r))
        cohort = play.case.cohorts[r]
        c = play.mean(c_weights, {i: play.grad(x, i) for i in cohort})

        def direction(y_i: Array, rows: slice, i: int, x: Array = x, m: Array = m, c: Array = c) -> Array:
            h = play.grad(y_i, i, rows) - (0 if is_lite else play.grad(x, i, rows) - c)
            return (1 - beta) * h + beta * m

        y = {i: play.local(x, i, partial(direction, i=i)) for i in cohort}
        m = (1 - beta) * c + beta * m
        x = play.mean(weights, y)
        yield x


def feddyn(play: Play, weights: str, share: str, alphas: str, sign: str, first: str) -> Rounds:
    """Acar et al., Algorithm 1: y_i <- y_i - lr (g_i(y_i) - l_i + alpha (y_i - x)); l_i <- l_i - alpha (y_i - x).

    h <- h - alpha (1/N) sum_S(y_i - x); x <- mean_S(y_i) - h / alpha. The paper's exact minimizer is the local work.
    """
    x, mean, alpha = play.x0, play.x0, play.case.options["alpha"]
    h, l_i = np.zeros_like(x), dict[int, Array]()
    if sign == "reversed":
        yield from _reversed_feddyn(play, weights, alphas, first)
        return
    mean_size = sum(play.problem.sizes) / len(play.clients)
    for r in play.rounds:
        h = h * (not play.loses("h", r))
        l_i = {i: value * (not play.loses("l_i", r)) for i, value in l_i.items()}
        y, cohort = {}, play.case.cohorts[r]
        for i in cohort:
            own = alpha * (mean_size / play.problem.sizes[i] if alphas == "by size" else 1.0)
            start = mean if first == "mean" and i not in l_i else x
            kept = l_i.get(i, np.zeros_like(x))
            y[i] = play.sgd(start, i, add=-kept, pull=own)
            l_i[i] = kept - own * (y[i] - start)
        h = h - alpha * sum(y[i] - x for i in cohort) / (len(play.clients) if share == "1/N" else len(cohort))
        mean = play.mean(weights, y)
        x = mean - h / alpha
        yield x


def _reversed_feddyn(play: Play, weights: str, alphas: str, first: str) -> Rounds:
    """FedDyn with d_i <- d_i - alpha (y_i - x) in place of + (y_i - x), and x <- mean_S(y_i) + mean_S(d_i)."""
    x, mean, sizes = play.x0, play.x0, play.problem.sizes
    d_i: dict[int, Array] = {}
    for r in play.rounds:
        y, cohort = {}, play.case.cohorts[r]
        for i in cohort:
            own = play.case.options["alpha"] * (np.mean(sizes) / sizes[i] if alphas == "by size" else 1.0)
            start = mean if first == "mean" and i not in d_i else x
            kept = d_i.get(i, np.zeros_like(x))
            y[i] = play.sgd(start, i, add=own * kept, pull=own)
            d_i[i] = kept - own * (y[i] - start)
        mean = play.mean(weights, y)
        x = mean + play.mean("uniform", {i: d_i[i] for i in cohort})
        yield x


def fednova(play: Play, weights: str, centre: str) -> Rounds:
    """Wang et al., normalized averaging: d_i = (x - y_i) / K_i; x <- x - (sum_i p_i K_i) sum_i p_i d_i."""
    x = play.x0
    for r in play.rounds:
        y = {i: play.sgd(x, i) for i in play.case.cohorts[r]}
        p = play.weights(weights, play.case.cohorts[r])
        steps = sum(p[i] * play.steps(i) for i in y)
        origin = x if centre == "x" else np.zeros_like(x)
        x = origin - steps * sum(p[i] * (origin - y[i]) / play.steps(i) for i in y)
        yield x


@dataclass(frozen=True)
class Question:
    """A point on which implementations differ.

    Attributes:
        answers: The answers and how a table words them. The first is the reading that ``expected`` follows.
        choices: The other answers that the paper leaves open: a framework that gives one of them is exact.
    """

    answers: Mapping[str, str]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """A method and what may differ.

    Attributes:
        title: Its name in tables.
        paper: The paper, with the line that the formula is.
        formula: The function.
        questions: What implementations answer differently, by the formula's keyword.
        states: What a run must keep over a restart, beside the parameters: keyword of :meth:`Play.loses` to words.
    """

    title: str
    paper: str
    formula: Callable[..., Rounds]
    questions: Mapping[str, Question]
    states: Mapping[str, str] = field(default_factory=dict)

    def answers(self) -> list[dict[str, str]]:
        """Return all ways to answer the questions, those nearest to the paper first."""
        ways = [
            dict(zip(self.questions, way, strict=True))
            for way in product(*(q.answers for q in self.questions.values()))
        ]
        return sorted(ways, key=lambda way: (len(self.deviations(way)), len(self.choices(way))))

    def choices(self, way: Mapping[str, str]) -> list[str]:
        """Return in words where a way takes what the paper leaves open."""
        return [q.answers[way[name]] for name, q in self.questions.items() if way[name] in q.choices]

    def deviations(self, way: Mapping[str, str]) -> list[str]:
        """Return in words where a way differs from the paper."""
        return [
            q.answers[way[name]]
            for name, q in self.questions.items()
            if way[name] != next(iter(q.answers)) and way[name] not in q.choices
        ]


def _mean_of(what: str, first: str, choices: tuple[str, ...] = ()) -> Question:
    words = {
        "uniform": f"{what} averaged uniformly",
        "examples": f"{what} weighted by examples",
        "steps": f"{what} weighted by local steps",
    }
    return Question({first: words[first], **words}, choices)


_MIME = Method(
    "Mime",
    "Karimireddy et al., Mime (2020), Algorithm 1 with SGDm of Table 4; the paper averages the sampled clients",
    mime,
    {"weights": _mean_of("x", "examples", ("uniform",)), "c_weights": _mean_of("c", "examples", ("uniform",))},
    {"m": "m"},
)
_FEDOPT = {
    "weights": _mean_of("x", "examples", ("uniform",)),
    "v0": Question(
        {"tau^2": "v starts at tau²", "0": "v starts at 0", "m, v": "m and v start at 1e-6"},
    ),
    "correction": Question(
        {
            "none": "no bias correction",
            "Adam": "Adam's bias correction",
            "rate": "bias correction in the rate",
            "rate, t+1": "bias correction in the rate, one step ahead",
        }
    ),
    "root": Question({"outside": "", "inside": "tau inside the square root"}),
    "scale": Question({"D": "D = mean of y - x", "lr D": "the server's rate multiplies D as well"}),
}
METHODS = {
    "fedavg": Method(
        "FedAvg",
        "McMahan et al. (2017), Algorithm 1, last line of the server: weights n_k / n; momentum is not in the paper",
        fedavg,
        {
            "weights": _mean_of("x", "examples"),
            "momentum": Question(
                {"restarted": "momentum restarted each round", "kept": "momentum kept between rounds"}, ("kept",)
            ),
        },
        {"momentum": "the clients' momentum"},
    ),
    "fedprox": Method(
        "FedProx",
        "Li et al. (2020), Algorithm 2: the local objective F_k(w) + (mu/2) |w - w_t|²",
        fedprox,
        {
            "weights": _mean_of("x", "examples", ("uniform",)),
            "pull": Question(
                {
                    "mu": "mu (y - x)",
                    "2mu": "penalty mu |y - x|², without the half",
                    "norms": "penalty (mu/2) |y - x| of each tensor, not squared",
                    "none": "no proximal term",
                }
            ),
        },
    ),
    "scaffold": Method(
        "SCAFFOLD",
        "Karimireddy et al. (2020), Algorithm 1: y_i - lr (g_i(y_i) - c_i + c); c_i+ by option i or ii; (dx, dc) = "
        "1/|S| sum of (y_i - x, c_i+ - c_i); x + lr_g dx and c + |S|/N dc",
        scaffold,
        {
            "weights": _mean_of("x", "uniform"),
            "c_weights": _mean_of("c", "uniform"),
            "share": Question({"|S|/N": "c moves by |S|/N", "1": "no |S|/N in c"}),
            "sign": Question({"paper": "", "reversed": "the gradients in c_i have the sign reversed"}),
            "server": Question({"moves": "", "stays": "c stays zero"}),
            "old": Question({"kept": "", "overwritten": "a known client's c_i+ replaces c_i before its local steps"}),
        },
        {"c": "c", "c_i": "c_i"},
    ),
    "fedopt": Method(
        "FedOpt",
        "Reddi et al. (2021), Algorithm 2: no bias correction, v at the start at least tau²; its mean is uniform "
        "in the algorithm and by examples in the experiments",
        fedopt,
        _FEDOPT,
        {"m,v": "m and v", "x": "x at the server's optimizer, whose next step starts from the first x"},
    ),
    "mime": _MIME,
    "mimelite": Method("MimeLite", _MIME.paper, mime, _MIME.questions, _MIME.states),
    "feddyn": Method(
        "FedDyn",
        "Acar et al. (2021), Algorithm 1: the local objective, h and the server's parameters",
        feddyn,
        {
            "weights": _mean_of("x", "uniform"),
            "share": Question({"1/N": "h moves by 1/N", "1/|S|": "h moves by 1/|S|"}),
            "alphas": Question(
                {"one": "one alpha", "by size": "alpha by the client's size, as in the authors' code"}, ("by size",)
            ),
            "sign": Question(
                {"paper": "l_i of the paper", "reversed": "the clients' terms move by -alpha (y - x), not by y - x"}
            ),
            "first": Question({"x": "", "mean": "a client's first round starts from the mean of the models"}),
        },
        {"h": "h", "l_i": "the clients' gradients"},
    ),
    "fednova": Method(
        "FedNova",
        "Wang et al. (2020), normalized averaging, with p_i = n_i / n and plain SGD at the clients",
        fednova,
        {
            "weights": _mean_of("x", "examples"),
            "centre": Question(
                {"x": "d_i from x", "0": "x is the sum of the y_i by tau_eff p_i / K_i, weights whose sum is not 1"}
            ),
        },
    ),
    "batchnorm": Method(
        "FedAvg with BatchNorm",
        "McMahan et al. (2017) has parameters only: what becomes of buffers is open",
        fedavg,
        {"weights": _mean_of("x", "examples"), "momentum": Question({"restarted": ""})},
    ),
}


def rounds_of(case: Case, way: Mapping[str, str] | None = None, lost: str = "") -> list[Array]:
    """Return the parameters after each round, one vector each.

    Args:
        case: The case.
        way: The answers to the method's questions; the paper's by default.
        lost: The states, separated by blanks, that a restart in the middle loses.
    """
    method = METHODS[case.method]
    answers: dict[str, Any] = {name: next(iter(question.answers)) for name, question in method.questions.items()}
    return list(method.formula(Play(case, lost), **answers | dict(way or {})))


COUNTS = {
    "largest": "taken from the client with the most steps",
    "client cut": "averaged to {}, which clients cut to a whole number",
    "cut": "averaged and cut to a whole number",
    "mean": "averaged to {}",
    "start": "left as it was at the start",
}
"""What becomes of ``num_batches_tracked``, which counts the batches that a BatchNorm layer has seen."""


def buffers_of(case: Case, weights: str, count: str) -> dict[str, Array]:
    """Return the buffers of BatchNorm after the last round.

    Args:
        case: The case.
        weights: How clients are weighed in averages; "chain" if each goes on from those of the one before it.
        count: A key of :data:`COUNTS`.
    """
    play, momentum = Play(case), 0.1
    start = case.problem.start
    mean, var = start["norm.running_mean"], start["norm.running_var"]
    seen = float(start["norm.num_batches_tracked"])
    for r in play.rounds:
        means, variances = {}, {}
        counts: dict[int, Any] = {}
        for i in case.cohorts[r]:
            means[i], variances[i] = mean, var
            counts[i] = (int(seen) if count == "client cut" else seen) + play.steps(i)
            for rows in case.batches(i):
                batch = case.problem.x[i][rows]
                means[i] = (1 - momentum) * means[i] + momentum * batch.mean(0)
                variances[i] = (1 - momentum) * variances[i] + momentum * batch.var(0, ddof=1)
            if weights == "chain":
                mean, var, seen = means[i], variances[i], float(counts[i])
        if weights == "chain":
            continue
        mean, var = play.mean(weights, means), play.mean(weights, variances)
        averaged = float(play.mean(weights, counts))
        largest = float(counts[max(case.cohorts[r], key=lambda i: case.problem.sizes[i])])
        seen = {"largest": largest, "start": seen, "cut": float(int(averaged))}.get(count, averaged)
    return {"norm.running_mean": mean, "norm.running_var": var, "norm.num_batches_tracked": np.array(seen)}
