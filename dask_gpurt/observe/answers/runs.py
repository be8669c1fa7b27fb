"""`Runs` and `RunReport`: what a user sees of the runs that a scheduler keeps. Pure: records in, text and HTML out."""

from __future__ import annotations

import dataclasses
import html
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.collect.causes import CAUSES
from dask_gpurt.observe.render.html import fragment
from dask_gpurt.observe.render.text import bytes_said, html_table, seconds_said, text_table
from dask_gpurt.observe.report import page
from dask_gpurt.observe.report.findings import advise
from dask_gpurt.observe.runs import record as records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.observe.report.facts import Run

COLUMNS = ("run", "began", "name", "seconds", "busy", "waited most for", "moved", "spilled", "ended")
#: those that are text
_LEFT = 3
#: findings and kinds of task that the text shows
SHOWN = 3


def row(headline: dict[str, Any]) -> list[str]:
    """One line of the table of runs."""
    cause, busy = headline["cause"], headline["busy"]
    said = headline["name"] if not headline["span"] else f"{headline['span']}: {headline['name']}"
    return [
        str(headline["number"]),
        time.strftime("%m-%d %H:%M:%S", time.localtime(headline["start"])),
        said if len(said) <= 40 else said[:37] + "...",
        f"{headline['seconds']:,.3g}",
        "-" if busy is None else f"{busy:.0%}",
        "-" if cause is None else f"{cause} {headline['cause_share']:.0%}",
        bytes_said(headline["moved_bytes"]),
        bytes_said(headline["spilled_bytes"]),
        headline["outcome"],
    ]


@dataclasses.dataclass(frozen=True)
class Runs:
    """The newest runs of a cluster."""

    #: newest first; see `dask_gpurt.observe.runs.record.headline`
    headlines: list[dict[str, Any]]
    #: graphs that belong to no run, as too many others were followed
    unfollowed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """``{"runs": [...], "unfollowed": n}``: as they are; times in seconds, sizes in bytes, shares from 0 to 1."""
        return {"runs": self.headlines, "unfollowed": self.unfollowed}

    def __len__(self) -> int:
        return len(self.headlines)

    def __repr__(self) -> str:
        if not self.headlines:
            return "nothing has run yet"
        rows = [row(headline) for headline in self.headlines]
        return "\n".join([*text_table(COLUMNS, rows, _LEFT, indent=""), *self._left_out()])

    def _repr_html_(self) -> str:
        if not self.headlines:
            return fragment("nothing has run yet")
        table = html_table(COLUMNS, [row(headline) for headline in self.headlines], _LEFT)
        return fragment(table + "".join(f"<p>{text}</p>" for text in self._left_out()))

    def _left_out(self) -> list[str]:
        if not self.unfollowed:
            return []
        return [f"{self.unfollowed:,} graphs are in none of them: too many others ran at the same time"]


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What one run did, what it waited for, and what to do about it."""

    record: dict[str, Any]

    @property
    def run(self) -> Run:
        """The facts that the report is made from."""
        return records.run_of(self.record)

    def to_dict(self) -> dict[str, Any]:
        """The record and the advice: plain values, times in seconds, sizes in bytes."""
        return {**self.record, "advice": [dataclasses.asdict(finding) for finding in advise(self.run)]}

    def write(self, path: str) -> str:
        """Write the whole report as one HTML file; returns `path`."""
        return page.write(self.run, path)

    def __repr__(self) -> str:
        run = self.run
        return "\n".join([*self._head(run), *_advice(run), *_kinds(run)])

    def _repr_html_(self) -> str:
        run = self.run
        head = "".join(f"<div>{html.escape(line)}</div>" for line in self._head(run))
        found = [[f.cause, f"{f.share:.0%}", f.text, f.remedy] for f in advise(run)[:SHOWN]]
        table = html_table(["cost", "share", "why", "what to do"], found, 4) if found else ""
        return fragment(head + table)

    def _head(self, run: Run) -> list[str]:
        record = self.record
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.start))
        workers = f"{record['worker_count']} workers with {record['threads']} threads"
        out = [
            (
                f"{run.title}: {record['outcome']}, {seconds_said(run.seconds)} from {began}; {run.task_count:,} tasks "
                f"on {workers}"
            )
        ]
        wanted = run.wanted_seconds
        if wanted > 0:
            worst = sorted((-s, c) for c, s in run.causes.items() if c != "no_work" and s >= 0.01 * wanted)
            idle = ", ".join(f"{CAUSES[cause][0]} {-seconds / wanted:.0%}" for seconds, cause in worst[:4])
            busy = f"{run.busy_seconds / wanted:.0%} busy of {wanted:,.3g} thread-seconds"
            out.append(f"{busy}; idle: {idle}" if idle else busy)
        out.append(
            f"fetched {bytes_said(record['fetched_bytes'])}, shuffled {bytes_said(run.shuffle['bytes_sent'])}, wrote "
            f"{_tiers(run, 'written_bytes')} to disk, read {_tiers(run, 'read_bytes')}"
        )
        out += run.notes
        out += [f"no answer from {run.worker(address)}: {why}" for address, why in run.silent.items()]
        return out


def _tiers(run: Run, name: str) -> str:
    return bytes_said(sum(w.tiers.get(name, 0) for w in run.workers))


def _advice(run: Run) -> list[str]:
    found = advise(run)[:SHOWN]
    out = ["", "why"]
    if not found:
        return [*out, f"  {records.verdict(None, run.wanted_seconds)}"]
    return [*out, *(f"  {f.share:4.0%}  {f.cause}: {f.text} {f.remedy}" for f in found)]


def _kinds(run: Run) -> list[str]:
    kinds: Sequence[Any] = run.digest.kinds[:SHOWN]
    if not kinds:
        return []
    rows = [
        [k.prefix, f"{k.tasks:,}", f"{k.seconds:,.3g}", seconds_said(k.median), seconds_said(k.longest)] for k in kinds
    ]
    return ["", "tasks that took most time", *text_table(["kind", "tasks", "seconds", "median", "longest"], rows, 1)]
