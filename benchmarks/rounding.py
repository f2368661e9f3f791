"""Check that engines differ only by rounding if an adaptive local optimizer divides by nearly zero.

    python benchmarks/rounding.py                 # about a minute
    python benchmarks/rounding.py --runs 500 --eps 1e-8 --list

Both engines train random configurations in float64 (networks, methods, optimizers at their defaults, cohorts) for a
round or two. Their distance is compared with the effect on the sequential engine of changing its start, or every
gradient, by one unit in the last place. If engines were further apart than that, one of them would be wrong.

Coordinates that no loss depends on are separate: their gradient is zero up to rounding. Examples are a bias before a
normalization that removes it, and the bias of the keys of attention. Other gradients here are exactly zero, for dead
ReLUs and for features that are always zero. Some classes never appear.
"""

import argparse
import json
import logging
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning_fed  # first: see lightning_fed.compat.torchvision
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed.algorithms import Algorithm, FedAvg, FedDane, FedDyn, FedProx, Scaffold

__all__ = ["Configuration", "distances", "draw", "main"]

FEATURES, CLASSES, DRAWS = 8, 4, 3
OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RMSprop,
)
METHODS: dict[str, Callable[[float], Algorithm]] = {
    "FedAvg": lambda _: FedAvg(),
    "FedProx": lambda mu: FedProx(mu=mu),
    "FedDyn": lambda alpha: FedDyn(alpha=alpha),
    "FedDane": lambda mu: FedDane(mu=mu),
    "Scaffold": lambda _: Scaffold(),
}
STILL = {"relu": "", "attention": "key.bias", "conv": "0.bias"}
"""The networks, each with the parameter that its loss does not depend on, if any."""

_ULP = torch.finfo(torch.float64).eps
_NOTHING = 1e-13  # a distance between engines that always passes
_FACTORS = (10, 1e4)  # limits in multiples of an ulp's effect: for the coordinates that matter, and for the others


@dataclass(frozen=True)
class Configuration:
    """A run.

    Attributes:
        seed: The seed of parameters, data and run.
        network: "relu", "attention" or "conv".
        method: The name of a method.
        strength: The pull of y to x in some methods: mu or alpha.
        optimizer: The optimizer's position in ``OPTIMIZERS``.
        eps: The constant that the optimizer adds to the root of its statistics.
        sizes: The numbers of examples of the clients.
        batch: The examples in a batch.
        epochs: Local epochs.
        rounds: Rounds.
        seen: The classes that appear.
    """

    seed: int
    network: str
    method: str
    strength: float
    optimizer: int
    eps: float
    sizes: tuple[int, ...]
    batch: int
    epochs: int
    rounds: int
    seen: int


def draw(seed: int, eps: float) -> Configuration:
    """Draw a configuration, the same for each eps."""
    stream = random.Random(seed)  # noqa: S311
    count = stream.choice((2, 4))
    return Configuration(
        seed=seed, network=stream.choice(list(STILL)), method=stream.choice(list(METHODS)),
        strength=stream.choice((0.01, 0.1, 1.0)), optimizer=stream.randrange(len(OPTIMIZERS)), eps=eps,
        sizes=tuple(stream.randint(4, 20) for _ in range(count)), batch=stream.choice((4, 5, 20)),
        epochs=stream.choice((1, 2, 5)), rounds=stream.choice((1, 2)), seen=stream.choice((2, 3, 4)),
    )  # fmt: skip


class Attention(nn.Module):
    """One head over two tokens of four features. The keys' bias adds the same value to all scores of a query."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.head = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 4] of features [B, 8]."""
        x = x.view(-1, 2, 4)
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2) / 2, -1)
        out: Tensor = self.head((weights @ self.value(x)).mean(1))
        return out


def build(network: str) -> nn.Module:
    """Return a network with random parameters."""
    net: nn.Module = Attention()
    if network == "relu":
        layers = [nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES)]
        with torch.no_grad():
            layers[0].bias[:4] = -8.0  # dead for all examples
        net = nn.Sequential(*layers)
    elif network == "conv":  # one group per channel removes its bias
        first, last = nn.Conv1d(1, 4, 3), nn.Linear(4 * (FEATURES - 2), CLASSES)
        net = nn.Sequential(first, nn.GroupNorm(4, 4), nn.ReLU(), nn.Flatten(), last)
    return net.double()


class Model(pl.LightningModule):
    """A network whose start or gradients may be changed by one unit in the last place.

    Args:
        configuration: The run.
        changed: "", "start" or "gradients".
        draw: The seed of the random change.
    """

    def __init__(self, configuration: Configuration, changed: str = "", draw: int = 0) -> None:
        super().__init__()
        self.configuration = configuration
        torch.manual_seed(configuration.seed)
        self.net = build(configuration.network)
        self.stream = torch.Generator().manual_seed(draw)
        for p in self.net.parameters():
            if changed == "start":
                p.data.mul_(self._factors(p))
            elif changed == "gradients":
                p.register_hook(lambda g: g * self._factors(g))

    def _factors(self, like: Tensor) -> Tensor:
        signs = torch.randint(0, 2, like.shape, generator=self.stream) * 2 - 1
        return 1 + _ULP * signs.to(torch.float64)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        return F.cross_entropy(self.net(x.unsqueeze(1) if self.configuration.network == "conv" else x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer at its defaults, except for eps."""
        return OPTIMIZERS[self.configuration.optimizer](self.parameters(), eps=self.configuration.eps)


def train(configuration: Configuration, engine: str, changed: str = "", draw: int = 0) -> dict[str, Tensor]:
    """Return the final parameters by name."""
    c, stream = configuration, torch.Generator().manual_seed(configuration.seed)
    clients = []
    for size in c.sizes:
        x = torch.randn(size, FEATURES, generator=stream, dtype=torch.float64)
        x[:, -2:] = 0 if c.network == "relu" else x[:, -2:]
        clients.append(TensorDataset(x, torch.randint(c.seen, (size,), generator=stream)))
    trainer = lightning_fed.FederatedTrainer(
        algorithm=METHODS[c.method](c.strength), max_rounds=c.rounds, local_epochs=c.epochs, seed=c.seed,
        engine=engine, precision="64-true", accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Model(c, changed, draw)
    trainer.fit(model, lightning_fed.FederatedDataModule(clients=clients, batch_size=c.batch))
    return {name: p.detach().clone() for name, p in model.net.named_parameters()}


def distances(configuration: Configuration) -> dict[str, tuple[float, float]]:
    """Return the distances of parameters that matter, and of parameters that no loss depends on.

    Returns:
        The largest absolute differences from the sequential engine's, for "engines", "start" and "gradients".
    """
    own = train(configuration, "sequential")
    others = {"engines": [train(configuration, "vectorized")]}
    for changed in ("start", "gradients"):
        others[changed] = [train(configuration, "sequential", changed, draw) for draw in range(DRAWS)]
    still = STILL[configuration.network]
    found = {}
    for what, results in others.items():
        by_name = {name: max(float((r[name] - p).abs().max()) for r in results) for name, p in own.items()}
        matter = max(value for name, value in by_name.items() if name != still)
        found[what] = matter, by_name.get(still, 0.0)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the distances, and return 1 if engines are further apart than rounding explains, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, help="configurations, each with every eps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first configuration")
    parser.add_argument("--eps", type=float, nargs="+", default=[1e-8, 1e-3], help="of the optimizers (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print a line for every run")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for every run instead")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    lines = []
    for seed in range(args.seed, args.seed + args.runs):
        for eps in args.eps:
            configuration = draw(seed, eps)
            found = distances(configuration)
            lines.append({**vars(configuration), **found, "explained": _is_explained(found)})
            if args.json:
                print(json.dumps(lines[-1]))
            elif args.list:
                print(_line(lines[-1]))
    if not args.json:
        print(_table(lines))
    return int(not all(line["explained"] for line in lines))


def _is_explained(found: dict[str, tuple[float, float]]) -> bool:
    """Return whether one unit in the last place explains the distance between engines.

    If no loss depends on a coordinate, its rounding may grow from step to step. The growth varies between draws by a
    few orders of magnitude.
    """
    return all(
        engines <= max(factor * max(start, gradients), _NOTHING)
        for factor, engines, start, gradients in zip(
            _FACTORS, found["engines"], found["start"], found["gradients"], strict=True
        )
    )


def _line(line: dict[str, Any]) -> str:
    optimizer = getattr(OPTIMIZERS[line["optimizer"]], "__name__", "")
    named = (
        f"{line['seed']:5} {line['network']:9} {line['method']:8} {line['strength']:4} {optimizer:7} {line['eps']:.0e}"
    )
    parts = (f"{what} {line[what][0]:.1e} {line[what][1]:.1e}" for what in ("engines", "start", "gradients"))
    return "  ".join([named, *parts, "" if line["explained"] else "NOT EXPLAINED"])


def _table(lines: Sequence[dict[str, Any]]) -> str:
    """Return medians and maxima by network, kind of coordinate and eps as a table in Markdown."""
    rows = [("network, coordinates", "eps", "runs", "engines apart", "start by an ulp", "gradients by an ulp")]
    rows.append(("---",) * len(rows[0]))
    for network, still in STILL.items():
        for at, which in enumerate(("that matter", f"of {still}, which does not") if still else ("all",)):
            for eps in sorted({line["eps"] for line in lines}):
                its = [line for line in lines if (line["network"], line["eps"]) == (network, eps)]
                if its:
                    columns = ([line[what][at] for line in its] for what in ("engines", "start", "gradients"))
                    shown = (f"{statistics.median(values):.0e}, at most {max(values):.0e}" for values in columns)
                    rows.append((f"{network}, {which}", f"{eps:.0e}", str(len(its)), *shown))
    missed = [line for line in lines if not line["explained"]]
    said = f"{len(missed)} of {len(lines)} runs are further apart than one ulp explains."
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", said])


if __name__ == "__main__":
    sys.exit(main())
