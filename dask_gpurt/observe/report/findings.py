"""What to do about a run: findings with the number behind them, the most expensive first.

A pure function of a `Run`. Each rule looks at one cause and answers with the slot-seconds that it cost, so that rules
of different kinds can be ranked; a finding below one per cent of the time in which there was work is not worth a line.

A slow worker explains more than the time its own tasks took too long: what others waited for its tasks (``skew`` on it,
``queued elsewhere``) is its doing. Those seconds are counted for one finding only.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dask_gpurt.observe.render.text import bytes_said, seconds_said
from dask_gpurt.observe.report.facts import slowness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.observe.report.facts import Fetches, Run, Slowness

#: share of the wanted slot-seconds below which a finding is left out
WORTH = 0.01
#: a worker that takes so many times as long as the others is slow
SLOW = 1.5
#: a link is slow when it has less than this share of the median bandwidth of the others
SLOW_LINK = 0.34
#: or less than this, in bytes per second: a gigabit has 125 MB/s
LITTLE = 60e6
#: share of the time of all fetches below which a link does not explain the waiting
LINK_SHARE = 0.3
#: bytes without which a bandwidth is not believed
MEASURED_BYTES = 4e6
#: tasks shorter than this are mostly overhead, in seconds
SHORT = 0.01


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that cost time."""

    #: ``slow worker``, ``slow link``, ``network``, ``spilling``, ``skew``, ``shuffle barrier``, ...
    cause: str
    #: slot-seconds that it cost, and the share of those in which there was work
    seconds: float
    share: float
    #: one sentence with the number
    text: str
    #: what to do
    remedy: str


def advise(run: Run) -> list[Finding]:
    """Findings, the most expensive first; empty when nothing was worth a line."""
    wanted = run.wanted_seconds
    if wanted <= 0:
        return []
    found = [
        dataclasses.replace(finding, share=finding.seconds / wanted)
        for finding in _rules(run)
        if finding.seconds >= WORTH * wanted
    ]
    return sorted(found, key=lambda f: -f.seconds)


def _rules(run: Run) -> Iterator[Finding]:
    causes = dict(run.causes)
    slow = next((s for s in slowness(run.tasks) if s.factor >= SLOW), None)
    if slow is not None:
        theirs = sum(seconds for (_, address), seconds in run.skewed.items() if address == slow.address)
        theirs = min(theirs, causes["skew"])
        causes["skew"] -= theirs
        waited = causes.pop("queued_elsewhere")
        yield _slow_worker(run, slow, theirs + waited)
    link = _slow_link(run)
    blocked = 0.0
    if link is not None and "queued_elsewhere" in causes:
        # What others waited for while the worker behind that link waited for its inputs.
        target = next((w for w in run.workers if w.address == link.target), None)
        if target is not None and target.slot_seconds > target.causes.get("no_work", 0.0):
            share = target.causes.get("network", 0.0) / (target.slot_seconds - target.causes.get("no_work", 0.0))
            blocked = causes["queued_elsewhere"] * share
            causes["queued_elsewhere"] -= blocked
    yield _network(run, causes["network"] + blocked, link)
    yield from _spilling(run, causes["unspill"], causes["memory"])
    if causes["skew"]:
        yield _skew(run, causes["skew"])
    if causes["shuffle_barrier"]:
        yield Finding(
            "shuffle barrier",
            causes["shuffle_barrier"],
            0.0,
            f"Threads waited {seconds_said(causes['shuffle_barrier'])} for the last inputs of a shuffle to be sent.",
            "Inputs of similar size and cost let all workers finish together; more, smaller partitions before the "
            "shuffle help when the last ones are few.",
        )
    yield Finding(
        "no ready task",
        causes["no_ready_task"],
        0.0,
        f"Threads had nothing to do for {seconds_said(causes['no_ready_task'])} because all other tasks waited for "
        "results of those that ran.",
        "The graph has too few tasks side by side: use more partitions (at least two or three per thread), or fewer "
        "workers.",
    )
    if causes.get("queued_elsewhere"):
        yield Finding(
            "queued elsewhere",
            causes["queued_elsewhere"],
            0.0,
            f"Threads were free for {seconds_said(causes['queued_elsewhere'])} while ready tasks waited for other "
            "workers, because their inputs are there, or because they may run there only.",
            "Spread the data (client.rebalance, or more partitions), and look whether restrictions (workers=, "
            "resources=) are needed; dask_gpurt.explain(client, key) tells why a task is where it is.",
        )
    yield Finding(
        "scheduler",
        causes["scheduler"],
        0.0,
        f"Threads waited {seconds_said(causes['scheduler'])} for the scheduler to assign a task, or for the message.",
        _small_tasks(run) or "Look at the scheduler's CPU use on the dashboard; fewer, larger tasks relieve it.",
    )
    yield Finding(
        "own planning",
        causes["planning"],
        0.0,
        f"Threads waited {seconds_said(causes['planning'])} while placement decided.",
        "Set gpurt.placement.candidates lower, or gpurt.placement.enabled: false for this workload.",
    )
    yield Finding(
        "task overhead",
        causes["serialisation"],
        0.0,
        f"Workers spent {seconds_said(causes['serialisation'])} of their threads' time between tasks, on "
        "serialisation and on their event loop.",
        _small_tasks(run)
        or "Large arguments in tasks are serialised with each of them: scatter them once, or load them in the task.",
    )
    yield Finding(
        "resources",
        causes["resources"],
        0.0,
        f"Threads were free for {seconds_said(causes['resources'])} while tasks waited for an abstract resource.",
        "Declare more of the resource on the workers, or ask for less of it in resources=.",
    )


def _spilling(run: Run, reading: float, waiting: float) -> Iterator[Finding]:
    written = sum(w.tiers.get("written_bytes", 0) for w in run.workers)
    read = sum(w.tiers.get("read_bytes", 0) for w in run.workers)
    said = []
    if read:
        said.append(f"{seconds_said(reading)} for data to be read back from disk")
    if waiting:
        said.append(f"{seconds_said(waiting)} for room in memory")
    if said:
        yield Finding(
            "spilling",
            (reading if read else 0.0) + waiting,
            0.0,
            f"Threads waited {' and '.join(said)}; {bytes_said(written)} were written and {bytes_said(read)} read.",
            "Give the workers more memory, or have smaller or fewer pieces of data alive at once: smaller partitions, "
            "fewer threads per worker, persist less.",
        )


def _slow_worker(run: Run, slow: Slowness, waited: float) -> Finding:
    lost = slow.seconds * (1 - 1 / slow.factor)
    return Finding(
        "slow worker",
        lost + waited,
        0.0,
        f"The same tasks take {slow.factor:.1f} times as long on {run.worker(slow.address)} as on the others "
        f"({slow.tasks} tasks); that cost {seconds_said(lost)} there, and others waited {seconds_said(waited)} for it.",
        "Look what else runs on that host, whether its clock is throttled (heat, power limit) or its CPU quota is "
        "smaller than its threads; until then, retire it or give it fewer threads.",
    )


def _network(run: Run, seconds: float, slow: Fetches | None) -> Finding:
    moved = sum(f.bytes for f in run.fetches)
    waited = f"Threads waited {seconds_said(seconds)} for inputs from other workers"
    if slow is None:
        return Finding(
            "network",
            seconds,
            0.0,
            f"{waited}; {bytes_said(moved)} were fetched.",
            "Move less (select columns and rows before joins and shuffles), or have fewer, larger workers per host.",
        )
    return Finding(
        "slow link",
        seconds,
        0.0,
        f"{waited}; {slow.seconds / sum(f.seconds for f in run.fetches):.0%} of the time of all fetches was that of a "
        f"slow link: from {run.worker(slow.source)} to {run.worker(slow.target)} came {bytes_said(slow.bytes)} at "
        f"{bytes_said(slow.bytes_per_second)}/s.",
        "Check that path (link speed, duplex, a shared or throttled interface, traffic of others, which interface the "
        "workers listen on: --interface); keep workers that exchange much on one side of it.",
    )


def _slow_link(run: Run) -> Fetches | None:
    """The slow link that took most time, if there is one that matters."""
    every = sum(f.seconds for f in run.fetches)
    measured = [f for f in run.fetches if f.bytes >= MEASURED_BYTES and f.seconds > 0]
    for f in sorted(measured, key=lambda f: -f.seconds):
        others = sorted(o.bytes_per_second for o in measured if o is not f)
        usual = others[len(others) // 2] if others else 0.0
        if f.seconds < LINK_SHARE * every:
            return None
        if f.bytes_per_second < LITTLE or f.bytes_per_second < SLOW_LINK * usual:
            return f
    return None


def _skew(run: Run, seconds: float) -> Finding:
    worst = max(run.skewed.items(), key=lambda item: item[1], default=None)
    text = f"Threads were idle for {seconds_said(seconds)} while one task took much longer than its siblings"
    if worst is not None:
        (prefix, address), _ = worst
        text += f": {prefix} on {run.worker(address)}"
        siblings = sorted(t.seconds for t in run.tasks if t.prefix == prefix)
        if siblings:
            median = siblings[len(siblings) // 2]
            text += f", {seconds_said(siblings[-1])} against a median of {seconds_said(median)}"
    if len(run.outputs) > 1:
        sizes = sorted(run.outputs)
        median_bytes = max(1, sizes[len(sizes) // 2])
        if sizes[-1] > 3 * median_bytes:
            text += (
                f"; the largest output of a shuffle has {bytes_said(sizes[-1])}, "
                f"{sizes[-1] / median_bytes:,.0f} times the median"
            )
    return Finding(
        "skew",
        seconds,
        0.0,
        text + ".",
        "The data is uneven: split the hot key (add a random part to it and aggregate twice), filter it out before, "
        "or use more partitions if it is many keys that fell together.",
    )


def _small_tasks(run: Run) -> str:
    if not run.tasks:
        return ""
    mean = sum(t.seconds for t in run.tasks) / len(run.tasks)
    if mean >= SHORT:
        return ""
    return (
        f"Tasks take {seconds_said(mean)} on average: make them larger (partitions, batches); below 10 ms the overhead "
        "of a task is more than its work."
    )
