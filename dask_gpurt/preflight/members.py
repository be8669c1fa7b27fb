"""`Member`: what the gate knows of one worker, and what `status` shows of it."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Any

from distributed.comm import get_address_host

from dask_gpurt.preflight.checks import Finding, State

if TYPE_CHECKING:
    from dask_gpurt.model.node_class import NodeClass


class Mode(enum.StrEnum):
    """``gpurt.preflight``: what becomes of a worker that fails."""

    #: it is not checked
    OFF = "off"
    #: it works, and `status` says what was found
    WARN = "warn"
    #: it gets no task
    HOLD = "hold"
    #: it is closed
    CLOSE = "close"

    @property
    def holds(self) -> bool:
        """Whether workers are kept back until they passed."""
        return self in (Mode.HOLD, Mode.CLOSE)


class Phase(enum.Enum):
    """Where a worker is."""

    #: it has not reported yet
    CHECKING = "checking"
    #: it failed
    HELD = "held"
    #: it may work
    PASSED = "passed"


@dataclasses.dataclass
class Member:
    """One worker."""

    address: str
    #: when it came, by the clock of the gate
    since: float
    #: its `running` is kept back until it has passed; not that of one that ran when the gate came
    gated: bool
    phase: Phase = Phase.CHECKING
    #: the stimulus of its `running` that is kept back
    running: str | None = None
    #: by check
    findings: dict[str, Finding] = dataclasses.field(default_factory=dict)
    #: None: it has not told, so it does not answer calls yet
    node: NodeClass | None = None
    #: the shortest time of the known answer
    own_seconds: float | None = None
    #: times that it has computed it
    attempts: int = 0
    #: peer -> what was measured
    peers: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def host(self) -> str:
        """Of its address."""
        return str(get_address_host(self.address))

    @property
    def kept(self) -> bool:
        """Whether it is kept from work."""
        return self.gated and self.phase is not Phase.PASSED

    def found(self, *states: State) -> list[Finding]:
        """Its findings of these states."""
        return [finding for finding in self.findings.values() if finding.state in states]

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what is not as it should be, and the links that were measured."""
        return {
            "phase": self.phase.value,
            "kept": self.kept,
            "findings": [finding.to_dict() for finding in self.found(State.FAIL, State.WARN)],
            "peers": self.peers,
        }
