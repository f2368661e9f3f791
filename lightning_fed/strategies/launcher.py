"""Processes that are started from within Python: the parent learns the round, and raises what ended one of them."""

import copy
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import Tqdm, TrainerFn, _MultiProcessingLauncher, rank_zero_info
from lightning_fed.core.errors import FederatedError
from lightning_fed.strategies.stopping import OtherProcessError

__all__ = ["RoundLauncher", "adopt_launcher"]

_LARGEST = 2**15  # bytes of an exception: a pipe takes them though nobody reads yet


class RoundLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of "fork" and "spawn", for trainers whose epochs are rounds.

    The parent raises the exception that ended a child, with the child's trace as its cause. After a fit the parent's
    trainer knows how many rounds are done. Forked processes compute on one thread each: the threads of OpenMP do not
    survive a fork, and a child that asks for several waits for them forever.
    """

    _errors: Any = None  # a queue of exceptions, while processes are running

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
                "A second fit of this trainer cannot go on from the first one: its state has ended with the processes"
                " that held it. Make a new FederatedTrainer, and resume with fit(..., ckpt_path=...)."
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
        """Run the function, and let the parent have the exception that ends it."""
        if self._start_method == "fork":
            _settle_in_fork()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _can_travel(error):
                self._errors.put(error)
            raise

    def _first_error(self) -> Exception | None:
        """Return the exception that ended a child, rather than one by which another process ended it."""
        errors: list[Exception] = []
        while not self._errors.empty():
            errors.append(self._errors.get())
        return min(errors, key=lambda error: isinstance(error, OtherProcessError), default=None)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        """Load the trained weights, in the precision that they have in the processes that trained them."""
        if worker_output.weights_path is not None:
            trainer.precision_plugin.convert_module(trainer.lightning_module)
        super()._recover_results_in_main_process(worker_output, trainer)

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return what the parent's trainer is told: the rounds done beside what Lightning tells it."""
        loop: Any = trainer.fit_loop
        return {**super().get_extra_results(trainer), "rounds": loop.round}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Let the parent's trainer know it."""
        super().update_main_process_results(trainer, extra)
        loop: Any = trainer.fit_loop
        loop.run_state.end_elsewhere(extra["rounds"])
        loop.set_progress(extra["rounds"])


def adopt_launcher(trainer: pl.Trainer) -> None:
    """Let a trainer that starts processes from within Python start them with :class:`RoundLauncher`."""
    launcher = trainer.strategy.launcher
    if type(launcher) is _MultiProcessingLauncher:
        launcher.__class__ = RoundLauncher


def _settle_in_fork() -> None:
    """Compute on one thread, and let go of the lock of progress bars that forks share with their parent.

    A process that is killed while it draws a bar would keep that lock, and the parent's next bar would wait for ever.
    """
    Tqdm.set_lock(threading.RLock())
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        rank_zero_info(
            "Forked processes compute on one thread each. Start more of them to use more cores, or run a script"
            " with strategy='clients'."
        )


def _can_travel(error: Exception) -> bool:
    """Whether an exception can be made again in another process, and fits the pipe to it."""
    try:
        return str(copy.copy(error)) == str(error) and len(pickle.dumps(error)) <= _LARGEST
    except Exception:
        return False
