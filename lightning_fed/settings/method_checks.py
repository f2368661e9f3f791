"""Checks of a method before it runs: its declarations, its hooks' names, and that they are elementwise."""

from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Step
from lightning_fed.core.seeds import preserved_random_state, random_state

_RULES = ("weighting", "examples", "uniform", "population")
_HOOKS = [name for name in vars(Algorithm) if not name.startswith("_")]
_SIZE = 6  # coordinates to try the hooks on


def check_method(algorithm: Algorithm) -> None:
    """Raise for a method with invalid declarations or local hooks; warn of names close to a hook's."""
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
    if tried := [hook for hook in ("start", "second_gradient_at", "correct") if hook in hooks]:
        with preserved_random_state(), torch.no_grad():
            for hook in tried:
                _check_vector(algorithm, hook)


def _check_vector(algorithm: Algorithm, hook: str) -> None:
    """Try a hook that returns a vector on a few numbers, and ``correct`` also on parts of them."""
    x = torch.linspace(0.5, 1.0, _SIZE, dtype=torch.float64)
    g, y, name = x.flip(0).square(), x + 0.1, type(algorithm).__name__

    def found_on(part: slice) -> Any:
        step = _step(algorithm, x, server, client, local, part)
        given = (x[part],) if hook == "start" else (g[part].clone(), y[part].clone())
        return getattr(algorithm, hook)(*given, step)

    try:
        server, client = algorithm.init_server(x.clone()), algorithm.init_client(x.clone())
        local, before = algorithm.init_local(x, server, client), random_state()
        found = found_on(slice(None))
    except Exception:  # it may read data of a round, or hold vectors of the model's size
        return
    if not isinstance(found, Tensor) or found.shape != x.shape:
        what, of, remedy = "a point", "x", ""
        if hook == "correct":
            what, of, remedy = "the direction of a local step", "g", " Return g to leave a gradient as it is."
        kind = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise FederatedError(
            f"{name}.{hook}() must return {what}, a tensor of the shape of {of}, found {kind} for {of} of shape"
            f" {tuple(x.shape)}.{remedy}"
        )
    if hook != "correct" or before != random_state():
        return
    parts = [found_on(slice(0, _SIZE // 2)), found_on(slice(_SIZE // 2, _SIZE))]
    if not torch.allclose(torch.cat(parts), found, rtol=1e-9, atol=1e-12):
        raise FederatedError(
            f"{name}.correct() is not elementwise: on a part of the coordinates it gives something else than on all of"
            " them. It is called parameter by parameter, so a norm or a mean in it would be that of one parameter. Clip"
            " with FederatedTrainer(gradient_clip_val=..., gradient_clip_on='corrected'), or work on whole vectors in"
            " finish()."
        )


def _step(algorithm: Algorithm, x: Tensor, server: Any, client: Any, local: Any, part: slice) -> Step:
    def cut(state: Any) -> dict[str, Tensor]:
        return {name: value[part] if value.shape == x.shape else value for name, value in state.items()}

    gradients = dict.fromkeys(algorithm.full_grad_at, x.square())
    takes_second = algorithm.anchor_at is not None or algorithm.looks_ahead
    second = x[part].sqrt() if takes_second else None
    own, mean = cut(gradients), cut(gradients)
    return Step(x[part], cut(server), cut(client), cut(local), second, own, mean, 5.0, 4.0, 0.1)
