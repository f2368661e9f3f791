"""A run's checkpoint folders: the checkpoint to resume or evaluate, and the path for a stopped run's checkpoint."""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fed.checkpoints.files import (
    AtomicCheckpointIO,
    by_age,
    damage_of,
    link,
    local_path,
    remove_temporary_files,
    resumable,
)
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import MisconfigurationException, rank_zero_info
from lightning_fed.core.errors import FederatedError


def adapt_checkpoint_callbacks(trainer: pl.Trainer, is_fit: bool) -> None:
    """Make ModelCheckpoints count rounds; before a fit, clean up their folders and change how they save ``last``.

    Checkpoints due every n steps are due every n rounds, since the global step counts rounds. Lightning would check it
    after each batch, in the middle of the next round. ``last`` becomes the last due round. Lightning only saves it in
    rounds of the top k, so a run killed long after its best round would lose all rounds since. Due checkpoints are
    saved once the round is complete. Links to checkpoints always point to a file. Patching the instances also covers
    subclasses.
    """
    writers = [c for c in trainer.checkpoint_callbacks if isinstance(c, pl.callbacks.ModelCheckpoint)]
    for callback in writers:
        if rounds := callback._every_n_train_steps:
            callback._every_n_train_steps, callback._every_n_epochs = 0, rounds
    if not is_fit:
        return
    for callback in writers:
        callback._save_topk_checkpoint = partial(_save_due, callback)  # type: ignore[method-assign]
        callback._save_last_checkpoint = partial(_save_last, callback)  # type: ignore[method-assign]
        callback.on_validation_end = partial(_save_after_round, callback, "on_validation_end")  # type: ignore[method-assign]
        callback.on_train_epoch_end = partial(_save_after_round, callback, "on_train_epoch_end")  # type: ignore[method-assign]
        is_lightnings = type(callback)._link_checkpoint is pl.callbacks.ModelCheckpoint._link_checkpoint
        if is_lightnings and not callback.save_weights_only:
            callback._link_checkpoint = _link_checkpoint  # type: ignore[method-assign]
    if trainer.is_global_zero:
        for callback in writers:
            if callback.save_top_k or callback.save_last:
                _check_writable(callback.dirpath)
        folders = {local_path(c.dirpath) for c in writers if c.dirpath and not c.save_weights_only}
        for folder in sorted(f for f in {*folders, local_path(trainer.default_root_dir)} if f is not None):
            for gone in remove_temporary_files(folder):
                rank_zero_info(f"Removed {gone}, which a save that was killed left.")


def _check_writable(path: Any) -> None:
    """Raise before the first round if checkpoints cannot be saved in a local folder."""
    folder = None if path is None else local_path(path)
    if folder is None:
        return
    place = next(place for place in (folder, *folder.parents) if place.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = f"this user cannot write to {place}" if place.is_dir() else f"{place} is not a folder"
        raise FederatedError(
            f"ModelCheckpoint cannot save in {folder}: {why}. Choose another folder with ModelCheckpoint's dirpath, or"
            " with default_root_dir."
        )


def restore_scores(trainer: pl.Trainer, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore the ModelCheckpoints' scores that Lightning saves but does not load.

    A run that resumes in the same folder gets the newest score of the top k. A run in a new folder gets the best
    checkpoints so far: otherwise, its best one would ignore earlier rounds. The files stay where they are. If the
    folder was moved, the run continues with the files in their new location.
    """
    resumed = local_path(trainer.ckpt_path)
    places = [*folders(trainer, whole=False), *(file.parent for file in _exception_checkpoints(trainer))]
    is_there = resumed is not None and resumed.parent.resolve() in [place.resolve() for place in places]
    for callback in _saving_callbacks(trainer, whole=False):
        state = states.get(callback.state_key, {})
        if is_there and (moved := _moved(trainer, callback, state)) is not None:
            callback.load_state_dict(state := moved)
        if state.get("dirpath") == callback.dirpath:
            callback.current_score = state.get("current_score")
        elif state.get("best_k_models"):
            _restore_best(trainer, callback, state["best_k_models"])


def _moved(
    trainer: pl.Trainer, callback: pl.callbacks.ModelCheckpoint, state: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return a ModelCheckpoint's state with the new location of its folder, or None if the folder was not moved."""
    before, now = state.get("dirpath"), callback.dirpath
    if before in (None, now) or now is None or "://" in before or _exists(trainer, before):
        return None

    def place(path: str) -> str:
        found = Path(now) / Path(path).name
        return str(found) if path and _exists(trainer, found) else ""

    best = {there: score for path, score in state["best_k_models"].items() if (there := place(path))}
    names = ("best_model_path", "kth_best_model_path", "last_model_path")
    return {**state, "dirpath": now, "best_k_models": best, **{name: place(state[name]) for name in names}}


def _restore_best(trainer: pl.Trainer, callback: pl.callbacks.ModelCheckpoint, scores: Mapping[str, Any]) -> None:
    """Give a ModelCheckpoint the best checkpoints of another folder; missing files no longer count.

    Remote files do not count either, since Lightning would remove them once there are better ones.
    """
    there = [path for path in scores if local_path(path) is not None and _exists(trainer, path)]
    there.sort(key=scores.__getitem__, reverse=callback.mode == "max")  # best first
    kept = there if callback.save_top_k == -1 else there[: callback.save_top_k]
    callback.best_k_models = {path: scores[path] for path in kept}
    callback.best_model_path = kept[0] if kept else ""
    if kept:
        callback.best_model_score = scores[kept[0]]
        callback.kth_best_model_path, callback.kth_value = kept[-1], scores[kept[-1]]


def newest(trainer: pl.Trainer, whole: bool = True) -> str | None:
    """Return the newest checkpoint of a run, or None.

    It searches the folders of the trainer's ModelCheckpoints and of stopped SLURM jobs. If these have none and a logger
    numbers its versions automatically, it searches earlier versions. It adds the files of OnExceptionCheckpoints. It
    may return a damaged checkpoint, since the user must choose to continue from an older one.
    """
    found_folders = folders(trainer, whole)
    root = local_path(trainer.default_root_dir)
    stopped = sorted(root.glob("hpc_ckpt_*.ckpt")) if root is not None else []
    found = [*stopped, *(file for folder in found_folders for file in by_age(folder))]
    if not found and _numbers_versions(trainer):
        numbered = [folder for folder in found_folders if folder.match("version_*/checkpoints")]
        found = by_age(*(other for folder in numbered for other in folder.parent.parent.glob("version_*/checkpoints")))
    found += [file for file in _exception_checkpoints(trainer) if file.is_file()]
    for file in sorted(found, key=lambda file: -file.stat().st_mtime_ns):
        if not whole or damage_of(file) is not None or resumable(file):
            return str(file)
    return None


def folders(trainer: pl.Trainer, whole: bool) -> list[Path]:
    """Return the local folders of ModelCheckpoints; ``whole`` skips those that only save weights."""
    paths = [
        local_path(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))
        for callback in _saving_callbacks(trainer, whole)
    ]
    return [path for path in paths if path is not None]


def _exception_checkpoints(trainer: pl.Trainer) -> list[Path]:
    """Return the local files of OnExceptionCheckpoints."""
    files = [local_path(c.ckpt_path) for c in trainer.callbacks if isinstance(c, pl.callbacks.OnExceptionCheckpoint)]
    return [file for file in files if file is not None]


def _numbers_versions(trainer: pl.Trainer) -> bool:
    """Return whether a logger numbers its versions automatically, and the trainer has not filled its own yet."""
    unnumbered = trainer._checkpoint_connector.unnumbered
    return trainer.fit_loop.round == 0 and any(logger in unnumbered for logger in trainer.loggers)


def save_last_round(trainer: pl.Trainer, round: int, kept: tuple[int, Any] | None) -> None:
    """Save the last completed round of a stopping run, unless a checkpoint has it; all processes must call it.

    It becomes the ``last.ckpt`` of the first ModelCheckpoint that saves more than weights.
    """
    path = kept[1] if kept is not None and kept[0] == round and _exists(trainer, kept[1]) else None
    keeper = next(_saving_callbacks(trainer), None)
    if path is None and round > 0 and keeper is not None and not trainer.fast_dev_run:
        path = _path_of_last(trainer, keeper, None if kept is None else str(kept[1]))
        if keeper.save_last:
            keeper.last_model_path = path
        trainer.save_checkpoint(path)
    if path is not None:
        resume = "To resume, run again with ckpt_path='last', on the command line --ckpt_path last."
        rank_zero_info(f"Stopped after {round} completed rounds. {resume} The checkpoint is {path}.")
    else:
        why = "; no ModelCheckpoint saves more than weights, so no checkpoint holds them" if round else ""
        rank_zero_info(f"Stopped after {round} completed rounds{why}.")


def _saving_callbacks(trainer: pl.Trainer, whole: bool = True) -> Iterator[pl.callbacks.ModelCheckpoint]:
    """Yield the callbacks that save checkpoints; ``whole`` skips those that only save weights."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, pl.callbacks.ModelCheckpoint) and not (whole and callback.save_weights_only):
            yield callback


def _path_of_last(trainer: pl.Trainer, keeper: pl.callbacks.ModelCheckpoint, resumed: str | None) -> str:
    """Return a path for the last checkpoint that does not overwrite another run's checkpoint."""
    candidates = keeper._monitor_candidates(trainer)
    path, version = keeper.format_checkpoint_name(candidates, keeper.CHECKPOINT_NAME_LAST), keeper.STARTING_VERSION
    own = {keeper.last_model_path, resumed}
    while path not in own and keeper.file_exists(path, trainer):
        path = keeper.format_checkpoint_name(candidates, keeper.CHECKPOINT_NAME_LAST, ver=version)
        version += 1
    return path


def _exists(trainer: pl.Trainer, path: Any) -> bool:
    """Return whether a checkpoint still exists, according to rank zero."""
    file = local_path(path)
    return bool(trainer.strategy.broadcast(file is None or file.exists()))


def _link_checkpoint(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
    """Link to a checkpoint atomically."""
    if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
        link(Path(filepath), Path(linkpath))
    trainer.strategy.barrier()


def _save_after_round(
    callback: pl.callbacks.ModelCheckpoint, hook: str, trainer: pl.Trainer, module: pl.LightningModule
) -> None:
    """Call a saving hook once the round is complete, first for callbacks that only save weights.

    A checkpoint saved earlier would miss the other hooks of the round's end: a resumed run does not call them again.
    Weights-only checkpoints come first, because a checkpoint only records files that were written before it.
    """
    save = partial(getattr(type(callback), hook), callback, trainer, module)
    if getattr(trainer.fit_loop, "is_closing", False):
        trainer.fit_loop.after_round.append((not callback.save_weights_only, save))
    else:
        save()


def _save_due(callback: pl.callbacks.ModelCheckpoint, trainer: pl.Trainer, monitor_candidates: dict[str, Any]) -> None:
    """Save a due round among the top k, or else as the last one."""
    if callback.save_last and not callback.last_model_path:  # the file saved below holds the path of the link to it
        callback.last_model_path = _path_of_last(trainer, callback, None)
    try:
        type(callback)._save_topk_checkpoint(callback, trainer, monitor_candidates)
    except MisconfigurationException:
        monitors = getattr(trainer.fit_loop, "monitors", None)
        if monitors is None or callback.monitor is None or callback.monitor in monitor_candidates:
            raise
        monitors.note(type(callback).__name__, callback.monitor, trainer.callback_metrics)
    if callback.save_last and callback._last_global_step_saved != trainer.global_step:
        callback._last_checkpoint_saved = ""  # otherwise the link would point to an older round
        callback._save_last_checkpoint(trainer, monitor_candidates)


def _save_last(callback: pl.callbacks.ModelCheckpoint, trainer: pl.Trainer, monitor_candidates: dict[str, Any]) -> None:
    """Save or link the last checkpoint, unless it already has this round, or this round is not due."""
    saved = callback._last_checkpoint_saved
    is_due = callback._last_global_step_saved == trainer.global_step
    if not saved or (is_due and saved != callback.last_model_path):
        type(callback)._save_last_checkpoint(callback, trainer, monitor_candidates)


_RUNS = ("checkpoints", "*/checkpoints", "*/*/checkpoints")  # without a logger, and below its name and version
_SHOWN = 8


def last_of_newest_run(trainer: pl.Trainer) -> str | None:
    """Return the newest checkpoint to evaluate, possibly with weights only, or None.

    It searches the folders of the trainer's ModelCheckpoints. If they are empty, it searches the folders of all runs
    under the trainer's :func:`roots`. A trainer that has trained only searches its own run.
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
