"""`Turns`: which task begins now, and which after another has ended, where the process is nearly full.

Values can leave memory. What a task allocates while it runs cannot, and neither can its inputs. So a task whose working
set does not fit beside those that run waits until one of them has ended, or one of our own writes, which make room.

*Working set* of a task: its inputs, and what it allocates. For a prefix that has run before, that is twice the result
or as much as the inputs, whichever is more; else as much as the inputs. A task begins when two sums together stay below
`SHARE` of the memory limit: the memory of the process without the values that could leave, and what the running tasks
and the new one allocate. (What the running tasks have allocated already is in both sums. That errs towards waiting, and
only where memory is short.) A task that allocates little neither waits nor counts: `Turns.least_bytes`.

A running task may wait for the very one that waits here: ``worker_client`` secedes first, other ways do not. So a task
that has seceded is never waited for, and no other longer than `PATIENCE_SECONDS`. A task that did not end by then is
passed by for good.

Why: two tasks at a time, each with a partition of a tenth of the worker's memory, its copy and what is made in between,
end a worker at whose limit one at a time works. (Seen in a sort of ten times the memory: the nanny ended the worker
with no value in memory but their inputs.)

Rejected: learning the peak of tasks from samples of the process's memory (several run at a time, most are shorter than
the time between two looks); Linux's own peak, reset for each task (other readers of it see the reset).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from dask.utils import key_split

from dask_gpurt.model.slots import MEMORY, waiting
from dask_gpurt.tiers.engine.buffer_roots import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dask.typing import Key


#: of the memory limit. distributed pauses a worker there, and ends it at 0.95
SHARE = 0.8
#: a task that did not end in so many seconds is not waited for
PATIENCE_SECONDS = 10.0
#: a task that allocates less does not wait, in bytes
LEAST_BYTES = 1 << 20
#: nor one that allocates less than its thread's part of this share of the limit. So tasks that are not counted take no
#: more than this together; and they need no look at the process, which takes longer than many of them do
LEAST_SHARE = 1 / 64
#: between two looks at the process while a task waits and nothing calls `Turns.look`
_LOOK_SECONDS = 0.1
#: a result below this is not remembered, in bytes: its task never waits for it
SMALL_RESULT_BYTES = LEAST_BYTES // 2
#: prefixes whose results' size is kept
_PREFIXES = 1000


class Memory(Protocol):
    """Where the values are of which tasks make and read some: host memory, or a device."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of values there."""

    @property
    def moving_bytes(self) -> int:
        """Of those, bytes of values that are about to leave by themselves."""


class Value(Protocol):
    """A value that a task reads."""

    @property
    def nbytes(self) -> int:
        """Its bytes there."""

    @property
    def in_memory(self) -> bool:
        """It is there now."""


class Outputs:
    """What tasks returned so far, by prefix, in bytes."""

    def __init__(self) -> None:
        self._nbytes: dict[str, float] = {}

    def learn(self, key: Key, nbytes: int) -> None:
        """A task has returned so much."""
        if as_bytes(nbytes) is None:
            return
        prefix = key_split(key)
        known = self._nbytes.pop(prefix, None)
        # A result larger than usual counts at once, a smaller one by and by: too little room costs the process.
        learned = nbytes if known is None else max(nbytes, 0.8 * known + 0.2 * nbytes)
        if len(self._nbytes) >= _PREFIXES:
            del self._nbytes[next(iter(self._nbytes))]
        self._nbytes[prefix] = learned

    def expected(self, key: Key) -> int | None:
        """What this one will return; None: not known."""
        nbytes = self._nbytes.get(key_split(key))
        return None if nbytes is None else int(nbytes)

    def small(self, prefix: str, below: float) -> bool:
        """Whether no result of this prefix is known that takes so many bytes."""
        return self._nbytes.get(prefix, 0) < below


@dataclasses.dataclass(eq=False, slots=True)
class Turn:
    """A task that runs. Bytes."""

    key: Key
    #: of its inputs, which cannot leave memory
    inputs: int
    #: what it may allocate
    growth: int
    #: it is not waited for any more
    passed_by: bool = False


class Turns:
    """The tasks that run on one worker. Event loop only. One for host memory; another where there is a device tier.

    Parameters
    ----------
    memory
        The one that is meant.
    limit_bytes
        The worker's limit of it; None: no task waits.
    process_bytes
        What the process has taken of it now.
    seceded
        Whether a task has left its thread to others.
    threads
        How many tasks run at a time.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        limit_bytes: Callable[[], int | None],
        process_bytes: Callable[[], int],
        seceded: Callable[[Key], bool],
        threads: Callable[[], int],
    ) -> None:
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._process_bytes = process_bytes
        self._seceded = seceded
        self._threads = threads
        self._running: dict[Turn, None] = {}
        self._changed: asyncio.Event = asyncio.Event()
        self.outputs = Outputs()
        #: called when a task has to wait: memory that others keep is to be given back
        self.on_short: Callable[[], None] = lambda: None
        #: tasks that waited for another, and the seconds, summed
        self.waits = 0
        self.wait_seconds = 0.0
        #: tasks that were not waited for any longer
        self.passed_by = 0

    @property
    def least_bytes(self) -> float:
        """A task that allocates less does not wait, nor is it counted; on a worker of 1 GiB and one thread 16 MiB."""
        return max(LEAST_BYTES, LEAST_SHARE * (self._limit_bytes() or 0) / self._threads())

    async def begin(self, key: Key, inputs: Iterable[Value]) -> Turn | None:
        """Wait until the task may begin. Give what it returns to `end`, in any case."""
        inputs = list(inputs)
        nbytes = sum(e.nbytes for e in inputs)
        known = self.outputs.expected(key)
        turn = Turn(key, nbytes, max(nbytes, 2 * (known or 0)))
        if turn.growth < self.least_bytes:
            return None
        if self._short(turn, inputs):
            await self._wait(turn, inputs)
        self._running[turn] = None
        return turn

    def end(self, turn: Turn | None) -> None:
        """The task has ended, or does not begin."""
        if turn is not None and self._running.pop(turn, turn) is None:
            self.look()

    def look(self) -> None:
        """A task has ended, or a value has left memory: tasks that wait look at once whether there is room for them."""
        self._changed.set()

    async def _wait(self, turn: Turn, inputs: list[Value]) -> None:
        start, waited = monotonic(), False  # the wall clock may be set back
        with waiting(MEMORY):
            # Also for our own writes, which always end: what they move is out of the way then.
            while (self._waited_for() or self._memory.moving_bytes) and self._short(turn, inputs):
                self.waits += not waited
                waited = True
                if monotonic() - start > PATIENCE_SECONDS:
                    for other in self._waited_for():
                        other.passed_by = True
                        self.passed_by += 1
                    break
                self.on_short()
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _LOOK_SECONDS)
        self.wait_seconds += monotonic() - start

    def _waited_for(self) -> list[Turn]:
        return [t for t in self._running if not t.passed_by and not self._seceded(t.key)]

    def _short(self, turn: Turn, inputs: list[Value]) -> bool:
        limit = self._limit_bytes()
        if not limit:
            return False
        pinned = sum(t.inputs for t in self._running)
        here = sum(e.nbytes for e in inputs if e.in_memory)
        # Counted twice where tasks share inputs: towards waiting.
        loose = max(0, self._memory.resident_bytes - pinned - here)
        coming = turn.inputs - here + turn.growth + sum(t.growth for t in self._running)
        return self._process_bytes() - loose + coming > SHARE * limit
