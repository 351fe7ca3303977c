"""``SimThread`` runs a function of a simulated process that may block for virtual time, as a ``def`` handler does.

The function has its own thread, but never runs in parallel with the simulation. While the function runs, the simulation
waits, and while the simulation runs, the function waits. So a run with the same seed repeats exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from plait.testing.simulated_disk import SimulatedCrash


class SimThread:
    """Runs ``function``. The simulation calls ``resume``, and the function calls ``block``."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self._thread = threading.Thread(target=self._run, name="plait-simulated", daemon=True)
        self.result: Any = None
        self.error: BaseException | None = None
        #: The virtual seconds for which the function blocks; None: it has ended.
        self.blocked: float | None = 0.0

    def resume(self) -> None:
        """Run the function until it blocks or ends."""
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._back.acquire()

    def kill(self) -> None:
        """End the function where it blocks, because its process is dead."""
        if self.blocked is not None and self._thread.ident is not None:
            self._killed = True
            self.resume()
            self._thread.join()

    def block(self, seconds: float) -> None:
        """Block for ``seconds`` of virtual time. Only the function itself calls this, in its thread."""
        self.blocked = seconds
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise SimulatedCrash("the process of this thread was killed")

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - the loop gives it to the future
            self.error = error
        self.blocked = None
        self._back.release()
