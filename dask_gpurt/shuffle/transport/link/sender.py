"""The sending end of a link as a state machine; see `events`."""

from __future__ import annotations

import collections
import dataclasses
import hmac
from typing import TYPE_CHECKING, Any, ClassVar

from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.events import Close, Ended, Instruction, LinkState, Send
from dask_gpurt.shuffle.transport.link.records import LinkRecord, RecordKind, RunKey

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(slots=True)
class _Pending:
    token: object
    buffers: Sequence[Any]
    #: what it costs in credit: its own bytes, and room
    nbytes: int
    room: int
    stall_seconds: float = 0.0


class SenderLink:
    """The sending end.

    Parameters
    ----------
    run, secret
        What the link is for, and what proves that this worker takes part in it.
    sender, receiver
        Addresses of the workers.
    limit
        Bytes of one message that the receiver takes, at most.
    now
        Seconds of any monotonic clock, as in every call here.
    offer
        Body of an OFFER to make, see `cma`; None: make none.
    """

    def __init__(
        self,
        run: RunKey,
        secret: bytes,
        sender: str,
        receiver: str,
        limit: int,
        nonce: bytes,
        now: float,
        offer: bytes | None = None,
    ) -> None:
        self.offer = offer
        self.run = run
        self.state = LinkState.OPENING
        self._secret, self._sender, self._receiver = secret, sender, receiver
        self._limit = limit
        self._nonce = nonce
        self._challenge = b""
        self._queue: collections.deque[_Pending] = collections.deque()
        self._flying: dict[int, _Pending] = {}
        self._sequence = 0
        self._sent = 0
        self._granted = 0
        self._wanted = 0
        self._heard = self._pinged = now
        self._strange = 0
        self._stalled_since: float | None = None
        #: the receiver reads messages where they lie
        self.pulled = False

    #: (state, kind) -> the method that handles it; None: a copy or a late one, nothing to do
    _TABLE: ClassVar[dict[tuple[LinkState, RecordKind], str | None]] = {
        (LinkState.OPENING, RecordKind.CHALLENGE): "_on_challenge",
        (LinkState.GREETING, RecordKind.CHALLENGE): None,
        (LinkState.GREETING, RecordKind.WELCOME): "_on_welcome",
        (LinkState.OPEN, RecordKind.CHALLENGE): None,
        (LinkState.OPEN, RecordKind.WELCOME): None,
        (LinkState.OPEN, RecordKind.GRANT): "_on_grant",
        (LinkState.OPEN, RecordKind.ACK): "_on_end",
        (LinkState.OPEN, RecordKind.REFUSED): "_on_end",
        (LinkState.OPEN, RecordKind.PONG): "_on_pong",
        (LinkState.OPEN, RecordKind.PULLS): "_on_pulls",
        (LinkState.OPENING, RecordKind.BYE): "_on_bye",
        (LinkState.GREETING, RecordKind.BYE): "_on_bye",
        (LinkState.OPEN, RecordKind.BYE): "_on_bye",
    }

    @property
    def outstanding(self) -> int:
        """Messages that have not ended."""
        return len(self._queue) + len(self._flying)

    def submit(self, token: object, buffers: Sequence[Any], now: float, room: int = 0) -> list[Instruction]:
        """Send a message when there is credit for it and for `room` bytes; an `Ended` with this token follows, once."""
        if self.state is LinkState.CLOSED:
            return [Ended(token, "the link is closed", lost=True)]
        nbytes = records.message_bytes(buffers) + room
        if nbytes > self._limit or not 1 <= len(buffers) <= records.MAX_FRAMES:
            why = f"{nbytes} bytes in {len(buffers)} frames; at most {self._limit} and {records.MAX_FRAMES}"
            return [Ended(token, f"too large for this link: {why}")]
        if not self.outstanding:
            self._heard = self._pinged = now
        self._queue.append(_Pending(token, buffers, nbytes, room))
        return self._pump(now)

    def receive(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        """A record came."""
        if self.state is LinkState.CLOSED:
            return []
        # A receiver that has just been connected to does not know yet which run it is for.
        if record.run != self.run and record.kind is not RecordKind.CHALLENGE:
            return self._close("a record of another run", violation=True)
        try:
            handler = self._TABLE[self.state, record.kind]
        except KeyError:
            return self._close(f"{record.kind.name} while {self.state.value}", violation=True)
        self._heard = now
        if handler is None:
            return []
        return getattr(self, handler)(record, body, now)

    def moves(self, now: float) -> None:
        """Bytes of what was sent get to the receiver's host: it is not taken for dead while they do."""
        self._heard = now

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        if self.state is LinkState.CLOSED or not self.outstanding:
            return []
        if now - self._heard >= lk.SILENCE_SECONDS:
            return self._close(f"nothing heard for {lk.SILENCE_SECONDS:g} s")
        if self.state is not LinkState.OPEN or now - self._pinged < lk.PING_SECONDS:
            return []
        self._pinged = now
        out: list[Instruction] = [Send(LinkRecord(RecordKind.PING, self.run, self._sequence))]
        if self._stalled_since is not None:
            out.append(Send(LinkRecord(RecordKind.WANT, self.run, value=self._wanted)))
        return out

    def lost(self, reason: str) -> list[Instruction]:
        """The transport lost the link."""
        return [] if self.state is LinkState.CLOSED else self._close(reason)

    def bye(self) -> list[Instruction]:
        """End the link in order."""
        if self.state is LinkState.CLOSED:
            return []
        return [Send(LinkRecord(RecordKind.BYE, self.run)), *self._close("the run ended")]

    def _close(self, reason: str, violation: bool = False) -> list[Instruction]:
        self.state = LinkState.CLOSED
        pending = (*self._flying.values(), *self._queue)
        ended: list[Instruction] = [Ended(p.token, reason, True, p.stall_seconds) for p in pending]
        self._flying.clear()
        self._queue.clear()
        return [*ended, Close(reason, violation, quiet=not ended and not violation)]

    def _on_challenge(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        if len(body) != records.NONCE_BYTES:
            return self._close(f"a challenge of {len(body)} bytes", violation=True)
        self._challenge = bytes(body)
        self.state = LinkState.GREETING
        said = records.hello(self._secret, self.run, self._challenge, self._nonce, self._sender, self._receiver)
        return [Send(LinkRecord(RecordKind.HELLO, self.run, length=len(said)), said)]

    def _on_welcome(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        want = records.mac(
            self._secret, "receiver", self.run, self._challenge, self._nonce, self._sender, self._receiver
        )
        if not hmac.compare_digest(bytes(body), want):
            return self._close("the receiver does not know the secret of the run", violation=True)
        self.state = LinkState.OPEN
        # Before the first message, so that one that needs no credit to come is the only one that is sent in full.
        offer = (
            []
            if self.offer is None
            else [Send(LinkRecord(RecordKind.OFFER, self.run, length=len(self.offer)), self.offer)]
        )
        return [*offer, *self._on_grant(record, body, now)]

    def _on_grant(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        self._granted = max(self._granted, record.value)
        return self._pump(now)

    def _on_end(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        if not 1 <= record.sequence <= self._sequence:
            return self._close(f"an answer to message {record.sequence}, which was not sent", violation=True)
        # An answer brings the credit that its message has freed.
        self._granted = max(self._granted, record.value)
        pending = self._flying.pop(record.sequence, None)
        ended: list[Instruction] = []
        if pending is not None:
            refused = record.kind is RecordKind.REFUSED
            problem = (bytes(body).decode(errors="replace") or "refused") if refused else ""
            ended.append(Ended(pending.token, problem, stall_seconds=pending.stall_seconds))
        return ended + self._pump(now)

    def _on_pong(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        # Twice in a row, as what is on its way may be overtaken. No transport that keeps order comes here.
        strange = record.count > 0 or any(sequence <= record.sequence for sequence in self._flying)
        self._strange = self._strange + 1 if strange else 0
        if self._strange >= 2:
            return self._close("messages or answers were lost on the way")
        return self._on_grant(record, body, now)

    def _on_pulls(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        self.pulled = self.offer is not None
        return [] if self.pulled else self._close("an answer to an offer that was not made", violation=True)

    def _on_bye(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        return self._close("the receiver ended the link")

    def _pump(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        while self.state is LinkState.OPEN and self._queue:
            head = self._queue[0]
            if self._sent + head.nbytes > self._granted:
                if self._stalled_since is None:
                    self._stalled_since = now
                if self._wanted < self._sent + head.nbytes:
                    self._wanted = self._sent + head.nbytes
                    out.append(Send(LinkRecord(RecordKind.WANT, self.run, value=self._wanted)))
                break
            if self._stalled_since is not None:
                head.stall_seconds = now - self._stalled_since
                self._stalled_since = None
            self._queue.popleft()
            self._sequence += 1
            self._sent += head.nbytes
            self._flying[self._sequence] = head
            length = head.nbytes - head.room
            record = LinkRecord(RecordKind.DATA, self.run, self._sequence, length, len(head.buffers), head.room)
            out.append(Send(record, buffers=head.buffers))
        return out
