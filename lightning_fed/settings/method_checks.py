"""What can be said of a method before it runs: its declarations, its hooks by name, and that they are elementwise."""

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

__all__ = ["check_method"]

_RULES = ("weighting", "examples", "uniform", "population")
_HOOKS = [name for name in vars(Algorithm) if not name.startswith("_")]
_SIZE = 6  # coordinates that the hooks are tried on


def check_method(algorithm: Algorithm) -> None:
    """Refuse a method whose declarations or local hooks cannot be right; warn of names that are nearly a hook's.

    Args:
        algorithm: The method.

    Raises:
        FederatedError: Naming the declaration or the hook, what it gave, and what to return.
    """
    name = type(algorithm).__name__
    for message, rule in algorithm.reduces.items():
        if rule not in _RULES:
            raise FederatedError(f"{name}.reduces[{message!r}] must be one of {_RULES}, found {rule!r}.")
    own = {key for cls in type(algorithm).__mro__ if not issubclass(Algorithm, cls) for key in vars(cls)}
    for key in sorted(own - set(_HOOKS)):
        close = get_close_matches(key, _HOOKS, n=1, cutoff=0.85)
        if close and callable(getattr(algorithm, key)) and not key.startswith("_"):
            rank_zero_warn(f"{name}.{key} is no hook of a method, and nobody calls it. Did you mean {close[0]}?")
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
                _check_correct(algorithm) if hook == "correct" else _check_point(algorithm, hook)


def _check_point(algorithm: Algorithm, hook: str) -> None:
    """Try a hook that returns a point on a few numbers."""
    x = torch.linspace(0.5, 1.0, _SIZE, dtype=torch.float64)
    try:
        server, client = algorithm.init_server(x.clone()), algorithm.init_client(x.clone())
        step = _step(algorithm, x, server, client, algorithm.init_local(x, server, client), slice(None))
        at_y = (x.flip(0), x + 0.1)
        found = algorithm.start(x, step) if hook == "start" else algorithm.second_gradient_at(*at_y, step)
    except Exception:  # see _check_correct
        return
    if not isinstance(found, Tensor) or found.shape != x.shape:
        raise FederatedError(
            f"{type(algorithm).__name__}.{hook}() must return a point, a tensor of the shape of x, found {_kind(found)}"
            f" for x of shape {tuple(x.shape)}."
        )


def _kind(found: Any) -> str:
    return f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__


def _check_correct(algorithm: Algorithm) -> None:
    """Try ``correct`` on a few numbers, on all at once and on parts of them."""
    x = torch.linspace(0.5, 1.0, _SIZE, dtype=torch.float64)
    g, y = x.flip(0).square(), x + 0.1
    try:
        server, client = algorithm.init_server(x.clone()), algorithm.init_client(x.clone())
        local = algorithm.init_local(x, server, client)
        before = random_state()
        found = algorithm.correct(g.clone(), y.clone(), _step(algorithm, x, server, client, local, slice(None)))
    except Exception:  # it may read what only a round makes, or hold vectors of the model's own size
        return
    name = type(algorithm).__name__
    if not isinstance(found, Tensor) or found.shape != g.shape:
        raise FederatedError(
            f"{name}.correct() must return the direction of a local step, a tensor of the shape of g, found"
            f" {_kind(found)} for g of shape {tuple(g.shape)}. Return g to leave a gradient as it is."
        )
    if before != random_state():
        return
    parts = [slice(0, _SIZE // 2), slice(_SIZE // 2, _SIZE)]
    cut = [algorithm.correct(g[p], y[p], _step(algorithm, x, server, client, local, p)) for p in parts]
    if not torch.allclose(torch.cat(cut), found, rtol=1e-9, atol=1e-12):
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
