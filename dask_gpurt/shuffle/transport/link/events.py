"""Both ends of a link as state machines: events in, instructions out. No sockets, no clock of their own, no threads.

The machines are `sender.SenderLink` and `receiver.ReceiverLink`. Here are their states and their instructions.

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
  credit: on a network that loses records nothing waits without end for one of them.
- Numbers that matter are totals (credit) or identities (sequence): a copy of a record, or one that comes late, changes
  nothing. Before its HELLO a sender can make a receiver do nothing but compare one MAC.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.shuffle.transport.link.records import LinkRecord

#: seconds without a record after which a link with messages under way is asked for one
PING_SECONDS = 1.0
#: seconds without a record, and without bytes that get there, after which it is given up. Above 3: a worker that stops
#: for a moment keeps its links
SILENCE_SECONDS = 8.0
#: seconds that a sender has for a valid HELLO; then it is a stranger
HELLO_SECONDS = 1.0


class LinkState(enum.Enum):
    """Where a link is between its beginning and its end."""

    # Members are single objects; the hash of their names is made anew in Python every time, several times per message.
    __hash__ = object.__hash__

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


class Send(NamedTuple):
    """Write a record; `buffers` are the frames of a message, `body` is that of any other record."""

    record: LinkRecord
    body: bytes = b""
    buffers: Sequence[Any] = ()


class Ended(NamedTuple):
    """A submitted message ended. `problem` is empty when it was stored; `lost` when the link closed first."""

    token: Any
    problem: str = ""
    lost: bool = False
    #: it was the first in the queue for so long, and there was no credit for it
    stall_seconds: float = 0.0


class Opened(NamedTuple):
    """A sender has proved itself."""

    sender: str


class Wanted(NamedTuple):
    """The sender needs so many bytes granted in all."""

    total: int


class Offered(NamedTuple):
    """The sender says where in its memory a token lies; see `cma`."""

    body: bytes


class Deliver(NamedTuple):
    """A message arrived whole, for the first time: store it, then call `ReceiverLink.stored`."""

    sequence: int
    #: what it cost in credit
    nbytes: int
    frames: list[Any]


class Close(NamedTuple):
    """Close the link."""

    reason: str
    #: the other side did what it must not do
    violation: bool = False
    #: no message had still to end
    quiet: bool = False


Instruction = Send | Ended | Opened | Wanted | Offered | Deliver | Close
