"""What the scheduler and the workers of a run tell each other: a class for each message, plain values on the wire.

`to_dict` gives what msgpack carries, `from_dict` of the class reads it back, and `parse` finds the class by the message
itself. Each side dispatches by class, in a table. A message that is not known, or lacks a field, raises `WireError`.

=================  ======================  ==========================================================================
message            answer                  meaning
=================  ======================  ==========================================================================
`Amend`            `Vouched`               an epoch has begun: outputs have new owners; which inputs are vouched for?
`Valid`            OK                      these attempts count in the epoch
`Reopen`           OK                      take inputs again, after a flush
`Flush`            OK                      all inputs of the epoch are split: send the rest, answer when it is sent
`Complete`         OK                      the open outputs have all their rows
`AskHistogram`     `HistogramAnswer`       how many rows does each output have?
`AskJoinKeys`      `JoinKeys`              the keys of which inputs of a join's side do you hold?
`AskJoinHits`      `JoinHits`              which of these hashes may be of keys that you hold?
`AskJoinBits`      `JoinBits`              make them a filter of so many words, and keep them no longer
`TakeJoinFilter`   OK                      drop rows that cannot match these keys
`OPEN_OUTPUT`      `OutputOpened`          a worker's call: an output that was handed out is wanted again
the barrier        `BarrierAnswer`         distributed's call by the barrier task
=================  ======================  ==========================================================================

Workers ask each other for endpoints and credit by messages of the same form: `AskCard`, which a `Card` answers, and
`AskCredit`. These are asked and answered by `transport.plane`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dask_gpurt.errors import WireError

if TYPE_CHECKING:
    from dask_gpurt.shuffle.protocol.recovery import State

#: field of a message that names its kind
KIND = "gpurt"
#: the scheduler's handler for a worker whose task asks for an output that was handed out before
OPEN_OUTPUT = "gpurt_shuffle_open_output"


class BarrierAnswer(enum.Enum):
    """What the scheduler answers to a barrier task."""

    PASSED = "passed"
    #: some inputs have to be split again first; this needs the thread that the barrier task holds
    RUN_AGAIN = "run-again"


def decoded(decode: Callable[[Any], Any]) -> Any:
    """A field of a message that is not read back as it was sent; `decode` makes it from what came."""
    return dataclasses.field(metadata={"decode": decode})


def _parts(value: Sequence[int] | None) -> frozenset[int] | None:
    return None if value is None else frozenset(value)


def _inputs(value: Sequence[Sequence[Any]]) -> tuple[tuple[int, int, Hashable], ...]:
    return tuple((partition, attempt, key) for partition, attempt, key in value)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return list(value.items())
    return sorted(value) if isinstance(value, frozenset) else value


class Wire:
    """A dataclass that travels as a dict of plain values."""

    __slots__ = ()
    #: what the dict has besides the fields
    HEAD: ClassVar[dict[str, str]] = {}

    def to_dict(self) -> dict[str, Any]:
        """The values for msgpack; mappings as lists of pairs, sets as sorted lists."""
        return self.HEAD | {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read back what `to_dict` gave.

        Raises
        ------
        WireError
            A field is missing.
        """
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        if missing := [f.name for f in fields if f.name not in data]:
            raise WireError(
                f"{cls.__name__} without {', '.join(missing)} arrived. Remedy: run one version of dask-gpurt on the "
                "scheduler and all workers"
            )
        return cls(**{f.name: f.metadata.get("decode", lambda value: value)(data[f.name]) for f in fields})


@dataclasses.dataclass(frozen=True, slots=True)
class Amend(Wire):
    """An epoch has begun, by the loss of a worker or since outputs change hands; see `recovery.State`."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "amend"}

    epoch: int
    #: addresses
    lost: Sequence[str]
    #: output -> owner, all of the run
    moved: Mapping[int, str] = decoded(dict)
    bound: Mapping[int, int] = decoded(dict)
    handing: Mapping[int, str] = decoded(dict)
    opened: frozenset[int] | None = decoded(_parts)

    @classmethod
    def of(cls, state: State, worker_for: Mapping[int, str]) -> Amend:
        """The message for the latest epoch of a run."""
        return cls(
            state.epoch, list(state.lost), dict(worker_for), dict(state.bound), dict(state.handing), state.opened
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Valid(Wire):
    """Which attempts count in an epoch."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "valid"}

    epoch: int
    #: input partition -> attempt
    attempts: Mapping[int, int] = decoded(dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Reopen(Wire):
    """Take inputs again: some are split again after a flush."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "reopen"}

    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Flush(Wire):
    """All inputs are split: send the rest. One of an epoch that is over may come late, and changes nothing."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "flush"}

    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Complete(Wire):
    """The outputs that were opened have all their rows."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "complete"}

    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class AskHistogram(Wire):
    """Ask for the rows of outputs."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "histogram"}


@dataclasses.dataclass(frozen=True, slots=True)
class AskJoinKeys(Wire):
    """Ask what keys of a join a worker holds, and what it has split; see `join_plan`."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "join-keys"}


@dataclasses.dataclass(frozen=True, slots=True)
class AskJoinHits(Wire):
    """Ask which of some keys of the other side may be among those that a worker holds."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "join-hits"}

    #: their hashes, uint32
    sample: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class AskJoinBits(Wire):
    """Make a filter of the keys of a join's side, and keep them no longer."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "join-bits"}

    #: of 64 bits; 0: no filter is wanted
    words: int


@dataclasses.dataclass(frozen=True, slots=True)
class TakeJoinFilter(Wire):
    """All keys of the other side; see `rows.key_filter.KeyFilter`."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "join-filter"}

    bits: bytes
    #: whether all keys are between these two
    bounded: bool
    low: int
    high: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ok(Wire):
    """Done."""

    HEAD: ClassVar[dict[str, str]] = {"status": "OK"}


@dataclasses.dataclass(frozen=True, slots=True)
class Vouched(Ok):
    """The inputs that a worker vouches for in an epoch."""

    epoch: int
    #: (input partition, attempt, key of the transfer task)
    vouched: Sequence[tuple[int, int, Hashable]] = decoded(_inputs)


@dataclasses.dataclass(frozen=True, slots=True)
class HistogramAnswer(Ok):
    """What a worker counted while it split inputs."""

    #: int64, by output
    rows: bytes
    #: of all outputs
    nbytes: int
    #: (output, "column = value") that stood out in an input; None: nothing did
    value: tuple[int, str] | None
    #: bytes per second of the fastest large message to another worker; 0: there was none
    rate: float


@dataclasses.dataclass(frozen=True, slots=True)
class JoinKeys(Ok):
    """The keys of a join's side that a worker holds, and the rows that it has split."""

    rows: int
    #: CPU seconds of hashing the keys
    seconds: float
    #: whether all keys are integers between these two
    bounded: bool
    low: int
    high: int
    #: inputs of the run that came by there, and their rows
    seen_inputs: int
    seen_rows: int
    #: rows that were split, and the CPU seconds of splitting and encoding them
    split_rows: int
    split_seconds: float
    #: hashes of some keys of the first inputs, uint32; b"": there are none, or it has a filter
    sample: bytes
    #: input partitions whose keys it holds, all of them
    inputs: frozenset[int] = decoded(frozenset)

    @classmethod
    def none(cls) -> Self:
        """No keys, no rows."""
        return cls(0, 0.0, False, 0, -1, 0, 0, 0, 0.0, b"", frozenset())


@dataclasses.dataclass(frozen=True, slots=True)
class JoinHits(Ok):
    """Which hashes of a sample may be of keys that a worker holds."""

    #: a byte each: 1, or 0
    hits: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class JoinBits(Ok):
    """Keys as the bits of a filter."""

    #: b"": they are not held any more, or no filter was wanted
    bits: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class OutputOpened(Ok):
    """Whether an output is opened again; else the worker has the shuffle restarted."""

    opened: bool


@dataclasses.dataclass(frozen=True, slots=True)
class AskCard(Wire):
    """How can you be reached? The answer is a `Card`."""

    HEAD: ClassVar[dict[str, str]] = {KIND: "open"}

    #: address of the worker that asks
    sender: str
    #: where it is: see `transport.select.locality`
    process: str
    host: str


@dataclasses.dataclass(frozen=True, slots=True)
class AskCredit(Wire):
    """May I send so much by distributed's comms? The answer is that of `transport.rpc_credit.SafeReceiver`."""

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
    #: transport -> what a sender needs to reach it, see `transport.base.Transport.endpoint_for`
    endpoints: Mapping[str, Any] = decoded(dict)


#: what the scheduler sends to the workers of a run, by kind
MESSAGES: dict[str, type[Wire]] = {
    one.HEAD[KIND]: one
    for one in (
        *(Amend, Valid, Reopen, Flush, Complete, AskHistogram),
        *(AskJoinKeys, AskJoinHits, AskJoinBits, TakeJoinFilter),
    )
}


def parse(data: Mapping[str, Any]) -> Any:
    """The message that a dict stands for.

    Raises
    ------
    WireError
        It is not known here, or lacks a field.
    """
    kind = data.get(KIND)
    if (found := MESSAGES.get(str(kind))) is None:
        raise WireError(
            f"message of kind {kind!r} arrived, must be one of {', '.join(MESSAGES)}. Remedy: run one version of "
            "dask-gpurt on the scheduler and all workers"
        )
    return found.from_dict(data)
