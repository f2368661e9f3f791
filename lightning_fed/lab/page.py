"""The pages of an experiment, in Markdown: one with its result first, and one with every detail."""

from collections.abc import Iterator, Sequence

from lightning_fed._version import __version__
from lightning_fed.lab.claims import Judgement, judge, overall
from lightning_fed.lab.experiment import Departure
from lightning_fed.lab.how import choices, dates, losses, means, other_choices, records_of
from lightning_fed.lab.reading import PAPERS
from lightning_fed.lab.results import Results
from lightning_fed.lab.tables import markdown, rows_of
from lightning_fed.lab.verdict import claim_details, claim_table, counted

_LINES = 150  # the most lines of a page


def pages(results: Results, command: str, figures: Sequence[str]) -> tuple[str, str]:
    """Return an experiment's page and its details page.

    Args:
        results: The finished cells.
        command: The command line of the run.
        figures: The names of the figures' files, in the same folder.
    """
    experiment = results.grid.experiment
    name = f"{experiment.name}_details.md"
    judged = [judge(claim, results) for claim in experiment.claims]
    departures = _departures(results)
    head = [f"# {experiment.title}", f"{experiment.paper}, {experiment.item}. {_scale(results, departures)}"]
    if judged:
        head += [counted(results, judged), *_words(results), claim_table(results, judged, name)]
    head += [_reading(results), *(f"![{figure}]({figure})" for figure in figures)]
    if departures:
        rows = [[d.what, d.paper, d.here, d.why] for d in departures]
        head += ["## Departures from the paper", markdown(["what", "the paper", "here", "why"], rows)]
    how = ["## How", f"    {command}", *means(results), _files(results), _citation(results)]
    lost = list(losses(results))
    if lost:
        how.append(f"Cells that diverged or failed are listed in the [details]({name}).")
    left = _LINES - _length([*head, *how])
    kept, rest = list[list[str]](), list[list[str]]()
    for section in [list(choices(results)), _beside(results, judged), *_tables(results)]:
        (kept if _length(section) <= left else rest).append(section)
        left -= _length(section) if kept and kept[-1] is section else 0
    parts = [*head, *(part for section in kept for part in section), *how]
    details = [f"# Details: {experiment.title}", f"[The page]({experiment.name}.md) has the result."]
    if judged:
        details += [_rule(results), "## Claims", *claim_details(results, judged)]
    details += [*(part for section in rest for part in section), *lost]
    if experiment.notes:
        details += ["## What the paper leaves open", experiment.notes]
    return "\n\n".join(parts) + "\n", "\n\n".join(details) + "\n"


def _length(parts: Sequence[str]) -> int:
    """Return the number of lines of paragraphs, including the empty lines between them."""
    return sum(part.count("\n") + 2 for part in parts)


def _departures(results: Results) -> list[Departure]:
    grid, experiment = results.grid, results.grid.experiment
    departures = [*experiment.departures, *grid.scale.departures]
    wanted = grid.scale.seeds or experiment.seeds
    if grid.seeds < wanted:
        departures.append(Departure("seeds", "", f"{grid.seeds}, where the file has {wanted}", "the command's --seeds"))
    return departures


def _scale(results: Results, departures: Sequence[Departure]) -> str:
    if not departures and results.grid.scale.name == "full":
        return "At full scale."
    link = " with [departures from the paper](#departures-from-the-paper)" if departures else ""
    return f"At the scale `{results.grid.scale.name}`,{link}." if link else f"At the scale `{results.grid.scale.name}`."


def _words(results: Results) -> Iterator[str]:
    """Yield the meanings of the claims' quantities that need an explanation."""
    claims = results.grid.experiment.claims
    quantities = dict.fromkeys(claim.quantity for claim in claims)
    meanings = dict.fromkeys(meaning for quantity in quantities if (meaning := quantity.meaning))
    if meanings:
        yield "\n".join(f"- {meaning}" for meaning in meanings)


def _rule(results: Results) -> str:
    """Return how a claim is decided."""
    if not results.grid.experiment.is_random:
        return "Nothing is drawn at random: every difference counts."
    seeds = results.grid.seeds
    if seeds < 2:
        return "With one seed, no claim is decided."
    return (
        f"A claim is decided by Student's t over the paired differences of n = {seeds} seeds, two-sided at the 5 %"
        " level. A claim that is checked at several places holds if it holds at all of them, and does not if it fails"
        " at one; each p is corrected for the number of places (Holm). A difference with a larger p is undecided."
        f"{_alike(results)}"
    )


def _alike(results: Results) -> str:
    """Return the condition of "~" in words, if a claim uses it."""
    claims = [part for claim in results.grid.experiment.claims for part in (claim, *claim.controls)]
    shares = sorted({claim.within for claim in claims if "~" in claim.signs})
    if not shares:
        return ""
    allowed = " or ".join(f"{100 * share:g}" for share in shares)
    return (
        f" A ~ B allows a difference of {allowed} % of the larger side, and its p is that of the difference from that"
        " limit."
    )


def _reading(results: Results) -> str:
    """Return how to read the numbers of the page and its figures."""
    grid = results.grid
    parts = [_rule(results)] if grid.experiment.claims else []
    if grid.experiment.claims:
        parts.append(
            "A difference is the left side of the inequality minus the right one. The table shows the place that"
            f" decides each claim; the [details]({grid.experiment.name}_details.md) have all places, and the controls."
        )
    if grid.experiment.is_random and grid.seeds > 1:
        parts.append(
            f"± is the sample standard deviation over the {grid.seeds} seeds, and so are the bands of the figures"
            f" unless their legend says otherwise. {_drawn(results)}"
        )
    if cases := _cases(results):
        parts.append(
            f"An accuracy is measured on {cases} test cases. The binomial error is the standard error that so many"
            " cases give a difference whose sides have their own cases: an upper limit, since both sides share them."
        )
    return " ".join(parts)


def _drawn(results: Results) -> str:
    """Return a sentence on whether a seed also draws the data."""
    grid = results.grid
    drawn = 0
    for point in grid.points:
        first, second = (grid.config(cell) for cell in grid.cells(point, grid.tuned(point)[0], range(2)))
        drawn += first["data"] != second["data"]
    if not drawn:
        return "Seeds draw starting points, cohorts and batches; the data and their division are the same for all."
    where = "" if drawn == len(grid.points) else " in part of the grid"
    return f"A seed draws the data and their division{where}, too."


def _cases(results: Results) -> str:
    """Return the number of test cases of the accuracies."""
    grid = results.grid
    metrics = [metric for metric in grid.experiment.metrics.values() if metric.factor == 100]
    found = {grid.cases(metric.name, point) for metric in metrics for point in grid.points} - {None}
    return " or ".join(f"{number:,}" for number in sorted(n for n in found if n is not None))


def _tables(results: Results) -> Iterator[list[str]]:
    for table in results.grid.experiment.tables:
        title = f"## {table.name.replace('_', ' ').capitalize()}"
        yield [title, markdown(*rows_of(table, results))]


def _beside(results: Results, judged: Sequence[Sequence[Judgement]]) -> list[str]:
    """Return the effect of the scale's ``also_by`` on the chosen values and on the verdicts."""
    other = results.beside
    section = list(other_choices(results))
    if other is None or not judged:
        return section
    again = [judge(claim, other) for claim in results.grid.experiment.claims]
    changed = [
        [str(number), f"`{claim.text}`", overall(before), overall(after)]
        for number, (claim, before, after) in enumerate(
            zip(results.grid.experiment.claims, judged, again, strict=True), 1
        )
        if overall(before) != overall(after)
    ]
    if not changed:
        return [*section, "No verdict changes with these values."]
    return [*section, "These verdicts change:", markdown(["", "claim", "verdict", "with these values"], changed)]


def _files(results: Results) -> str:
    """Return a description of the files with the numbers behind the page."""
    name = results.grid.experiment.name
    sums = f" `{name}_data.sha256` has the checksums of the data files." if results.grid.data_sets else ""
    return (
        f"`{name}_cells.csv` has a row for each cell, `{name}_rounds.csv.gz` its curves,"
        f" `{name}_configurations.json.gz` its complete configuration.{sums}"
    )


def _citation(results: Results) -> str:
    """Return how to cite the page."""
    found = records_of(results)
    commits = dict.fromkeys(commit for record in found if (commit := record.made_with.get("commit")))
    versions = dict.fromkeys(record.made_with.get("lightning_fed", __version__) for record in found)
    made = f"lightning_fed {' and '.join(versions or [__version__])}"
    made += f" (commit {' and '.join(commits)})" if commits else ""
    days = f", {day}" if (day := dates(found)) else ""
    experiment = results.grid.experiment
    if experiment.file.parent != PAPERS or experiment.added:  # a user's page
        return f'Cite this page as: "{experiment.title}", made with {made}{days}.'
    return (
        f'Cite this page as: The lightning_fed maintainers, "{experiment.title}", docs/papers/{experiment.name}.md,'
        f" {made}{days}. `CITATION.cff` has the entry of the library."
    )
