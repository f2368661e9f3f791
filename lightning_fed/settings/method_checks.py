"""Checks of a method before it runs: its declarations, its hooks' names, and a rehearsal of one of its rounds."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Cohort, Run, Step, Update
from lightning_fed.core.seeds import preserved_random_state, random_state
from lightning_fed.core.types import State, Vector

_RULES = ("weighting", "examples", "uniform", "population")
_HOOKS = [name for name in vars(Algorithm) if not name.startswith("_")]
_FEW, _MOST = 6, 2**16  # numbers of coordinates; a million would take half a second
_EXCHANGED = {  # entries of client states that are not the method's, by name prefix
    "buffer.": "buffers",
    "solver.": "the optimizer's statistics",
    "residual.": "residuals of compression",
    "personal.": "personal parameters",
    "schedule.": "the count of local steps",
}
_UNSEEDED = ("init_server", "init_client", "begin_round", "evaluate_at", "evaluate_client_at")


def check_method(algorithm: Algorithm) -> None:
    """Raise if a method's declarations or hook arguments are invalid; warn about names close to a hook's."""
    name = type(algorithm).__name__
    for message, rule in algorithm.reduces.items():
        if rule not in _RULES:
            raise FederatedError(f"{name}.reduces[{message!r}] must be one of {_RULES}, found {rule!r}.")
    own = {key for cls in type(algorithm).__mro__ if not issubclass(Algorithm, cls) for key in vars(cls)}
    for key in sorted(own - set(_HOOKS)):
        close = get_close_matches(key, _HOOKS, n=1, cutoff=0.85)
        if close and callable(getattr(algorithm, key)) and not key.startswith("_"):
            rank_zero_warn(f"{name}.{key} is not a hook of a method, and nothing calls it. Did you mean {close[0]}?")
    hooks = [hook for hook in _HOOKS if algorithm.overrides(hook) and callable(getattr(Algorithm, hook))]
    for hook in hooks:
        wanted, has = list(signature(getattr(Algorithm, hook)).parameters)[1:], signature(getattr(algorithm, hook))
        try:
            has.bind(*wanted)
        except TypeError as error:
            raise FederatedError(f"{name}.{hook}{has} must take ({', '.join(wanted)}): {error}.") from error


# ------------------------------------------------------------------ a rehearsal


class _CannotTryError(Exception):
    """A hook has raised an error: it may need data of a round, or hold vectors of the model's size."""


def has_parts_of_users(algorithm: Algorithm) -> bool:
    """Return whether a method or one of its options, such as Mime's base optimizer, comes from outside this package."""
    modules = [type(part).__module__.partition(".")[0] for part in (algorithm, *vars(algorithm).values())]
    return not {"builtins", "lightning_fed"}.issuperset(modules)


def try_hooks(algorithm: Algorithm, size: int = _FEW) -> None:
    """Raise for hooks that return invalid values, change their inputs, or are not elementwise.

    Raise also if hooks that the run does not seed draw from global generators.

    A copy of the method runs one round with one client. The trial ends without an error at the first hook that raises,
    since a run may meet its needs. Vectors have ``size`` coordinates like the model, or only a few if it is large.
    """
    try:
        tried = copy.deepcopy(algorithm)
    except Exception:  # attributes that cannot be copied
        return
    with preserved_random_state(), torch.no_grad():
        try:
            _TrialRound(tried, size if 1 < size <= _MOST else _FEW).play()
        except _CannotTryError:
            return


class _TrialRound:
    """One round of a method, with one client."""

    def __init__(self, algorithm: Algorithm, size: int) -> None:
        self.algorithm, self.name = algorithm, type(algorithm).__name__
        self.x = torch.linspace(0.5, 1.0, size, dtype=torch.float64)
        self.g = self.x.flip(0).square()

    def play(self) -> None:
        """Call the hooks in the order of a round."""
        algorithm, x = self.algorithm, self.x
        server = self._state("init_server", self._call("init_server", x))
        client = self._state("init_client", self._call("init_client", x))
        for name in client:
            if (part := next((part for part in _EXCHANGED if name.startswith(part)), None)) is not None:
                raise FederatedError(
                    f"{self.name}.init_client() names a state {name!r}, but names with {part!r} are those of"
                    f" {_EXCHANGED[part]}, which clients keep too. Choose another name."
                )
        gradients = dict.fromkeys(algorithm.full_grad_at, x.square())
        cohort = Cohort(2, 4, 0, gradients, torch.tensor(1.0) if algorithm.population_loss else None)
        server = self._state("begin_round", self._call("begin_round", x, dict(server), cohort))
        if algorithm.own_solve is not None:
            _TrialRound(algorithm.own_solve, len(x)).work(server, client, gradients)
        messages = self.work(server, client, gradients)
        if unsent := algorithm.reduces.keys() - messages.keys():
            raise FederatedError(
                f"{self.name}.finish() sends {sorted(messages)}, and `reduces` declares {sorted(algorithm.reduces)}."
                f" Send {sorted(unsent)[0]!r} too, or do not declare it."
            )
        mean = {name: messages[name].double() for name in algorithm.reduces}
        found = self._call("update_server", x, dict(server), mean, cohort)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise FederatedError(
                f"{self.name}.update_server() must return a direction and the server state, found {kind_of(found)}."
                " Return mean['delta'], server to leave both as they are."
            )
        self._vector("update_server", found[0], "a direction")
        server = self._state("update_server", found[1])
        self._vector("evaluate_at", self._call("evaluate_at", x, server), "a point")
        self._vector("evaluate_client_at", self._call("evaluate_client_at", x, server, client), "a point")

    def work(self, server: State, client: State, gradients: State) -> State:
        """Run a client's work from its own state, and return its messages."""
        algorithm, x, g, y = self.algorithm, self.x, self.g, self.x + 0.1
        local = self._state("init_local", self._call("init_local", x, server, client))
        takes_second = algorithm.anchor_at is not None or algorithm.looks_ahead

        def cut(state: State, part: slice) -> State:
            return {name: value[part] if value.shape == x.shape else value for name, value in state.items()}

        def step(part: slice = slice(None), second: bool = takes_second) -> Step:
            anchor_grad, own, mean = x[part].sqrt() if second else None, cut(gradients, part), cut(gradients, part)
            states = cut(server, part), cut(client, part), cut(local, part)
            return Step(x[part], *states, anchor_grad, own, mean, 5.0, 4.0, 0.1)

        if algorithm.overrides("start"):
            self._vector("start", self._call("start", x, step(second=False)), "a point")
        if algorithm.looks_ahead:
            self._vector("second_gradient_at", self._call("second_gradient_at", g, y, step(second=False)), "a point")
        if algorithm.overrides("correct") and algorithm.local_work:
            found = self._call("correct", g, y, step())
            self._vector(
                "correct", found, "the direction of a local step", "g", " Return g to leave a gradient as it is."
            )
            self._elementwise(
                "correct", {"": found}, lambda part: {"": algorithm.correct(g[part], y[part], step(part))}
            )
        if algorithm.overrides("advance") and algorithm.local_work:
            found = self._state("advance", self._call("advance", g, y, step()), like=local, of="init_local")
            for name, value in found.items():
                if value.data_ptr() == y.data_ptr():
                    raise FederatedError(
                        f"{self.name}.advance() returns y itself as {name!r}, which the step then changes in place."
                        " Return y.clone()."
                    )
            self._elementwise("advance", found, lambda part: algorithm.advance(g[part], y[part], step(part)))
        return self._finish(y, server, client, local, gradients)

    def _finish(self, y: Vector, server: State, client: State, local: State, gradients: State) -> State:
        """Run the end of a client's work, and return its messages."""
        x, delta = self.x, y - self.x
        states = server, client, local, gradients, gradients
        run = Run(x, delta, *states, 5.0, 4.0, 3, 0.3, lambda: delta / -0.3, path_follows=True)
        update = self._call("finish", y, run)
        if not isinstance(update, Update):
            raise FederatedError(
                f"{self.name}.finish() must return an Update, found {kind_of(update)}. Return Update(send={{'delta':"
                " run.delta}) to send the model's change."
            )
        hint = "torch.as_tensor(run.num_steps), which is a number with one engine and a tensor with the other"
        send = self._state("finish", update.send, hint=hint)
        self._state("finish", update.keep, like=client if update.keep else None, of="init_client")
        return send

    # ------------------------------------------------------------------ calls and checks

    def _call(self, hook: str, *inputs: Any) -> Any:
        """Call a hook; raise if it changes an input."""
        names = signature(getattr(Algorithm, hook)).parameters
        given = [pair for name, value in zip(list(names)[1:], inputs, strict=True) for pair in _tensors(name, value)]
        before, state = [value.clone() for _, value in given], random_state()
        try:
            found = getattr(self.algorithm, hook)(*inputs)
        except Exception as error:
            raise _CannotTryError from error
        for (name, now), value in zip(given, before, strict=True):
            if not torch.equal(now.nan_to_num(), value.nan_to_num()):
                raise FederatedError(
                    f"{self.name}.{hook}() changes {name} in place, which other code still reads. Return new tensors,"
                    " such as g + 1 instead of g.add_(1)."
                )
        if hook in _UNSEEDED and state != random_state():
            raise FederatedError(
                f"{self.name}.{hook}() draws from a global generator, whose numbers differ between processes, between"
                " engines, and in a resumed run. Draw in update_server(), which the run seeds, or from a new generator"
                " such as torch.Generator().manual_seed(0)."
            )
        return found

    def _state(self, hook: str, state: Any, like: State | None = None, of: str = "", hint: str = "") -> State:
        """Return a hook's state; raise unless it is a dict of tensors with the names and shapes of ``like``."""
        where = f"{self.name}.{hook}()"
        if not isinstance(state, Mapping):
            raise FederatedError(
                f"{where} must return a state, which is a dict of tensors, found {kind_of(state)}. Return {{}} for"
                " none."
            )
        for name, value in state.items():
            if not isinstance(value, Tensor):
                example = hint or f"torch.tensor({value!r})" if isinstance(value, (int, float)) else "a tensor"
                raise FederatedError(
                    f"{where} returns {name!r} as {kind_of(value)}, not as a tensor. Return {example}."
                )
        if like is not None and (state.keys(), *_shapes(state)) != (like.keys(), *_shapes(like)):
            raise FederatedError(
                f"{where} must keep the names and shapes of {of}, {self._text(like)}, found {self._text(state)}. Return"
                f" all of them, and add what is missing to {of}."
            )
        return dict(state)

    def _text(self, state: Mapping[str, Tensor]) -> str:
        shapes = {n: "[P]" if value.shape == self.x.shape else str(list(value.shape)) for n, value in state.items()}
        return ", ".join(f"{name!r} {shape}" for name, shape in shapes.items()) or "none"

    def _vector(self, hook: str, found: Any, what: str, of: str = "x", remedy: str = "") -> None:
        """Raise unless a hook has returned a vector of the shape of ``of``."""
        if isinstance(found, Tensor) and found.shape == self.x.shape:
            return
        kind = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else kind_of(found)
        raise FederatedError(
            f"{self.name}.{hook}() must return {what}, a tensor of the shape of {of}, found {kind} for {of} of shape"
            f" {tuple(self.x.shape)}.{remedy}"
        )

    def _elementwise(self, hook: str, found: State, on_part: Callable[[slice], State]) -> None:
        """Raise if a hook's results on parts of the coordinates differ from its result on all of them."""
        before, half = random_state(), len(self.x) // 2
        try:
            parts = [on_part(slice(0, half)), on_part(slice(half, len(self.x)))]
            if before != random_state():
                return
            is_equal = all(
                torch.allclose(
                    _joined([part[name] for part in parts], value), value, rtol=1e-9, atol=1e-12, equal_nan=True
                )
                for name, value in found.items()
            )
        except (RuntimeError, KeyError, IndexError):
            is_equal = False
        if not is_equal:
            raise FederatedError(
                f"{self.name}.{hook}() is not elementwise: on a part of the coordinates it gives something else than on"
                " all of them. It is called parameter by parameter, so a norm or a mean in it would be that of one"
                " parameter, and only vectors like x are cut with it. Clip with"
                " FederatedTrainer(gradient_clip_val=..., gradient_clip_on='corrected'), or work on whole vectors in"
                " finish()."
            )


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a hook's argument, with their names in the code of the hook."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(f"{name}[{key!r}]", part)
    elif isinstance(value, (Step, Run, Cohort)):
        for field in fields(value):
            yield from _tensors(f"{name}.{field.name}", getattr(value, field.name))


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Join the parts of a vector; for a value that was not cut, return it if the parts agree, else NaN."""
    if parts[0].shape != like.shape:
        return torch.cat(parts)
    return parts[0] if torch.equal(parts[0], parts[1]) else parts[0].new_full((), torch.nan)


def _shapes(state: Mapping[str, Tensor]) -> Iterator[torch.Size]:
    return (state[name].shape for name in sorted(state))
