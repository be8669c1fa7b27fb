"""The scheduler's side of `recovery` after the barrier: outputs of a lost worker are opened, completed and let go.

Theory of operation. When a worker is lost after the barrier, the outputs that are still wanted and were its own get new
owners and are *opened*: their tasks wait (`park`), in state ``no-worker``, restricted to a worker that does not exist.
The survivors are told by `Amender`, as before the barrier. Then `complete`, in the background,

1. has transfer tasks run for whose inputs nobody vouches, and waits for them. Nobody in the graph waits for them any
   more: their results are dropped at once, and what they have done is known by asking who vouches for it;
2. has all workers flush; then every open output has all its rows;
3. tells all workers so, and restricts the tasks to the new owners.

Outputs of survivors are made and kept all the while. Another loss meanwhile begins a new epoch, and 1 again.

An output task that is not pinned (a join's, one that was fused) may be sent anywhere at any time; it asks where it
belongs, and is parked when that is open (`place`). One whose rows are gone, since nobody wanted it when its owner was
lost, restarts the shuffle, as does a lost barrier task.

An output that was made, and is wanted again though its owner lives (what was made of it was on another worker, say,
which had stolen the task that followed), is opened with the others, all of its rows void. Should nobody know so before
its task runs, the task asks for it (`asked`); then the other side of a join has to be opened, too, since the task may
have taken that.

All on the scheduler's event loop.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.recovery import EPOCHS, lost_outputs, reassign
from dask_gpurt.shuffle.scheduler.co_shuffles import partner, sources

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from dask_gpurt.shuffle.scheduler.recovery import Amender

#: no worker has this address
NOWHERE = "gpurt://output-is-not-complete"
#: states of a transfer task that will end
_UNDER_WAY = ("waiting", "queued", "no-worker", "processing")
#: between two looks at tasks, here and in `recovery`
LOOK_SECONDS = 0.02
#: how often outputs of one run are opened because a task asks for one; then the run is restarted
ASKED = 5
#: how often a flush that fails is asked for again, and after how many seconds: a worker may be leaving
PATIENCE = 15
PATIENCE_SECONDS = 0.2


class Opener:
    """What `Amender` does with runs whose barrier has passed."""

    def __init__(self, scheduler: Any, plugin: Any, amender: Amender) -> None:
        self._scheduler = scheduler
        self._plugin = plugin
        self._amender = amender
        #: run -> outputs that were made since they were opened last
        self._made: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        #: run -> how often its tasks have asked
        self._asked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: outputs opened, and those of them whose owner lived
        self.opened = 0
        self.void = 0

    def ended(self, key: Hashable) -> None:
        """A task has ended well: notes which output that was."""
        ts = self._scheduler.tasks.get(key)
        for name, state in sources(self._plugin, ts) if ts is not None and len(ts.dependencies) <= 2 else ():
            if self._amender.ours(state) and (part := seam.output_of(ts.run_spec, name)) is not None:
                self._made.setdefault(state, set()).add(part)

    def asked(self, state: Any, key: Hashable) -> bool:
        """An output's task asks for what was handed out; whether it is opened again."""
        ts = self._scheduler.tasks.get(key)
        part = None if ts is None else seam.output_of(ts.run_spec, state.id)
        if ts is None or part is None:
            return False
        runs = [one for _, one in sources(self._plugin, ts)]
        if state not in runs or len(runs) < len(ts.dependencies):
            return False
        if not all(self._amender.ours(one) and self._amender.passed(one) for one in runs):
            return False
        if any(self._asked.get(one, 0) >= ASKED or part not in one.run_spec.worker_for for one in runs):
            return False
        for one in runs:
            if part in (one.run_spec.spec.state.opened or ()):
                continue
            self._made.setdefault(one, set()).add(part)
            self._asked[one] = self._asked.get(one, 0) + 1
            if not self.begin(one.id, one, self._amender.barrier_of(one.id), ""):
                return False
            self._amender.amend(one.id, one)
        self._park(ts)
        return True

    def there(self, state: Any) -> set[str]:
        """Workers that may own outputs. One that came back under the address of a lost one gets no rows."""
        return set(self._scheduler.workers) - set(state.run_spec.spec.state.lost)

    def begin(self, shuffle_id: Any, state: Any, barrier: Any, worker: str) -> bool | None:
        """Open what was lost, or is wanted again; None when nothing has to be done, False when that can not be.

        Parameters
        ----------
        worker
            Who was lost; empty: nobody.
        """
        run_state, worker_for = state.run_spec.spec.state, state.run_spec.worker_for
        parts = {ts: seam.output_of(ts.run_spec, shuffle_id) for ts in barrier.dependents}
        if None in parts.values():
            return False
        wanted: set[Any] = {part for ts, part in parts.items() if ts.state not in ("memory", "released", "forgotten")}
        if barrier.state != "memory" or state._failed or run_state.epoch >= EPOCHS:
            return False
        if not all(part in worker_for for part in wanted):
            return False  # made before the run that is for the rest
        if any(ts.state == "erred" for ts in (*barrier.dependencies, *barrier.dependents)):
            return False
        there = self.there(state) - {worker}
        opened = run_state.opened or frozenset()
        # Of what was being handed over nobody has all rows but those who split them. Wanted or not: its owner may live.
        gone = lost_outputs(wanted | opened, worker_for, there) | frozenset(run_state.handing)
        made = self._made.setdefault(state, set())
        again = frozenset(part for part in wanted & made if worker_for[part] in there) - opened
        gone |= again
        owners = sorted(there & set(barrier.worker_restrictions or there))
        other = partner(self._plugin, barrier, shuffle_id)
        stay = {part: worker_for[part] for part in gone if worker_for[part] in there}
        moved = stay | (reassign({part: worker_for[part] for part in gone}, owners, other) if owners else {})
        # The sides of a join must stay together.
        apart = (p for p, owner in moved.items() if other.get(p, owner) in self._scheduler.workers)
        if len(moved) < len(gone) or any(other.get(p, moved[p]) != moved[p] for p in apart):
            return False
        if worker:
            run_state.lost.append(worker)
        run_state.opened = opened
        for ts, part in parts.items():
            if part not in gone and worker_for.get(part) == worker:
                self._plugin._unset_restriction(ts)  # should it be wanted, it has to ask
        if not gone and not opened:
            return None
        worker_for.update(moved)
        state.participating_workers |= set(moved.values())
        run_state.epoch += 1
        run_state.void(again)
        made -= gone
        self.void += len(again)
        run_state.opened = opened | gone
        run_state.scopes[run_state.epoch] = run_state.opened
        self.opened += len(gone - opened)
        for ts, part in parts.items():
            if part in gone:
                self._park(ts)
        return True

    # ---- tasks of outputs

    def close(self, state: Any, barrier: Any) -> bool:
        """Undo that a barrier has passed; False when there are outputs, or were."""
        if state.run_spec.spec.state.opened is not None or self._made.get(state):
            return False
        for ts in barrier.dependents:
            self._plugin._unset_restriction(ts)  # they are pinned again when it passes
        return True

    def _park(self, ts: Any) -> None:
        """Have an output's task wait. When it is on a worker that will send it back, it waits from then on."""
        self._plugin._set_restriction(ts, NOWHERE)
        self._scheduler.set_restrictions({ts.key: {NOWHERE}})

    def place(self, state: Any, key: Hashable) -> bool:
        """An output's task asks where it belongs; whether that was answered here."""
        ts = self._scheduler.tasks.get(key)
        part = None if ts is None else seam.output_of(ts.run_spec, state.id)
        if ts is None or part is None:
            return False
        run_state = state.run_spec.spec.state
        if run_state.opened and part in run_state.opened:
            self._park(ts)
            return True
        owner = state.run_spec.worker_for.get(part)
        if owner in self.there(state):
            if run_state.epoch and ts.annotations and "shuffle_original_restrictions" in ts.annotations:
                # Pinned to who had it before an amendment.
                self._scheduler.set_restrictions({key: {owner}})
                return True
            return False
        if run_state.opened is not None:
            self._amender.restart(state.id, state, f"output {part} is wanted, and its owner was lost when it was not")
            return True
        return False

    def _let_go(self, shuffle_id: Any, state: Any, opened: frozenset[int]) -> None:
        stimulus_id = f"gpurt-complete-{shuffle_id}-{state.run_spec.spec.state.epoch}"
        recommendations: dict[Any, Any] = {}
        for ts in self._amender.barrier_of(shuffle_id).dependents:
            part = seam.output_of(ts.run_spec, shuffle_id)
            if part not in opened or any(part in others for others in self._others(ts, shuffle_id)):
                continue  # of a join, and open in the other shuffle: that will let it go
            if ts.worker_restrictions == {NOWHERE}:
                self._scheduler.set_restrictions({ts.key: {state.run_spec.worker_for[part]}})
                if ts.state == "no-worker":
                    recommendations[ts.key] = "processing"
        self._scheduler.transitions(recommendations, stimulus_id=stimulus_id)

    def _others(self, ts: Any, shuffle_id: Any) -> Iterator[frozenset[int]]:
        """What is open in the other shuffles that an output's task depends on."""
        for name, state in sources(self._plugin, ts):
            if name != shuffle_id and self._amender.ours(state):
                yield state.run_spec.spec.state.opened or frozenset()

    def wait_on(self) -> None:
        """Outputs that are parked wait for us, not for a worker: ``no-workers-timeout`` must not end them."""
        if self._scheduler.no_workers_timeout is None:
            return
        unrunnable = self._scheduler.unrunnable
        for ts in [ts for ts in unrunnable if ts.worker_restrictions == {NOWHERE}]:
            del unrunnable[ts]
            unrunnable[ts] = time.monotonic()  # at the end: distributed counts on their order

    # ---- completing

    def run_again(self, shuffle_id: Any, keys: set[Hashable], stimulus_id: str) -> int:
        """Have transfer tasks run for whose input nobody vouches; how many are not done."""
        missing = [ts for ts in self._amender.barrier_of(shuffle_id).dependencies if ts.key not in keys]
        kept = {ts.key: "released" for ts in missing if ts.state == "memory"}
        self._scheduler.transitions(kept, stimulus_id=stimulus_id)
        again = {ts.key: "waiting" for ts in missing if ts.state == "released"}
        self._scheduler.transitions(again, stimulus_id=stimulus_id)
        self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
        self._amender.transfers_again += len(again)
        return len(missing)

    async def complete(self, shuffle_id: Any, state: Any, epoch: int) -> bool:
        """Complete what is open; False when a worker was lost meanwhile. True, too, when the run is over.

        Raises
        ------
        RuntimeError
            It can not be flushed.
        """
        run_state, barrier = state.run_spec.spec.state, self._amender.barrier_of(shuffle_id)
        patience = PATIENCE

        def over() -> bool:
            return not self._amender.current(shuffle_id, state) or barrier.state != "memory"

        while not over() and run_state.epoch == epoch:
            self.wait_on()
            if any(ts.state in _UNDER_WAY for ts in barrier.dependencies):
                await asyncio.sleep(LOOK_SECONDS)
                continue
            answers = await self._amender.tell(state, self._amender.question(state))
            if over() or run_state.epoch != epoch:
                continue
            if answers is None:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            _, keys = self._amender.agreed(state, answers)
            if self.run_again(shuffle_id, keys, f"gpurt-open-{shuffle_id}-{epoch}"):
                await asyncio.sleep(LOOK_SECONDS)
                continue
            workers = [a for a in state.participating_workers if a in self._scheduler.workers]
            problems = await self._amender.flush(state, workers)
            if problems is None:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            if over() or run_state.epoch != epoch:
                continue
            if problems:
                patience -= 1
                if patience < 0:
                    raise RuntimeError(f"can not be flushed: {problems[0]!r}")
                await asyncio.sleep(PATIENCE_SECONDS)
                continue
            told = await self._amender.tell(state, {"gpurt": "complete", "epoch": epoch})
            if told is not None and run_state.epoch == epoch and not over():
                opened, run_state.opened = run_state.opened, frozenset()
                self._let_go(shuffle_id, state, opened)
                return True
        return over()
