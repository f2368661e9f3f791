"""Lightning's Trainer arguments, and ours: values from the environment, and checks before Lightning sees them."""

import math
import os
import re
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from torch._dynamo import OptimizedModule

from lightning_fed.compat.package import pl, refuse_foreign
from lightning_fed.compat.private import MisconfigurationException, rank_zero_info
from lightning_fed.core.arguments import check_flags, check_paths, finite, format_value, kind_of
from lightning_fed.core.errors import FederatedError

_LEAST: Mapping[str, float] = {
    "num_nodes": 1,
    "min_epochs": 0,
    "max_steps": -1,
    "min_steps": 0,
    "limit_train_batches": 0,
    "limit_val_batches": 0,
    "limit_test_batches": 0,
    "limit_predict_batches": 0,
    "overfit_batches": 0,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 0,
    "accumulate_grad_batches": 1,
    "gradient_clip_val": 0,
}
_ELSEWHERE = {"strategy"}  # checked by `check_strategy`


def check_trainer_arguments(arguments: Mapping[str, Any], own: Iterable[str]) -> None:
    """Raise for arguments that are not Lightning's, or lack the documented type or range; ``own`` has ours."""
    refuse_foreign(*arguments.values())
    hints = _hints()
    for name, value in arguments.items():
        if name not in hints:
            close = get_close_matches(name, own, n=1) or get_close_matches(name, hints, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise FederatedError(f"FederatedTrainer has no argument {name!r}.{hint}")
        if name not in _ELSEWHERE and not _fits(value, hints[name]):
            raise FederatedError(
                f"FederatedTrainer({name}={format_value(value)}): {name} must be {_describe(hints[name])},"
                f" found {kind_of(value)}."
            )
        least = _LEAST.get(name)
        if least is not None and value is not None and value < least:
            raise FederatedError(f"FederatedTrainer({name}={value!r}): {name} must be at least {least:g}.")


def as_callbacks(callbacks: Any) -> list[pl.Callback]:
    """Return the argument ``callbacks`` as a list."""
    given = [callbacks] if isinstance(callbacks, pl.Callback) else [] if callbacks is None else callbacks
    is_sequence = isinstance(given, Sequence) and not isinstance(given, str | bytes)  # Hydra's sequence is not a list
    given = list(given) if is_sequence else given
    refuse_foreign(given)
    if not is_sequence or not all(isinstance(callback, pl.Callback) for callback in given):
        raise FederatedError(
            f"FederatedTrainer(callbacks={format_value(callbacks)}): callbacks must be a Callback or a list of"
            " Callbacks, instances and not classes."
        )
    return list(given)


@contextmanager
def refusals_of_lightning() -> Iterator[None]:
    """Convert Lightning's errors inside to a :class:`FederatedError` with the same message and this cause."""
    try:
        yield
    except FederatedError:
        raise
    except (MisconfigurationException, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise FederatedError(
            _notebook_advice(str(error))
            or f"FederatedTrainer: Lightning's Trainer refuses its arguments. {_strategy_meant(str(error))}{error}"
        ) from error


def _notebook_advice(refusal: str) -> str:
    """Return the message if a notebook uses a strategy that starts the script once per process."""
    found = re.search(r"strategy='?([\w.]+).*is not compatible with an interactive", refusal)
    if found is None:
        return ""
    ours = "ddp_notebook" if found[1].startswith("ddp") else "clients_fork"
    return (
        f"strategy={found[1]!r} starts the script once per process, and a notebook is not a script. Set"
        f" strategy={ours!r}, which forks the notebook's process, or run a script."
    )


def _strategy_meant(refusal: str) -> str:
    """Return a suggested strategy if Lightning does not know the name; Lightning's examples lack ours."""
    found = re.search(r"invalid strategy name: `strategy='(\w+)'`", refusal)
    ours = [
        name for name in pl.strategies.StrategyRegistry.available_strategies() if name.startswith(("clients", "ddp"))
    ]
    close = get_close_matches(found[1], ours, n=1) if found else []
    return f"Did you mean strategy={close[0]!r}? " if close else ""


@cache
def _hints() -> dict[str, Any]:
    hints = get_type_hints(pl.Trainer.__init__)
    return {name: hints[name] for name in signature(pl.Trainer.__init__).parameters if name in hints}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has an annotation's type; a float may be an integer, and must be finite."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in inner)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner)
    if hint is bool or hint is type(None):
        return isinstance(value, hint)
    if hint is float:
        return not math.isnan(finite(value))
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 2**63
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, inner[0]) for key in value)
    if origin is Iterable and isinstance(value, Iterator):  # checking its elements would consume it
        return True
    if origin is not None:  # a list, or any iterable
        return isinstance(value, list | tuple | set) and all(_fits(part, inner[0]) for part in value)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    """Return an annotation as text, such as ``bool or None``."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_describe(part) for part in inner)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if hint is type(None):
        return "None"
    if origin is not None:
        return f"{origin.__name__} of {' or '.join(_describe(part) for part in inner)}"
    return str(hint.__name__)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_LOADERS = {"validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


def checked(stage: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a stage of Lightning's Trainer that first checks its arguments; see :func:`check_call`."""

    @wraps(stage)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        given = signature(stage).bind(*args, **kwargs).arguments
        check_call(stage.__name__, given.pop("self"), **given)
        return stage(*args, **kwargs)

    return call


def check_call(
    stage: str,
    trainer: pl.Trainer,
    model: Any = None,
    dataloaders: Any = None,
    datamodule: Any = None,
    ckpt_path: Any = None,
    weights_only: Any = None,
    **_: Any,
) -> None:
    """Raise for arguments that no stage supports."""
    owner = f"FederatedTrainer.{stage}"
    if (running := trainer.state.fn) is not None and trainer.state.status == "running":
        raise FederatedError(
            f"{owner} was called while this trainer runs {running.value}, in one of its hooks. Call it when that has"
            " ended. To evaluate during a fit, give the data module a list of validation sets, or call"
            " trainer.fit_loop.evaluate_clients(client_ids)."
        )
    refuse_foreign(model, dataloaders, datamodule)
    found = model if model is not None or stage == "fit" else trainer.lightning_module
    if not isinstance(found, (pl.LightningModule, OptimizedModule)):
        made = f"; write {found.__name__}()" if isinstance(found, type) else ""
        raise FederatedError(f"{owner}(model={format_value(found)}): model must be a LightningModule{made}.")
    if datamodule is not None and not isinstance(datamodule, pl.LightningDataModule):
        raise FederatedError(
            f"{owner}(datamodule={format_value(datamodule)}): datamodule must be a LightningDataModule."
        )
    if ckpt_path is not None:
        check_paths(owner, ckpt_path=ckpt_path)
    if weights_only is not None:
        check_flags(owner, weights_only=weights_only)
    if stage == "fit":
        return
    is_data = isinstance(dataloaders, Iterable) and not isinstance(dataloaders, (str, bytes, type))
    if dataloaders is not None and not is_data and not isinstance(dataloaders, pl.LightningDataModule):
        raise FederatedError(
            f"{owner}(dataloaders={format_value(dataloaders)}): pass a data module, or loaders of batches."
        )
    hook = _LOADERS[stage]
    has_own = model is not None and getattr(type(model), hook, None) is not getattr(pl.LightningModule, hook)
    if dataloaders is None and datamodule is None and model is not None and not has_own:
        raise FederatedError(f"{owner} has no data. Pass a data module: trainer.{stage}(model, datamodule).")


Init = TypeVar("Init", bound=Callable[..., None])

_PREFIX = "PL_TRAINER_"
_SAME = ("max_rounds", "max_epochs")  # two names for one number


def arguments_of_environment(own: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the arguments set by environment variables, of Lightning's trainer and our ``own``.

    As in Lightning, values are Python literals if valid, else text. ``max_rounds`` overrides ``max_epochs``; either is
    returned as ``max_rounds``.
    """
    names = {**own, **signature(pl.Trainer.__init__).parameters}
    found = {name: _value(text) for name in names if (text := os.environ.get(_PREFIX + name.upper()))}
    if "max_epochs" in found:
        found = {"max_rounds": found.pop("max_epochs"), **found}
    return found


def defaults_of_environment(make: Init) -> Init:
    """Wrap a trainer's ``__init__``, with keyword arguments only, to read missing arguments from the environment."""

    @wraps(make)
    def call(self: Any, **given: Any) -> None:
        known = given.keys() | (set(_SAME) if any(given.get(name) is not None for name in _SAME) else set())
        found = arguments_of_environment(signature(make).parameters)
        used = {name: value for name, value in found.items() if name not in known}
        if not used:
            make(self, **given)
            return
        listed = ", ".join(f"{name}={value!r}" for name, value in used.items())
        try:
            make(self, **used, **given)
        except FederatedError as error:
            raise FederatedError(f"{error} The environment ({_PREFIX}...) sets {listed}.") from error
        rank_zero_info(f"Arguments of the trainer from the environment ({_PREFIX}...): {listed}.")

    return cast(Init, call)


def _value(text: str) -> Any:
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return literal_eval(text)
    return text
