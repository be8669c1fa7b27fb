"""`ignore`: a worker that has a nanny leaves Ctrl-C to the process of its nanny.

A terminal, and a notebook that interrupts a cell, send SIGINT to a whole group of processes, the workers of a
`LocalCluster` among them. Each of those closes, and its nanny with it, as if it had been asked to: the cluster is empty
for good, and what is computed next waits for ever. The nanny's process gets the signal as well, and it decides: ``dask
worker`` closes its worker, a session goes on with what it has.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Worker


def _left_to_the_nanny(signum: int, frame: object) -> None:
    # Not SIG_IGN: programs that tasks start would inherit it.
    pass


def ignore(worker: Worker) -> Callable[[], None]:
    """Have this process do nothing on SIGINT; returns the way back.

    Nothing is done where the worker has no nanny, or runs in another than the main thread, as no signal comes there.
    """
    if not worker.nanny or threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.signal(signal.SIGINT, _left_to_the_nanny)

    def undo() -> None:
        if signal.getsignal(signal.SIGINT) is _left_to_the_nanny:
            signal.signal(signal.SIGINT, before)

    return undo
