"""The receiving end of a link as a state machine; see `events`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.events import (
    Close,
    Deliver,
    Instruction,
    LinkState,
    Offered,
    Opened,
    Send,
    Verdict,
    Wanted,
)
from dask_gpurt.shuffle.transport.link.records import LinkRecord, RecordKind, RunKey

if TYPE_CHECKING:
    from collections.abc import Callable

#: how far sequence numbers may run ahead of the first one missing
_AHEAD = 1 << 20
#: before the HELLO
NO_RUN = RunKey(0, 0)


class ReceiverLink:
    """The receiving end. Credit is decided by `credits.Arbiter` and entered by `granted`.

    Parameters
    ----------
    receiver
        Address of this worker.
    secret_of
        The secret of a run that this worker takes part in, else None.
    arrive
        Called with the bytes of a message before anything is allocated; False when they were not granted.
    now
        Seconds of any monotonic clock, as in every call here.
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
        self.state = LinkState.WAITING
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

    _TABLE: ClassVar[dict[tuple[LinkState, RecordKind], str | None]] = {
        (LinkState.WAITING, RecordKind.HELLO): "_on_hello",
        (LinkState.WAITING, RecordKind.BYE): "_on_bye",
        (LinkState.OPEN, RecordKind.HELLO): None,
        (LinkState.OPEN, RecordKind.DATA): "_on_data",
        (LinkState.OPEN, RecordKind.WANT): "_on_want",
        (LinkState.OPEN, RecordKind.PING): "_on_ping",
        (LinkState.OPEN, RecordKind.OFFER): "_on_offer",
        (LinkState.OPEN, RecordKind.BYE): "_on_bye",
    }

    def begin(self, now: float) -> None:
        """The time for a valid HELLO begins now, not when the link was made."""
        self._since = now

    def start(self) -> list[Instruction]:
        """The link is there."""
        return [Send(LinkRecord(RecordKind.CHALLENGE, self.run, length=len(self._challenge)), self._challenge)]

    def admit(self, record: LinkRecord) -> tuple[Verdict, list[Instruction]]:
        """May the body of this record be received? To be asked once per record, before anything is allocated."""
        if self.state is LinkState.CLOSED:
            return Verdict.NO, []
        if (self.state, record.kind) not in self._TABLE:
            return Verdict.NO, self._close(f"{record.kind.name} while {self.state.value}", violation=True)
        if record.kind is not RecordKind.HELLO and record.run != self.run:
            return Verdict.NO, self._close("a record of another run", violation=True)
        if record.kind is RecordKind.DATA:
            if self._seen(record.sequence):
                # Costs no credit; its body is received to stay in step, and dropped.
                return (
                    (Verdict.COPY, [])
                    if record.length <= self._copy_limit
                    else (Verdict.NO, self._close("a long copy"))
                )
            if not self._low < record.sequence <= self._low + _AHEAD:
                return Verdict.NO, self._close(f"message {record.sequence} after {self._low}", violation=True)
            cost = record.length + record.value
            if not self._arrive(cost):
                return Verdict.NO, self._close(f"{cost} bytes that were not granted", violation=True)
            self._answers[record.sequence] = None
            self._copy_limit = max(self._copy_limit, record.length)
        return Verdict.YES, []

    def receive(
        self,
        record: LinkRecord,
        body: Any,
        now: float,
        frames: list[Any] | None = None,
        fresh: bool = True,
    ) -> list[Instruction]:
        """An admitted record came, whole.

        Parameters
        ----------
        frames
            Those of a message that did not arrive in one buffer; None: they are in `body`.
        fresh
            False: `admit` said that it is a copy.
        """
        if self.state is LinkState.CLOSED:
            return []
        handler = self._TABLE.get((self.state, record.kind), "_on_misplaced")
        if handler is None:
            return []
        if record.kind is RecordKind.DATA:
            return self._on_data(record, body, frames, fresh)
        return getattr(self, handler)(record, body, now)

    def stored(self, sequence: int, problem: str = "") -> list[Instruction]:
        """A delivered message is stored, or `problem` says why not."""
        if self.state is LinkState.CLOSED:
            return []
        if problem:
            text = problem.encode()[: records.MAX_CONTROL // 2]
            answer = Send(LinkRecord(RecordKind.REFUSED, self.run, sequence, len(text), value=self._granted), text)
        else:
            answer = Send(LinkRecord(RecordKind.ACK, self.run, sequence, value=self._granted))
        self._answers[sequence] = answer
        while (given := self._answers.get(self._low + 1)) is not None:
            self._low += 1
            # Refusals are few and are kept; of what was stored the number says enough.
            if given.record.kind is RecordKind.ACK:
                del self._answers[self._low]
        return [answer]

    def granted(self, total: int) -> list[Instruction]:
        """The sender may have sent so many bytes in all. The next answers say so, too."""
        if self.state is not LinkState.OPEN or total <= self._granted:
            return []
        self._granted = total
        return [Send(LinkRecord(RecordKind.GRANT, self.run, value=total))]

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        if self.state is LinkState.WAITING and now - self._since >= lk.HELLO_SECONDS:
            return self._close(f"no valid HELLO within {lk.HELLO_SECONDS:g} s", violation=True)
        return []

    def lost(self, reason: str) -> list[Instruction]:
        """The transport lost the link."""
        return [] if self.state is LinkState.CLOSED else self._close(reason)

    def bye(self) -> list[Instruction]:
        """The run ended here."""
        if self.state is LinkState.CLOSED:
            return []
        return [Send(LinkRecord(RecordKind.BYE, self.run)), *self._close("the run ended")]

    def violation(self, reason: str) -> list[Instruction]:
        """What came is not even a record."""
        return [] if self.state is LinkState.CLOSED else self._close(reason, violation=True)

    def _seen(self, sequence: int) -> bool:
        return sequence <= self._low or sequence in self._answers

    def _close(self, reason: str, violation: bool = False) -> list[Instruction]:
        self.state = LinkState.CLOSED
        self._answers.clear()
        return [Close(reason, violation)]

    def _on_hello(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        if self.run.tag and record.run != self.run:
            return self._close("a record of another run", violation=True)
        secret = self._secret_of(record.run)
        if secret is None:
            return self._close("a HELLO for a run that is not here", violation=True)
        try:
            nonce, sender = records.read_hello(secret, record.run, self._challenge, bytes(body), self._receiver)
        except WireError as e:
            return self._close(str(e), violation=True)
        self.run, self.sender, self.state = record.run, sender, LinkState.OPEN
        said = records.mac(secret, "receiver", self.run, self._challenge, nonce, sender, self._receiver)
        # In this order: credit that `Opened` brings must not overtake the WELCOME.
        return [
            Send(LinkRecord(RecordKind.WELCOME, self.run, length=len(said), value=self._granted), said),
            Opened(sender),
        ]

    def _on_data(
        self, record: LinkRecord, body: memoryview, frames: list[Any] | None, fresh: bool
    ) -> list[Instruction]:
        if not fresh:
            answer = self._answers.get(record.sequence)
            if answer is None and record.sequence <= self._low:
                answer = Send(LinkRecord(RecordKind.ACK, self.run, record.sequence, value=self._granted))
            return [] if answer is None else [answer]
        try:
            whole = records.frames_of(record, body) if frames is None else frames
        except WireError:
            # The header was right, so the link is in step. A message without frames is refused when it is parsed.
            whole = []
        return [Deliver(record.sequence, record.length + record.value, whole)]

    def _on_want(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        return [Wanted(record.value)]

    def _on_ping(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        if record.sequence > self._low + _AHEAD:
            return self._close(f"message {record.sequence} after {self._low}", violation=True)
        missing = sum(n not in self._answers for n in range(self._low + 1, record.sequence + 1))
        return [Send(LinkRecord(RecordKind.PONG, self.run, self._low, count=missing, value=self._granted))]

    def _on_offer(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        return [Offered(bytes(body))]

    def _on_bye(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        return self._close("the sender ended the link")

    def _on_misplaced(self, record: LinkRecord, body: bytes, now: float) -> list[Instruction]:
        return self._close(f"{record.kind.name} while {self.state.value}", violation=True)
