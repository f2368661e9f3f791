"""Infer problems from the measurements, ordered by evidence."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_fed.algorithms import Algorithm, FedDane, FedDyn, FedSpeed, Mime, MimeMVR, Scaffnew, Scaffold, ScaffoldM
from lightning_fed.data.skew_report import SkewTable
from lightning_fed.lab.diagnosis.measurement import Measured
from lightning_fed.lab.diagnosis.self_check import SelfCheck
from lightning_fed.lab.diagnosis.theory import Theory
from lightning_fed.lab.diagnosis.trials import Trial

_EVIDENCE = ("certain", "likely", "possible")
_CORRECTING = (Scaffold, ScaffoldM, Scaffnew, Mime, MimeMVR, FedDane, FedDyn, FedSpeed)
_KNOWING = (Scaffold, ScaffoldM, Scaffnew, FedDyn)  # they store each client's gradient, so sampling matters less

_UPHILL = -0.5  # cosine with the negative gradient
_NOTICEABLE = 1.5  # the best fall of the loss, as a multiple of the configured step size's
_DRIFTING, _DRIFTED = 0.25, 0.5  # drift as a share of the progress of local steps on f
_NAMED = 5  # the most clients named in a message
_FEW_CLASSES = 0.5  # total variation distance of a client's labels from all
_BALANCED, _SKEWED = 0.75, 0.5  # effective number of classes (by entropy), as a share of all classes


@dataclass(frozen=True)
class Findings:
    """All findings about a configuration.

    Attributes:
        algorithm: The method.
        measured: The clients' constants.
        theory: The theory's values for these constants.
        trials: A few rounds at each step size, in order.
        skew: The differences between clients' data; None if labels cannot be read.
        check: The self-check of the method.
    """

    algorithm: Algorithm
    measured: Measured
    theory: Theory
    trials: Sequence[Trial]
    skew: SkewTable | None
    check: SelfCheck


@dataclass(frozen=True)
class Verdict:
    """A problem that may keep a run from converging.

    Attributes:
        evidence: "certain", "likely" or "possible".
        cause: The problem.
        text: The numbers that show it, and the change to make.
    """

    evidence: str
    cause: str
    text: str


def corrects_drift(algorithm: Algorithm) -> bool:
    """Return whether a method removes the clients' drift from their local steps."""
    return isinstance(algorithm, _CORRECTING)


def plural(number: int, what: str) -> str:
    """Return a number with its noun.

    Example:
        >>> plural(1, "round"), plural(5, "round")
        ('1 round', '5 rounds')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def verdicts(findings: Findings) -> list[Verdict]:
    """Return at least one possible problem, best evidence first."""
    found = [
        *_faults(findings),
        *_step_size(findings),
        *_drift(findings),
        *_noise(findings),
        *_imbalance(findings),
    ]
    here, best = _current_and_best(findings)
    better = (
        f" Of the step sizes tried, {best.rate:.3g} did a little better: the loss {_trend(best)} there, and"
        f" {_trend(here)} at the configured {here.rate:.3g}."
        if best.change < here.change
        else ""
    )
    nothing = Verdict(
        "possible",
        "nothing stands out",
        "The loss falls at the configured step size, and no measurement points to a problem. Continue the run, and"
        " diagnose a checkpoint after the loss has stopped falling (--ckpt_path)." + better,
    )
    return sorted(found, key=lambda verdict: _EVIDENCE.index(verdict.evidence)) or [nothing]


def _faults(f: Findings) -> Iterator[Verdict]:
    cause = "there is a fault"
    if f.check.is_fault:
        yield Verdict("certain", cause, f.check.text)
    if not math.isfinite(f.measured.loss):
        lost = f.measured.lost
        some = f"client{'s' * (len(lost) > 1)} {', '.join(map(repr, lost[:_NAMED]))}"
        some += f" and {len(lost) - _NAMED} more" * (len(lost) > _NAMED)
        whose = f" Only that of {some} is not finite: look at their data." if len(lost) < f.measured.clients else ""
        yield Verdict(
            "certain", cause, f"The training loss is {f.measured.loss} at this model, before any step.{whose}"
        )
    if f.measured.gradient == 0:
        yield Verdict("certain", cause, "The gradient of the training loss is 0: no parameter trains.")
    here, _ = _current_and_best(f)
    if math.isfinite(here.losses[-1]) and here.losses[-1] < min(0.0, here.losses[0]):
        yield Verdict(
            "possible",
            cause,
            f"The training loss {_trend(here)}, which is below 0. A cross-entropy or a squared error cannot; look for"
            " a reversed sign in the loss. The logarithm of a density can.",
        )
    smallest = f.trials[0]
    if smallest.cosine < _UPHILL:
        yield Verdict(
            "likely",
            cause,
            f"At the smallest step size, {smallest.rate:.3g}, the model goes uphill: the cosine between its change and"
            f" the negative gradient is {smallest.cosine:.2f}. Look for a reversed sign in"
            f" {type(f.algorithm).__name__} or in the server's optimizer.",
        )


def _step_size(f: Findings) -> Iterator[Verdict]:
    here, best = _current_and_best(f)
    rounds = plural(len(best.losses) - 1, "round")
    does = f"at {here.rate:.3g} the loss {_trend(here)}, at {best.rate:.3g} it {_trend(best)} ({rounds})"
    if best.change >= 0 and f.measured.is_plain and f.trials[0].rate > f.theory.ceiling:
        yield Verdict(
            "likely",
            "the step size is too large",
            f"The loss falls at none of the five step sizes, and even the smallest, {f.trials[0].rate:.3g}, is above"
            f" 1/L = {f.theory.ceiling:.3g}. Start below that.",
        )
    elif best.change >= 0:
        yield Verdict(
            "possible",
            "no step size helps",
            f"The loss does not fall at any of the five step sizes: at the smallest, {f.trials[0].rate:.3g}, it"
            f" {_trend(f.trials[0])}. Possible reasons: the model has converged, noise hides the progress, the step"
            " size is more than ten times too large, or there is a fault.",
        )
    elif here.change >= 0:
        stable = f.theory.ceiling
        note = f" Theory allows about 1/L = {stable:.3g}." if f.measured.is_plain and not math.isnan(stable) else ""
        evidence = "certain" if math.isinf(here.change) else "likely"
        if isinstance(f.algorithm, _KNOWING) and not math.isinf(here.change) and here.losses[-1] < here.losses[1]:
            evidence = "possible"
            note += (
                " It falls since the first round, in which the method cannot correct the drift yet: see more --rounds."
            )
        yield Verdict(evidence, "the step size is too large", f"{does[0].upper()}{does[1:]}.{note}")
    elif best.change < _NOTICEABLE * here.change:
        size = "large" if best.factor < 1 else "small"
        note = " A few rounds favor large steps; drift and noise show later." if best.factor > 1 else ""
        yield Verdict("possible", f"the step size is rather {size}", f"{does[0].upper()}{does[1:]}.{note}")


def _current_and_best(f: Findings) -> tuple[Trial, Trial]:
    """Return the trial at the configured step size, and the one in which the loss fell most."""
    return next(trial for trial in f.trials if trial.factor == 1), min(f.trials, key=lambda trial: trial.change)


def _trend(trial: Trial) -> str:
    if math.isinf(trial.change):
        return "diverges"
    return f"goes from {trial.losses[0]:.4g} to {trial.losses[-1]:.4g}"


def _drift(f: Findings) -> Iterator[Verdict]:
    m, t = f.measured, f.theory
    missed = m.drift / m.progress if m.progress else math.nan
    here, _ = _current_and_best(f)
    if corrects_drift(f.algorithm) or not missed > _DRIFTING:
        return
    overshoots = m.rate > 2 * t.ceiling  # steps on f overshoot, too, so their progress is less informative
    if overshoots and here.change >= 0:
        return
    noise = max(t.batches, t.drawing)
    skew = f.skew.label_distance if f.skew is not None else math.nan
    source = f" Their labels differ (distance {skew:.2f} of 1), which is a source of it." if skew > _FEW_CLASSES else ""
    yield Verdict(
        "likely" if missed > _DRIFTED and not overshoots else "possible",
        "clients drift",
        f"After {min(t.K, 50):.3g} local steps of {m.rate:.3g}, the clients' mean and the result of the same steps on f"
        f" differ by {missed:.2g} of the distance that these steps cover. That is an error of {m.drift:.3g} in the mean"
        " gradient,"
        f" {'above' if m.drift > noise else 'below'} the noise of a round ({noise:.3g}). Unlike noise, it does not"
        f" average out.{source} Try a method that corrects it (Scaffold, or Mime if clients rarely return), fewer"
        " local steps, or smaller ones.",
    )


def _noise(f: Findings) -> Iterator[Verdict]:
    m, t = f.measured, f.theory
    drawing = 0.0 if isinstance(f.algorithm, _KNOWING) else t.drawing
    others = [m.gradient, *([] if corrects_drift(f.algorithm) or math.isnan(m.drift) else [m.drift])]
    if not max(t.batches, drawing) > max(others):
        return
    by_batches = t.batches >= drawing
    what = "Batch" if by_batches else "Sampling"
    change = "Larger batches" if by_batches else "More clients per round, a method with momentum (MimeMVR, FedCM),"
    yield Verdict(
        "possible",
        "noise dominates",
        f"{what} noise ({max(t.batches, drawing):.3g} in the mean gradient of a round) is above the gradient"
        f" ({m.gradient:.3g}). {change} and smaller steps towards the end reduce it.",
    )


def _imbalance(f: Findings) -> Iterator[Verdict]:
    skew, cause = f.skew, "the classes are imbalanced"
    if skew is None or skew.classes < 2:
        return
    like = 2**skew.global_entropy
    if like < _BALANCED * skew.classes:
        yield Verdict(
            "likely" if like < _SKEWED * skew.classes else "possible",
            cause,
            f"The {skew.classes} classes of all clients count as {like:.2g} equal ones (by entropy): rare classes"
            " barely affect the loss. Weight the loss by class, or check the accuracy per class.",
        )
    if skew.label_distance > _FEW_CLASSES and not corrects_drift(f.algorithm):
        yield Verdict(
            "possible",
            f"{cause} among the clients",
            f"The labels of a client are {skew.label_distance:.2f} of 1 away from those of all."
            f" {type(f.algorithm).__name__} does not correct the drift that this causes over many local steps, and"
            " each round depends on its cohort.",
        )
