"""What is one run, and that all of it is bounded: with a scheduler of plain objects, and a clock that is told."""

from __future__ import annotations

import asyncio
import types
from collections import deque
from typing import Any

import pytest

from dask_gpurt.observe.answers.compare import Comparison
from dask_gpurt.observe.answers.runs import RunReport, Runs
from dask_gpurt.observe.collect import stall_ledger
from dask_gpurt.observe.collect.causes import BUSY, CAUSES
from dask_gpurt.observe.collect.stall_ledger import StallLedger
from dask_gpurt.observe.report import page
from dask_gpurt.observe.runs import record, recorder
from dask_gpurt.observe.runs.recorder import GAP_SECONDS, KEPT_BYTES, KEPT_RUNS, LONGEST_SECONDS, RunRecorder
from tests.observe.fakes import Clock


class Cluster:
    """A ledger that follows runs, on as much of a scheduler as they look at."""

    def __init__(self, workers: int = 2) -> None:
        self.workers = {
            f"tcp://h{i}:1": types.SimpleNamespace(
                address=f"tcp://h{i}:1",
                name=f"w{i}",
                nthreads=2,
                memory_limit=10**9,
                metrics={},
                extra={},
                processing={},
                long_running=set(),
            )
            for i in range(workers)
        }
        self.tasks: dict[Any, Any] = {}
        self.queued: list[Any] = []
        self.unrunnable: set[Any] = set()
        self.clock = Clock()
        self.ledger = StallLedger(self, clock=self.clock)  # type: ignore[arg-type]
        self.runs = RunRecorder(self, self.ledger, clock=self.clock)  # type: ignore[arg-type]
        self.ledger.observer = self.runs
        #: when workers last spoke, and what each has said
        self.at = self.clock.now
        self.told = dict.fromkeys(("slots", BUSY, "unassigned"), 0.0)

    def submit(self, *keys: str, client: str = "c", span: tuple[str, ...] = ("default",)) -> None:
        for key in keys:
            self.tasks[key] = types.SimpleNamespace(
                key=key,
                state="waiting",
                who_wants={client},
                dependents=(),
                prefix=types.SimpleNamespace(name=key.split("-")[0]),
                processing_on=next(iter(self.workers.values())),
            )
        self.ledger.guarded(self.ledger.graph_arrived, client, set(keys), {key: {"name": span} for key in keys})

    def finish(self, *keys: str, state: str = "memory", seconds: float = 1.0) -> None:
        for key in keys:
            self.ledger.transition(key, "waiting", "processing", {})
            self.tasks[key].state = state
            stop = self.clock.now
            rows = [{"action": "compute", "start": stop - seconds, "stop": stop}]
            worker = next(iter(self.workers))
            self.ledger.transition(key, "processing", state, {"worker": worker, "startstops": rows, "nbytes": 8})

    def beat(self, seconds: float = 0.0, busy: float = 0.0, **figures: Any) -> None:
        """Time passes, then every worker says what it did, and these figures."""
        self.clock.now += seconds
        since, self.at = self.clock.now - self.at, self.clock.now
        self.told["slots"] += 2 * since
        self.told[BUSY] += busy
        self.told["unassigned"] += 2 * since - busy
        for ws in self.workers.values():
            told = {f"slot_{key}_seconds": value for key, value in self.told.items()}
            self.ledger.heartbeat(ws, told | figures)  # type: ignore[arg-type]

    def outcomes(self) -> list[tuple[int, str, int]]:
        """(number, outcome, graphs), oldest first."""
        assert self.ledger.errors == 0, self.ledger.last_traceback
        return [(h["number"], h["outcome"], h["graphs"]) for h in reversed(self.runs.headlines())]


def test_a_run_is_between_two_heartbeats_and_sealed_after_the_second() -> None:
    c = Cluster()
    c.beat(10, written_bytes=100)
    c.submit("x-1")
    c.clock.now += 2
    c.finish("x-1", seconds=2.0)
    assert c.runs.find(1)["open"]
    c.beat(0.5, busy=2, written_bytes=130, read_bytes=7)
    assert c.runs.statistics()["kept"] == 0  # it may go on within the gap
    c.beat(GAP_SECONDS, written_bytes=500)
    assert c.runs.statistics() | {"kept_bytes": 0} == {
        "seen": 1,
        "kept": 1,
        "kept_bytes": 0,
        "followed": 0,
        "unfollowed": 0,
    }
    found = c.runs.find(1)
    assert not found["open"]
    assert (found["start"], found["stop"], found["outcome"]) == (1010, 1012, "finished")
    assert found["busy_seconds"] == pytest.approx(2 * 2)
    assert [w["tiers"]["written_bytes"] for w in found["workers"]] == [30, 30]
    run = record.run_of(found)
    assert run.busy_seconds + sum(run.causes.values()) == pytest.approx(run.slot_seconds, abs=1e-6)


@pytest.mark.parametrize("inside", [True, False], ids=["in a run", "after it"])
def test_a_clock_that_is_set_back_keeps_no_run_open(inside: bool) -> None:
    c = Cluster()
    c.beat(1)
    c.submit("x-1")
    if inside:
        c.clock.now -= 3600
        assert c.runs.headlines()[0]["seconds"] == 0
    c.finish("x-1")
    if not inside:
        c.clock.now -= 3600
    c.at = c.clock.now
    c.beat(GAP_SECONDS)
    c.beat(GAP_SECONDS)
    assert c.runs.statistics()["kept"] == 1
    c.submit("x-2")
    assert [h["seconds"] for h in c.runs.headlines()][1] == 0
    assert len(c.outcomes()) == 2


def test_a_counter_that_fell_began_anew() -> None:
    c = Cluster(workers=1)
    c.beat(1, written_bytes=1000)
    c.submit("x-1")
    c.finish("x-1")
    c.beat(1, written_bytes=40)
    (worker,) = c.runs.find(1)["workers"]
    assert worker["tiers"]["written_bytes"] == 40


def test_overlapping_graphs_of_one_client_and_span_are_one_run() -> None:
    c = Cluster()
    c.submit("x-1")
    c.submit("y-1")
    c.submit("z-1", client="other")
    c.submit("z-2", span=("load",))
    c.submit("n-1", client="Client-worker-1")
    assert c.outcomes() == [(1, "going on", 2), (2, "going on", 1), (3, "going on", 2)]
    c.finish("x-1")
    assert c.outcomes()[0] == (1, "going on", 2)
    c.finish("y-1", "z-1", "z-2")
    assert [outcome for _, outcome, _ in c.outcomes()] == ["finished"] * 3
    assert all(h["number"] for h in c.runs.headlines())
    assert c.runs.find(3)["span"] == "load"
    assert c.runs.find(2)["shared"]


def test_a_run_that_goes_on_beside_another_one_is_shared() -> None:
    """Two clients in a loop: the graphs of the first come between the begin and the end of the other's."""
    c = Cluster()
    c.submit("x-1")
    c.finish("x-1")
    c.submit("y-1", client="other")
    assert [c.runs.find(number)["shared"] for number in (1, 2)] == [False, False]
    c.submit("x-2")
    assert c.outcomes() == [(1, "going on", 2), (2, "going on", 1)]
    assert [c.runs.find(number)["shared"] for number in (1, 2)] == [True, True]


def test_short_graphs_of_one_name_are_one_run_while_they_follow_at_once() -> None:
    c = Cluster()
    for i, wait in enumerate((0.5, 0.5, GAP_SECONDS + 0.1, 0.5)):
        c.submit(f"x-{i}")
        c.clock.now += 0.2
        c.finish(f"x-{i}")
        c.clock.now += wait
    assert [graphs for *_, graphs in c.outcomes()] == [3, 1]
    assert c.runs.find(1)["gap_seconds"] == pytest.approx(1.0)
    c.submit("y-1")
    assert len(c.outcomes()) == 3  # another name
    c.finish("y-1")
    c.submit("z-1")
    c.clock.now += 5
    c.finish("z-1")
    c.submit("z-2")
    assert len(c.outcomes()) == 5  # the one before was long


def test_a_client_that_always_has_work_gets_a_run_after_some_time() -> None:
    c = Cluster()
    c.submit("x-1")
    c.clock.now += LONGEST_SECONDS + 1
    c.submit("x-2")
    c.finish("x-1")
    assert c.outcomes() == [(1, "finished", 1), (2, "going on", 1)]


def test_two_clients_that_want_the_same() -> None:
    c = Cluster()
    c.submit("x-1")
    c.ledger.graph_arrived("other", {"x-1"}, {})
    c.finish("x-1")
    assert c.outcomes() == [(1, "finished", 1), (2, "finished", 1)]
    assert not c.runs.wanted


def test_what_is_there_already_is_no_run() -> None:
    c = Cluster()
    c.submit("x-1")
    c.finish("x-1")
    c.ledger.graph_arrived("other", {"x-1"}, {})
    assert c.outcomes() == [(1, "finished", 1)]


def test_released_and_failed_through_others() -> None:
    c = Cluster()
    c.submit("x-1", "x-2")
    c.clock.now += 3
    c.ledger.transition("y-1", "processing", "erred", {})
    c.tasks["x-1"].state = c.tasks["x-2"].state = "erred"  # of this the ledger hears nothing
    c.clock.now += 4
    assert c.outcomes() == [(1, "failed", 1)]
    assert c.runs.find(1)["stop"] == 1003
    c.submit("z-1", "z-2")
    del c.tasks["z-1"]
    c.tasks["z-2"].who_wants = set()
    assert c.outcomes()[1] == (2, "cancelled", 1)
    assert not c.runs.wanted


def test_a_run_of_which_most_was_released_is_cancelled() -> None:
    c = Cluster()
    c.submit("x-1", "x-2", "x-3")
    c.finish("x-1")
    del c.tasks["x-2"], c.tasks["x-3"]
    assert c.outcomes() == [(1, "cancelled", 1)]
    assert "Of what was asked for, 67% was released before it was there." in repr(RunReport(c.runs.find(1) or {}))
    c.submit("y-1", client="d")
    c.submit("z-1", client="d")
    c.tasks["y-1"].who_wants, c.tasks["y-1"].dependents = set(), (c.tasks["z-1"],)
    c.outcomes()
    c.finish("y-1", "z-1")
    assert c.outcomes()[1] == (2, "finished", 2), "what was persisted, and then another made of it"


def test_more_tasks_than_are_remembered_are_said_to_be() -> None:
    c = Cluster()
    c.ledger.history.rows = deque(maxlen=10)
    for number, keys in ((1, 15), (2, 3)):
        c.beat(1)
        names = [f"x-{number}-{i}" for i in range(keys)]
        c.submit(*names)
        c.clock.now += 1
        c.finish(*names)
        c.beat(1)
    many, few = (RunReport(c.runs.find(number) or {}) for number in (1, 2))
    assert "Of single tasks the newest 10 of 15 are known" in repr(many)
    assert "Of single tasks" not in repr(few)
    assert "of the tasks of run 1 the newest 10 are known" in repr(Comparison(many.record, few.record))


def test_a_silent_worker_does_not_keep_a_run_open_for_ever() -> None:
    c = Cluster()
    c.beat(1)
    c.submit("x-1")
    c.finish("x-1")
    dead, alive = c.workers.values()
    for _ in range(40):
        c.clock.now += 0.5
        c.ledger.heartbeat(alive, {f"slot_{k}_seconds": v for k, v in c.told.items()})  # type: ignore[arg-type]
    assert c.runs.statistics()["kept"] == 1
    assert dead.address not in [w["address"] for w in c.runs.find(1)["workers"]]


def test_a_report_counts_the_workers_that_are_shown_as_one() -> None:
    c = Cluster(workers=100)
    c.runs._facts["prices"] = {"h7": 5.0, "h*": 2.0}
    c.submit("x-1")
    c.finish("x-1")
    c.beat(1, busy=1)
    run = record.run_of(c.runs.find(1))
    assert sum(count for _, _, count in page.cost(run) or ()) == 100
    assert sum(price * count for _, price, count in page.cost(run) or ()) == 99 * 2.0 + 5.0
    text = page.page(run).render()
    assert "<b>100, 200</b><span>workers, threads</span>" in text
    assert "The 31 of 100 workers that lost most time." in text
    assert "tasks of 69 others" not in text


def test_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Cluster(workers=100)
    c.beat(1)
    kinds = ["x" + chr(ord("a") + i // 8) + chr(ord("a") + i % 8) for i in range(60)]
    keys = [f"{kinds[i % 60]}-{i}" for i in range(20_000)]
    c.submit(*keys)
    assert len(c.runs.wanted) <= recorder.FOLLOWED_KEYS
    for i, key in enumerate(keys):
        c.clock.now += 1e-4
        c.finish(key, seconds=1e-3 * (i % 7))
    c.beat(1, busy=1, written_bytes=10**9)
    c.beat(GAP_SECONDS)
    found = c.runs.find(1)
    assert 19_900 < found["task_count"] <= 20_000, "it ends with the last key that is followed"
    assert [len(found[key]) for key in ("tasks", "kinds", "workers")] == [record.TASKS, record.KINDS, record.WORKERS]
    assert found["worker_count"] == 100
    # What is folded is still in the sums.
    assert sum(w["slots"] for w in found["workers"]) == pytest.approx(found["slot_seconds"])
    assert sum(w["tiers"]["written_bytes"] for w in found["workers"]) == 100 * 10**9
    assert c.runs.statistics()["kept_bytes"] < 60_000
    for i in range(KEPT_RUNS + 20):
        c.submit(f"y-{i}", span=(str(i),))
        c.finish(f"y-{i}")
        c.beat(GAP_SECONDS + 0.1)
    c.beat(GAP_SECONDS)
    assert c.runs.statistics()["kept"] == KEPT_RUNS
    assert c.runs.numbers() == list(range(22, 122))  # the oldest went first
    assert c.runs.find(21) is None
    assert c.runs.statistics()["kept_bytes"] <= KEPT_BYTES
    monkeypatch.setattr(recorder, "KEPT_BYTES", 10_000)
    c.submit("z-1")
    c.finish("z-1")
    c.beat(GAP_SECONDS + 0.1)
    c.beat(GAP_SECONDS)
    assert c.runs.statistics()["kept_bytes"] <= 10_000
    assert c.runs.numbers()[-1] == 122
    # Many at the same time are not followed, and that is said.
    for i in range(recorder.FOLLOWED + 5):
        c.submit(f"w-{i}", client=str(i))
    assert c.runs.statistics()["unfollowed"] == 5
    assert "5 graphs are in none of them" in repr(Runs(c.runs.headlines(), 5))
    for i in range(recorder.FOLLOWED + 5):
        c.finish(f"w-{i}")
    assert not c.runs.wanted


def test_the_words_of_a_comparison() -> None:
    c = Cluster(workers=1)
    c.beat(1)
    c.submit("x-1")
    c.clock.now += 10
    c.finish("x-1")
    c.beat(0.5, busy=10)
    first = c.runs.find(1)
    second = first | {"number": 2, "stop": first["start"] + 20, "busy_seconds": 4.0, "threads": 3, "name": "y"}
    second["causes"] = dict.fromkeys(CAUSES, 0.0) | {"unspill": 20.0}
    got = Comparison(first, second)
    assert got.ratio == pytest.approx(2)
    assert got.verdict()[:3] == [
        "run 2 took 10 s longer than run 1, 2 times as long",
        "it had 3 threads instead of 2",
        "they have different names, so they may not be the same work",
    ]
    assert "threads waited (unspilling) 20 s more" in got.verdict()
    assert "threads worked 6 s less" in got.verdict()
    assert "took 10 s less than run 2, 0.5 times as long" in Comparison(second, first).verdict()[0]
    assert "took as long as" in Comparison(first, first).verdict()[0]
    assert "run 1, x: finished" in repr(RunReport(first))


def test_one_released_future_does_not_cancel_a_run() -> None:
    c = Cluster()
    c.submit("x-1", "x-2")
    del c.tasks["x-1"]
    c.beat(1)
    c.finish("x-2")
    assert c.outcomes() == [(1, "finished", 1)]


def test_what_is_asked_for_twice_is_cancelled_once() -> None:
    c = Cluster()
    c.submit("x-1")
    c.submit("x-1", "x-2")
    c.tasks.clear()
    c.beat(5.0)
    c.beat(5.0)
    assert c.outcomes() == [(1, "cancelled", 2)]


def test_a_million_released_futures_do_not_block_the_event_loop() -> None:
    """What is looked at in one heartbeat is bounded, also when all has been released at once."""
    c = Cluster()
    keys = [f"x-{i}" for i in range(3 * recorder.FOLLOWED_KEYS)]
    c.submit(*keys)
    followed = len(c.runs.wanted)
    assert followed == recorder.FOLLOWED_KEYS
    c.tasks.clear()
    before = len(c.runs.wanted)
    c.runs.numbers()
    assert before - len(c.runs.wanted) == recorder.SWEPT
    for _ in range(followed // recorder.SWEPT):
        c.runs.numbers()
    assert c.outcomes() == [(1, "cancelled", 1)]


def test_a_worker_that_comes_back_at_its_address_has_done_both() -> None:
    """As with a fixed port: what was done before it was restarted is not taken off what it did after."""
    c = Cluster(workers=1)
    c.beat(100, busy=100, written_bytes=1000)
    c.submit("x-1")
    c.beat(10, busy=20, written_bytes=1500)
    (ws,) = c.workers.values()
    c.ledger.worker_removed(ws.address)
    c.ledger.worker_added(ws)
    c.told = dict.fromkeys(c.told, 0.0)
    c.finish("x-1")
    c.beat(GAP_SECONDS, busy=2 * GAP_SECONDS, written_bytes=30)
    (worker,) = c.runs.find(1)["workers"]
    assert worker[BUSY] == pytest.approx(20 + 2 * GAP_SECONDS)
    assert worker["slots"] == pytest.approx(20 + 2 * GAP_SECONDS)
    assert worker["tiers"]["written_bytes"] == 530


def test_a_worker_that_left_after_the_end_counts_once() -> None:
    c = Cluster(workers=2)
    c.beat(1)
    c.submit("x-1")
    c.finish("x-1")
    c.beat(0.1, busy=0.1)
    gone = next(iter(c.workers))
    del c.workers[gone]
    c.ledger.worker_removed(gone)
    c.beat(GAP_SECONDS)
    assert c.runs.statistics()["kept"] == 1
    assert c.runs.find(1)["worker_count"] == 2
    assert c.runs.find(1)["lost"] == []


def test_the_end_of_a_run_is_no_look_at_all_workers_for_each_of_them() -> None:
    c = Cluster(workers=200)
    c.beat(1)
    c.submit("x-1")
    c.finish("x-1")
    c.beat(0.1)
    c.runs._live[0].ends.clear()  # as if the gap had passed before their first word
    looked = 0

    class Counted(dict[str, Any]):
        def __iter__(self) -> Any:
            nonlocal looked
            for address in super().__iter__():
                looked += 1
                yield address

    c.workers = Counted(c.workers)
    c.beat(GAP_SECONDS)
    assert c.runs.statistics()["kept"] == 1
    assert looked <= 2 * len(c.workers)


def test_a_run_of_no_thread_seconds_has_a_page() -> None:
    c = Cluster()
    c.submit("x-1")
    c.finish("x-1")
    c.beat(2)
    found = c.runs.find(1)
    run = record.run_of(found | {"slot_seconds": 0.0, "causes": found["causes"] | {"network": 0.1}})
    assert "report of run 1" in page.page(run).render()


def test_services_that_never_end_do_not_hide_all_other_runs() -> None:
    c = Cluster()
    for i in range(recorder.FOLLOWED):
        c.submit(f"serve-{i}", span=(f"s{i}",))
    c.submit("x-1")
    assert c.runs.statistics()["unfollowed"] == 1
    c.beat(LONGEST_SECONDS + 1)
    c.submit("x-2")
    assert c.runs.statistics()["unfollowed"] == 1
    assert c.outcomes()[0] == (1, "followed no more", 1)
    assert "serve-0" not in c.runs.wanted
    c.finish("serve-0", "x-2")
    assert c.outcomes()[-1] == (recorder.FOLLOWED + 1, "finished", 1)
    assert "The run was followed no more." in record.notes(c.runs.find(1))


def test_a_run_of_weeks_keeps_only_some_of_the_workers_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "LEFT", 3)
    monkeypatch.setattr(stall_ledger, "SKEWED", 4)
    c = Cluster(workers=1)
    c.submit("serve-1")
    (stays,) = c.workers.values()
    for i in range(10):
        ws = c.workers[f"tcp://h:{i}"] = types.SimpleNamespace(**vars(stays) | {"address": f"tcp://h:{i}"})
        c.ledger.worker_added(ws)  # type: ignore[arg-type]
        c.beat(1)
        reading = c.ledger.readings()[ws.address]
        c.runs.heard(ws, reading, reading, {}, (("x", ws.address), float(i)))  # type: ignore[arg-type]
        del c.workers[ws.address]
        c.ledger.worker_removed(ws.address)
    (run,) = c.runs._live
    assert list(run.left) == ["tcp://h:7", "tcp://h:8", "tcp://h:9"]
    assert len(run.skewed) <= 4
    assert run.skewed["x", "tcp://h:9"] == 9
    assert c.runs.find(1)["worker_count"] == 4


def test_many_runs_that_go_on_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at each takes up to 30 ms of the scheduler's loop."""
    c = Cluster()
    for i in range(recorder.FOLLOWED):
        c.submit(f"x-{i}", span=(f"s{i}",))
    made = 0
    stock = record.made

    def counted(*args: Any) -> dict[str, Any]:
        nonlocal made
        made += 1
        return stock(*args)

    monkeypatch.setattr(record, "made", counted)

    async def go() -> None:
        looking = asyncio.create_task(c.runs.refresh())
        while not looking.done():
            before = made
            await asyncio.sleep(0)
            assert made <= before + 1
        looking.result()

    asyncio.run(go())
    assert made == recorder.FOLLOWED
    assert len(c.runs.headlines()) == recorder.FOLLOWED
    assert made == recorder.FOLLOWED, "they are fresh"
