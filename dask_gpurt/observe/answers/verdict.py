"""What a status says in words: gain or loss against stock Dask, what is left to Dask or switched off, what to do first.

Pure functions of a `Snapshot`. *Stock* means Dask's own choice. Gain and loss are said only where graphs or tasks of
this cluster ran both ways (`placement.evaluate`); from predictions nothing is concluded.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.report.facts import Run, from_snapshots
from dask_gpurt.observe.report.findings import Finding, advise

if TYPE_CHECKING:
    from dask_gpurt.observe.answers.snapshot import Snapshot

#: thread-seconds with work to do, before which shares of them mean nothing
COLD_SECONDS = 10.0
#: share of them from which a cause is worth doing something about first
WORTH = 0.05
#: time relative to stock's from which it is a gain
EVEN = 0.97
_RATIO = re.compile(r"ours took ([0-9.]+) times as long as stock's")


def evidence(snapshot: Snapshot) -> list[str]:
    """What placement gained or lost against stock, by its own comparisons; the losses first."""
    placement = snapshot.scheduler.get("placement", {})
    judge, governor = placement.get("graph_judge", {}), placement.get("governor", {})
    lost = [f"lost on {name}: {why}" for name, why in judge.get("switched_off", {}).items()]
    if governor.get("standing") == "retired":
        lost.append(f"lost on single decisions: {governor.get('reason')}")
    cleared = {name: (why, _RATIO.search(why)) for name, why in judge.get("cleared", {}).items()}
    won = [f"{_outcome(ratio)} on {name}: {why}" for name, (why, ratio) in cleared.items() if ratio]
    open_ = [f"not comparable, {name}: {why}" for name, (why, ratio) in cleared.items() if not ratio]
    passed = governor.get("trials", 0) - governor.get("retirements", 0) - (governor.get("standing") == "trial")
    if passed > 0:
        won.append(f"not worse than stock in {_count(passed, 'trial')} of single decisions")
    open_ += [f"on trial, {name}: {why}" for name, why in judge.get("on_trial", {}).items()]
    said = lost + won + open_
    if lost:
        said.append("what lost is left to Dask, so the loss does not go on")
    if not lost and not won:
        why = "no comparison has come to an end" if open_ else _why_none(placement, judge)
        said.insert(0, f"no evidence yet of a gain or a loss: {why}")
    return said


def _outcome(ratio: re.Match[str]) -> str:
    return "gained" if float(ratio.group(1)) <= EVEN else "even"


def _why_none(placement: dict[str, Any], judge: dict[str, Any]) -> str:
    if not placement:
        return "placement is off, and only placement is compared"
    judged = judge.get("judged", 0)
    if not judged:
        return "no graph was long enough to be judged"
    if judged == 1:
        return "the graph that was judged gave no reason to run it under stock Dask too"
    return f"none of {judged:,} graphs that were judged gave a reason to run it under stock Dask too"


def left_to_stock(snapshot: Snapshot) -> list[str]:
    """What Dask decided by itself, on purpose, with the reasons and how often."""
    s = snapshot.scheduler
    out = []
    declined = Counter({k: n for k, n in s.get("placement", {}).get("declined", {}).items() if n})
    if declined:
        reasons = ", ".join(f"{reason} ({n:,})" for reason, n in declined.most_common(4))
        out.append(f"placement of {_count(declined.total(), 'task')}: {reasons}")
    shuffles = Counter({k: n for k, n in s.get("shuffle", {}).get("fallbacks", {}).items() if n and k != "rechunk"})
    if shuffles:
        reasons = ", ".join(f"{reason} ({n:,})" for reason, n in shuffles.most_common(3))
        out.append(f"{_count(shuffles.total(), 'shuffle')}: {reasons}")
    rechunks = s.get("shuffle", {}).get("fallbacks", {}).get("rechunk", 0)
    if rechunks:
        out.append(f"{_count(rechunks, 'rechunk')} of arrays, as always")
    return out


def switched_off(snapshot: Snapshot) -> list[str]:
    """Parts that do not run, or ran and were given up, with the reason; of workers, grouped by reason."""
    s = snapshot.scheduler
    out = [f"{part} is {state}" for part, state in s.get("parts", {}).items() if state != "on"]
    if snapshot.installed:
        named = s.get("parts", {})
        for part, word in (("placement", "placement"), ("shuffle", "shuffle"), ("ledger", "observation")):
            if part not in named:
                out.append(f"{word} is switched off by its setting")
    if s.get("trace", {}).get("error"):
        out.append(f"the recording into {s['trace']['path']} has ended: {s['trace']['error']}")
    out += _safe(snapshot)
    for engine in ("placement", "shuffle"):
        out += [f"{engine}: {part} retired, {why}" for part, why in s.get(engine, {}).get("retired", {}).items()]
    out += [f"{what}: {s[what]}" for what in ("plots", "metrics") if s.get(what, "on") not in ("on", "off")]
    places: defaultdict[str, list[str]] = defaultdict(list)
    for address, worker in snapshot.having.items():
        for why in _off_on(worker):
            places[why].append(address)
    for why, addresses in sorted(places.items(), key=lambda item: -len(item[1])):
        every = len(addresses) == len(snapshot.having)
        where = "all workers" if every else ", ".join(snapshot.title(a) for a in addresses[:3])
        out.append(f"{where}{'' if every or len(addresses) <= 3 else f' and {len(addresses) - 3} more'}: {why}")
    return out


def _safe(snapshot: Snapshot) -> list[str]:
    """The parts in safe mode, and workers that differ from their scheduler."""
    since: dict[str, float] = snapshot.scheduler.get("safe", {})
    out = []
    if since:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(since.values())))
        out.append(f"safe mode since {began}: {', '.join(since)} as in stock Dask; `dask gpurt safe off` ends it")
    other = [a for a, worker in snapshot.having.items() if "safe" in worker and set(worker["safe"]) != set(since)]
    if other:
        named = ", ".join(snapshot.title(a) for a in other[:3])
        out.append(f"{len(other)} workers have not followed into or out of safe mode: {named}; say it again")
    return out


def _off_on(worker: dict[str, Any]) -> list[str]:
    out = [f"{part} is {state}" for part, state in worker.get("parts", {}).items() if state != "on"]
    tiers = worker.get("tiers", {})
    if tiers.get("left_alone"):
        out.append(f"tiers serve shuffles only, {tiers['left_alone']}")
    if tiers.get("device_off"):
        out.append(f"no device tier, {tiers['device_off']}")
    if tiers.get("device", {}).get("stands_aside"):
        out.append(f"the device tier stands aside, {tiers['device']['stands_aside']}")
    out += [f"tiers: {part} retired, {why}" for part, why in tiers.get("retired", {}).items()]
    aside = sum(bool(disk.get("set_aside")) for disk in tiers.get("disks", ()))
    if aside:
        out.append(f"{aside} of {len(tiers['disks'])} folders for spilled data set aside after errors")
    return out


def as_run(snapshot: Snapshot) -> Run:
    """All since the start of the cluster, without single tasks: what advice is made from."""
    return from_snapshots(
        None,
        {
            "time": 0.0,
            "started": 0.0,
            "scheduler": snapshot.scheduler,
            "details": {},
            "workers": {
                address: {
                    "name": snapshot.title(address),
                    "host": "",
                    "threads": member.threads,
                    "status": snapshot.having.get(address, {}),
                }
                for address, member in snapshot.members.items()
            },
        },
    )


def first_thing(snapshot: Snapshot, run: Run) -> str:
    """What to do first, with the number behind it."""
    if snapshot.missing:
        return snapshot.missing.partition("Remedy: ")[2] or snapshot.missing
    if not snapshot.installed:
        return "dask_gpurt.attach(client), or `dask scheduler --preload dask_gpurt.preload`"
    for address in snapshot.silent:
        return (
            f"look at {snapshot.title(address)} ({address}): its process may be stopped, swapped out, or hold the GIL "
            "(ps, py-spy dump); retire it if it does not come back"
        )
    for address, why in snapshot.without.items():
        return f"mend {snapshot.title(address)}: {why.partition('Remedy: ')[2] or why}"
    for address, member in snapshot.scheduler.get("preflight", {}).get("workers", {}).items():
        remedies = [finding["remedy"] for finding in member["findings"] if finding["state"] == "fail"]
        if member["kept"] and remedies:
            return f"mend {snapshot.title(address)}, which gets no task: {remedies[0]}"
    quarantine = snapshot.scheduler.get("quarantine", {})
    for address, why in quarantine.get("held", {}).items():
        if why["cause"] != "asked":
            return f"mend {snapshot.title(address)}, which gets no task ({why['found']}): {why['remedy']}"
    for one in quarantine.get("suspects", ()):
        return f"look at {snapshot.title(one['worker'])} ({one['found']}): {one['remedy']}"
    broken = [text for text in switched_off(snapshot) if "retired" in text or "is off: " in text]
    if broken:
        return f"see why: {broken[0]}. The log of that process has the traceback"
    if run.wanted_seconds < COLD_SECONDS:
        return "nothing: too little work so far to say what costs time"
    finding = next(iter(findings(run)), None)
    if finding is None:
        return f"nothing: no cause of idleness cost {WORTH:.0%} of the threads' time"
    return f"{finding.remedy} ({finding.cause} cost {finding.share:.0%} of the threads' time)"


def findings(run: Run) -> list[Finding]:
    """The advice that is worth doing something about; none on a cluster that has hardly worked."""
    if run.wanted_seconds < COLD_SECONDS:
        return []
    return [finding for finding in advise(run) if finding.share >= WORTH]


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
