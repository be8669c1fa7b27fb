"""`Status` adds over workers only what adds."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dask_gpurt.observe.answers import snapshot, summary
from dask_gpurt.observe.answers.snapshot import Member
from dask_gpurt.observe.answers.status import Status
from dask_gpurt.observe.collect.causes import CAUSES


def worker(**changes: Any) -> dict[str, Any]:
    share = changes.get("share", 0.5)
    return {
        "tiers": {
            "written": {"bytes": 5},
            "host_limit_bytes": 100,
            "hints": {"evictions_by_hint_share": share},
            "prefetch": {"share": 0.2, "queue": 1},
            "loop_blocked_seconds": {"sum": 2.0, "max": changes.get("blocked", 0.5)},
            "below": {"object": {"resting_seconds": 3.0, "writes": 1}},
        },
        "slots": {"fetched": {"tcp://10.0.0.1:5": {"bytes": 7}}},
        "shuffle": {
            "transport": {
                "receive": {"budget_bytes": 64, "peak_held_bytes": changes.get("peak", 1)},
                "links": [
                    {"peer": "x", "transport": "tcp", "stall_seconds": 0.5},
                    {"peer": "y", "transport": "tcp", "stall_seconds": 0.25},
                    {"peer": "y", "transport": "rpc", "stall_seconds": 2.0},
                ],
            }
        },
        "events": {"last": {"x": 1}},
    }


def test_only_what_adds_is_added() -> None:
    status = Status({}, {"a": worker(), "b": worker(share=0.9, blocked=0.75, peak=9), "c": {}, "d": {"error": "gone"}})
    assert status.totals() == {
        "tiers.written.bytes": 10,
        "tiers.host_limit_bytes": 200,
        "tiers.prefetch.queue": 2,
        "tiers.loop_blocked_seconds.sum": 4.0,
        "tiers.loop_blocked_seconds.max": 0.75,
        "tiers.below.object.resting_seconds": 3.0,
        "tiers.below.object.writes": 2,
        "slots.fetched.tcp://10.0.0.1:5.bytes": 14,
        "shuffle.transport.receive.peak_held_bytes": 9,
        "shuffle.transport.links.tcp.stall_seconds": 1.5,
        "shuffle.transport.links.rpc.stall_seconds": 4.0,
    }
    assert status.ranges() == {
        "tiers.hints.evictions_by_hint_share": (0.5, 0.9),
        "tiers.prefetch.share": (0.2, 0.2),
        "shuffle.transport.receive.budget_bytes": (64, 64),
    }
    assert json.loads(json.dumps(status.to_dict()))["ranges"]["tiers.prefetch.share"] == [0.2, 0.2]
    text = status.text(verbose=True)
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines() if " " in line.strip()}
    assert lines["hints.evictions_by_hint_share"] == "0.5 to 0.9"
    assert lines["prefetch.share"] == "0.2"
    assert lines["transport.receive.budget_bytes"] == "64 B"


# ------------------------------------------------------------------ twenty lines

A, B = "tcp://10.0.0.1:5", "tcp://10.0.0.2:5"


def ledger(**seconds: float) -> dict[str, Any]:
    """Of two workers with one thread each, for 100 s in all."""
    causes = dict.fromkeys(CAUSES, 0.0) | seconds
    busy = 100.0 - sum(causes.values())
    sums = {"slot_seconds": 100.0, "busy_seconds": busy, "causes": causes}
    return {**sums, "tasks": 40, "workers": {A: sums}}


def scheduler(**changes: Any) -> dict[str, Any]:
    placement = {
        "decisions": {"total": 5, "moved": 1, "local": 4, "newest": [[0.1, 0.2, 0]] * 9},
        "declined": {"no inputs": 7, "nothing that stock does not know": 1200, "actor": 0},
        "links": {
            "host": {"bytes_per_second": 1.5e9, "samples": 9},
            "network": {"bytes_per_second": 4e8, "samples": 0},
        },
        "graph_judge": {"judged": 0, "switched_off": {}, "cleared": {}, "on_trial": {}},
        "governor": {"standing": "trusted", "reason": None},
        "retired": {},
        **changes.pop("placement", {}),
    }
    return {
        "version": "0.1",
        "policy": "gpurt",
        "parts": {"ledger": "on", "workers": "on", "placement": "on", "shuffle": "on"},
        "plots": "on",
        "metrics": "on",
        "refused": {},
        "placement": placement,
        "shuffle": {
            "runs": 2,
            "active": 0,
            "fallbacks": {"rechunk": 3, "object dtype": 1},
            "retired": {},
            "recovery": {},
        },
        "ledger": ledger(),
        **changes,
    }


def spilling(**changes: Any) -> dict[str, Any]:
    return {
        "parts": {"tiers": "on"},
        "tiers": {
            "enabled": True,
            "left_alone": "",
            "host_bytes": 3e8,
            "host_limit_bytes": 6e8,
            "disk_bytes": 2e9,
            "disk_limit_bytes": None,
            "spilled_keys": 12,
            "written": {"bytes": 3e9, "io_seconds": 2.0},
            "read": {"bytes": 2e9, "io_seconds": 1.0},
            "prefetch": {"started": 10, "in_time": 6, "share": 0.2},
            **changes,
        },
        "shuffle": {"bytes_sent": 1.2e9, "bytes_self": 6e8, "restarts": 0},
        "slots": {"fetched": {B: {"bytes": 4e8, "seconds": 0.5, "requests": 20}}},
    }


MEMBERS = {
    A: Member("0", 1, 500_000_000, 1_000_000_000),
    B: Member("big", 1, 900_000_000, 1_000_000_000, quiet_seconds=30.0),
}


def shown(scheduler: dict[str, Any], workers: dict[str, dict[str, Any]], **changes: Any) -> dict[str, str]:
    """The text by label; it fits."""
    text = repr(Status(scheduler, workers, address="tcp://10.0.0.9:8786", members=MEMBERS, **changes))
    lines = text.splitlines()
    assert len(lines) <= summary.LINES == 20, text
    assert max(map(len, lines)) <= summary.WIDTH == 100, text
    out, label = {"": lines[0]}, ""
    for line in lines[1:]:
        label = line[:10].strip() or label
        out[label] = f"{out.get(label, '')} {line[11:]}".strip()
    return out


def test_a_spilling_join_in_twenty_lines() -> None:
    got = shown(scheduler(ledger=ledger(unspill=30.0, network=8.0, no_work=20.0)), {A: spilling(), B: spilling()})
    assert got == {
        "": "dask-gpurt 0.1, policy gpurt: on 2 of 2 workers, 2 threads, tcp://10.0.0.9:8786",
        "verdict": "no evidence yet of a gain or a loss: no graph was long enough to be judged",
        "threads": "52% busy of 80 thread-seconds with work to do, 40 tasks; idle: unspilling 38%, waiting for input "
        "10%",
        "workers": "2: all answer, all with dask-gpurt",
        "memory": "values in memory 600 MB of 1.2 GB, disk 4 GB; 24 results are not in memory "
        "processes use 1.4 GB of 2 GB; "
        "fullest: big, 90%",
        "network": "fetched 800 MB in 40 requests, 800 MB/s each; learned: host 1.5 GB/s",
        "shuffles": "2 run, 0 active; 2.4 GB sent, 1.2 GB stayed",
        "spilling": "wrote 6 GB at 1.5 GB/s, read 4 GB at 2 GB/s, 60% of 20 reads ahead in time",
        "to Dask": "placement of 1,207 tasks: nothing that stock does not know (1,200), no inputs (7) "
        "1 shuffle: object dtype (1) 3 rechunks of arrays, as always",
        "do first": "Give the workers more memory, or have smaller or fewer pieces of data alive at once: "
        "smaller partitions, fewer threads per worker, persist less. (spilling cost 38% of the threads' time)",
    }


def test_figures_of_workers_are_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 workers that shuffled with each other report millions of them; a text needs them four times."""
    looks: list[str] = []
    collect = snapshot._collect

    def counted(tree: dict[str, Any], prefix: str, out: dict[str, list[float]]) -> None:
        looks.append(prefix)
        collect(tree, prefix, out)

    monkeypatch.setattr(snapshot, "_collect", counted)
    workers = {"a": worker(), "b": worker()}
    repr(Status({"version": "1", "shuffle": {"runs": 1}}, workers, verbose=True))
    assert looks.count("") == len(workers)


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        (
            {"cleared": {"sum (40 tasks)": "ours took 0.80 times as long as stock's, 4 graphs of each"}},
            "gained on sum (40 tasks): ours took 0.80 times as long as stock's, 4 graphs of each",
        ),
        (
            {"cleared": {"sum": "no two sides to compare after 32 graphs"}},
            "no evidence yet of a gain or a loss: no comparison has come to an end not comparable, sum: no two sides",
        ),
        (
            {"cleared": {"sum": "ours took 1.01 times as long as stock's, 8 graphs of each"}},
            "even on sum: ours took 1.01",
        ),
        ({"switched_off": {"sum": "ours took 1.30 times as long"}}, "lost on sum: ours took 1.30 times as long"),
        ({"judged": 3}, "no evidence yet of a gain or a loss: none of 3 graphs that were judged gave a reason"),
        ({"on_trial": {"sum": "it took 3 s"}}, "on trial, sum: it took 3 s"),
    ],
)
def test_the_verdict_is_from_comparisons_only(placement: dict[str, Any], says: str) -> None:
    got = shown(scheduler(placement={"graph_judge": placement}), {A: spilling()})
    assert says in got["verdict"]


def test_who_is_missing_and_why() -> None:
    workers = {A: {"error": "TimeoutError('no answer within 10 s')"}, B: {}}
    got = shown(scheduler(refused={B: "RuntimeError: this worker has dask-gpurt 0.0.9. Remedy: install one"}), workers)
    assert got["workers"] == (
        f"2: 1 of 2 answer worker 0 ({A}): no answer within 10 s "
        f"big ({B}) runs without dask-gpurt: RuntimeError: this worker has dask-gpurt 0.0.9. Remedy: install one"
    )
    assert got["do first"].startswith(f"look at worker 0 ({A}): its process may be stopped")
    lacking = {"error": "ModuleNotFoundError(\"No module named 'dask_gpurt'\")"}
    got = shown(scheduler(), {A: spilling(), B: lacking})
    assert got["workers"].endswith("runs without dask-gpurt: ModuleNotFoundError(\"No module named 'dask_gpurt'\")")
    got = shown(scheduler(), {A: spilling(), B: {}})
    assert "big (tcp://10.0.0.2:5) runs without dask-gpurt: it was not sent its part" in got["workers"]
    assert got["do first"] == "mend big: it was not sent its part"


def test_what_is_switched_off_and_why() -> None:
    plain = spilling(left_alone="worker.data is a plain dict: the worker has no memory limit")
    got = shown(scheduler(), {A: plain, B: plain})
    assert (
        got["off"]
        == "all workers: tiers serve shuffles only, worker.data is a plain dict: the worker has no memory limit"
    )
    broken = spilling() | {"parts": {"tiers": "off: no space left"}}
    got = shown(scheduler(placement={"retired": {"decide": "100 failures"}}), {A: spilling(), B: broken})
    assert "placement: decide retired, 100 failures" in got["off"]
    assert "big: tiers is off: no space left" in got["off"]
    assert got["do first"].startswith("see why: placement: decide retired, 100 failures")


def test_a_disk_that_takes_nothing_is_not_one_that_was_not_needed() -> None:
    full = spilling(read={"bytes": 0}, written={"bytes": 0}, write_errors={"ENOSPC": 2, "EIO": 1})
    got = shown(scheduler(), {A: full, B: full})
    assert got["spilling"] == "nothing was spilled, failed writes: 6 (EIO, ENOSPC)"
    got = shown(scheduler(), {A: spilling(write_errors={"ENOSPC": 1}), B: spilling(write_errors={})})
    assert got["spilling"].endswith("reads ahead in time, failed writes: 1 (ENOSPC)")


def test_what_the_read_cache_found() -> None:
    found = spilling(read={"bytes": 0}, written={"bytes": 0}, read_cache={"spared_bytes": 600_000_000})
    got = shown(scheduler(), {A: found, B: found})
    assert got["spilling"] == "nothing was spilled, 1.2 GB of files' columns not decoded again"


def test_why_there_is_no_device_tier() -> None:
    managed = spilling(device_off="RMM allocates managed memory. Remedy: --rmm-async")
    aside = spilling(device={"stands_aside": "cuDF's own spilling is on"})
    got = shown(scheduler(), {A: managed, B: aside})
    assert f"worker 0: no device tier, {managed['tiers']['device_off']}" in got["off"]
    assert "big: the device tier stands aside, cuDF's own spilling is on" in got["off"]
    assert "off" not in shown(scheduler(), {A: spilling(device_off="", device={"stands_aside": ""})})


def test_a_cold_cluster_gets_no_advice_and_no_unspilling() -> None:
    cold = ledger(no_work=95.0, unspill=3.0, memory=1.0)
    got = shown(scheduler(ledger=cold), {A: spilling(read={"bytes": 0}, written={"bytes": 0}, disk_bytes=0)})
    assert got["do first"] == "nothing: too little work so far to say what costs time"
    assert got["spilling"] == "nothing was spilled"
    assert "unspill" not in " ".join(got.values())
    assert "0 B" not in " ".join(got.values())
    got = shown(scheduler(ledger=ledger(no_work=100.0)), {A: spilling()})
    assert got["threads"] == "nothing was submitted yet"


def test_a_text_that_is_too_long_is_cut() -> None:
    workers: dict[str, dict[str, Any]] = {f"tcp://10.0.1.{i}:5": {} for i in range(100)}
    long = {"graph_judge": {"switched_off": {f"kind {i}" * 9: "because " * 40 for i in range(9)}}}
    got = shown(scheduler(placement=long), workers)
    assert "more lines" in got["workers"]
    assert "..." in got["verdict"]


def test_without_the_extension() -> None:
    got = shown({}, {A: {}, B: {}})
    assert got[""] == "dask-gpurt is not installed on this scheduler"
    assert "dask_gpurt.attach(client)" in got["do first"]
    why = "the scheduler cannot import dask_gpurt (No module named 'dask_gpurt'). Remedy: install it there"
    got = shown({}, {A: {}, B: {}}, missing=why)
    assert got[""] == "dask-gpurt: the scheduler cannot import dask_gpurt (No module named 'dask_gpurt')"
    assert got["do first"] == "install it there"


def test_all_figures_are_grouped_and_have_units() -> None:
    status = Status(scheduler(), {A: spilling(), B: spilling()}, members=MEMBERS)
    text = status.text(verbose=True)
    assert text.startswith(repr(status) + "\n\nscheduler\n")
    assert repr(status) == status.text()
    lines = text.splitlines()
    rows = {
        line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  ") and " " in line.strip()
    }
    assert lines.count("all workers: tiers") == lines.count("scheduler: placement") == 1
    assert rows["placement.decisions.newest"] == "9 values"
    assert rows["written.bytes"] == "6 GB"
    assert rows["written.io_seconds"] == "4 s"
    assert rows["placement.links.host.bytes_per_second"] == "1.5 GB/s"
    assert rows["prefetch.share"] == "0.2"
    assert rows["placement.declined.no"].split() == ["inputs", "7"]


def test_html_has_bars_and_escapes_what_it_is_given() -> None:
    evil = "<script>alert(1)</script>"
    status = Status(
        scheduler(refused={B: evil}, ledger=ledger(network=30.0)),
        {A: spilling(), B: {}, evil: {"error": evil}},
        members=MEMBERS,
    )
    page = status._repr_html_()
    assert "<script>" not in page
    assert page.count("<svg") == 2
    assert "<details><summary>all workers: tiers" in page
    assert "<details open>" in dataclasses.replace(status, verbose=True)._repr_html_()


def test_trials_of_single_decisions_count() -> None:
    passed = {"standing": "trusted", "trials": 3, "retirements": 1}
    got = shown(scheduler(placement={"governor": passed}), {A: spilling()})
    assert got["verdict"] == "not worse than stock in 2 trials of single decisions"
    lost = {"standing": "retired", "trials": 1, "retirements": 1, "reason": "ours took 2 times as long"}
    got = shown(scheduler(placement={"governor": lost}), {A: spilling()})
    assert got["verdict"].startswith("lost on single decisions: ours took 2 times as long")
    assert got["verdict"].endswith("what lost is left to Dask, so the loss does not go on")


def finding(check: str, state: str, remedy: str = "") -> dict[str, Any]:
    return {"check": check, "state": state, "found": f"bad {check}", "expected": "good", "remedy": remedy, "seconds": 0}


def test_what_is_held_and_what_waits_for_a_class() -> None:
    preflight = {
        "workers": {
            A: {"kept": False, "phase": "passed", "findings": [finding("setup", "warn"), finding("stack", "warn")]},
            B: {
                "kept": True,
                "phase": "held",
                "findings": [finding("stack", "warn"), finding("disk", "fail", "mount it")],
            },
        },
        "waiting": {"h200*": 3},
        "classes": {"cpu.epyc.2c": 2},
    }
    got = shown(scheduler(preflight=preflight), {A: spilling(), B: spilling()})
    assert got["checks"] == (
        f"big ({B}) gets no task: disk: bad disk, expected good. Remedy: mount it "
        f"worker 0 ({A}) works: stack: bad stack, expected good "
        "3 tasks wait for a node of class 'h200*', which no worker has (cpu.epyc.2c)"
    )
    assert got["do first"] == "mend big, which gets no task: mount it"
    preflight["workers"] = {A: {"kept": True, "phase": "checking", "findings": []}}
    got = shown(scheduler(preflight=preflight), {A: spilling(), B: spilling()})
    assert got["checks"].startswith(f"worker 0 ({A}) is being checked and gets no task yet")
    assert "checks" not in shown(scheduler(preflight={"workers": {}, "waiting": {}}), {A: spilling()})


def test_steps_that_were_fused_are_said() -> None:
    placement = {"fusion": {"graphs": 1, "spared": 1200}}
    got = shown(scheduler(placement=placement), {A: spilling()})
    assert "40 tasks (1,200 fewer, as steps were fused)" in got["threads"]
