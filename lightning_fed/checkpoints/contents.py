"""The contents of a checkpoint: only values that load without running code, and the names of all others."""

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import call, rank_zero_warn
from lightning_fed.core.errors import FederatedError

_LEFT_OUT = "left_out"  # key of the list of entries left out of a checkpoint
_OURS = ("state_dict", "loops", "optimizer_states")  # tensors and numbers for any module
_PARTS = {
    "hyper_parameters": "hyper-parameters",
    "datamodule_hyper_parameters": "hyper-parameters of the data module",
    "callbacks": "state of the callback",
    "lr_schedulers": "in the state of a schedule:",
    "server_lr_scheduler": "in the state of server_lr_scheduler:",
}
_Path = tuple[str, ...]


class SafeContents:
    """Removes values that do not load without running code from a run's checkpoints, and warns once about each."""

    def __init__(self) -> None:
        self._unsafe: dict[_Path, Any] = {}  # the unsafe values so far, to skip testing the same object again
        self._reported: set[_Path] = set()
        self._is_checked = False

    def of(self, checkpoint: Mapping[str, Any], module: pl.LightningModule) -> dict[str, Any]:
        """Return a checkpoint that loads with ``weights_only=True``.

        It leaves out whole entries: hyper-parameters, callbacks' states, entries of schedules' and data modules'
        states, and entries that hooks add. NumPy numbers become Python numbers. Raise if an optimizer has such a value.
        """
        safe = {key: value if key == "state_dict" else _without_numpy(value) for key, value in checkpoint.items()}
        if "optimizer_states" in safe and not self._is_checked:
            check_loads(safe["optimizer_states"], "The state or an option of the local optimizer")
            check_loads(_server_step(safe).get("optimizer"), "The state or an option of server_optimizer")
            self._is_checked = True
        entries = list(_entries(safe))
        left_out: dict[_Path, Any] = {}
        for path, parent, name in entries:
            if path in self._unsafe and self._unsafe[path] is parent[name]:
                left_out[path] = parent.pop(name)
        rest = [entry for entry in entries if entry[0] not in left_out]
        if not _loads([parent[name] for _, parent, name in rest]):
            for path, parent, name in rest:
                if not _loads(parent[name]):
                    left_out[path] = parent.pop(name)
        for kind in ("", "datamodule_"):  # otherwise an empty configuration would be passed under the argument's name
            if (f"{kind}hyper_parameters",) in left_out:
                safe.pop(f"{kind}hparams_name", None)
        if left_out:
            safe[_LEFT_OUT] = [list(path) for path in left_out]
            self._unsafe |= left_out
            self._report({path: value for path, value in left_out.items() if path not in self._reported}, module)
        return safe

    def _report(self, entries: Mapping[_Path, Any], module: pl.LightningModule) -> None:
        self._reported |= entries.keys()
        reported = {path: value for path, value in entries.items() if not path[0].endswith("hparams_type")}
        if not reported:
            return
        groups: dict[str, list[str]] = {}
        for path, value in reported.items():
            part = _PARTS.get(path[0], "entries of hooks")
            inner = path if part == "entries of hooks" else path[1:]
            name = ".".join(inner) or "all"
            groups.setdefault(part, []).append(f"{name} ({', '.join(_kinds(value))})")
        listed = "; ".join(f"{part} {', '.join(names)}" for part, names in groups.items())
        restart = " Callbacks without a saved state start again." if any(p[0] == "callbacks" for p in reported) else ""
        arguments = [path[1:] for path in reported if path[0] == "hyper_parameters"]
        by_name = ""
        if arguments:
            example = "".join(f" ({name}=...)" for name in arguments[0])
            by_name = (
                f" {type(module).__name__}.load_from_checkpoint(path) uses the defaults of these arguments; pass others"
                f" by name{example}."
            )
        rank_zero_warn(
            f"Checkpoints leave out what cannot be loaded without running code: {listed}. A resumed run uses those of"
            f" the module and the data module passed to it.{restart}{by_name} To keep a type in checkpoints, allow it"
            " with torch.serialization.add_safe_globals."
        )


def fill_in(checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
    """Add the entries left out of a checkpoint, as the trainer's module and data module would save them now.

    Hooks that load the checkpoint then find every entry that they saved.
    """
    claims = checkpoint.get(_LEFT_OUT)
    if not isinstance(claims, list) or not claims:
        return
    own = {key: dict(value) if isinstance(value, dict) else value for key, value in checkpoint.items()}
    module, data = trainer.lightning_module, trainer.datamodule
    for holder in (module, data):
        if holder is not None and getattr(holder, "hparams", None):
            key, hparams = holder.CHECKPOINT_HYPER_PARAMS_KEY, holder.hparams
            own[key] = dict(hparams) if isinstance(hparams, dict) else hparams
    if data is not None and (state := data.state_dict()):
        own[type(data).__qualname__] = state
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", own)
    for claim in claims:
        path = tuple(claim) if isinstance(claim, list) else ()
        if not path or path[0] in (*_OURS, "callbacks", "lr_schedulers", "server_lr_scheduler"):
            continue
        source, target = (own, checkpoint) if len(path) == 1 else (own.get(path[0]), checkpoint.get(path[0]))
        if isinstance(source, Mapping) and isinstance(target, dict) and path[-1] in source:
            target.setdefault(path[-1], source[path[-1]])


def _entries(checkpoint: dict[str, Any]) -> Iterator[tuple[_Path, dict[str, Any], str]]:
    """Yield entries that may be left out: the path, the containing dict, and the key."""
    for key, value in checkpoint.items():
        if key == "lr_schedulers":
            for number, state in enumerate(value):
                yield from (((key, str(number), str(name)), state, name) for name in state)
        elif key not in _OURS and type(value) is dict:
            yield from (((key, str(name)), value, name) for name in value)
        elif key not in _OURS:
            yield (key,), checkpoint, key
    schedule = _server_step(checkpoint).get("schedule") or {}
    yield from ((("server_lr_scheduler", str(name)), schedule, name) for name in schedule)


def _server_step(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("step", {})
    return found


def check_loads(value: Any, what: str) -> None:
    """Raise if a value that checkpoints must contain does not load without running code."""
    safe = _without_numpy(value)
    if not _loads(safe):
        raise FederatedError(
            f"{what} holds {', '.join(_kinds(safe))}, which does not load without running code. Use"
            " numbers, text, tensors, and dicts and lists of them, or allow the type with"
            " torch.serialization.add_safe_globals."
        )


def _loads(value: Any) -> bool:
    """Return whether a value can be saved, and loaded without running code.

    Tensors always can. It skips them, since a callback may hold as many as the model, or one for each checkpoint.
    """
    buffer = io.BytesIO()
    try:
        torch.save(_without_tensors(value), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # pickling runs user code, which may raise anything
        return False
    return True


def _without_tensors(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples without tensors that hold nothing but numbers."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value if vars(value) or value.layout != torch.strided else None
    if type(value) is dict:
        return {key: _without_tensors(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_tensors, value))
    return value


def _kinds(value: Any) -> list[str]:
    """Return the names of the types that prevent a value from loading."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    found = [kind for part in parts if not _loads(part) for kind in _kinds(part)]
    return list(dict.fromkeys(found)) or [type(value).__name__]


def _without_numpy(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples with NumPy numbers converted to Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_without_numpy(key): _without_numpy(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_numpy, value))
    return value
