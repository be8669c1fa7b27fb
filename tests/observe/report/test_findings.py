"""Advice is a pure function of a run: each trouble by itself, two at once, and none."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

from dask_gpurt.observe.collect.causes import CAUSES
from dask_gpurt.observe.report import page
from dask_gpurt.observe.report.facts import Fetches, Run, WorkerRun, from_snapshots, grown
from dask_gpurt.observe.report.findings import advise
from dask_gpurt.observe.report.tasks import Task, slowness


def run(causes: dict[str, float] | None = None, busy: float = 50.0, **known: Any) -> Run:
    every = dict.fromkeys(CAUSES, 0.0) | (causes or {})
    slots = busy + sum(every.values())
    half = {cause: seconds / 2 for cause, seconds in every.items()}
    workers = tuple(
        WorkerRun(
            name,
            name,
            f"host-{name}",
            f"2 threads, {name}",
            2,
            slots / 2,
            busy / 2,
            half,
            {"written_bytes": 5e8, "read_bytes": 4e8},
        )
        for name in ("a", "b")
    )
    facts: dict[str, Any] = {
        "start": 0.0,
        "stop": slots / 4,
        "workers": workers,
        "slot_seconds": slots,
        "busy_seconds": busy,
        "causes": every,
        "waits": {"network": [0, 3, 1], "unassigned": [2]},
        "tasks": (),
        "task_count": 0,
        "fetches": (),
        "skewed": {},
        "outputs": (),
        "scheduler": {},
        "placement": {},
        "shuffle": {},
        "prices": None,
    }
    return Run(**(facts | known))


def tasks(prefix: str, address: str, *seconds: float) -> tuple[Task, ...]:
    return tuple(Task(address, prefix, 0.0, s, 0.0) for s in seconds)


def test_nothing_to_say() -> None:
    assert advise(run()) == []
    assert advise(run({"no_work": 1000.0})) == []
    assert advise(run({"scheduler": 0.4, "network": 0.3})) == []


def test_a_slow_worker_takes_what_others_waited_for() -> None:
    both = tasks("f", "a", *[0.1] * 20) + tasks("f", "b", *[0.4] * 10)
    (first, *rest) = advise(
        run({"queued_elsewhere": 10, "skew": 6, "network": 2}, tasks=both, skewed={("f", "b"): 5.0, ("g", "a"): 1.0})
    )
    assert first.cause == "slow worker"
    assert "The same tasks take 4.0 times as long on b" in first.text
    assert first.seconds == pytest.approx(4.0 * (1 - 1 / 4) + 10 + 5)
    assert [f.cause for f in rest] == ["network", "skew"]


def test_one_large_task_does_not_make_a_worker_slow() -> None:
    both = tasks("f", "a", *[0.1] * 8) + tasks("f", "b", *[0.1] * 7, 5.0)
    assert max(s.factor for s in slowness(both)) == pytest.approx(1.0)
    (first,) = advise(run({"skew": 20}, tasks=both, skewed={("f", "b"): 20.0}, outputs=(1, 1, 1, 50)))
    assert first.cause == "skew"
    assert "f on b, 5 s against a median of 0.1 s" in first.text
    assert "50 times the median" in first.text


class Counted(float):
    """Seconds that count how often they are compared."""

    compared = 0

    def __sub__(self, other: float) -> Counted:
        return Counted(float(self) - other)

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < other


def test_slowness_does_not_sort_all_tasks_for_each_worker() -> None:
    """It is made on the scheduler's event loop, of 10,000 tasks and any number of workers."""
    draw = random.Random(1)
    seconds = [Counted(draw.choice((0.1, 0.2, draw.random()))) for _ in range(3000)]
    rows = [(f"w{i % 100}", f"f{i % 3}", 0.0, s, 0.0) for i, s in enumerate(seconds)]
    Counted.compared = 0
    found = {s.address: s for s in slowness(rows)}
    assert Counted.compared < 100_000
    assert len(found) == 100
    for address, one in found.items():
        logs = total = 0.0
        for prefix in ("f0", "f1", "f2"):
            mine = sorted(float(r[3]) for r in rows if r[1] == prefix and r[0] == address and r[3] >= 1e-3)
            others = sorted(float(r[3]) for r in rows if r[1] == prefix and r[0] != address and r[3] >= 1e-3)
            logs += sum(mine) * math.log(mine[len(mine) // 2] / others[len(others) // 2])
            total += sum(mine)
        assert (one.factor, one.seconds) == (pytest.approx(math.exp(logs / total)), pytest.approx(total))


def test_links() -> None:
    fast, slow = Fetches("a", "b", 1e9, 1.0, 10), Fetches("b", "a", 1e9, 10.0, 10)
    assert advise(run({"network": 20}, fetches=(fast,)))[0].cause == "network"
    (first,) = advise(run({"network": 20}, fetches=(slow, fast)))
    assert first.cause == "slow link"
    assert "from b to a came 1 GB at 100 MB/s" in first.text
    assert "91% of the time of all fetches" in first.text
    longer = Fetches("a", "b", 9e9, 30.0, 10)
    assert advise(run({"network": 20}, fetches=(slow, longer)))[0].cause == "network"
    assert advise(run({"network": 20}, fetches=(Fetches("a", "b", 1e3, 1.0, 1),)))[0].cause == "network"


@pytest.mark.parametrize(
    ("cause", "named"),
    [
        ("unspill", "spilling"),
        ("memory", "spilling"),
        ("shuffle_barrier", "shuffle barrier"),
        ("no_ready_task", "no ready task"),
        ("queued_elsewhere", "queued elsewhere"),
        ("scheduler", "scheduler"),
        ("planning", "own planning"),
        ("serialisation", "task overhead"),
        ("resources", "resources"),
    ],
)
def test_each_cause_has_a_finding_with_its_number(cause: str, named: str) -> None:
    (finding,) = advise(run({cause: 25.0, "no_work": 500.0}))
    assert finding.cause == named
    assert finding.share == pytest.approx(25 / 75)
    assert "25 s" in finding.text
    assert finding.remedy


def test_every_cause_is_looked_at() -> None:
    assert len(advise(run(dict.fromkeys(CAUSES, 10.0)))) == len(CAUSES) - 2  # unspill + memory; no_work is none


def test_nothing_is_blamed_that_did_not_happen() -> None:
    """Round trips to a busy event loop were once told as reads, of 0 B."""
    dry = [dataclasses.replace(w, tiers={"written_bytes": 0, "read_bytes": 0}) for w in run().workers]
    assert advise(run({"unspill": 25.0}, workers=tuple(dry))) == []
    (finding,) = advise(run({"unspill": 25.0, "memory": 10.0}, workers=tuple(dry)))
    assert finding.seconds == 10.0
    assert finding.text == "Threads waited 10 s for room in memory; 0 B were written and 0 B read."
    (finding,) = advise(run({"unspill": 25.0}))
    assert finding.text == "Threads waited 25 s for data to be read back from disk; 1 GB were written and 800 MB read."


def test_tiny_tasks_are_named() -> None:
    found = advise(run({"serialisation": 25.0}, tasks=tasks("f", "a", *[0.001] * 50)))
    assert "Tasks take 1 ms on average" in found[0].remedy


def test_counters_that_started_over() -> None:
    assert grown({"a": 3, "b": {"c": 5}, "t": "x", "f": True}, {"a": 10, "b": {"c": 2}}) == {
        "a": 3,
        "b": {"c": 3},
        "t": "x",
        "f": True,
    }


def test_a_run_of_a_cluster_with_a_worker_that_says_nothing() -> None:
    after = {
        "time": 20.0,
        "started": 10.0,
        "scheduler": {"version": "1", "policy": "gpurt", "ledger": {"slot_seconds": 10.0, "busy_seconds": 10.0}},
        "details": {},
        "prices": None,
        "workers": {"x": {"name": "x", "host": "h", "threads": 1, "status": {}}},
    }
    got = from_snapshots(None, after)
    assert (got.seconds, got.busy_seconds, got.workers[0].slot_seconds) == (10.0, 10.0, 0.0)
    assert "No task ended" in page.page(got).render()


def test_the_tasks_of_a_run_are_those_that_ended_in_it_by_whatever_clock() -> None:
    def snapshot(seconds: float, *stops: float) -> dict[str, Any]:
        rows = [["x", "f", stop - 1.0, stop, 0.0] for stop in stops]
        scheduler = {"ledger": {"tasks": len(stops)}}
        return {"time": seconds, "started": 0.0, "scheduler": scheduler, "details": {"rows": rows}, "workers": {}}

    # The worker's clock is two seconds behind, and the last two tasks ended after the first snapshot.
    got = from_snapshots(snapshot(20.0, 18.5), snapshot(30.0, 18.5, 18.9, 27.0))
    assert [task.stop for task in got.tasks] == [18.9, 27.0]
    assert got.task_count == 2
    assert from_snapshots(snapshot(20.0, 18.5), snapshot(30.0, 18.5)).tasks == ()


@pytest.mark.parametrize(("kind", "named"), [("EDQUOT", True), ("ENOSPC", True), ("unpicklable", False)])
def test_a_disk_that_is_full_is_named_before_memory(kind: str, named: bool) -> None:
    tiers = {"written": {"bytes": 10}, "write_errors": {kind: 3}}
    worker = {"name": "x", "host": "h", "threads": 1, "memory_bytes": 0, "status": {"tiers": tiers}}
    after = {"time": 20.0, "started": 10.0, "scheduler": {}, "details": {}, "workers": {"x": worker}}
    (finding,) = advise(run({"memory": 25.0}, workers=from_snapshots(None, after).workers))
    assert ("disk-limit" in finding.remedy) is named
    assert "more memory" in finding.remedy


def test_cost() -> None:
    assert page.cost(run()) is None
    a, b = "2 threads, a", "2 threads, b"
    assert page.cost(run(prices=2.5)) == [(a, 2.5, 1), (b, 2.5, 1)]
    assert page.cost(run(prices={"host-b": 4.0})) == [(a, 0.0, 1), (b, 4.0, 1)]
    assert page.cost(run(prices={"a": 1.0, "host*": 3.0})) == [(a, 1.0, 1), (b, 3.0, 1)]
    assert page.cost(run(prices={"2 threads, b*": 7.0})) == [(a, 0.0, 1), (b, 7.0, 1)]
    assert "$ of this run" in page.page(run(prices=1.0)).render()


def test_what_users_call_things_is_escaped() -> None:
    evil = "<script>alert('&')</script>"
    got = run(tasks=tasks(evil, "a", 1.0), fetches=(Fetches(evil, "a", 1e7, 1.0, 1),), skewed={(evil, evil): 3.0})
    text = page.page(got).render()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_seconds_of_the_disk_are_without_encoding_as_in_heartbeats() -> None:
    written = {"bytes": 10, "io_seconds": 1.0, "codec_seconds": 5.0}
    status = {"tiers": {"written": written, "read": written}}
    worker = {"name": "w", "host": "h", "threads": 1, "memory_bytes": 1, "status": status}
    snapshot = {"scheduler": {}, "details": {}, "started": 0.0, "time": 1.0, "workers": {"tcp://h:1": worker}}
    (made,) = from_snapshots(None, snapshot).workers
    assert (made.tiers["written_seconds"], made.tiers["read_seconds"]) == (1.0, 1.0)
