"""`dask gpurt diagnose`: each cause by evidence that was made up, then on live clusters that have one."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client, Event

import dask_gpurt
from dask_gpurt.client.diagnosis import Answer, Evidence, diagnose
from dask_gpurt.doctor.finding import Finding, State
from dask_gpurt.observe.answers.snapshot import Snapshot
from dask_gpurt.observe.report.findings import advise
from tests.observe.report.test_findings import run, tasks

from .processes import processes, together
from .test_sick import PRELOAD, gpurt, stopped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dask_gpurt.observe.report.facts import Run

pytestmark = pytest.mark.timeout(600)

A, B = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"


def evidence(of: Run | None = None, scheduler: dict[str, Any] | None = None, **known: Any) -> Evidence:
    """Of a healthy cluster with two workers, besides what is given."""
    workers = known.pop("workers", {A: {"version": "1"}, B: {"version": "1"}})
    snapshot = Snapshot({"version": "1", **(scheduler or {})}, workers)
    advice = () if of is None else tuple(advise(of))
    return Evidence(snapshot, known.pop("checks", ()), of, advice, known.pop("progress", {}), **known)


def check(id: str, state: State) -> Finding:
    return Finding(id, id, state, "this", "that", "It matters", "mend it", 0.1)


def ids(given: Evidence, *, every: bool = False) -> list[tuple[int, str]]:
    """(step, cause) of all that was found."""
    return [(step.number, cause.id) for step in diagnose(given, every=every).steps for cause in step.causes]


def test_nothing_is_wrong() -> None:
    found = diagnose(evidence(run({"network": 1.0}, busy=99.0)))
    assert [step.answer for step in found.steps] == [Answer.NO_CAUSE] * 5
    assert "No cause was found" in repr(found)
    assert json.loads(json.dumps(found.to_dict()))["steps"][1]["answer"] == "no cause here"


def test_what_is_not_known_is_not_answered() -> None:
    for nothing in (None, run({}, busy=1.0)):
        answers = [step.answer for step in diagnose(evidence(nothing)).steps]
        assert answers == [Answer.NO_CAUSE, *[Answer.UNKNOWN] * 3, Answer.NO_CAUSE]


def test_the_first_cause_ends_it() -> None:
    given = evidence(run({"network": 80.0}, busy=20.0), checks=(check("T8", State.FAIL), check("T11", State.FAIL)))
    assert ids(given) == [(1, "M1")]
    assert ids(given, every=True) == [(1, "M1"), (3, "T11"), (4, "network")]


def test_busy_threads_that_compute_nothing_are_a_cause() -> None:
    given = evidence(run({}, busy=100.0), checks=(check("T4", State.WARN), check("T11", State.WARN)))
    assert ids(given) == [(3, "M6")]


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("T1", (1, "M1")),
        ("stack", (1, "M4")),
        ("T13", (1, "T13")),
        ("T6", (3, "T6")),
        ("T10", (4, "M3")),
        ("T12", (4, "M3")),
    ],
)
def test_checks_of_the_doctor(id: str, expected: tuple[int, str]) -> None:
    assert ids(evidence(checks=(check(id, State.FAIL),))) == [expected]
    assert ids(evidence(checks=(check(id, State.WARN),))) == []


def test_who_gets_no_work() -> None:
    finding = {"check": "import", "state": "fail", "found": "no module x", "remedy": "install it"}
    gate = {"workers": {A: {"kept": True, "phase": "held", "findings": [finding]}}}
    why = {"worker": A, "peer": "", "cause": "disk", "found": "3 errors", "remedy": "check it"}
    assert ids(evidence(scheduler={"preflight": gate})) == [(1, "M1")]
    assert ids(evidence(scheduler={"quarantine": {"held": {A: why}, "suspects": [why]}})) == [
        (1, "held"),
        (1, "suspect"),
    ]
    assert ids(evidence(workers={A: {"error": "no answer within 10 s"}, B: {}})) == [(1, "silent")]


@pytest.mark.parametrize(
    ("cause", "step", "id"),
    [
        ("no_ready_task", 2, "no ready task"),
        ("skew", 2, "skew"),
        ("unspill", 3, "spilling"),
        ("serialisation", 3, "task overhead"),
        ("network", 4, "network"),
        ("shuffle_barrier", 4, "shuffle barrier"),
    ],
)
def test_causes_of_the_ledger(cause: str, step: int, id: str) -> None:
    of = run({cause: 60.0}, busy=40.0)
    if cause == "unspill":
        of = dataclasses.replace(
            of, workers=tuple(dataclasses.replace(w, tiers={"read_bytes": 1e9}) for w in of.workers)
        )
    assert ids(evidence(of)) == [(step, id)]
    assert ids(evidence(run({cause: 10.0}, busy=90.0))) == []  # too little to be the cause


def test_small_tasks_are_a_mistake() -> None:
    """Neither CPU nor GPU is busy."""
    small = run({"scheduler": 60.0}, busy=40.0, tasks=tasks("inc", A, *[0.001] * 50))
    assert ids(evidence(small)) == [(2, "M6")]
    large = run({"scheduler": 60.0}, busy=40.0, tasks=tasks("fit", A, *[1.0] * 50))
    assert ids(evidence(large)) == [(2, "scheduler")]


def test_a_spike_is_a_mistake() -> None:
    waits = {"ledger": {"waits": {"unassigned": {"p50_seconds": 0.01, "p99_seconds": 0.9}}}}
    large = run({"scheduler": 60.0}, busy=40.0, tasks=tasks("fit", A, *[1.0] * 50))
    assert ids(evidence(large, waits)) == [(2, "M5")]


def test_a_class_of_nodes_that_is_slower() -> None:
    slow = run(
        {"skew": 40.0},
        busy=60.0,
        tasks=tasks("fit", "a", *[3.0] * 10) + tasks("fit", "b", *[1.0] * 10) + tasks("fit", "c", *[1.0] * 10),
    )
    workers = tuple(
        dataclasses.replace(w, node_class="gpu.new" if w.address == "a" else "gpu.old") for w in slow.workers
    )
    found = ids(evidence(dataclasses.replace(slow, workers=workers)))
    assert (2, "M2") in found
    alike = tuple(dataclasses.replace(w, node_class="gpu.old") for w in slow.workers)
    assert (2, "slow worker") in ids(evidence(dataclasses.replace(slow, workers=alike)))


def progress(**changes: float) -> dict[str, Any]:
    return {"ended": 40.0, "running": 1, "oldest": 40.0, "kind": "fit", "quiet": 0.2} | changes


def test_a_stall_names_the_oldest_progress() -> None:
    given = evidence(progress={A: progress(), B: progress(ended=90.0, kind="join")})
    (step, cause) = next((s, c) for s in diagnose(given).steps for c in s.causes)
    assert (step.number, cause.id) == (2, "M3")
    assert f"that of {B}: 1.5 min ago" in cause.found or f"that of {B}: 90 s ago" in cause.found
    assert "'join'" in cause.found


def test_a_quiet_worker_goes_before_an_older_one() -> None:
    given = evidence(progress={A: progress(quiet=35.0), B: progress(ended=90.0)})
    assert f"that of {A}" in diagnose(given).causes[0].found


@pytest.mark.parametrize(
    "other",
    [
        {},  # nothing runs
        {A: progress(running=0, oldest=0.0), B: progress(running=0, oldest=0.0)},
        {A: progress(ended=1.0), B: progress()},  # a task has ended elsewhere
        {A: progress(oldest=2.0), B: progress(running=0)},  # it was idle, and has just begun
    ],
)
def test_no_stall(other: dict[str, Any]) -> None:
    assert ids(evidence(progress=other)) == []
    assert ids(evidence(progress=other, stall_seconds=0.5 if not other else 100.0)) == []


# ------------------------------------------------------------------ live


def _sleep(i: int, seconds: float) -> int:
    time.sleep(seconds)
    return i


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        dask_gpurt.local_cluster(n_workers=2, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.slow
@pytest.mark.cluster
def test_one_long_task_is_named(client: Client) -> None:
    """Three threads wait for the fourth."""
    client.submit(_sleep, 0, 6, key="long", pure=False).result()
    found = dask_gpurt.diagnose(client, every=True)
    ledger = [step for step in found.steps if step.number == 2]
    assert ledger, repr(found)
    assert ledger[0].answer is Answer.CAUSE
    assert {cause.id for cause in ledger[0].causes} <= {"no ready task", "skew"}


@pytest.mark.slow
@pytest.mark.cluster
def test_threads_that_are_busy_have_no_cause_but_that_tasks_sleep(client: Client) -> None:
    client.gather(client.map(_sleep, range(40), seconds=0.4, pure=False))
    found = dask_gpurt.diagnose(client, every=True)
    mine = [cause for step in found.steps if step.number > 1 for cause in step.causes]
    # The second is found, and true, where other work fills the machine.
    allowed = {("M6", "Tasks wait"), ("M6", "Threads wait for processors")}
    assert {(cause.id, cause.meaning.split(":")[0]) for cause in mine} <= allowed, repr(found)


@pytest.mark.cluster
def test_a_task_that_waits_for_ever_is_a_stall(client: Client) -> None:
    address = next(iter(client.scheduler_info()["workers"]))
    future = client.submit(Event.wait, Event("never", client=client), workers=[address], key="stuck-1", pure=False)
    while not client.processing()[address]:
        time.sleep(0.05)
    time.sleep(1.2)
    found = dask_gpurt.diagnose(client, every=True, stall_seconds=1.0)
    (stall,) = [cause for cause in found.causes if cause.id == "M3"]
    assert "'stuck'" in stall.found
    Event("never", client=client).set()
    future.result()
    assert not [
        cause for cause in dask_gpurt.diagnose(client, every=True, stall_seconds=1.0).causes if cause.id == "M3"
    ]


@pytest.mark.slow
@pytest.mark.cluster
def test_a_stopped_worker_from_the_command_line(tmp_path: Path) -> None:
    with processes(tmp_path) as started:
        address = started.scheduler(*PRELOAD)
        for name in ("one", "two"):
            started.worker(address, "--name", name, "--no-nanny")
        with Client(address) as client:
            client.wait_for_workers(2)
            pids = client.run(os.getpid)
            done = gpurt("diagnose", address, "--json")
            steps = json.loads(done.stdout)["steps"]
            assert done.returncode == (1 if any(step["causes"] for step in steps) else 0), done.stderr
            victim, pid = next(iter(pids.items()))
            running = client.map(time.sleep, [0.2] * 4, pure=False)  # a function that these processes can import
            with stopped(pid):
                words = ("diagnose", address, "--timeout", "2", "--stall", "1")
                done, every = together(partial(gpurt, *words), partial(gpurt, *words, "--every"))
                assert done.returncode == 1, (done.stdout, done.stderr)
                name = client.scheduler_info()["workers"][victim]["name"]
                assert f"silent: {name}" in done.stdout
                assert done.stdout.startswith("1. Is every node healthy and at work? here is a cause")
                assert "\n2." not in done.stdout
                assert "\n5. Is another backend" in every.stdout
            client.gather(running)


def test_a_wrong_address_is_one_line() -> None:
    done = gpurt("diagnose", "tcp://127.0.0.1:1", "--timeout", "3")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
