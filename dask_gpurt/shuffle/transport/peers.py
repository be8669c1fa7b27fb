"""What a plane knows of a peer: how a run reaches it, and what went there and came from it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle.transport.rpc_credit import SafeSender

if TYPE_CHECKING:
    from dask_gpurt.shuffle.protocol.messages import Card
    from dask_gpurt.shuffle.transport.base import Header, Peer
    from dask_gpurt.shuffle.transport.select.selector import TransportChooser


@dataclasses.dataclass
class LinkCounters:
    """What went to one peer by one transport, and came from it."""

    messages_out: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    bytes_in: int = 0
    #: seconds from hand-over to acknowledgement, summed over messages
    seconds: float = 0.0
    #: seconds that messages waited for credit (on `rpc`: for the call that asks for it)
    stall_seconds: float = 0.0
    #: messages that the peer did not take, or whose link was lost; sent again by the safe path
    resent: int = 0
    #: messages from this peer that did not parse or failed a checksum
    corrupt: int = 0


class LinkTable:
    """The figures of one worker's links. Any thread."""

    #: links of which figures are kept, and peers
    LIMIT = 4096

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], LinkCounters] = {}
        #: peer -> messages from it that did not parse or failed a checksum
        self.corrupt: dict[str, int] = {}
        #: peer -> what went wrong with it last
        self.problems: dict[str, str] = {}

    def of(self, peer: str, name: str) -> LinkCounters:
        """The figures of a transport to and from a peer, made on first use."""
        found = self._links.get((peer, name))
        if found is None:
            if len(self._links) >= self.LIMIT:
                self._links.pop(next(iter(self._links)), None)
            found = self._links.setdefault((peer, name), LinkCounters())
        return found

    def was_corrupt(self, peer: str, name: str) -> None:
        """Count a message that did not parse or failed a checksum."""
        self.of(peer, name).corrupt += 1
        self.corrupt[peer] = self.corrupt.get(peer, 0) + 1
        self._bound(self.corrupt)

    def had_problem(self, peer: str, text: str) -> None:
        """Enter what went wrong with a peer."""
        self.problems.pop(peer, None)  # the latest comes last
        self.problems[peer] = text
        self._bound(self.problems)

    def _bound(self, table: dict[str, Any]) -> None:
        """Every worker that is lost leaves an entry, and a worker may outlive any number of others."""
        while len(table) > self.LIMIT:
            table.pop(list(table)[0], None)  # noqa: RUF015  an iterator would see what other threads enter

    def statistics(self) -> list[dict[str, Any]]:
        """Plain JSON values, by peer and transport."""
        return [
            {"peer": peer, "transport": name, **dataclasses.asdict(counters)}
            for (peer, name), counters in sorted(self._links.items())
        ]


class NoRoute(Exception):
    """A peer gives no card; what it answered instead goes to the caller."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(str(answer))
        self.answer = answer


@dataclasses.dataclass(eq=False)
class Route:
    """The ways from one run to one peer."""

    #: what the peer says of itself
    card: Card
    chooser: TransportChooser
    #: goes with every message
    header: Header
    #: whether messages may be compressed
    squeezes: bool = False
    #: by transport
    targets: dict[str, Peer] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.safe = SafeSender(self.card.limit)
