"""Signals that stop a fit: recorded on arrival, handled at the next local step, in all processes together."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from lightning_fed.compat.private import SIGTERMException, TrainerFn, _SignalConnector
from lightning_fed.core.errors import ClientError


class Stop(IntEnum):
    """The request of a signal; the larger number wins."""

    NO = 0
    INTERRUPT = 1  # SIGINT
    TERMINATE = 2  # SIGTERM
    REQUEUE = 3  # SLURM's signal before the time limit


class OtherProcessError(ClientError):
    """Another process has failed, and this one ends with it."""


class RequeueException(SIGTERMException):
    """A fit stops so that SLURM can restart it."""


_EXCEPTIONS: dict[Stop, type[BaseException]] = {
    Stop.INTERRUPT: KeyboardInterrupt,
    Stop.TERMINATE: SIGTERMException,
    Stop.REQUEUE: RequeueException,  # also a SIGTERMException, so `stop_of` takes the larger number
}


def exception_of(stop: Stop) -> BaseException:
    """Return Lightning's exception for a request."""
    return _EXCEPTIONS[stop]()


def stop_of(error: BaseException | None) -> Stop:
    """Return the request that an exception represents; NO for any other exception."""
    return max((stop for stop, kind in _EXCEPTIONS.items() if isinstance(error, kind)), default=Stop.NO)


@dataclass(frozen=True)
class Failure:
    """The description of one process's exception for the others."""

    text: str | None  # the message; empty for a request to stop
    stop: Stop  # the request that it represents

    @staticmethod
    def of(error: BaseException | None) -> "Failure | None":
        """Return the description of an exception, if there is one."""
        if error is None:
            return None
        stop = stop_of(error)
        return Failure(None if stop else str(error) or type(error).__name__, stop)

    @staticmethod
    def raise_first(failures: Sequence["Failure | None"], own: BaseException | None = None) -> None:
        """Raise, in each process, the error that ends all of them; return if none failed.

        A failure of this process takes precedence over others' failures, and any failure over a request to stop.
        """
        if own is not None and not stop_of(own):
            raise own
        for rank, failure in enumerate(failures):
            if failure is not None and failure.text is not None:
                raise OtherProcessError(f"Process {rank} failed: {failure.text}") from own
        if stop := max((failure.stop for failure in failures if failure is not None), default=Stop.NO):
            raise exception_of(stop) from own


class RoundSignalConnector(_SignalConnector):
    """Lightning's signal handlers, which only record the request during a fit.

    Lightning's handlers save or communicate at once, while other processes may train other clients. A second SIGINT
    raises ``KeyboardInterrupt`` at once.
    """

    asked = Stop.NO
    _is_waiting = False

    def register_signal_handlers(self) -> None:
        """Register the handlers, and reset the request."""
        self.asked = Stop.NO
        super().register_signal_handlers()
        if self.trainer.state.fn == TrainerFn.FITTING and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._register_signal(signal.SIGINT, self._sigint_handler_fn)

    def check(self) -> None:
        """Raise the exception of a stop if a signal has requested one."""
        if self.asked:
            raise exception_of(self.asked)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal stop the fit inside at once, since the fit is only waiting.

        If other code also handles SIGTERM, that code must end the process.
        """
        self._is_waiting = True
        try:
            self.check()
            yield
        finally:
            self._is_waiting = False

    def requeue(self) -> None:
        """Save the last completed round for SLURM's next job, and request that job."""
        super()._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]

    def _ask(self, stop: Stop) -> None:
        self.asked = max(self.asked, stop)
        others = self._original_handlers.get(signal.SIGTERM) if stop == Stop.TERMINATE else None
        if self._is_waiting and others in (None, signal.SIG_DFL, signal.SIG_IGN):
            raise exception_of(self.asked)

    def _sigint_handler_fn(self, signum: Any, frame: Any) -> None:
        if self.asked >= Stop.INTERRUPT:
            raise KeyboardInterrupt
        self._ask(Stop.INTERRUPT)
        if self.trainer.is_global_zero:  # written directly, since a handler may interrupt a log record
            os.write(2, b"\nStopping at the next local step; interrupt once more to stop at once.\n")

    def _slurm_sigusr_handler_fn(self, signum: Any, frame: Any) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._ask(Stop.REQUEUE)
        else:
            super()._slurm_sigusr_handler_fn(signum, frame)

    def _sigterm_notifier_fn(self, signum: Any, frame: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if launcher is not None and not self.received_sigterm and self.asked < Stop.TERMINATE:
            launcher.kill(signum)
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._ask(Stop.TERMINATE)
        else:
            self.received_sigterm = True
