"""What workers of a run ask each other about transports, over distributed's comms; `plane` asks and answers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from dask_gpurt.shuffle.protocol.messages import KIND, Ok, Wire, decoded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class AskCard(Wire):
    """How can you be reached? The answer is a `Card`."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "open"}

    #: address of the worker that asks
    sender: str
    #: where it is: see `locality`
    process: str
    host: str


@dataclasses.dataclass(frozen=True, slots=True)
class AskCredit(Wire):
    """May I send so much by distributed's comms? The answer is that of `rpc_credit.SafeReceiver`."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "want"}

    sender: str
    #: bytes in all, those included that were sent before
    total: int


@dataclasses.dataclass(frozen=True, slots=True)
class Card(Ok):
    """How a worker can be reached, and where it is."""

    process: str
    host: str
    #: bytes of one message that it takes, at most
    limit: int
    #: compression that it can undo
    codecs: Sequence[str]
    #: transport -> what a sender needs to reach it, see `Transport.endpoint_for`
    endpoints: Mapping[str, Any] = decoded(dict)
