"""Draw the paths of clients within rounds, in the plane of a model's two parameters or against the step."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fed.cli.configuration import CellParts
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.lab.experiment import Figure as Plan
from lightning_fed.lab.figures import COLORS, add_legend, new_figure, panels_of
from lightning_fed.lab.records import Record
from lightning_fed.lab.results import Results
from lightning_fed.lab.workers import quietly

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SERVER = "server"
_RESOLUTION = 60  # grid points per parameter for the level sets


def draw_paths(plan: Plan, results: Results) -> "Figure":
    """Return a figure of the paths of the first seed's clients. See :class:`lightning_fed.callbacks.LocalIterates`.

    Args:
        plan: The figure's description.
        results: The finished cells.

    Raises:
        FederatedError: If matplotlib is not installed, or no iterates were kept.
    """
    panels = list(panels_of(plan, results))
    figure, grid = new_figure(max(p.row for p in panels) + 1, max(p.column for p in panels) + 1)
    for panel in panels:
        axes = grid[panel.row][panel.column]
        axes.set_title(" ".join(filter(None, (panel.row_label, panel.column_label))), fontsize=10)
        for record in (found for point in panel.points for found in results.records(point)[:1]):
            rounds = _read(record, plan.rounds)
            if len(next(iter(rounds[0].values()))[0]) == 1:
                _draw_steps(axes, rounds)
            else:
                with quietly():  # the module's step is called without a trainer
                    _draw_plane(axes, rounds, _Landscape.of(record))
        for set_limits, limits in ((axes.set_xlim, plan.xlim), (axes.set_ylim, plan.ylim)):
            if limits is not None:
                set_limits(limits)
    add_legend(figure, [axes for row in grid for axes in row])
    return figure


def _read(record: Record, rounds: int) -> list[dict[str, list[list[float]]]]:
    """Return each round's paths by client."""
    paths = []
    for number in range(1, rounds + 1):
        path = record.folder / "iterates" / f"round_{number:06d}.csv"
        if not path.is_file():
            raise FederatedError(
                f"A figure of paths needs {path.parent.name}/{path.name} of every cell it shows, and there is none: put"
                " lightning_fed.callbacks.LocalIterates among trainer.callbacks, and let max_rounds be large enough."
            )
        paths.append(_rows(path))
    return paths


def _rows(path: Path) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        next(rows)
        for client, _, *numbers in rows:
            found.setdefault(client, []).append([float(number) for number in numbers])
    return found


def _draw_steps(axes: "Axes", rounds: Sequence[dict[str, list[list[float]]]]) -> None:
    """Draw a single parameter against the local step, round after round."""
    start = 0
    for paths in rounds:
        clients = [client for client in paths if client != _SERVER]
        steps = max((len(paths[client]) for client in clients), default=1) - 1
        for i, client in enumerate(clients):
            values = [y[0] for y in paths[client]]
            x = range(start, start + len(values))
            axes.plot(x, values, color=COLORS[i % len(COLORS)], linewidth=1.2, label=f"client {client}")
        ends = [y[0] for y in paths[_SERVER]]
        axes.plot([start, start + steps], ends, "o", color="black", markersize=4, label=_SERVER)
        start += steps
    axes.set(xlabel="local steps", ylabel="x")
    axes.grid(alpha=0.25, linewidth=0.6)


def _draw_plane(axes: "Axes", rounds: Sequence[dict[str, list[list[float]]]], landscape: "_Landscape") -> None:
    """Draw the paths over the level sets of the mean loss, with the optima."""
    shown = np.array([y[:2] for paths in rounds for path in paths.values() for y in path] + landscape.optima)
    low, high = shown.min(axis=0), shown.max(axis=0)
    margin = 0.12 * (high - low).max()
    _draw_levels(axes, landscape, low - margin, high + margin)
    for paths in rounds:
        for i, client in enumerate(client for client in paths if client != _SERVER):
            x, y = np.array(paths[client])[:, :2].T
            colour = COLORS[i % len(COLORS)]
            axes.plot(x, y, "-", marker=".", color=colour, linewidth=1.3, markersize=5, label=f"client {client}")
    server = [rounds[0][_SERVER][0], *(paths[_SERVER][-1] for paths in rounds)]
    x, y = np.array(server)[:, :2].T
    axes.plot(x, y, "--", marker="o", color="black", linewidth=1, markersize=4, label=_SERVER)
    *clients, mean, whole = landscape.optima
    for i, (px, py) in enumerate(clients):
        axes.plot(px, py, "s", color=COLORS[i % len(COLORS)], markersize=6, label=f"optimum of client {i}")
    axes.plot(*mean, "x", color="0.35", markersize=7, mew=2, linestyle="none", label="mean of the optima")
    axes.plot(*whole, "*", color="#B8860B", markersize=11, linestyle="none", label="optimum of the mean loss")
    axes.set_aspect("equal", adjustable="box")
    axes.tick_params(labelsize=8)


def _draw_levels(axes: "Axes", landscape: "_Landscape", low: Any, high: Any) -> None:
    """Draw the level sets of the mean loss, evenly spaced in its square root."""
    xs, ys = (np.linspace(low[i], high[i], _RESOLUTION) for i in (0, 1))
    values = np.array([[landscape.loss([float(x), float(y)]) for x in xs] for y in ys])
    above = np.sqrt(np.maximum(values - values.min(), 0))
    axes.contour(xs, ys, above, levels=12, colors="0.75", linewidths=0.6)


@dataclass
class _Landscape:
    """The clients' losses as functions of a model's two parameters.

    Args:
        model: The module.
        batches: Each client's examples as one batch.
        optima: The optimum of each client, the mean of these, and the optimum of the mean loss.
    """

    model: Any
    batches: list[Any]
    optima: list[list[float]]

    @staticmethod
    def of(record: Record) -> "_Landscape":
        """Recreate a cell's module and data, and find the optima.

        Raises:
            FederatedError: If the model does not have two parameters, or the data module is not federated.
        """
        parts = CellParts(record.config)
        model, data = parts.model.double(), parts.datamodule
        size = sum(parameter.numel() for parameter in model.parameters())
        if size != 2 or not isinstance(data, FederatedDataModule):
            raise FederatedError(f"A figure of paths shows models of one or two parameters; this one has {size}.")
        data.setup("fit")
        batches = []
        for client in data.client_ids:
            examples = data.client_batches(client).full(torch.Generator())
            batches += [
                [part.double() if part.is_floating_point() else part for part in batch] for batch, _ in examples
            ]
        landscape = _Landscape(model, batches, [])
        clients = [landscape._minimum([i]) for i in range(len(batches))]
        mean = [sum(values) / len(clients) for values in zip(*clients, strict=True)]
        landscape.optima = [*clients, mean, landscape._minimum(range(len(batches)))]
        return landscape

    def loss(self, point: list[float], which: Sequence[int] | None = None) -> float:
        """Return the mean loss over clients at a point."""
        with torch.no_grad():
            nn.utils.vector_to_parameters(self._like(point), self.model.parameters())
            return float(self._mean(range(len(self.batches)) if which is None else which))

    def _like(self, point: list[float]) -> Tensor:
        parameters: Tensor = next(self.model.parameters()).new_tensor(point)
        return parameters

    def _mean(self, which: Sequence[int]) -> Tensor:
        losses: list[Tensor] = [self.model.training_step(self.batches[i], 0) for i in which]
        mean: Tensor = torch.stack(losses).mean()
        return mean

    def _minimum(self, which: Sequence[int]) -> list[float]:
        """Return the minimizer of some clients' mean loss, or [0, 0] if the solver diverges."""
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        solver = torch.optim.LBFGS(self.model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            solver.zero_grad()
            value = self._mean(which)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        solver.step(closure)  # type: ignore[arg-type]
        found: list[float] = nn.utils.parameters_to_vector(self.model.parameters()).tolist()
        return found if all(map(math.isfinite, found)) else [0.0, 0.0]
