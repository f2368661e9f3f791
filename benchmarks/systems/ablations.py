"""Mechanisms of the engines that can be taken out one by one, to see what each buys.

Nothing in the package can be switched off: each is patched away here, in a process that ends with its run. What is run
without it is what the package would do if it did not have it. A target that is no longer there is an error that says
so: the entry needs a new one, or goes with its mechanism.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["ABLATIONS", "Ablation", "check", "places_of", "switch_off"]

Replace: TypeAlias = Callable[[Any], Any]  # from what stands at a place to what stands in for it


@dataclass(frozen=True)
class Ablation:
    """A mechanism.

    Attributes:
        what: What it does.
        places: What replaces what: "module:attribute" or "module:Class.attribute", below the package.
        engine: The engine that has it.
    """

    what: str
    places: Mapping[str, Replace]
    engine: str = "vectorized"


def check(names: Sequence[str], engine: str) -> None:
    """Refuse names of mechanisms that are not known, or that an engine does not have.

    Args:
        names: The names; several in one are joined by "+".
        engine: "auto", which is the vectorized one here, "vectorized" or "sequential".

    Raises:
        SystemExit: Naming the mechanisms there are, or the engine that has it.
    """
    for name in (part for joined in names for part in joined.split("+")):
        if name not in ABLATIONS:
            known = "\n".join(f"  {known:16} {ablation.what}" for known, ablation in ABLATIONS.items())
            raise SystemExit(f"--without {name}: there is no such mechanism. There are\n{known}")
        own = ABLATIONS[name].engine
        if (engine == "sequential") != (own == "sequential"):
            raise SystemExit(f"--without {name}: that is a mechanism of the {own} engine; give --engine {own}.")


def switch_off(name: str) -> None:
    """Take a mechanism out of the package, for good.

    Raises:
        SystemExit: If something that it replaces is not there.
    """
    for owner, attribute, replace in list(places_of(name)):
        setattr(owner, attribute, replace(getattr(owner, attribute)))


def places_of(name: str) -> Iterator[tuple[Any, str, Replace]]:
    """Yield module or class, name of the attribute and what replaces it, for all that a mechanism replaces.

    Raises:
        SystemExit: If one is not there.
    """
    for place, replace in ABLATIONS[name].places.items():
        module_name, _, path = place.partition(":")
        *owners, attribute = path.split(".")
        try:
            owner: Any = importlib.import_module(f"lightning_fed.{module_name}")
            for part in owners:
                owner = getattr(owner, part)
            getattr(owner, attribute)
        except (ImportError, AttributeError) as error:
            raise SystemExit(
                f"--without {name}: there is no {place} in lightning_fed any more ({error}). Let the entry in"
                " benchmarks/systems/ablations.py name what has taken its place, or remove it."
            ) from error
        yield owner, attribute, replace


def _always(value: Any) -> Replace:
    """Replace a function by one that returns the same whatever it is given."""
    return lambda _: lambda *args, **kwargs: value


def _with_last(value: Any) -> Replace:
    """Replace a method by one whose last argument is always the same."""
    return lambda original: lambda *args: original(*args[:-1], value)


def _by(value: Any) -> Replace:
    """Replace anything by a value."""
    return lambda _: value


def _then(name: str, value: Any) -> Replace:
    """Replace a method by one that sets an attribute afterwards."""

    def replace(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            getattr(self, name)  # raises where it has another name by now, and nothing would be switched off
            setattr(self, name, value)

        return method

    return replace


def _once_for_each(_: Any) -> Any:
    """Work out what stays as it is from step to step anew for every choice of clients."""

    def once(self: Any, trace: Any, clients: Any) -> Any:
        return trace.once([*self.step.shared, *clients.of(self.step.own)])

    return once


_VECTORIZED = "engines.vectorized"
ABLATIONS = {
    "tracing": Ablation(
        "traces of any kind: PyTorch runs every step through Python",
        {"tracing.traces:Traces.__init__": _then("allowed", False)},
    ),
    "in-place": Ablation(
        "traces that move the parameters: they return directions, along which the parameters are moved afterwards",
        {f"{_VECTORIZED}.chunk_work:ChunkWork.__init__": _then("is_bare", False)},
    ),
    "several": Ablation(
        "several small clients at once on a CPU",
        {f"{_VECTORIZED}.engine:default_chunk_size": _always(1)},
    ),
    "interleaved": Ablation(
        "clients that do not wait for each other: all step whenever one does",
        {f"{_VECTORIZED}.schedule:Schedule.steps": _with_last(False)},
    ),
    "any-size": Ablation(
        "traces for any number of clients or examples: smaller batches, and steps of some clients only, run untraced",
        {"tracing.traces:generalize": _always(False)},
    ),
    "full-traces": Ablation(
        "traced full gradients, of one client and of several at once",
        {
            f"{_VECTORIZED}.full_gradients:FullGradients.of_one": _always(None),
            f"{_VECTORIZED}.full_gradients:FullGradients.of_many": _always(None),
        },
    ),
    "simplify": Ablation(
        "passes that simplify graphs",
        {"tracing.traces:simplify": _always(None)},
    ),
    "cross-entropy": Ablation(
        "cross-entropies that are kernels, not the small operators that vmap makes of them",
        {"tracing.traces:restore_cross_entropy": _always(None)},
    ),
    "products": Ablation(
        "products of matrices that are added to parameters without being formed",
        {"tracing.in_place:_Update._is_product": _always(False)},
    ),
    "constants": Ablation(
        "what is the same for every step, worked out once for all steps",
        {"tracing.in_place:_constant": _by(lambda graph, inputs: dict.fromkeys(inputs))},
    ),
    "chunk-constants": Ablation(
        "that, worked out once for all clients of a chunk",
        {f"{_VECTORIZED}.local_steps:LocalSteps._once": _once_for_each},
    ),
    "lookups": Ablation(
        "lookups of the batches of several steps at once",
        {f"{_VECTORIZED}.batches:_AHEAD": _by(0)},
    ),
    "recurring": Ablation(
        "traces only of shapes that recur, where batches may have any",
        {f"{_VECTORIZED}.schedule:RecurringShapes.note": _always(True)},
    ),
    "lean": Ablation(
        "local steps of the sequential engine without hooks that nobody has",
        {"engines.sequential.local_loop:ClientOptimization.prepare": _then("has_fast_path", False)},
        engine="sequential",
    ),
}
"""The mechanisms by name."""
