"""The figures' files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_fed.lab import figures
from lightning_fed.lab.figures import COLORS, add_legend, draw, draw_best, new_figure, save
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.quantities import parse_quantity
from lightning_fed.lab.reading import read_experiment
from tests.helpers.lab import results_of
from tests.helpers.optional import needs_matplotlib


@pytest.mark.thorough
@needs_matplotlib
def test_large_image_keeps_its_colors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, ((axes,),) = new_figure(1, 1)
    x = np.arange(2000.0)
    noise = np.random.default_rng(1).standard_normal((len(COLORS), len(x)))
    for i, color in enumerate(COLORS):
        y = 4 * i + noise[i]
        axes.plot(x, y, color=color)
        axes.fill_between(x, y - 1, y + 1, color=color, alpha=0.18, linewidth=0)
    few, all_of_them = tmp_path / "few.png", tmp_path / "all.png"
    save(figure, few)
    figure.set_layout_engine("none")  # matplotlib below 3.11 moves the panels a little each time it draws a figure
    monkeypatch.setattr(figures, "_LARGEST", 0)
    save(figure, few)
    monkeypatch.setattr(figures, "_LARGEST", 10**9)
    save(figure, all_of_them)
    assert (Image.open(few).mode, Image.open(all_of_them).mode) == ("P", "RGB")
    assert few.stat().st_size < 0.6 * all_of_them.stat().st_size
    pixels = [np.asarray(Image.open(path).convert("RGB"), dtype=int) for path in (few, all_of_them)]
    off = np.abs(pixels[0] - pixels[1]).max(axis=-1)
    assert off.max() <= 16
    assert off.mean() < 1


@pytest.mark.thorough
@needs_matplotlib
def test_long_legend_does_not_shrink_panels() -> None:
    heights = []
    for lines in (1, 12):
        figure, ((axes,),) = new_figure(1, 1)
        for i in range(lines):
            axes.plot([0, 1], [i, i], label=f"a method with a long name, {i}")
        add_legend(figure, [axes])
        figure.draw_without_rendering()
        heights.append(axes.get_window_extent().height)
    assert heights[1] > 0.9 * heights[0]


@needs_matplotlib
def test_labels_omitted_from_a_figure_are_omitted_from_its_axis(write: Any, tmp_path: Path) -> None:
    steps: dict[str, Any] = {"0.1": {}, "0.3": {}, "best": {}}
    figures = {name: {"y": "final", "x": "step", "at": {"step": shown}} for name, shown in SHOWN.items()}
    experiment = read_experiment(write(axes={"step": steps}, figures=figures))
    results = results_of(Grid(experiment), tmp_path / "o", lambda cell: [1.0])
    found = {}
    for plan in experiment.figures:
        (axes,) = draw(plan, results).axes
        found[plan.name] = list(axes.get_lines()[0].get_xdata())
    assert found == {"numbers": [0.1, 0.3], "words": [0, 1]}


SHOWN = {"numbers": ["0.1", "0.3"], "words": ["0.3", "best"]}


@needs_matplotlib
def test_figure_describes_lines_and_bands_and_names_overlapping_lines(write: Any, tmp_path: Path) -> None:
    metrics = {"val_distance": {"mode": "max", "label": "test accuracy", "percent": True}}
    methods: dict[str, Any] = {"A": {}, "B": {}, "C": {}}
    figures = {
        "std": {},
        "range": {"band": "range"},
        "none": {"band": "none"},
        "by_method": {"lines": "G", "columns": "method"},
    }
    experiment = read_experiment(
        write(methods=methods, metrics=metrics, figures=figures, axes={"G": {"1": {}}}, random=True, seeds=3)
    )
    level = {"A": 0.5, "B": 0.5001, "C": 0.7}
    results = results_of(
        Grid(experiment),
        tmp_path / "o",
        lambda c: [level[c.point.by_axis["method"]] + c.seed / 100 + n / 50 for n in range(9)],
    )
    drawn = {plan.name: draw(plan, results) for plan in experiment.figures}
    titles = {name: figure.legends[0].get_title().get_text() for name, figure in drawn.items()}
    assert titles["std"] == "lines: mean of 3 seeds, bands ± one sample standard deviation"
    assert titles["range"] == "lines: mean of 3 seeds, bands from the lowest to the highest"
    assert titles["none"] == "lines: mean of 3 seeds"
    (axes,) = drawn["std"].axes
    assert axes.get_ylabel() == "test accuracy (%)"
    assert [text.get_text() for text in axes.texts] == ["one line: A, B"]
    assert [axes.get_title() for axes in drawn["by_method"].axes] == ["A", "B", "C"]
    assert [text.get_text() for text in drawn["by_method"].legends[0].get_texts()] == ["G = 1"]


@needs_matplotlib
def test_line_label_counts_seeds_when_some_failed(write: Any, tmp_path: Path) -> None:
    experiment = read_experiment(write(methods={"A": {}, "B": {}}, figures={"f": {}}, random=True, seeds=3))
    results = results_of(
        Grid(experiment),
        tmp_path / "o",
        lambda c: "failed" if (c.point.by_axis["method"], c.seed) == ("A", 1) else [1.0, 2.0 + c.seed],
    )
    final = parse_quantity("", "final", experiment.metrics)
    for figure in (draw(experiment.figures[0], results), draw_best(results, final, results.grid.points)):
        labels = [text.get_text().removeprefix("method ") for text in figure.legends[0].get_texts()]
        assert labels == ["A (2 of 3 seeds)", "B"]
