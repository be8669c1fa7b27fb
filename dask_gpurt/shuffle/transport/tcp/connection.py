"""The socket of a link: records out of it and into it, with as few calls of the kernel as there can be.

Theory of operation. A message of 64 KiB costs less to copy than one call of the kernel and one wake-up of another
thread cost, so both are shared. What a turn of the loop writes is queued and goes out in one `sendmsg` at its end.
Every read asks for what is missing and for what follows it, up to `AHEAD_BYTES`, so that many answers, or a body and
the next header, come in one call. What was read ahead is invisible to epoll: a reader that stops before it is used up
has to come again by itself (`more`).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle.transport.link.records import HEADER_BYTES, LinkRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.shuffle.transport.ioloop import IoLoop

#: a connection that is not there after so long is lost
CONNECT_SECONDS = 5.0
#: a peer whose host does not answer for so long is lost
LOST_SECONDS = 5
#: bytes that one read takes beyond what is missing
AHEAD_BYTES = 1 << 13
#: a peer that answers so soon is near: the buffer below is enough for 5 GB/s at this distance
NEAR_MICROSECONDS = 200
#: of the buffer for sending to it; the kernel doubles what it is asked for
NEAR_BYTES = 1 << 20
#: where `tcpi_rtt` is in the kernel's `tcp_info`
_RTT_AT = 68
#: and `tcpi_bytes_acked`
_ACKED_AT = 120
#: bytes taken between two looks that are those of messages. A stopped peer's kernel takes PINGs, which are fewer
MOVED_BYTES = 1 << 12
#: the first byte of it while both sides may write
_ESTABLISHED = 1
#: buffers of one `sendmsg`, below the kernel's limit of 1024
_IOV = 512


class Connection:
    """A socket that belongs to one loop: what waits to be written, and the record that is being read.

    Parameters
    ----------
    sock
        Connected, or about to be.
    failed
        Called with the reason, in the loop's thread, when what was queued cannot be written.
    accepted
        The peer has connected to here, so the connection is there.
    """

    def __init__(
        self, loop: IoLoop, sock: socket.socket, failed: Callable[[str], None], accepted: bool = False
    ) -> None:
        self.loop, self.sock, self._failed = loop, sock, failed
        #: records can be written and read
        self.ready = accepted
        self._since = time.monotonic()
        #: bytes that the peer's kernel had taken when it was last asked
        self._acked = 0
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)
        self._out: collections.deque[bytes | memoryview] = collections.deque()
        self._events = select.EPOLLIN
        self.closed = False
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._got = 0
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._low = self._high = 0
        self.record: LinkRecord | None = None
        self.body: memoryview = memoryview(b"")
        loop.poll.register(sock, self._events)

    def connected(self) -> None:
        """The peer has accepted: records can be written and read from now on."""
        self.ready = True
        self._shorten()

    def late(self, now: float) -> str:
        """Why the connection is given up, as it is not ready after its time; else empty."""
        waited = now - self._since
        return "" if self.ready or waited <= CONNECT_SECONDS else f"no connection within {CONNECT_SECONDS:g} s"

    def _shorten(self) -> None:
        """Give a near peer, which has just answered, a short buffer.

        What waits in the kernel was copied there through the caches and is copied out of there again. With the
        buffer that the kernel lets grow (4 MiB) it has left them by then: 1.79 instead of 2.01 GB/s with messages of
        8 MiB, 1.33 instead of 1.73 with 64 (`benchmarks/transport.py --place netns`). On a long way the buffer has to
        be long, and stays the kernel's.
        """
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
            (rtt,) = struct.unpack_from("=I", info, _RTT_AT)
            if rtt <= NEAR_MICROSECONDS:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BYTES // 2)
        except (OSError, struct.error):  # it is only faster
            pass

    @property
    def more(self) -> bool:
        """Whether bytes were read that no record has taken."""
        return self._low < self._high

    @property
    def left(self) -> bool:
        """Whether the peer has closed the connection; what it wrote before may still be unread."""
        return self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED

    def moves(self) -> bool:
        """Whether the peer's kernel has taken bytes of a message since the last call."""
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
            (acked,) = struct.unpack_from("=Q", info, _ACKED_AT)
        except (OSError, struct.error):  # an old kernel does not say
            return False
        before, self._acked = self._acked, acked
        return bool(acked - before >= MOVED_BYTES)

    def write(self, *parts: Any) -> None:
        """Queue bytes; they are written at the end of the loop's turn, as far as the socket takes them then."""
        for p in parts:
            part = p if type(p) is bytes else memoryview(p).cast("B")
            if part:
                self._out.append(part)
        self.loop.at_end(self._flush_or_fail)

    def _flush_or_fail(self) -> None:
        try:
            self.flush()
        except OSError as e:
            self._failed(repr(e))

    def flush(self) -> None:
        """Write what waits.

        Raises
        ------
        OSError
            The connection is gone.
        """
        if not self.closed:
            self._write_out()

    def _write_out(self) -> None:
        while self._waits():
            try:
                n = self._send(list(itertools.islice(self._out, _IOV)))
            except BlockingIOError:
                break
            while n:
                if n >= len(self._out[0]):
                    n -= len(self._out.popleft())
                else:
                    self._out[0] = memoryview(self._out[0])[n:]
                    n = 0
        wanted = select.EPOLLIN | (select.EPOLLOUT if self._waits() else 0)
        if wanted != self._events:
            self._events = wanted
            self.loop.poll.modify(self.sock, wanted)

    def _waits(self) -> bool:
        """Whether something waits to be written, and may be."""
        return bool(self._out)

    def _send(self, few: Sequence[bytes | memoryview]) -> int:
        """Write some of it; returns the bytes that need not be kept. Raises `BlockingIOError`: the socket is full."""
        return self.sock.sendmsg(few)

    def read(self, begin: Callable[[LinkRecord], memoryview | None]) -> tuple[LinkRecord, memoryview] | None:
        """The next record that is there whole, else None.

        Parameters
        ----------
        begin
            Asked for the memory of a record's body when its header is there; None: the link was closed.

        Raises
        ------
        WireError
            What came is not a record.
        OSError
            The connection is gone.
        """
        while not self.closed:
            if self.record is None:
                if not self._fill(self._head):
                    return None
                self.record = record = LinkRecord.unpack(self._head)
                self._got = 0
                body = begin(record)
                if body is None:
                    return None
                self.body = body
            if not self._fill(self.body):
                return None
            record, body = self.record, self.body
            self.record, self.body, self._got = None, memoryview(b""), 0
            return record, body
        return None

    def _fill(self, into: memoryview) -> bool:
        while self._got < len(into):
            if self._low < self._high:
                n = min(len(into) - self._got, self._high - self._low)
                into[self._got : self._got + n] = self._ahead[self._low : self._low + n]
                self._low += n
                self._got += n
                continue
            rest = into[self._got :]
            try:
                n = self._receive(rest)
            except BlockingIOError:
                return False
            self._low, self._high = 0, max(0, n - len(rest))
            self._got += n - self._high
        return True

    def _receive(self, into: memoryview) -> int:
        """Read into it, and then ahead; returns the bytes. Raises `BlockingIOError`: nothing is there."""
        n = self.sock.recvmsg_into([into, self._ahead])[0]
        if not n:
            raise ConnectionResetError("closed by the peer")
        return n

    def close(self) -> None:
        """Write what the socket takes now (the last word is there), and close it."""
        if self.closed:
            return
        with contextlib.suppress(OSError):
            self._write_out()
        self.closed = True
        self.loop.on_event.pop(self.sock.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self.loop.poll.unregister(self.sock)
        self.sock.close()
        self._out.clear()
