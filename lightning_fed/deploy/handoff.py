"""A job that is driven from outside: it runs until it needs something, and goes on when it is given it."""

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Handoff", "HandoffClosed"]


class HandoffClosed(BaseException):
    """Ends a job that nobody drives any longer."""


class Handoff:
    """Run a job, which calls :meth:`pause`, in its own thread; either it or its driver runs at any time, never both."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._thread: threading.Thread | None = None
        self._to_job, self._to_driver = threading.Semaphore(0), threading.Semaphore(0)
        self._value: Any = None  # for the job
        self._item: Any = None  # for the driver
        self._error: BaseException | None = None
        self._is_closing = self.is_done = False

    def resume(self, value: Any = None) -> Any:
        """Continue the job with a value for its :meth:`pause`; return what it pauses with next, None if it is done.

        The driver calls it. It raises what the job has raised.
        """
        if self.is_done:
            return None
        self._value = value
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lightning_fed-rounds", daemon=True)
            self._thread.start()
        else:
            self._to_job.release()
        self._to_driver.acquire()
        if (error := self._error) is not None:
            self._error = None
            raise error
        return self._item

    def pause(self, item: Any) -> Any:
        """Let the driver go on with an item; return what it gives in return; from the job."""
        self._item = item
        self._to_driver.release()
        self._to_job.acquire()
        if self._is_closing:
            raise HandoffClosed
        return self._value

    def close(self) -> None:
        """End the job where it has paused; from the driver."""
        if self._thread is None or self.is_done:
            self.is_done = True
            return
        self._is_closing = True
        self._to_job.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._job()
        except HandoffClosed:
            pass
        except BaseException as error:
            self._error = error
        self.is_done, self._item = True, None
        self._to_driver.release()
