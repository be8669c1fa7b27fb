"""The listening socket of a worker. It stays quiet when the process has no file descriptor left.

Theory of operation. A connection that cannot be accepted stays in the kernel's queue, and epoll reports it again at
once: a loop that only tries again takes a whole core. So one descriptor is kept in reserve. When `accept` fails for
want of descriptors, the reserve is closed, each connection in the queue is accepted and closed, and the reserve is
opened again. The other workers see that at once and send by distributed's comms, instead of waiting for an answer.
Where that is not possible, and for any other failure of `accept`, nothing is accepted for `PAUSE_SECONDS`.

While there are too many that have not proved themselves, the others wait in the kernel's queue: `look` goes on.

All of it runs in the thread of the receiving loop.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.shuffle.transport.ioloop import IoLoop

#: after a failure that the reserve does not help with, nothing is accepted for so long
PAUSE_SECONDS = 1.0
_BACKLOG = 128
_SHORT = frozenset({errno.EMFILE, errno.ENFILE})


def _reserve() -> int | None:
    """A descriptor to give up later; None: there is none left."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # shown when `accept` fails for the same reason
        return None


def _bound(host: str, ports: tuple[int, int]) -> socket.socket:
    """A socket that listens on the first free port of a range, first and last included."""
    for port in range(ports[0], ports[1] + 1):
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if port:
                # Connections of a worker before this one may linger there. A port that is listened on stays refused.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            return sock
        except OSError as e:
            sock.close()
            if port == ports[1]:
                if port and e.errno == errno.EADDRINUSE:
                    raise OSError(
                        errno.EADDRINUSE,
                        f"gpurt.shuffle.listen-ports is {ports[0]}:{ports[1]}, and none of these is free on {host}. "
                        "Remedy: a range with a port for each worker of a host",
                    ) from e
                raise
            if e.errno != errno.EADDRINUSE:
                raise
    raise ValueError(f"the range of ports {ports!r} is empty")


class Listener:
    """Listen on an address of this worker; `serve` begins to accept.

    Parameters
    ----------
    ports
        The first and the last that may be taken; (0, 0): any that is free.

    Raises
    ------
    OSError
        The address cannot be bound, or none of the ports is free.
    """

    def __init__(self, host: str, ports: tuple[int, int] = (0, 0)) -> None:
        self._socket = _bound(host, ports)
        #: (host, port) that peers connect to
        self.endpoint: tuple[str, int] = self._socket.getsockname()[:2]
        self._spare = _reserve()
        #: connections closed because no descriptor was left
        self.refused = 0
        #: times that nothing was accepted for `PAUSE_SECONDS`
        self.pauses = 0
        self._resume_at = math.inf
        #: nothing is accepted, as there are too many
        self._held = False

    def serve(
        self,
        loop: IoLoop,
        accepted: Callable[[socket.socket], None],
        failed: Callable[[str], None],
        full: Callable[[], bool] = lambda: False,
    ) -> None:
        """Accept in the loop's thread from now on.

        Parameters
        ----------
        failed
            Called with a text for each failure, which may be often.
        full
            Whether no more may be accepted for now. When it changes, `look` is to be called.
        """
        self._loop, self._accepted, self._failed, self._full = loop, accepted, failed, full
        loop.on_event[self._socket.fileno()] = self._event
        loop.poll.register(self._socket, select.EPOLLIN)

    def tick(self, now: float) -> None:
        """Accept again when a pause is over."""
        if now >= self._resume_at:
            self._resume_at = math.inf
            if self._spare is None:
                self._spare = _reserve()
            self._loop.poll.modify(self._socket, select.EPOLLIN)

    def look(self) -> None:
        """Accept what waits, if it may be accepted again."""
        if self._held and not self._full():
            self._held = False
            self._loop.poll.modify(self._socket, select.EPOLLIN)

    def close(self) -> None:
        """Stop listening."""
        self._loop.on_event.pop(self._socket.fileno(), None)
        self._socket.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _event(self, event: int) -> None:
        while True:
            if self._full():
                self._held = True
                self._loop.poll.modify(self._socket, 0)
                return
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as e:
                refused = self._refuse() if e.errno in _SHORT else 0
                self._failed(
                    f"a connection of another worker was not accepted: {e}. {refused} were closed, their workers use "
                    "Dask's comms. Remedy where too many files are open: raise the limit (ulimit -n)"
                )
                if not refused:
                    self._pause()
                return
            self._accepted(sock)

    def _refuse(self) -> int:
        """Close what waits in the queue, by means of the reserve; returns the number of connections."""
        if self._spare is None:
            return 0
        os.close(self._spare)
        count = 0
        try:
            while count < _BACKLOG:
                sock, _ = self._socket.accept()
                sock.close()
                count += 1
        except OSError:  # the queue is empty, or another thread took the descriptor: then the caller pauses
            pass
        self._spare = _reserve()
        self.refused += count
        return count

    def _pause(self) -> None:
        self.pauses += 1
        self._resume_at = time.monotonic() + PAUSE_SECONDS
        self._loop.poll.modify(self._socket, 0)
