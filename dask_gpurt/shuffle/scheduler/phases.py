"""`Phase`, where a run of our shuffle is, and `TRANSITIONS`, how events move it. Pure.

Events move a run by the table, and nothing else does::

    RECEIVING --BARRIER_PASSED--> PASSED --OUTPUTS_OPENED--> OPENED
        ^                          |  ^                       |  ^
        +-------BARRIER_LOST-------+  +---OUTPUTS_COMPLETE----+  +-- OUTPUTS_OPENED

    any of them --DROPPED--> ENDED

What is not a phase: an epoch that is being told to the workers, and outputs that change hands, may be under way in any
of the first three.
"""

from __future__ import annotations

import enum


class InvalidTransition(RuntimeError):
    """An event happened to a run in a phase in which it cannot."""


class Phase(enum.Enum):
    """Where a run is."""

    #: inputs are split and sent; its barrier has not passed
    RECEIVING = "receiving"
    #: the barrier has passed, and every output has its rows
    PASSED = "passed"
    #: the barrier has passed; the tasks of some outputs wait until rows were sent again
    OPENED = "opened"
    #: Dask has dropped it
    ENDED = "ended"


class RunEvent(enum.Enum):
    """What moves a run to another phase."""

    BARRIER_PASSED = "barrier passed"
    #: the barrier's task was lost before its end was known, and no output was made
    BARRIER_LOST = "barrier lost"
    OUTPUTS_OPENED = "outputs opened"
    OUTPUTS_COMPLETE = "outputs complete"
    DROPPED = "dropped"


TRANSITIONS: dict[Phase, dict[RunEvent, Phase]] = {
    Phase.RECEIVING: {
        RunEvent.BARRIER_PASSED: Phase.PASSED,
        RunEvent.DROPPED: Phase.ENDED,
    },
    Phase.PASSED: {
        # The task of a barrier may run twice: its worker was lost.
        RunEvent.BARRIER_PASSED: Phase.PASSED,
        RunEvent.BARRIER_LOST: Phase.RECEIVING,
        RunEvent.OUTPUTS_OPENED: Phase.OPENED,
        RunEvent.DROPPED: Phase.ENDED,
    },
    Phase.OPENED: {
        RunEvent.BARRIER_PASSED: Phase.OPENED,
        RunEvent.OUTPUTS_OPENED: Phase.OPENED,
        RunEvent.OUTPUTS_COMPLETE: Phase.PASSED,
        RunEvent.DROPPED: Phase.ENDED,
    },
    Phase.ENDED: {},
}
