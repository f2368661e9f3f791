"""Checks of a method before it runs: its declarations, and the names of its hooks."""

from difflib import get_close_matches
from inspect import signature

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.errors import FederatedError

_RULES = ("weighting", "examples", "uniform", "population")
_HOOKS = [name for name in vars(Algorithm) if not name.startswith("_")]


def check_method(algorithm: Algorithm) -> None:
    """Raise for a method with invalid declarations or arguments of hooks; warn of names close to a hook's."""
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
