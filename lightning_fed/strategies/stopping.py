"""Signals that ask a fit to stop: noted when they come, heeded at the next local step, in all processes together."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from lightning_fed.compat.private import SIGTERMException, TrainerFn, _SignalConnector
from lightning_fed.core.errors import ClientError

__all__ = [
    "Failure",
    "OtherProcessError",
    "RequeueException",
    "RoundSignalConnector",
    "Stop",
    "exception_of",
    "stop_of",
]


class Stop(IntEnum):
    """What a signal asks for; the larger number wins."""

    NO = 0
    INTERRUPT = 1  # SIGINT
    TERMINATE = 2  # SIGTERM
    REQUEUE = 3  # SLURM's signal before the time is up


class OtherProcessError(ClientError):
    """Another process has failed, and with it this one ends."""


class RequeueException(SIGTERMException):
    """A fit stops for SLURM to start it again."""


def exception_of(stop: Stop) -> BaseException:
    """Return what is raised where a request is heeded: what Lightning raises."""
    kinds = {Stop.INTERRUPT: KeyboardInterrupt, Stop.TERMINATE: SIGTERMException, Stop.REQUEUE: RequeueException}
    return kinds[stop]()


def stop_of(error: BaseException | None) -> Stop:
    """Return the request that an exception stands for; NO for any other exception."""
    if isinstance(error, RequeueException):
        return Stop.REQUEUE
    if isinstance(error, SIGTERMException):
        return Stop.TERMINATE
    return Stop.INTERRUPT if isinstance(error, KeyboardInterrupt) else Stop.NO


@dataclass(frozen=True)
class Failure:
    """What the other processes hear of an exception in one.

    Attributes:
        text: Its message; none of a request to stop.
        stop: The request to stop that it stands for.
    """

    text: str | None
    stop: Stop

    @staticmethod
    def of(error: BaseException | None) -> "Failure | None":
        """Return what others hear of an exception, if there is one."""
        if error is None:
            return None
        stop = stop_of(error)
        return Failure(None if stop else str(error) or type(error).__name__, stop)

    @staticmethod
    def raise_first(failures: Sequence["Failure | None"], own: BaseException | None = None) -> None:
        """Raise in every process what ends them all; return if nobody failed.

        Raises:
            OtherProcessError: If another process failed; this one's own exception goes before.
            SIGTERMException: If nobody failed, and one was told to stop; KeyboardInterrupt likewise.
        """
        if own is not None and not stop_of(own):
            raise own
        for rank, failure in enumerate(failures):
            if failure is not None and failure.text is not None:
                raise OtherProcessError(f"Process {rank} failed: {failure.text}") from own
        if stop := max((failure.stop for failure in failures if failure is not None), default=Stop.NO):
            raise exception_of(stop) from own


class RoundSignalConnector(_SignalConnector):
    """Lightning's handlers of signals, which in a fit do nothing but note the request.

    Lightning's own save, or ask the other processes, wherever the signal strikes: there the others are at other
    clients. A second SIGINT is a ``KeyboardInterrupt`` on the spot.
    """

    asked = Stop.NO
    _is_waiting = False

    def register_signal_handlers(self) -> None:
        """Register the handlers; nothing has been asked yet."""
        self.asked = Stop.NO
        super().register_signal_handlers()
        if self._is_fit and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._register_signal(signal.SIGINT, self._sigint_handler_fn)

    def check(self) -> None:
        """Stop here if a signal asked for it."""
        if self.asked:
            raise exception_of(self.asked)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal stop the fit inside right where it strikes: there the fit does nothing but wait.

        If others handle SIGTERM as well, it is up to them to end the process.
        """
        self._is_waiting = True
        try:
            self.check()
            yield
        finally:
            self._is_waiting = False

    def requeue(self) -> None:
        """Save the last completed round where SLURM's next job looks for it, and ask SLURM for that job."""
        super()._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]

    @property
    def _is_fit(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    def _ask(self, stop: Stop) -> None:
        self.asked = max(self.asked, stop)
        others = self._original_handlers.get(signal.SIGTERM) if stop == Stop.TERMINATE else None
        if self._is_waiting and others in (None, signal.SIG_DFL, signal.SIG_IGN):
            raise exception_of(self.asked)

    def _sigint_handler_fn(self, signum: Any, frame: Any) -> None:
        if self.asked >= Stop.INTERRUPT:
            raise KeyboardInterrupt
        self._ask(Stop.INTERRUPT)
        if self.trainer.is_global_zero:  # written at once: a handler may strike in the middle of a log record
            os.write(2, b"\nStopping at the next local step; interrupt once more to stop at once.\n")

    def _slurm_sigusr_handler_fn(self, signum: Any, frame: Any) -> None:
        if self._is_fit:
            self._ask(Stop.REQUEUE)
        else:
            super()._slurm_sigusr_handler_fn(signum, frame)

    def _sigterm_notifier_fn(self, signum: Any, frame: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if launcher is not None and not self.received_sigterm and self.asked < Stop.TERMINATE:
            launcher.kill(signum)
        if self._is_fit:
            self._ask(Stop.TERMINATE)
        else:
            self.received_sigterm = True
