"""`Comparison`: two runs side by side, and what changed, in thread-seconds. Pure: two records in, text and HTML out."""

from __future__ import annotations

import dataclasses
import html
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.collect.causes import BUSY, CAUSES
from dask_gpurt.observe.render.html import fragment
from dask_gpurt.observe.render.text import bytes_said, html_table, seconds_said, text_table
from dask_gpurt.observe.runs.record import run_of

if TYPE_CHECKING:
    from dask_gpurt.observe.report.facts import Run

#: share of the longer run's thread-seconds below which a change is left out of the words
WORTH = 0.02
#: kinds of task that are compared, and changes that are said in words
SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs of a cluster."""

    first: dict[str, Any]
    second: dict[str, Any]

    @property
    def seconds(self) -> tuple[float, float]:
        """How long each took."""
        a, b = self.first, self.second
        return a["stop"] - a["start"], b["stop"] - b["start"]

    @property
    def ratio(self) -> float | None:
        """Seconds of the second over those of the first; None where the first took none."""
        before, after = self.seconds
        return after / before if before > 0 else None

    def changes(self) -> dict[str, float]:
        """Use of the threads (``busy``, or a cause of idleness) -> thread-seconds more; the largest changes first."""
        before, after = _uses(run_of(self.first)), _uses(run_of(self.second))
        grown = {use: after[use] - before[use] for use in before}
        return dict(sorted(grown.items(), key=lambda item: -abs(item[1])))

    def to_dict(self) -> dict[str, Any]:
        """``{"first", "second": records, "seconds": [a, b], "ratio", "changes": {use: thread-seconds}}``"""
        return {
            "first": self.first,
            "second": self.second,
            "seconds": list(self.seconds),
            "ratio": self.ratio,
            "changes": self.changes(),
        }

    def verdict(self) -> list[str]:
        """What changed, in words; the most important first."""
        a, b = (f"run {record['number']}" for record in (self.first, self.second))
        before, after = self.seconds
        ratio = self.ratio
        if ratio is not None and 0.95 <= ratio <= 1.05:
            out = [f"{b} took as long as {a}: {seconds_said(after)} against {seconds_said(before)}"]
        else:
            times = "" if ratio is None else f", {ratio:.3g} times as long"
            more = "longer" if after > before else "less"
            out = [f"{b} took {seconds_said(abs(after - before))} {more} than {a}{times}"]
        threads = (self.first["threads"], self.second["threads"])
        if threads[0] != threads[1]:
            out.append(f"it had {threads[1]} threads instead of {threads[0]}")
        if self.first["name"] != self.second["name"]:
            out.append("they have different names, so they may not be the same work")
        for record, name in ((self.first, a), (self.second, b)):
            if record["known_tasks"] < record["task_count"]:
                out.append(f"of the tasks of {name} the newest {record['known_tasks']:,} are known: kinds are of these")
        scale = max(sum(_uses(run_of(record)).values()) for record in (self.first, self.second))
        worth = [(use, s) for use, s in self.changes().items() if scale > 0 and abs(s) >= WORTH * scale]
        for use, seconds in worth[:SHOWN]:
            what = "worked" if use == BUSY else f"waited ({CAUSES[use][0]})"
            out.append(f"threads {what} {seconds_said(abs(seconds))} {'more' if seconds > 0 else 'less'}")
        if not worth:
            out.append("no use of the threads changed by more than two per cent")
        return out

    def _rows(self) -> list[list[str]]:
        """(what, first, second, difference, ratio)."""
        a, b = self.first, self.second
        runs = run_of(a), run_of(b)
        rows = [["began", *(time.strftime("%m-%d %H:%M:%S", time.localtime(r["start"])) for r in (a, b)), "", ""]]
        rows.append(["name", *(_short(r["span"] or r["name"]) for r in (a, b)), "", ""])
        rows.append(["ended", a["outcome"], b["outcome"], "", ""])
        rows.append(_line("seconds", *self.seconds, seconds_said))
        rows.append(_line("tasks", a["task_count"], b["task_count"], _count))
        rows.append(_line("threads", a["threads"], b["threads"], _count))
        uses = [_uses(run) for run in runs]
        for use in (BUSY, *CAUSES):
            if use in uses[0] and any(u[use] >= 5e-4 for u in uses):
                label = "threads busy" if use == BUSY else f"idle: {CAUSES[use][0]}"
                rows.append(_line(label, uses[0][use], uses[1][use], seconds_said))
        rows.append(_line("fetched", a["fetched_bytes"], b["fetched_bytes"], bytes_said))
        rows.append(_line("shuffled", a["shuffle"]["bytes_sent"], b["shuffle"]["bytes_sent"], bytes_said))
        for label, key in (("written to disk", "written_bytes"), ("read from disk", "read_bytes")):
            before, after = (sum(w.tiers.get(key, 0) for w in run.workers) for run in runs)
            rows.append(_line(label, before, after, bytes_said))
        kinds = [{k.prefix: k.seconds for k in run.digest.kinds} for run in runs]
        every = sorted(set(kinds[0]) | set(kinds[1]), key=lambda k: -abs(kinds[1].get(k, 0) - kinds[0].get(k, 0)))
        first, second = kinds
        rows.extend(
            _line(f"tasks {_short(kind)}", first.get(kind, 0.0), second.get(kind, 0.0), seconds_said)
            for kind in every[:SHOWN]
        )
        return rows

    def _columns(self) -> list[str]:
        return ["", f"run {self.first['number']}", f"run {self.second['number']}", "difference", "ratio"]

    def __repr__(self) -> str:
        return "\n".join([*self.verdict(), "", *text_table(self._columns(), self._rows(), 1, indent="")])

    def _repr_html_(self) -> str:
        words = "".join(f"<div>{html.escape(text)}</div>" for text in self.verdict())
        return fragment(words + html_table(self._columns(), self._rows(), 1))


def _uses(run: Run) -> dict[str, float]:
    """Thread-seconds by use; those in which nothing was submitted are no use."""
    return {BUSY: run.busy_seconds, **{cause: run.causes.get(cause, 0.0) for cause in CAUSES if cause != "no_work"}}


def _line(label: str, before: float, after: float, said: Any) -> list[str]:
    grown = after - before
    sign = "+" if grown > 0 else "-" if grown < 0 else ""
    ratio = f"{after / before:.3g}" if before > 0 and after > 0 else "-"
    return [label, said(before), said(after), f"{sign}{said(abs(grown))}" if sign else "-", ratio]


def _count(n: float) -> str:
    return f"{n:,.0f}"


def _short(text: str) -> str:
    return text if len(text) <= 32 else text[:29] + "..."
