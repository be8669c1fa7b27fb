"""The scheduler's side of `recovery`: a run whose worker is lost goes on without it, or is restarted for what is left.

Theory of operation. `Amender.lost` is called, in the same turn of the loop, when a worker has left. Before the barrier
a run is amended: its outputs get new owners at once, so nobody who joins the run later sees the old ones; then, in the
background, the survivors are told and asked what they vouch for, transfer tasks for whose inputs nobody vouches are
released, and which attempts count is told to all. `Amender.barrier` lets the barrier pass when all have flushed and no
amendment is under way or has begun meanwhile.

After the barrier it is the same, with what `reopen` adds: only outputs that are wanted get new owners, and their tasks
wait for a completion of their own.

Whatever can not be amended, or fails while it is, is restarted by stock's own means, with two differences: outputs that
are in memory stay (`keep_outputs`), and the new run is for the outputs that are still to be made (`wanted`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import traceback
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.recovery import EPOCHS, Validity, agreed, reassign, too_narrow, undone
from dask_gpurt.shuffle.scheduler.barrier_hold import Holder
from dask_gpurt.shuffle.scheduler.calls import Asking
from dask_gpurt.shuffle.scheduler.co_shuffles import partner
from dask_gpurt.shuffle.scheduler.rebalance import Binder
from dask_gpurt.shuffle.scheduler.reopen import LOOK_SECONDS, PATIENCE, PATIENCE_SECONDS, Opener
from dask_gpurt.shuffle.spec import GpurtShuffleSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

logger = logging.getLogger("distributed.scheduler.gpurt")


class Amender(Asking):
    """Amends the runs of one scheduler.

    Parameters
    ----------
    plugin
        The scheduler plugin named ``shuffle``.
    failed
        Called in an exception handler: counts an error of ours.
    able
        Whether a worker can run our spec, by its address.
    """

    def __init__(
        self,
        scheduler: Any,
        plugin: Any,
        failed: Callable[[], None],
        able: Callable[[str], bool] = lambda address: True,
    ) -> None:
        super().__init__(scheduler)
        self._plugin = plugin
        self._failed = failed
        self._opener = Opener(scheduler, plugin, self)
        self.made = self._opener.ended
        self.binder = Binder(scheduler, plugin, self, able)
        self.holder = Holder(scheduler, self)
        #: runs being amended
        self._tasks: dict[tuple[Any, int], asyncio.Task[None]] = {}
        #: run ids whose barrier has passed
        self._passed: dict[int, None] = {}
        #: run -> key of a transfer task -> epoch in which its result was lost
        self._least: weakref.WeakKeyDictionary[Any, dict[Hashable, int]] = weakref.WeakKeyDictionary()
        #: the latest stimulus that released tasks, and their keys
        self._released: tuple[str, list[Hashable]] = ("", [])
        #: ids of shuffles that are being restarted
        self.restarting: set[Any] = set()
        self.amended = 0
        self.transfers_again = 0
        self.outputs_kept = 0
        #: shuffles restarted because a worker was lost
        self.restarted = 0

    # ---- what is whose

    @staticmethod
    def ours(state: Any) -> bool:
        """Whether a run is of our kind."""
        return state is not None and type(state.run_spec.spec) is GpurtShuffleSpec

    def barrier_of(self, shuffle_id: Any) -> Any:
        return self._scheduler.tasks.get(seam.barrier_key(shuffle_id))

    def wanted(self, spec: Any) -> tuple[int, ...] | None:
        """Outputs that are still to be made; None: all, or which is not known."""
        barrier = self.barrier_of(spec.id)
        parts = set()
        for ts in barrier.dependents:
            part = seam.output_of(ts.run_spec, spec.id)
            if part is None:
                return None
            if ts.state not in ("memory", "released", "forgotten"):
                parts.add(part)
        every = set(spec.output_partitions)
        return tuple(sorted(parts & every)) if parts and parts < every else None

    def keep_outputs(self, shuffle_id: Any, recommendations: dict[Any, Any]) -> None:
        """Take outputs that are in memory out of the recommendations of a restart."""
        barrier = self.barrier_of(shuffle_id)
        if barrier is None or any(seam.output_of(ts.run_spec, shuffle_id) is None for ts in barrier.dependents):
            return
        for ts in barrier.dependents:
            if ts.state == "memory" and recommendations.pop(ts.key, None) is not None:
                self.outputs_kept += 1

    # ---- a worker is lost

    def place(self, state: Any, run_id: int, key: Hashable, again: bool = False) -> bool:
        """An output's task asks where it belongs, or has it opened `again`; whether that was done. Never raises."""
        try:
            answer = self._opener.asked if again else self._opener.place
            return self.ours(state) and state.run_id == run_id and answer(state, key)
        except Exception:
            self._failed()
            return False

    def released(self, key: Hashable, stimulus_id: str) -> None:
        """A task was released; those released by the loss of a worker are told before `lost` is."""
        if self._released[0] != stimulus_id:
            self._released = (stimulus_id, [])
        self._released[1].append(key)

    def lost(self, worker: str, stimulus_id: str) -> None:
        """Amend what can be; the rest is left to stock's restart, which comes next. Never raises."""
        released = self._released[1] if self._released[0] == stimulus_id else []
        for shuffle_id, state in self._plugin.active_shuffles.items():
            if not self.ours(state) or worker not in {
                *state.participating_workers,
                *state.run_spec.worker_for.values(),
            }:
                continue
            # An owner that nobody has sent anything yet is as lost; stock would not know.
            state.participating_workers.add(worker)
            try:
                if self._begin(shuffle_id, state, worker, released):
                    # Stock restarts the shuffles in which the worker took part.
                    state.participating_workers.discard(worker)
                    self.amended += 1
                else:
                    self.restarted += 1
            except Exception:
                self._failed()

    def _begin(self, shuffle_id: Any, state: Any, worker: str, released: list[Hashable]) -> bool:
        barrier = self.barrier_of(shuffle_id)
        if barrier is None or state._failed:
            return False
        run_state = state.run_spec.spec.state
        if state.run_id in self._passed and barrier.state != "memory" and self._opener.close(state, barrier):
            # The barrier's task was lost before its end was known: it runs again, as if it had not passed.
            del self._passed[state.run_id]
        if state.run_id in self._passed:
            begun = self._opener.begin(shuffle_id, state, barrier, worker)
            if begun is None:
                return True
        else:
            begun = self._open_all(shuffle_id, state, barrier, worker)
        if not begun:
            return False
        self._least.setdefault(state, {}).update(dict.fromkeys(released, run_state.epoch))
        self.amend(shuffle_id, state)
        return True

    def amend(self, shuffle_id: Any, state: Any) -> None:
        """Have the workers told of the epoch that has begun."""
        key = (shuffle_id, state.run_id)
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._amend(key, state))

    def amending(self, shuffle_id: Any, state: Any) -> bool:
        """Whether they are being told."""
        return (shuffle_id, state.run_id) in self._tasks

    def passed(self, state: Any) -> bool:
        """Whether a run's barrier has passed."""
        return state.run_id in self._passed

    def _open_all(self, shuffle_id: Any, state: Any, barrier: Any, worker: str) -> bool:
        """A worker was lost before the barrier: its outputs get new owners."""
        if barrier.state not in ("released", "waiting", "processing", "queued", "no-worker"):
            return False
        run_state, worker_for = state.run_spec.spec.state, state.run_spec.worker_for
        there = self._opener.there(state)
        alive = [a for a in barrier.worker_restrictions or there if a in there]
        needed = [seam.output_of(ts.run_spec, shuffle_id) for ts in barrier.dependents if ts.state != "memory"]
        if not alive or run_state.epoch >= EPOCHS or not all(part is None or part in worker_for for part in needed):
            return False
        worker_for.update(reassign(worker_for, alive, partner(self._plugin, barrier, shuffle_id)))
        state.participating_workers |= set(worker_for.values())
        run_state.epoch += 1
        run_state.lost.append(worker)
        run_state.void()
        return True

    # ---- amending

    def current(self, shuffle_id: Any, state: Any) -> bool:
        return self._plugin.active_shuffles.get(shuffle_id) is state

    async def _amend(self, key: tuple[Any, int], state: Any) -> None:
        run_state = state.run_spec.spec.state
        try:
            while self.current(key[0], state):
                epoch = run_state.epoch
                if not await self._once(key[0], state, epoch) or run_state.epoch != epoch:
                    continue
                # Before the barrier, the barrier sees to the rest.
                if run_state.opened is None or await self._opener.complete(key[0], state, epoch):
                    break
        except Exception:
            self._failed()
            self.restart(key[0], state, f"amending failed: {traceback.format_exc(limit=1)}")
        finally:
            del self._tasks[key]

    async def _once(self, shuffle_id: Any, state: Any, epoch: int) -> bool:
        """Tell the survivors of an epoch; False when it must be done again."""
        run_state = state.run_spec.spec.state
        answers = await self.tell(state, self.question(state))
        if run_state.epoch != epoch or not self.current(shuffle_id, state):
            return False
        if answers is None:
            await asyncio.sleep(LOOK_SECONDS)
            return False
        attempts, keys = self.agreed(state, answers)
        run_state.validity = Validity(epoch, attempts)
        again = self._again if run_state.opened is None else self._opener.run_again
        again(shuffle_id, keys, f"gpurt-amend-{shuffle_id}-{epoch}")
        told = await self.tell(state, {"gpurt": "valid", "epoch": epoch, "attempts": list(attempts.items())})
        if told is None:
            await asyncio.sleep(LOOK_SECONDS)
        return told is not None

    def agreed(self, state: Any, answers: list[Any]) -> tuple[dict[int, int], set[Hashable]]:
        narrow = too_narrow(state.run_spec.spec.state.scopes, state.run_spec.spec.state.opened)
        return agreed((v for answer in answers for v in answer["vouched"]), self._least.get(state, {}), narrow)

    def _undone(self, shuffle_id: Any, keys: set[Hashable]) -> set[Hashable]:
        """Transfer tasks that count as done, for whose input nobody vouches."""
        return undone([ts.key for ts in self.barrier_of(shuffle_id).dependencies if ts.state == "memory"], keys)

    def _again(self, shuffle_id: Any, keys: set[Hashable], stimulus_id: str) -> bool:
        """Have transfer tasks run again for whose input nobody vouches; whether there were any."""
        again = self._undone(shuffle_id, keys)
        self.transfers_again += len(again)
        if again:
            self._scheduler.transitions(dict.fromkeys(again, "released"), stimulus_id=stimulus_id)
            self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
        return bool(again)

    def question(self, state: Any) -> dict[str, Any]:
        run_state = state.run_spec.spec.state
        return {
            "gpurt": "amend",
            "epoch": run_state.epoch,
            "lost": list(run_state.lost),
            "moved": list(state.run_spec.worker_for.items()),
            "bound": list(run_state.bound.items()),
            "handing": list(run_state.handing.items()),
            "opened": None if run_state.opened is None else sorted(run_state.opened),
        }

    async def _complete(self, shuffle_id: Any, state: Any) -> bool:
        """Whether somebody vouches for every input of an amended run; else their tasks run again."""
        epoch = state.run_spec.spec.state.epoch
        answers = await self.tell(state, self.question(state))
        if answers is None or state.run_spec.spec.state.epoch != epoch:
            return False
        if not self.current(shuffle_id, state):
            return False
        _, keys = self.agreed(state, answers)
        if not self._undone(shuffle_id, keys):
            return True
        # They have flushed, and have to take inputs again before the first of these comes.
        told = await self.tell(state, {"gpurt": "reopen", "epoch": epoch})
        if told is not None and state.run_spec.spec.state.epoch == epoch and self.current(shuffle_id, state):
            self._again(shuffle_id, keys, f"gpurt-complete-{shuffle_id}-{epoch}")
        return False

    def restart(self, shuffle_id: Any, state: Any, why: str) -> None:
        """As stock does when a worker is lost."""
        if self._plugin.active_shuffles.get(shuffle_id) is not state:
            return
        logger.warning("gpurt: shuffle %s is restarted: %s", shuffle_id, why)
        self.restarted += 1
        self.binder.leave(shuffle_id, state)
        stimulus = f"gpurt-restart-{shuffle_id}-{state.run_id}"
        self._plugin._fail_on_workers(state, str(seam.P2PConsistencyError(f"{state}: {why}")))
        self._plugin._clean_on_scheduler(shuffle_id, stimulus)
        self._plugin._restart_shuffle(shuffle_id, self._scheduler, stimulus_id=stimulus)

    # ---- the barrier

    async def barrier(self, shuffle_id: Any, run_id: int) -> bool:
        """Return True when all inputs of a run are where they belong, False when the barrier task has to wait for some.

        Its thread must not wait here for transfer tasks: it may be the only one left to run them.

        Raises
        ------
        KeyError, ValueError, RuntimeError
            As stock's: the run is not there, is another one, or can not be flushed.
        """
        no_progress = 0
        while True:
            state = self._plugin.active_shuffles[shuffle_id]
            if state.run_id != run_id:
                raise ValueError(f"{run_id=} does not match {state}")
            barrier = self.barrier_of(shuffle_id)
            if barrier is None or barrier.state != "processing":
                return False
            if (shuffle_id, run_id) in self._tasks:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            run_state = state.run_spec.spec.state
            epoch, workers = run_state.epoch, list(state.participating_workers)
            problems, _ = await asyncio.gather(self.flush(state, workers), self.binder.hear(state, workers))
            if problems is None:
                await asyncio.sleep(LOOK_SECONDS)  # whoever was lost took part: an amendment or a restart is next
                continue
            if (
                run_state.epoch != epoch
                or self._plugin.active_shuffles.get(shuffle_id) is not state
                or barrier.state != "processing"
                or set(workers) != state.participating_workers
            ):
                continue
            if not problems:
                if epoch and not await self._complete(shuffle_id, state):
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                if not await self.binder.settled(shuffle_id, state):
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                if run_state.epoch != epoch or not self.current(shuffle_id, state):
                    continue
                if barrier.state != "processing" or (shuffle_id, run_id) in self._tasks:
                    continue
                if (bound := self._bind(shuffle_id, state)) is not False:
                    if bound is None:
                        await asyncio.sleep(LOOK_SECONDS)
                    continue
                run_state.handing.clear()
                self._passed[run_id] = None
                while len(self._passed) > 10_000:
                    del self._passed[next(iter(self._passed))]
                return True
            no_progress += 1
            if no_progress > PATIENCE and run_state.handing:
                self.restart(shuffle_id, state, f"outputs can not be handed over: {problems[0]!r}")
                return False
            if no_progress > PATIENCE:
                raise RuntimeError(f"Unexpected error encountered during P2P barrier: {problems[0]!r}")
            await asyncio.sleep(PATIENCE_SECONDS)

    def _bind(self, shuffle_id: Any, state: Any) -> bool | None:
        """As `Binder.begin`; never raises."""
        try:
            return self.binder.begin(shuffle_id, state)
        except Exception:
            self._failed()
            return False

    def for_the_rest(self, spec: GpurtShuffleSpec) -> GpurtShuffleSpec:
        """The spec of a new run, for the outputs that are still to be made."""
        # Not for a first run: outputs that nobody wants yet may be wanted while it goes on.
        wanted = self.wanted(spec) if self._plugin._shuffles.get(spec.id) else None
        fields: dict[str, Any] = {"parts_out": wanted}
        return spec if wanted is None else dataclasses.replace(spec, **fields)

    def statistics(self) -> dict[str, Any]:
        """Counts; plain JSON values."""
        return {
            "amended": self.amended,
            "amending": len(self._tasks),
            "transfers_again": self.transfers_again,
            "outputs_kept": self.outputs_kept,
            "outputs_opened": self._opener.opened,
            "outputs_void": self._opener.void,
            "restarted": self.restarted,
        }
