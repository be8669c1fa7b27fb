"""Both ends of a link as state machines: events in, instructions out. No sockets, no clock of its own, no threads.

Theory of operation. A transport owns the machines of its links and runs them in one thread. It tells them what happened
(`submit`, `receive`, `tick`, `lost`, ...) and carries out the instructions it gets back, in order. What a state allows
is a table; anything else is a violation and closes the link, which is always safe: whatever is not acknowledged is then
sent again by the safe path, and the receiving run drops what it has already.

::

    sender    OPENING --CHALLENGE--> GREETING --WELCOME--> OPEN --> CLOSED
    receiver  WAITING --HELLO--> OPEN --> CLOSED

Invariants
- A submitted message ends exactly once: stored (ACK), refused (REFUSED) or lost (the link closed first).
- A receiver accepts a sequence number once. A copy is drained, not used, and answered as the first one was.
- A sender never sends more bytes than were granted; a receiver closes the link before it allocates for one that does.
- PING says how many messages were sent, PONG up to which all were answered, how many of the others are missing, and the
  credit: on a network that loses records nothing waits for ever for one of them.
- Numbers that matter are totals (credit) or identities (sequence): a copy of a record, or one that comes late, changes
  nothing. Before its HELLO a sender can make a receiver do nothing but compare one MAC.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import hmac
from typing import TYPE_CHECKING, Any, ClassVar

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport import records
from dask_gpurt.shuffle.transport.records import Kind, Record, RunKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: a link with messages under way on which nothing was heard for so long is asked for a sign
PING_SECONDS = 1.0
#: and is given up after so long. Above 3 s, so that a worker that is stopped for a moment keeps its links
SILENCE_SECONDS = 8.0
#: a connection that has not said a valid HELLO by then is a stranger's
HELLO_SECONDS = 1.0
#: how far sequence numbers may run ahead of the first one missing
_AHEAD = 1 << 20
#: before the HELLO
NO_RUN = RunKey(0, 0)


class State(enum.Enum):
    OPENING = "opening"
    GREETING = "greeting"
    WAITING = "waiting"
    OPEN = "open"
    CLOSED = "closed"


class Verdict(enum.Enum):
    """What to do with the body of a record."""

    NO = "no"  #: do not receive it; the link is closed
    YES = "yes"
    COPY = "copy"  #: receive and drop it


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Write a record; `buffers` are the frames of a message, `body` is that of any other record."""

    record: Record
    body: bytes = b""
    buffers: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A submitted message ended. `problem` is empty when it was stored; `lost` when the link closed first."""

    token: Any
    problem: str = ""
    lost: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A sender has proved itself."""

    sender: str


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """The sender needs so many bytes granted in all."""

    total: int


@dataclasses.dataclass(frozen=True, slots=True)
class Deliver:
    """A message arrived whole, for the first time: store it, then call `ReceiverLink.stored`."""

    sequence: int
    nbytes: int
    frames: list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
    """Close the link."""

    reason: str
    #: the other side did what it must not
    violation: bool = False
    #: nobody misses anything: no message had still to end
    quiet: bool = False


Instruction = Send | Ended | Opened | Wanted | Deliver | Close


@dataclasses.dataclass(slots=True)
class _Pending:
    token: Any
    buffers: Sequence[Any]
    nbytes: int


class SenderLink:
    """The sending end.

    Parameters
    ----------
    limit
        Bytes of one message that the receiver takes, at most.
    now
        Seconds of any monotonic clock, as in every call here.
    """

    def __init__(
        self, run: RunKey, secret: bytes, sender: str, receiver: str, limit: int, nonce: bytes, now: float
    ) -> None:
        self.run = run
        self.state = State.OPENING
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
        #: seconds with a message ready and no credit for it
        self.stall_seconds = 0.0

    #: (state, kind) -> the method that handles it; None: a copy or a late one, nothing to do
    _TABLE: ClassVar[dict[tuple[State, Kind], str | None]] = {
        (State.OPENING, Kind.CHALLENGE): "_on_challenge",
        (State.GREETING, Kind.CHALLENGE): None,
        (State.GREETING, Kind.WELCOME): "_on_welcome",
        (State.OPEN, Kind.CHALLENGE): None,
        (State.OPEN, Kind.WELCOME): None,
        (State.OPEN, Kind.GRANT): "_on_grant",
        (State.OPEN, Kind.ACK): "_on_end",
        (State.OPEN, Kind.REFUSED): "_on_end",
        (State.OPEN, Kind.PONG): "_on_pong",
        (State.OPENING, Kind.BYE): "_on_bye",
        (State.GREETING, Kind.BYE): "_on_bye",
        (State.OPEN, Kind.BYE): "_on_bye",
    }

    @property
    def outstanding(self) -> int:
        """Messages that have not ended."""
        return len(self._queue) + len(self._flying)

    def submit(self, token: Any, buffers: Sequence[Any], now: float) -> list[Instruction]:
        """Send a message when there is credit for it; an `Ended` with this token follows, once."""
        if self.state is State.CLOSED:
            return [Ended(token, "the link is closed", lost=True)]
        nbytes = records.message_bytes(buffers)
        if nbytes > self._limit or not 1 <= len(buffers) <= records.MAX_FRAMES:
            why = f"{nbytes} bytes in {len(buffers)} frames; at most {self._limit} and {records.MAX_FRAMES}"
            return [Ended(token, f"too large for this link: {why}")]
        if not self.outstanding:
            self._heard = self._pinged = now
        self._queue.append(_Pending(token, buffers, nbytes))
        return self._pump(now)

    def receive(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        """A record came."""
        if self.state is State.CLOSED:
            return []
        # A receiver that has just been connected to does not know yet which run it is for.
        if record.run != self.run and record.kind is not Kind.CHALLENGE:
            return self._close("a record of another run", violation=True)
        try:
            handler = self._TABLE[self.state, record.kind]
        except KeyError:
            return self._close(f"{record.kind.name} while {self.state.value}", violation=True)
        self._heard = now
        if handler is None:
            return []
        out: list[Instruction] = getattr(self, handler)(record, body, now)
        return out

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        if self.state is State.CLOSED or not self.outstanding:
            return []
        if now - self._heard >= SILENCE_SECONDS:
            return self._close(f"nothing heard for {SILENCE_SECONDS:g} s")
        if self.state is not State.OPEN or now - self._pinged < PING_SECONDS:
            return []
        self._pinged = now
        out: list[Instruction] = [Send(Record(Kind.PING, self.run, self._sequence))]
        if self._stalled_since is not None:
            out.append(Send(Record(Kind.WANT, self.run, value=self._wanted)))
        return out

    def lost(self, reason: str) -> list[Instruction]:
        """The transport lost the link."""
        return [] if self.state is State.CLOSED else self._close(reason)

    def bye(self) -> list[Instruction]:
        """End the link in order."""
        if self.state is State.CLOSED:
            return []
        return [Send(Record(Kind.BYE, self.run)), *self._close("the run ended")]

    def _close(self, reason: str, violation: bool = False) -> list[Instruction]:
        self.state = State.CLOSED
        ended: list[Instruction] = [Ended(p.token, reason, lost=True) for p in (*self._flying.values(), *self._queue)]
        self._flying.clear()
        self._queue.clear()
        return [*ended, Close(reason, violation, quiet=not ended and not violation)]

    def _on_challenge(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        if len(body) != records.NONCE_BYTES:
            return self._close(f"a challenge of {len(body)} bytes", violation=True)
        self._challenge = bytes(body)
        self.state = State.GREETING
        said = records.hello(self._secret, self.run, self._challenge, self._nonce, self._sender, self._receiver)
        return [Send(Record(Kind.HELLO, self.run, length=len(said)), said)]

    def _on_welcome(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        want = records.mac(
            self._secret, "receiver", self.run, self._challenge, self._nonce, self._sender, self._receiver
        )
        if not hmac.compare_digest(bytes(body), want):
            return self._close("the receiver does not know the secret of the run", violation=True)
        self.state = State.OPEN
        return self._on_grant(record, body, now)

    def _on_grant(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        self._granted = max(self._granted, record.value)
        return self._pump(now)

    def _on_end(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        if not 1 <= record.sequence <= self._sequence:
            return self._close(f"an answer to message {record.sequence}, which was not sent", violation=True)
        # An answer brings the credit that its message has freed.
        self._granted = max(self._granted, record.value)
        pending = self._flying.pop(record.sequence, None)
        ended: list[Instruction] = []
        if pending is not None:
            refused = record.kind is Kind.REFUSED
            problem = (bytes(body).decode(errors="replace") or "refused") if refused else ""
            ended.append(Ended(pending.token, problem))
        return ended + self._pump(now)

    def _on_pong(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        # Twice in a row, as what is on its way may be overtaken. No transport that keeps order comes here.
        strange = record.count > 0 or any(sequence <= record.sequence for sequence in self._flying)
        self._strange = self._strange + 1 if strange else 0
        if self._strange >= 2:
            return self._close("messages or answers were lost on the way")
        return self._on_grant(record, body, now)

    def _on_bye(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        return self._close("the receiver ended the link")

    def _pump(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        while self.state is State.OPEN and self._queue:
            head = self._queue[0]
            if self._sent + head.nbytes > self._granted:
                if self._stalled_since is None:
                    self._stalled_since = now
                if self._wanted < self._sent + head.nbytes:
                    self._wanted = self._sent + head.nbytes
                    out.append(Send(Record(Kind.WANT, self.run, value=self._wanted)))
                break
            if self._stalled_since is not None:
                self.stall_seconds += now - self._stalled_since
                self._stalled_since = None
            self._queue.popleft()
            self._sequence += 1
            self._sent += head.nbytes
            self._flying[self._sequence] = head
            record = Record(Kind.DATA, self.run, self._sequence, head.nbytes, len(head.buffers))
            out.append(Send(record, buffers=head.buffers))
        return out


class ReceiverLink:
    """The receiving end. Credit is decided elsewhere (`credits.Arbiter`) and told here.

    Parameters
    ----------
    secret_of
        The secret of a run that this worker takes part in, else None.
    arrive
        Called with the bytes of a message before anything is allocated; False when they were not granted.
    run
        The only run this link may be of; None: the HELLO says.
    """

    def __init__(
        self,
        receiver: str,
        secret_of: Callable[[RunKey], bytes | None],
        arrive: Callable[[int], bool],
        challenge: bytes,
        now: float,
        run: RunKey = NO_RUN,
    ) -> None:
        self.run = run
        self.state = State.WAITING
        self.sender = ""
        self._receiver, self._secret_of, self._arrive = receiver, secret_of, arrive
        self._challenge = challenge
        self._since = now
        self._granted = 0
        #: sequence -> the answer that was given; None: not stored yet
        self._answers: dict[int, Send | None] = {}
        #: every sequence up to this one was seen and answered
        self._low = 0
        #: bytes of the longest message so far
        self._copy_limit = 0
        self.copies = 0

    _TABLE: ClassVar[dict[tuple[State, Kind], str | None]] = {
        (State.WAITING, Kind.HELLO): "_on_hello",
        (State.WAITING, Kind.BYE): "_on_bye",
        (State.OPEN, Kind.HELLO): None,
        (State.OPEN, Kind.DATA): "_on_data",
        (State.OPEN, Kind.WANT): "_on_want",
        (State.OPEN, Kind.PING): "_on_ping",
        (State.OPEN, Kind.BYE): "_on_bye",
    }

    def start(self) -> list[Instruction]:
        """The link is there."""
        return [Send(Record(Kind.CHALLENGE, self.run, length=len(self._challenge)), self._challenge)]

    def admit(self, record: Record) -> tuple[Verdict, list[Instruction]]:
        """May the body of this record be received? To be asked once per record, before anything is allocated."""
        if self.state is State.CLOSED:
            return Verdict.NO, []
        if (self.state, record.kind) not in self._TABLE:
            return Verdict.NO, self._close(f"{record.kind.name} while {self.state.value}", violation=True)
        if record.kind is not Kind.HELLO and record.run != self.run:
            return Verdict.NO, self._close("a record of another run", violation=True)
        if record.kind is Kind.DATA:
            if self._seen(record.sequence):
                # Costs no credit; its body is received to stay in step, and dropped.
                return (
                    (Verdict.COPY, [])
                    if record.length <= self._copy_limit
                    else (Verdict.NO, self._close("a long copy"))
                )
            if not self._low < record.sequence <= self._low + _AHEAD:
                return Verdict.NO, self._close(f"message {record.sequence} after {self._low}", violation=True)
            if not self._arrive(record.length):
                return Verdict.NO, self._close(f"{record.length} bytes that were not granted", violation=True)
            self._answers[record.sequence] = None
            self._copy_limit = max(self._copy_limit, record.length)
        return Verdict.YES, []

    def receive(
        self, record: Record, body: Any, now: float, frames: list[Any] | None = None, fresh: bool = True
    ) -> list[Instruction]:
        """An admitted record came, whole.

        Parameters
        ----------
        frames
            Those of a message that did not arrive in one buffer.
        fresh
            False: `admit` said that it is a copy.
        """
        if self.state is State.CLOSED:
            return []
        handler = self._TABLE.get((self.state, record.kind), "_on_misplaced")
        if handler is None:
            return []
        if record.kind is Kind.DATA:
            return self._on_data(record, body, frames, fresh)
        out: list[Instruction] = getattr(self, handler)(record, body, now)
        return out

    def stored(self, sequence: int, problem: str = "") -> list[Instruction]:
        """A delivered message is stored, or `problem` says why not."""
        if self.state is State.CLOSED:
            return []
        if problem:
            text = problem.encode()[: records.MAX_CONTROL // 2]
            answer = Send(Record(Kind.REFUSED, self.run, sequence, len(text), value=self._granted), text)
        else:
            answer = Send(Record(Kind.ACK, self.run, sequence, value=self._granted))
        self._answers[sequence] = answer
        while self._answers.get(self._low + 1) is not None:
            self._low += 1
            # Refusals are few and are kept; of what was stored the number says enough.
            if self._answers[self._low].record.kind is Kind.ACK:  # type: ignore[union-attr]
                del self._answers[self._low]
        return [answer]

    def granted(self, total: int) -> list[Instruction]:
        """The sender may have sent so many bytes in all. Rides on the next answer too."""
        if self.state is not State.OPEN or total <= self._granted:
            return []
        self._granted = total
        return [Send(Record(Kind.GRANT, self.run, value=total))]

    def tick(self, now: float) -> list[Instruction]:
        if self.state is State.WAITING and now - self._since >= HELLO_SECONDS:
            return self._close(f"no valid HELLO within {HELLO_SECONDS:g} s", violation=True)
        return []

    def lost(self, reason: str) -> list[Instruction]:
        return [] if self.state is State.CLOSED else self._close(reason)

    def bye(self) -> list[Instruction]:
        """The run ended here."""
        if self.state is State.CLOSED:
            return []
        return [Send(Record(Kind.BYE, self.run)), *self._close("the run ended")]

    def violation(self, reason: str) -> list[Instruction]:
        """What came is not even a record."""
        return [] if self.state is State.CLOSED else self._close(reason, violation=True)

    def _seen(self, sequence: int) -> bool:
        return sequence <= self._low or sequence in self._answers

    def _close(self, reason: str, violation: bool = False) -> list[Instruction]:
        self.state = State.CLOSED
        self._answers.clear()
        return [Close(reason, violation)]

    def _on_hello(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        if self.run.tag and record.run != self.run:
            return self._close("a record of another run", violation=True)
        secret = self._secret_of(record.run)
        if secret is None:
            return self._close("a HELLO for a run that is not here", violation=True)
        try:
            nonce, sender = records.read_hello(secret, record.run, self._challenge, bytes(body), self._receiver)
        except WireError as e:
            return self._close(str(e), violation=True)
        self.run, self.sender, self.state = record.run, sender, State.OPEN
        said = records.mac(secret, "receiver", self.run, self._challenge, nonce, sender, self._receiver)
        # In this order: credit that `Opened` brings must not overtake the WELCOME.
        return [Send(Record(Kind.WELCOME, self.run, length=len(said), value=self._granted), said), Opened(sender)]

    def _on_data(self, record: Record, body: Any, frames: list[Any] | None, fresh: bool) -> list[Instruction]:
        if not fresh:
            self.copies += 1
            answer = self._answers.get(record.sequence)
            if answer is None and record.sequence <= self._low:
                answer = Send(Record(Kind.ACK, self.run, record.sequence, value=self._granted))
            return [] if answer is None else [answer]
        try:
            whole = records.frames_of(record, body) if frames is None else frames
        except WireError:
            # The header was right, so the link is in step. A message without frames is refused by whoever parses it.
            whole = []
        return [Deliver(record.sequence, record.length, whole)]

    def _on_want(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        return [Wanted(record.value)]

    def _on_ping(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        if record.sequence > self._low + _AHEAD:
            return self._close(f"message {record.sequence} after {self._low}", violation=True)
        missing = sum(n not in self._answers for n in range(self._low + 1, record.sequence + 1))
        return [Send(Record(Kind.PONG, self.run, self._low, count=missing, value=self._granted))]

    def _on_bye(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        return self._close("the sender ended the link")

    def _on_misplaced(self, record: Record, body: bytes, now: float) -> list[Instruction]:
        return self._close(f"{record.kind.name} while {self.state.value}", violation=True)
