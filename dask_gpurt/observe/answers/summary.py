"""`summary`: a status in at most twenty lines, the verdict first. Pure functions of a `Snapshot`.

Each section has a number of lines that it may use. While they are more than `LINES` together, the longest gives one up.
What does not fit is cut with dots, and is in the full figures.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.answers import verdict
from dask_gpurt.observe.collect.causes import CAUSES
from dask_gpurt.observe.render.text import bytes_said, seconds_said

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dask_gpurt.observe.answers.snapshot import Snapshot
    from dask_gpurt.observe.report.facts import Run

#: lines of the whole, and characters of each
LINES, WIDTH = 20, 100
_LABEL = 10
#: how the names of counted errors begin; then their kind
_FAILED = "tiers.write_errors."


@dataclasses.dataclass(frozen=True)
class Section:
    """Some lines with one label."""

    label: str
    #: each begins a line
    texts: tuple[str, ...]
    #: at most
    lines: int

    def render(self) -> list[str]:
        """The lines, with the label before the first."""
        room = WIDTH - _LABEL - 1
        out: list[str] = []
        for i, text in enumerate(self.texts):
            # A line for each of the rest, so that a long text does not hide the others.
            mine = max(1, self.lines - len(out) - (len(self.texts) - i - 1))
            out += textwrap.wrap(text, room, max_lines=mine, placeholder=" ...", break_on_hyphens=False)
        if len(out) > self.lines:
            more = len(out) - self.lines + 1
            out = [*out[: self.lines - 1], f"... and {more} more lines"]
        return [f"{self.label if i == 0 else '':<{_LABEL}} {line}" for i, line in enumerate(out)]


def headline(snapshot: Snapshot) -> str:
    """What is installed, on how many workers."""
    s = snapshot.scheduler
    if snapshot.missing:
        return _cut(f"dask-gpurt: {snapshot.missing.partition('. Remedy: ')[0]}")
    if not snapshot.installed:
        return "dask-gpurt is not installed on this scheduler"
    threads = sum(member.threads for member in snapshot.members.values())
    return _cut(
        f"dask-gpurt {s.get('version')}, policy {s.get('policy')}: on {len(snapshot.having)} of "
        f"{len(snapshot.workers)} workers{f', {threads} threads' if threads else ''}"
        f"{f', {snapshot.address}' if snapshot.address else ''}"
    )


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 4] + " ..."


def lines(snapshot: Snapshot) -> list[str]:
    """The text."""
    found = sections(snapshot)
    rendered = [section.render() for section in found]
    while sum(map(len, rendered)) >= LINES:
        longest = max(range(len(found)), key=lambda i: len(rendered[i]))
        found[longest] = dataclasses.replace(found[longest], lines=len(rendered[longest]) - 1)
        rendered[longest] = found[longest].render()
    return [headline(snapshot), *(line for section in rendered for line in section)]


def sections(snapshot: Snapshot) -> list[Section]:
    """What the text is made of, without the headline; sections that have nothing to say are left out."""
    run = verdict.as_run(snapshot)
    if not snapshot.installed:
        found = [
            Section("workers", tuple(_workers(snapshot)), 8),
            Section("memory", (_process_memory(snapshot),), 1),
            Section("do first", (verdict.first_thing(snapshot, run),), 3),
        ]
    else:
        found = [
            Section("verdict", tuple(verdict.evidence(snapshot)), 3),
            Section("threads", tuple(_threads(snapshot, run)), 2),
            Section("workers", tuple(_workers(snapshot)), 5),
            Section("checks", tuple(_checks(snapshot)), 4),
            Section("memory", tuple(_memory(snapshot)), 2),
            Section("network", (_network(snapshot, run),), 2),
            Section("shuffles", tuple(_shuffles(snapshot)), 2),
            Section("spilling", tuple(_spilling(snapshot)), 2),
            Section("to Dask", tuple(verdict.left_to_stock(snapshot)), 3),
            Section("off", tuple(verdict.switched_off(snapshot)), 3),
            Section("do first", (verdict.first_thing(snapshot, run),), 3),
        ]
    return [section for section in found if any(section.texts)]


def _threads(snapshot: Snapshot, run: Run) -> Iterable[str]:
    wanted = run.wanted_seconds
    if wanted <= 0:
        yield "nothing was submitted yet"
        return
    spared = snapshot.scheduler.get("placement", {}).get("fusion", {}).get("spared", 0)
    fewer = f" ({spared:,} fewer, as steps were fused)" if spared else ""
    read = sum(w.tiers.get("read_bytes", 0) for w in run.workers)
    costs = {
        cause: seconds / wanted
        for cause, seconds in run.causes.items()
        # Where nothing was spilled, nothing is read back: what is counted there is the look for it.
        if cause != "no_work" and (cause != "unspill" or read) and seconds >= 0.01 * wanted
    }
    worst = sorted(costs.items(), key=lambda item: -item[1])[:4]
    idle = ", ".join(f"{CAUSES[cause][0]} {share:.0%}" for cause, share in worst)
    yield (
        f"{run.busy_seconds / wanted:.0%} busy of {wanted:,.3g} thread-seconds with work to do, "
        f"{run.task_count:,} tasks{fewer}{f'; idle: {idle}' if idle else ''}"
    )


def _workers(snapshot: Snapshot) -> Iterable[str]:
    silent, stock = snapshot.silent, snapshot.without
    total = len(snapshot.workers)
    if not total:
        yield "there are none"
        return
    answered = "all answer" if not silent else f"{total - len(silent)} of {total} answer"
    own = "" if not snapshot.installed else ", all with dask-gpurt" if not stock and not silent else ""
    yield f"{total}: {answered}{own}"
    for address, why in silent.items():
        member = snapshot.members.get(address)
        quiet = f", quiet for {seconds_said(member.quiet_seconds)}" if member and member.quiet_seconds >= 2 else ""
        yield f"{_name(snapshot, address)}: {why}{quiet}"
    if snapshot.installed:
        for address, why in stock.items():
            yield f"{_name(snapshot, address)} runs without dask-gpurt: {why}"


def _checks(snapshot: Snapshot) -> Iterable[str]:
    """What the gate keeps from work, and tasks for which there is no node."""
    preflight = snapshot.scheduler.get("preflight", {})
    workers = preflight.get("workers", {})
    for address, member in sorted(workers.items(), key=lambda item: not item[1]["kept"]):
        # That it runs stock is said above.
        all_found = [f for f in member["findings"] if member["kept"] or f["check"] != "setup"]
        found = [f for f in all_found if f["state"] == "fail"] or all_found
        if member["kept"] and member["phase"] == "checking":
            yield f"{_name(snapshot, address)} is being checked and gets no task yet"
        elif found:
            said = "; ".join(_finding(f) for f in found)
            yield f"{_name(snapshot, address)} {'gets no task' if member['kept'] else 'works'}: {said}"
    quarantine = snapshot.scheduler.get("quarantine", {})
    for address, why in quarantine.get("held", {}).items():
        left = f"; {why['only_here']:,} values are only there still" if why["only_here"] else ""
        yield f"{_name(snapshot, address)} is held and gets no task: {why['cause']}: {why['found']}{left}"
    for one in quarantine.get("suspects", ()):
        to = f" -> {_name(snapshot, one['peer'])}" if one["peer"] else ""
        yield f"{_name(snapshot, one['worker'])}{to} is suspected: {one['cause']}: {one['found']}"
    for pattern, count in preflight.get("waiting", {}).items():
        classes = ", ".join(preflight.get("classes", {})) or "none has told its class"
        yield f"{count:,} tasks wait for a node of class {pattern!r}, which no worker has ({classes})"


def _finding(finding: Mapping[str, Any]) -> str:
    text = f"{finding['check']}: {finding['found']}"
    text += f", expected {finding['expected']}" if finding["expected"] else ""
    return text + (f". Remedy: {finding['remedy']}" if finding["remedy"] else "")


def _name(snapshot: Snapshot, address: str) -> str:
    title = snapshot.title(address)
    return title if title == address else f"{title} ({address})"


def _process_memory(snapshot: Snapshot) -> str:
    used = {a: m for a, m in snapshot.members.items() if m.memory_bytes}
    if not used:
        return ""
    text = f"processes use {bytes_said(sum(m.memory_bytes for m in used.values()))}"
    limited = {a: m.memory_bytes / m.memory_limit_bytes for a, m in used.items() if m.memory_limit_bytes}
    if limited:
        fullest = max(limited, key=lambda a: limited[a])
        text += f" of {bytes_said(sum(used[a].memory_limit_bytes for a in limited))}"
        text += f"; fullest: {snapshot.title(fullest)}, {limited[fullest]:.0%}"
    return text


def _memory(snapshot: Snapshot) -> Iterable[str]:
    tiers = [worker["tiers"] for worker in snapshot.having.values() if "tiers" in worker]

    def total(*path: str) -> float:
        out = 0.0
        for node in tiers:
            for name in path:
                node = node.get(name) if isinstance(node, dict) else None
            out += node if isinstance(node, (int, float)) else 0.0
        return out

    parts = []
    for name, held, limit in (
        ("device", total("device", "device_bytes"), total("device", "limit_bytes")),
        ("memory", total("host_bytes"), total("host_limit_bytes")),
        ("disk", total("disk_bytes"), total("disk_limit_bytes")),
        ("object store", total("below", "object", "used_bytes"), 0.0),
    ):
        if held or limit:
            parts.append(f"{name} {bytes_said(held)}{f' of {bytes_said(limit)}' if limit else ''}")
    if parts:
        keys = total("spilled_keys")
        spilled = f"; {keys:,.0f} results are not in memory" if keys else ""
        yield f"values in {', '.join(parts)}{spilled}"
    yield _process_memory(snapshot)


def _network(snapshot: Snapshot, run: Run) -> str:
    moved, seconds = sum(f.bytes for f in run.fetches), sum(f.seconds for f in run.fetches)
    if not moved:
        return "no inputs were fetched from other workers"
    requests = sum(f.requests for f in run.fetches)
    rate = f", {bytes_said(moved / seconds)}/s each" if seconds > 0 else ""
    links = snapshot.scheduler.get("placement", {}).get("links", {})
    learned = ", ".join(f"{c} {bytes_said(f['bytes_per_second'])}/s" for c, f in links.items() if f.get("samples"))
    return f"fetched {bytes_said(moved)} in {requests:,} requests{rate}{f'; learned: {learned}' if learned else ''}"


def _ways(sums: Mapping[str, float]) -> str:
    """How shuffled rows went from worker to worker, the way of most of them first."""
    moved = {
        name.split(".")[-2]: nbytes
        for name, nbytes in sums.items()
        if name.startswith("shuffle.transport.links.") and name.endswith(".bytes_out") and nbytes
    }
    return f" by {' and '.join(sorted(moved, key=lambda way: -moved[way]))}" if moved else ""


def _shuffles(snapshot: Snapshot) -> Iterable[str]:
    s, sums = snapshot.scheduler.get("shuffle", {}), snapshot.totals()
    if not s.get("runs"):
        return
    sent, kept = sums.get("shuffle.bytes_sent", 0), sums.get("shuffle.bytes_self", 0)
    text = f"{s['runs']:,} run, {s.get('active', 0)} active; "
    text += f"{bytes_said(sent)} sent{_ways(sums)}, {bytes_said(kept)} stayed"
    for name, words in (
        ("shuffle.restarts", "started over"),
        ("shuffle.resent_safe", "messages sent again"),
        ("shuffle.transport.transports.tls.handshakes_failed", "TLS handshakes failed"),
        ("shuffle.outputs_handed", "outputs handed over"),
        ("shuffle.join_rows_dropped", "rows of joins not sent, as they match none"),
    ):
        if sums.get(name):
            text += f", {sums[name]:,.0f} {words}"
    amended = s.get("recovery", {}).get("amended", 0)
    yield text + (f", {amended} went on without a lost worker" if amended else "")


def _spilling(snapshot: Snapshot) -> Iterable[str]:
    sums = snapshot.totals()
    parts = []
    for word, verb in (("written", "wrote"), ("read", "read")):
        nbytes, seconds = sums.get(f"tiers.{word}.bytes", 0), sums.get(f"tiers.{word}.io_seconds", 0)
        if nbytes:
            parts.append(f"{verb} {bytes_said(nbytes)}{f' at {bytes_said(nbytes / seconds)}/s' if seconds else ''}")
    ahead, in_time = sums.get("tiers.prefetch.started", 0), sums.get("tiers.prefetch.in_time", 0)
    if not parts:
        parts.append("nothing was spilled")
    elif ahead:
        parts.append(f"{in_time / ahead:.0%} of {ahead:,.0f} reads ahead in time")
    if spared := sums.get("tiers.read_cache.spared_bytes", 0):
        parts.append(f"{bytes_said(spared)} of files' columns not decoded again")
    for name, words in (("tiers.checksum_failures", "wrong checksums"), ("tiers.lost", "values lost, made again")):
        if sums.get(name):
            parts.append(f"{sums[name]:,.0f} {words}")
    failed = {name.removeprefix(_FAILED): n for name, n in sums.items() if name.startswith(_FAILED) and n}
    if failed:
        parts.append(f"failed writes: {sum(failed.values()):,.0f} ({', '.join(sorted(failed))})")
    yield ", ".join(parts)
