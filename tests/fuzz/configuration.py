"""Configurations of fuzzed runs: the axes, random draws, and descriptions."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

__all__ = ["AXES", "FULL_GRADIENTS", "Configuration", "compatible", "covering", "draw"]

AXES: Mapping[str, tuple[Any, ...]] = {
    # The module. The first value of every axis is its default. A value that is listed twice is drawn twice as often.
    "network": (
        *("linear", "linear", "mlp", "mlp", "mlp", "mlp", "conv", "conv", "attention", "attention"),
        *("wide", "wide", "gru", "lstm", "sparse", "batchnorm", "dropout"),
    ),
    "tied": (False, False, True),
    "frozen": (False, False, True),
    "unused": (False, False, True),
    "scalar": (False, False, False, True),
    "groups": (False, False, True),
    "buffer": (
        *("none",) * 14,
        *("int set", "int set", "float set", "float set", "inner set"),
        *("int add_", "float add_", "inner add_", "batch set", "batch add_"),
    ),
    "buffer_read": (False, False, True),
    "attribute": ("none",) * 12 + ("read", "one", "one", "distinct", "round", "index", "epoch"),
    "client_lr": ("none",) * 17 + ("one", "one", "distinct"),
    "log": (
        *("loss", "none", "batch_size", "batch_size", "several", "several"),
        *("dict", "tokens", "number", "step", "bar"),
    ),
    "output": ("loss",) * 9 + ("dict", "dict", "skip"),
    "loss": ("mean", "mean", "sum", "weighted", "smooth", "mse"),
    "optimizer": (
        *("sgd", "sgd", "sgd", "decay", "decay", "momentum", "nesterov"),
        *("adam", "adamw", "rmsprop", "adagrad"),
    ),
    "schedule": ("none",) * 5 + ("step", "step", "lambda", "lambda", "plateau", "each step"),
    "steps": ("trainer",) * 8 + ("own", "own, two optimizers"),  # "own": training_step steps the optimizer
    "precision": ("64-true", "64-true", "64-true", "64-true", "32-true", "bf16-mixed"),
    # The data.
    "sizes": ((7, 5, 10, 4), (6, 6, 6), (1, 8, 3, 5), (1, 1, 4), (5, 2, 11), (4, 0, 6, 3)),
    "batch": (4, 4, 3, 8, 100),
    "drop_last": (False, False, False, True),
    "shuffle": (True, True, True, False),
    "dataset": ("tensors", "tensors", "tensors", "subset", "plain", "dict", "named", "partition"),
    "augment": (False,) * 7 + (True,),
    # The method and the server.
    "method": (
        *("FedAvg", "FedProx", "Scaffold", "FedCM", "Mime", "MimeLite") * 2,
        *("CMime", "MimeMVR", "FedDyn", "FedNova"),
        *("FedExP", "FedACG", "FedDane", "FedSAM", "MoFedSAM", "FedSpeed", "FedProxVR", "ScaffoldM", "Scaffnew"),
        *("ServerOnly", "FedPer", "LGFedAvg", "FedRep", "FedBN", "Ditto", "APFL", "PFedMe"),
    ),
    "variant": (0, 1, 2, 3),
    "weighting": (None, None, None, None, "examples", "uniform", "steps", "roots"),
    "server": ("sgd", "sgd", "sgd", "half", "momentum", "adam", "FedAdam", "FedYogi", "FedAdagrad"),
    "server_schedule": ("none", "none", "none", "step"),
    "clients": (None, None, 2, 0.5, "bernoulli", "weighted", "round robin"),
    "work": ("1 epoch", "1 epoch", "2 epochs", "1 step", "3 steps"),
    "heterogeneity": ("none", "none", "none", "none", "stragglers", "late dropped", "deadline", "lost"),
    "clip": ("none", "none", "none", "none", "gradient", "corrected", "value"),
    "accumulate": (1,) * 15 + (2,),
    "limit": (1.0, 1.0, 1.0, 1.0, 1.0, 2, 0.5),
    "buffers": ("average",) * 5 + ("server", "local"),
    "local_state": ("reset",) * 19 + ("keep",),
    "aggregator": ("none",) * 8 + ("median", "trimmed", "geometric", "clipping"),
    "asynchronous": ("none",) * 9 + ("FedBuff", "FedBuff", "FedAsync"),
    "compression": ("none",) * 8 + ("TopK", "QSGD"),
    "personal": (False,) * 9 + (True,),
    "on_error": ("raise", "raise", "raise", "drop"),
    "fails": (False,) * 15 + (True,),
    "states": ("memory", "memory", "memory", "disk"),
    "validate": (False, False, True),
    "measure": ("none",) * 8 + ("accuracy", "personalized"),
    # The run.
    "engine": ("auto", "auto", "auto", "vectorized"),
    "chunk": (None, None, None, None, 1, 1, 1, 2),
    "resume_after": (0, 0, 1, 2),
    "processes": (1,) * 39 + (2,),
    "plain": (False, True),
    "mended": (True,) * 9 + (False,),
}
"""The axes with the values that are drawn from. The last two are about the draw: ``plain`` sets back what the plain
loop has no formula for, ``mended`` what is known to be refused."""


@dataclass(frozen=True)
class Configuration:
    """One run: a point of :data:`AXES`, and the number of its draw."""

    seed: int = 0
    number: int = 0
    network: str = "linear"
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    scalar: bool = False
    groups: bool = False
    buffer: str = "none"
    buffer_read: bool = False
    attribute: str = "none"
    client_lr: str = "none"
    log: str = "loss"
    output: str = "loss"
    loss: str = "mean"
    optimizer: str = "sgd"
    schedule: str = "none"
    steps: str = "trainer"
    precision: str = "64-true"
    sizes: tuple[int, ...] = (7, 5, 10, 4)
    batch: int = 4
    drop_last: bool = False
    shuffle: bool = True
    dataset: str = "tensors"
    augment: bool = False
    method: str = "FedAvg"
    variant: int = 0
    weighting: str | None = None
    server: str = "sgd"
    server_schedule: str = "none"
    clients: int | float | str | None = None
    work: str = "1 epoch"
    heterogeneity: str = "none"
    clip: str = "none"
    accumulate: int = 1
    limit: int | float = 1.0
    buffers: str = "average"
    local_state: str = "reset"
    aggregator: str = "none"
    asynchronous: str = "none"
    compression: str = "none"
    personal: bool = False
    on_error: str = "raise"
    fails: bool = False
    states: str = "memory"
    validate: bool = False
    measure: str = "none"
    engine: str = "auto"
    chunk: int | None = None
    resume_after: int = 0
    processes: int = 1
    plain: bool = False
    mended: bool = True

    @property
    def changed(self) -> dict[str, Any]:
        """Return the axes that are not at their defaults, with their values."""
        named = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return {name: value for name, value, default in named if value != default and name not in ("seed", "number")}

    @property
    def tokens(self) -> bool:
        """Return whether the inputs are tokens instead of features."""
        return self.network in ("gru", "lstm", "sparse")

    def __str__(self) -> str:
        """Show the number and the axes that are not at their defaults."""
        shown = " ".join(f"{name}={value!r}" for name, value in self.changed.items())
        return f"[seed {self.seed} number {self.number}] {shown or 'all defaults'}"


def draw(seed: int, number: int) -> Configuration:
    """Return a configuration that depends only on both numbers.

    Every axis repeats its values, each time in another order. So ``len(values)`` consecutive numbers, starting at a
    multiple of it, contain every value of the axis as often as it is listed.
    """
    chosen = {name: _spread(seed, name, values, number) for name, values in AXES.items()}
    drawn = Configuration(seed=seed, number=number, **chosen)
    drawn = _made_plain(drawn) if drawn.plain and drawn.method in PLAIN_METHODS else drawn
    drawn = replace(drawn, **_refused_late(drawn))
    return compatible(drawn) if drawn.mended else drawn


def _spread(seed: int, name: str, values: tuple[Any, ...], number: int) -> Any:
    block, place = divmod(number, len(values))
    return values[_order(f"{seed}/{name}/{block}", len(values))[place]]


@cache
def _order(stream: str, count: int) -> list[int]:
    order = list(range(count))
    random.Random(stream).shuffle(order)
    return order


def _refused_late(c: Configuration) -> dict[str, Any]:
    """Return changes that remove settings that a run would refuse only at a client of a later round."""
    changes: dict[str, Any] = {}
    if 1 in c.sizes and (c.network == "batchnorm" or c.method == "FedBN"):
        changes["sizes"] = (6, 6, 6)  # BatchNorm cannot train on a batch of one example
    if (c.method in FULL_GRADIENTS or (c.method == "FedProx" and c.variant % 2)) and c.attribute in (
        "one",
        "distinct",
    ):
        changes["attribute"] = "none"  # full gradients are taken before hooks set an attribute
    if c.fails and not c.mended:
        changes["fails"] = False  # a failing client ends the run unless it may be dropped
    return changes


def compatible(c: Configuration) -> Configuration:
    """Return the configuration with known conflicts resolved, so that most configurations run."""
    for _ in range(2):  # a change may create a new conflict
        for changes in _conflicts(c):
            c = replace(c, **changes)
    return c


PLAIN_METHODS = ("FedAvg", "FedProx", "Scaffold", "FedCM", "Mime", "MimeLite")
PLAIN: Mapping[str, Any] = {
    **{"precision": "64-true", "accumulate": 1, "local_state": "reset", "personal": False, "fails": False},
    **{"aggregator": "none", "asynchronous": "none", "compression": "none", "heterogeneity": "none", "clip": "none"},
    "buffers": "average",
}
LOOKS_AHEAD = ("FedSAM", "MoFedSAM", "FedSpeed", "FedProxVR", "APFL")
UNWEIGHTED = ("Scaffold", "ScaffoldM", "FedDyn", "FedSpeed", "Scaffnew")
SEVERAL = ("FedCM", "MoFedSAM", "FedExP", "FedNova")
FULL_GRADIENTS = ("Mime", "MimeLite", "CMime", "MimeMVR", "FedDane", "ServerOnly")


def _made_plain(c: Configuration) -> Configuration:
    """Return a configuration that the plain loop supports."""
    takes_any = c.optimizer in ("sgd", "decay") or c.method in ("FedAvg", "FedProx")
    server = c.server if c.server in ("sgd", "half", "momentum", "adam") else "momentum"
    return replace(c, **PLAIN, optimizer=c.optimizer if takes_any else "decay", server=server)


def _conflicts(c: Configuration) -> Iterator[dict[str, Any]]:
    if c.steps != "trainer":  # the module's step returns no gradient
        yield {"engine": "auto", "clip": "none", "accumulate": 1, "schedule": "none", "measure": "none"}
        if c.method in (*FULL_GRADIENTS, *LOOKS_AHEAD, "FedRep", "Ditto", "PFedMe"):
            yield {"method": "Scaffold"}
        if c.method in ("FedProx", "Scaffold"):
            yield {"variant": 0}
    if c.method == "FedBN":
        yield {"network": "batchnorm"}
    if c.method == "FedBN" or c.network == "batchnorm":
        yield {"batch": 100, "drop_last": False, "dataset": "tensors" if c.dataset == "partition" else c.dataset}
    if c.network == "sparse":
        yield {"optimizer": "sgd", "clip": "none"}
    if c.method == "ServerOnly":
        yield {"heterogeneity": "none", "clip": "none", "accumulate": 1, "limit": 1.0, "local_state": "reset"}
        yield {"weighting": None if c.weighting == "steps" else c.weighting}
    if c.method == "Scaffnew":
        yield {"clients": None, "heterogeneity": "none", "work": "3 steps", "asynchronous": "none", "weighting": None}
        yield {"fails": False, "on_error": "raise", "server": "sgd", "server_schedule": "none", "accumulate": 1}
        yield {"client_lr": "none", "output": "loss", "aggregator": "none", "compression": "none"}
    if c.method in LOOKS_AHEAD or c.method == "PFedMe":
        yield {"accumulate": 1, "clip": "none" if c.clip == "none" else "corrected"}
    if c.method in ("Mime", "MimeLite"):
        yield {"local_state": "reset"}
    if c.method in ("Mime", "MimeLite", "CMime") and not (c.method != "CMime" and c.variant == 3):
        yield {"optimizer": c.optimizer if c.optimizer in ("sgd", "decay") else "sgd"}
    if (c.method == "Ditto" and c.variant % 3 == 1) or (
        c.method == "PFedMe" and c.variant % 2
    ):  # another personal_rate
        yield {"clip": "none" if c.clip == "corrected" else c.clip}
        yield {"optimizer": c.optimizer if c.optimizer in ("sgd", "decay", "momentum", "nesterov") else "momentum"}
    if c.asynchronous != "none":
        yield {"clients": None, "aggregator": "none", "heterogeneity": "none", "on_error": "raise", "fails": False}
        yield {"weighting": None}
        if c.method in (*FULL_GRADIENTS, "FedExP", "FedNova", "FedProxVR", "FedSpeed", "Scaffnew"):
            yield {"method": "Scaffold" if c.variant else "FedAvg"}
        if c.asynchronous == "FedAsync" and c.method == "FedAvg":
            yield {"variant": 0}  # in the other variants, clients send gradients
    if c.schedule == "each step":
        yield {"schedule": "step"}
    if c.fails:
        yield {"measure": "none", "clients": None, "heterogeneity": "none"}  # some clients remain after a failure
        yield {"on_error": "drop", "dataset": "plain", "sizes": (7, 5, 10, 4)}
    if c.compression != "none" or c.aggregator != "none":
        yield {"precision": "64-true"}
    if c.output == "skip":
        yield {"accumulate": 1, "clip": "none" if c.clip == "value" else c.clip}
    if c.client_lr != "none":
        yield {"schedule": "none"}
    if c.method in UNWEIGHTED:
        yield {"weighting": None}
    if c.aggregator in ("median", "trimmed", "geometric"):
        yield {"weighting": None}
    if c.aggregator == "clipping" and c.method in (*FULL_GRADIENTS, *UNWEIGHTED, *SEVERAL):
        yield {"method": "FedAvg"}
    if c.aggregator != "none" or c.asynchronous != "none":
        yield {"buffers": "server"}
    if c.personal and c.method not in ("FedAvg", "Scaffold", "FedCM", "FedDyn", "FedACG", "FedNova", "FedSAM"):
        yield {"personal": False}
    if c.personal and c.method == "Scaffold":
        yield {"variant": 0}
    if c.loss == "mse" and c.dataset == "partition":
        yield {"dataset": "subset"}


def covering(count: int, required: Sequence[Callable[[Configuration], bool]], seed: int = 0) -> list[int]:
    """Return the numbers of a few configurations that meet the requirements and cover as many axis values as possible.

    Args:
        count: How many numbers.
        required: Conditions on a configuration. For each, the cheapest configuration that satisfies it is taken.
        seed: The seed of the draws.
    """
    drawn = [draw(seed, number) for number in range(_AMONG)]
    held = [{(name, getattr(c, name)) for name in AXES} for c in drawn]
    chosen: list[int] = []
    for is_wanted in required:
        fitting = (number for number in range(_AMONG) if is_wanted(drawn[number]))
        found = min(fitting, key=lambda number: (_cost(drawn[number]), number), default=None)
        assert found is not None, "no configuration has what the default run is to have; draw among more"
        chosen += [found] if found not in chosen else []
    missing = {(name, value) for name, values in AXES.items() for value in values}
    missing -= set().union(*(held[number] for number in chosen))
    left = [number for number in range(_AMONG) if not _is_left_out(drawn[number])]
    while len(chosen) < count:
        best = max(
            left,
            key=lambda number: (number not in chosen, len(missing & held[number]) - _cost(drawn[number]) / 2, -number),
        )
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


_AMONG = 600


def _cost(c: Configuration) -> int:
    """Return a rough cost of examining a configuration: large networks are slow to trace, and processes to start."""
    is_slow = c.network in ("attention", "conv", "lstm", "gru", "wide")
    return is_slow * (3 if c.engine == "vectorized" else 1) + (c.processes == 2) + (c.resume_after > 0)


def _is_left_out(c: Configuration) -> bool:
    """Return whether a configuration sets an attribute that full-batch gradients ignore, so that runs may differ."""
    # full-batch gradients are taken before on_client_start: docs/your_model.md
    return c.attribute in ("one", "distinct") and c.method in FULL_GRADIENTS
