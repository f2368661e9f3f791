"""Processes started from Python: the parent gets the round, and raises a child's exception."""

import copy
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import (
    Tqdm,
    TrainerFn,
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
    rank_zero_info,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.strategies.stopping import OtherProcessError

_NO_SCRIPT = ("", "-", "-c")  # sys.argv[0] of a program that is not in a file
_LARGEST = 2**15  # maximum bytes of an exception, so that a pipe accepts it without a reader


class RoundLauncher(_MultiProcessingLauncher):
    """Lightning's launcher for "fork" and "spawn", for trainers whose epochs are rounds.

    The parent raises the exception that ended a child, with the child's trace as its cause. After a fit the parent's
    trainer has the number of completed rounds. Forked processes use one thread each: OpenMP's threads do not survive a
    fork, and a child that uses several would wait for them forever.
    """

    _errors: Any = None  # a queue of exceptions while processes run

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run a function in all processes; see Lightning's launcher."""
        if self._start_method == "fork" and dist.is_available() and dist.is_initialized():
            raise FederatedError(
                "A strategy that forks, such as 'clients_fork', cannot start here: this process is in a process group,"
                " which a run with strategy='clients' or 'ddp' leaves behind, and the forked processes would wait for"
                " each other forever. Call torch.distributed.destroy_process_group() first, or start a new process."
            )
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise FederatedError(
                "A second fit of this trainer cannot continue the first one: its state ended with the processes that"
                " held it. Make a new FederatedTrainer, and resume with fit(..., ckpt_path=...)."
            )
        self._errors = multiprocessing.get_context(self._start_method).SimpleQueue()
        try:
            return super().launch(partial(self._in_child, function), *args, trainer=trainer, **kwargs)
        except ProcessRaisedException as error:
            raised = self._first_error()
            if raised is None:
                raise
            raise raised from error
        finally:
            self._errors = None

    def _in_child(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the function, and send an exception that ends it to the parent."""
        if self._start_method == "fork":
            _settle_in_fork()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _can_travel(error):
                self._errors.put(error)
            raise

    def _first_error(self) -> Exception | None:
        """Return the exception that ended a child, preferably not one caused by another process."""
        errors: list[Exception] = []
        while not self._errors.empty():
            errors.append(self._errors.get())
        return min(errors, key=lambda error: isinstance(error, OtherProcessError), default=None)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        """Load the trained weights in the precision of the processes that trained them."""
        if worker_output.weights_path is not None:
            trainer.precision_plugin.convert_module(trainer.lightning_module)
        super()._recover_results_in_main_process(worker_output, trainer)

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the results for the parent's trainer: Lightning's, and the number of completed rounds."""
        loop: Any = trainer.fit_loop
        return {**super().get_extra_results(trainer), "rounds": loop.round}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Set these results in the parent's trainer."""
        super().update_main_process_results(trainer, extra)
        loop: Any = trainer.fit_loop
        loop.run_state.end_elsewhere(extra["rounds"])
        loop.set_progress(extra["rounds"])


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts a trainer's other processes by running its script again, and refuses a program that is not in a file."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other processes unless they exist already, and call a function in this one.

        Raises:
            FederatedError: If there is no script to run.
        """
        starts_some = self.num_processes > 1 and not self.cluster_environment.creates_processes_externally
        if starts_some and sys.argv[0] in _NO_SCRIPT:
            name = getattr(None if trainer is None else trainer.strategy, "strategy_name", "ddp")
            raise FederatedError(
                f"strategy={name!r} starts its other processes by running the script again, found a program that is not"
                f" in a file (python -c, or from standard input). Write it to a file and run that, or pass"
                f" strategy='{name}_fork', which starts them from Python."
            )
        return super().launch(function, *args, trainer=trainer, **kwargs)


def adopt_launcher(trainer: pl.Trainer) -> None:
    """Make a trainer that starts processes use the launchers of this module."""
    launcher = trainer.strategy.launcher
    if type(launcher) is _MultiProcessingLauncher:
        launcher.__class__ = RoundLauncher
    elif type(launcher) is _SubprocessScriptLauncher:
        launcher.__class__ = ScriptLauncher


def _settle_in_fork() -> None:
    """Use one thread, and replace the lock of progress bars that forks share with their parent.

    A process killed while drawing a bar would keep the lock, and the parent's next bar would wait forever.
    """
    Tqdm.set_lock(threading.RLock())
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        rank_zero_info(
            "Forked processes compute on one thread each. Start more of them to use more cores, or run a script"
            " with strategy='clients'."
        )


def _can_travel(error: Exception) -> bool:
    """Return whether an exception can be rebuilt in another process, and fits into a pipe."""
    try:
        return str(copy.copy(error)) == str(error) and len(pickle.dumps(error)) <= _LARGEST
    except Exception:
        return False
