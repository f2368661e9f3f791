"""The checkpoint for an evaluation: the last or best one of the newest run in the trainer's folders."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_fed.checkpoints.files import AtomicCheckpointIO, by_age, local_path
from lightning_fed.checkpoints.folders import folders, newest
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError

_RUNS = ("checkpoints", "*/checkpoints", "*/*/checkpoints")  # without a logger, and in folders for its name and version
_SHOWN = 8


def last_of_newest_run(trainer: pl.Trainer) -> str | None:
    """Return the newest checkpoint to evaluate, possibly with weights only, or None.

    It searches the folders of the trainer's ModelCheckpoints; if they are empty, the folders of all runs under the
    trainer's :func:`roots`. A trainer that has trained only searches its own run.
    """
    if trainer.fit_loop.round > 0:
        return newest(trainer, whole=False)
    own = by_age(*folders(trainer, whole=False))
    return next(map(str, own or _below(roots(trainer))), None)


def best_of_newest_run(trainer: pl.Trainer) -> str:
    """Return the best checkpoint of the newest run, according to that run's newest checkpoint."""
    latest = last_of_newest_run(trainer)
    if latest is None:
        raise FederatedError(f"ckpt_path='best' found no checkpoint under {' or '.join(map(str, roots(trainer)))}.")
    states = trainer.strategy.checkpoint_io.load_checkpoint(latest).get("callbacks") or {}
    noted = {key: str(state["best_model_path"]) for key, state in states.items() if "best_model_path" in state}
    mine = trainer.checkpoint_callback
    own = noted.get(mine.state_key) if isinstance(mine, pl.callbacks.ModelCheckpoint) else None
    best = own or next(filter(None, noted.values()), None)
    if best is not None:
        beside = Path(latest).parent / Path(best).name  # the folder may have been moved
        for file in (Path(best), beside):
            if file.is_file():
                return str(file)
    why = f"the best one, {best}, is gone" if best else "it does not note which one was best"
    raise FederatedError(
        f"ckpt_path='best': the newest run's last checkpoint is {latest}, and {why}. Pass a path, or ckpt_path='last'."
        f" {_contents(Path(latest).parent)}"
    )


def check_exists(trainer: pl.Trainer, path: Any) -> None:
    """Raise if a local checkpoint does not exist; URLs are not checked."""
    file = local_path(path)
    if file is None or file.is_file() or not isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO):
        return
    folder = next(place for place in (file, *file.parents) if place.is_dir())
    what = "It is a folder. " if folder == file else ""
    latest = last_of_newest_run(trainer)
    hint = f" The newest one of this configuration is {latest} (ckpt_path='last')." if latest is not None else ""
    raise FederatedError(f"There is no checkpoint {path}. {what}{_contents(folder)}{hint}")


def roots(trainer: pl.Trainer) -> list[Path]:
    """Return the local folders that contain a trainer's runs: its own, and its loggers'."""
    places = [trainer.default_root_dir, *(logger.save_dir for logger in trainer.loggers)]
    found = [local_path(place) for place in places if place is not None]
    return list(dict.fromkeys(root for root in found if root is not None))


def _below(places: Iterable[Path]) -> list[Path]:
    """Return the checkpoints of all runs under some folders, newest first."""
    found = [folder for place in places for folder in (place, *(f for p in _RUNS for f in place.glob(p)))]
    return by_age(*{folder.resolve() for folder in found})


def _contents(folder: Path) -> str:
    """Return a description of a folder's checkpoints, newest first."""
    names = [str(file.relative_to(folder.resolve())) for file in _below([folder])]
    if not names:
        return f"{folder} holds no checkpoint."
    more = [f"and {len(names) - _SHOWN} older ones"] if len(names) > _SHOWN else []
    return f"{folder} holds {', '.join([*names[:_SHOWN], *more])}."
