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


def _by(value: Any) -> Replace:
    """Replace anything by a value."""
    return lambda _: value


def _then(name: str, value: Any) -> Replace:
    """Replace a method by one that sets an attribute afterwards."""

    def replace(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            setattr(self, name, value)

        return method

    return replace


def _equal_chunks(_: Any) -> Any:
    def chunks(plans: Sequence[Any], most: int, numel: int) -> Iterator[Sequence[Any]]:
        return (plans[i : i + most] for i in range(0, len(plans), most))

    return chunks


def _look_up_each(_: Any) -> Any:
    """Look up each batch of a client that runs alone when its step comes."""
    from lightning_fed.engines.vectorized import row_batches

    def runs(self: Any) -> Iterator[Any]:
        size, stream = self._batches.settings.batch_size, self._stream()
        for length in self._epochs:
            rows = self._batches.epoch_rows(stream, self._shuffle)[: length * size]
            for i, of_batch in enumerate(rows.split(size)):
                found = row_batches.look_up(self._trainer, self._resident, self._batches, of_batch)
                yield row_batches.Alike([found], len(of_batch), i)

    return runs


def _take_each(_: Any) -> Any:
    """Take the traced steps of a client that runs alone one by one."""
    import torch

    from lightning_fed.engines.vectorized.functional import Logged

    def take_alike(self: Any, alike: Any, kept: Any, each: Callable[[], None]) -> Any:
        found = []
        for i in range(1, len(alike.batches)):
            found.append(self.take(alike.group(i), kept[i] if kept else None))
            each()
        if not found:
            return None
        losses, logged = zip(*found, strict=True)
        values = {
            name: Logged(torch.stack([of_step[name].value for of_step in logged]), first.options, first.batch_size)
            for name, first in logged[0].items()
        }
        return torch.stack(losses), values

    return take_alike


def _trace_each_size(original: Any) -> Any:
    """Trace batches of each number of examples by themselves."""
    from lightning_fed.tracing.traces import kinds

    def trace(self: Any, leaves: Any, spec: Any, examples: int, kept: Any) -> Any:
        full = self._steps.batch_size
        if full is None or examples > full or not self.alone:
            return original(self, leaves, spec, examples, kept)
        return self._get((*self._key(spec, kept), *kinds(leaves)), leaves, spec, kept)

    return trace


_VECTORIZED = "engines.vectorized"
ABLATIONS = {
    "tracing": Ablation(
        "traces of any kind: PyTorch runs every step through Python",
        {"tracing.traces:Traces.__init__": _then("allowed", False)},
    ),
    "whole-steps": Ablation(
        "traces of whole local steps: gradients alone are traced, of full batches",
        {f"{_VECTORIZED}.traced_steps:LocalSteps.bind": _always(None)},
    ),
    "several": Ablation(
        "several small clients at once on a CPU",
        {f"{_VECTORIZED}.engine:_chunk_size": _always(1)},
    ),
    "chunk-costs": Ablation(
        "chunks by what they cost: as many clients at once as memory allows",
        {f"{_VECTORIZED}.engine:chunks_that_pay": _equal_chunks},
    ),
    "turns": Ablation(
        "turns: all clients of a chunk step whenever one does",
        {f"{_VECTORIZED}.schedule:Stepping.takes_turns": _always(False)},
    ),
    "any-clients": Ablation(
        "graphs for any number of clients: each number has its own, and few numbers are taken",
        {f"{_VECTORIZED}.traced_steps:BoundSteps._get_any_count": _always(None)},
    ),
    "any-examples": Ablation(
        "graphs of local steps for any number of examples: each number has its own",
        {f"{_VECTORIZED}.traced_steps:BoundSteps._trace": _trace_each_size},
    ),
    "smaller-batches": Ablation(
        "graphs for batches that are not full, in local steps, full gradients and anchors: they run untraced",
        {
            "tracing.traces:Traces.fits_any_size": _always(False),
            f"{_VECTORIZED}.traced_steps:BoundSteps._get_any_size": _always(None),
            f"{_VECTORIZED}.full_gradients:FullGradients._polymorphic": _always(None),
            f"{_VECTORIZED}.anchors:AnchorPass._of_any_size": _always(None),
        },
    ),
    "anchors": Ablation(
        "gradients at the anchor kept from the full pass to the local steps",
        {f"{_VECTORIZED}.engine:VectorizedEngine._may_keep_anchors": _always(False)},
    ),
    "anchor-spans": Ablation(
        "many batches at once in the full pass that keeps them",
        {f"{_VECTORIZED}.anchors:_is_by_rows": _always(False)},
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
    "bindings": Ablation(
        "PyTorch's Python bindings instead of operators in graphs",
        {"tracing.traces:use_bindings": _always(None)},
    ),
    "products": Ablation(
        "products of matrices that are added to parameters without being formed",
        {"tracing.in_place:_Update._is_product": _always(False)},
    ),
    "constants": Ablation(
        "what is the same for every step, worked out once for all steps",
        {"tracing.in_place:_constant": _by(lambda graph, inputs: dict.fromkeys(inputs))},
    ),
    "known-parts": Ablation(
        "constant parts of directions taken from those of more clients",
        {f"{_VECTORIZED}.correction_inputs:KnownParts.has": _always(False)},
    ),
    "lookups": Ablation(
        "lookups of the batches of several steps at once",
        {
            f"{_VECTORIZED}.row_batches:_AHEAD": _by(0),
            f"{_VECTORIZED}.row_batches:OneClient.runs": _look_up_each,
        },
    ),
    "alike": Ablation(
        "the steps of one client on batches of one size in one go",
        {f"{_VECTORIZED}.traced_steps:BoundSteps.take_alike": _take_each},
    ),
    "recurring": Ablation(
        "traces only of shapes that recur, where batches may have any",
        {f"{_VECTORIZED}.recurring:Recurring.note": _always(True)},
    ),
    "lean": Ablation(
        "local steps of the sequential engine without hooks that nobody has",
        {"engines.sequential.local_loop:_ClientOptimization.prepare": _then("_is_lean", False)},
        engine="sequential",
    ),
}
"""The mechanisms by name."""
