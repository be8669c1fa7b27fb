"""`Explanation`: why a task ran where it ran, made from the scheduler's decision log by `from_story`.

The sentence is built from the same figures as the table: what the chosen worker had, and the term of the cost that
the best of the others lost by. It says no more than the log knows. An input that a worker is *already fetching*
counts as there in a decision, so a worker with inbound traffic is said to hold its inputs *or be fetching them*.
"""

from __future__ import annotations

import dataclasses
import html
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.render.text import bytes_said, html_table, seconds_said, text_table

if TYPE_CHECKING:
    from collections.abc import Mapping

#: why stock Dask decided -> what that means
STOCK_REASONS: dict[str, str] = {
    "no inputs": "it has no inputs to be near to, so Dask's own rule (the least occupied worker) decided",
    "queue": "it is one of many similar tasks with few inputs, and Dask's own rule for those decided (as a rule the "
    "next worker with a free thread)",
    "nothing that stock does not know": "nothing is known that Dask does not know (links and workers are about alike, "
    "its inputs are in memory), so Dask's own rule decided: of the workers that hold an input the one that can begin "
    "first",
    "actor": "it is an actor, and Dask spreads those by number",
    "over budget": "decisions had become slower than placement allows itself, so Dask's own rule decided",
    "safe mode": "placement was in safe mode (`dask gpurt safe`), so Dask's own rule decided",
    "took too long": "the comparison took longer than a decision may, so Dask's own rule decided",
    "policy": "the policy of this cluster left it to Dask's own rule",
    "governor": "single decisions had lost a comparison with Dask's own rule, so that one decides",
    "graph judge": "graphs of its kind have lost against Dask's own rule, or are compared with it by lot, and that "
    "rule decided for this one",
    "trial": "single decisions are compared with Dask's own rule by lot, and this one was drawn for that rule",
    "no candidate": "none of the workers that were looked at takes tasks, so Dask searched all of them",
    "bookkeeping retired": "placement's own bookkeeping had failed too often, so Dask's own rule decides",
}
#: kinds of decision about root tasks -> why the worker was chosen
ROOTS: dict[str, str] = {
    "root group": "that worker had begun the group of root tasks that are used together with it",
    "root at home": "its input is there, and all the work on that takes less time than sending it",
    "tiny root": "tasks like it take less time than the scheduler needs to queue them, so it was sent at once to the "
    "worker of its group, or the least busy one",
}
#: why a worker was compared -> how that is said
WHYS: dict[str, str] = {
    "holder": "has inputs",
    "neighbour": "near inputs",
    "idle": "idle",
    "allowed": "allowed",
    "all": "everyone",
    "random": "random",
}
_TERMS = ("queue", "inputs", "hidden", "read", "compute", "excused", "overflow", "moved")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A worker that was compared."""

    address: str
    #: ``holder`` (has inputs, or was already fetching them), ``neighbour`` of a holder, ``idle``, ``allowed`` by the
    #: task's restrictions, ``all`` (a small cluster is compared whole), ``random``
    why: str
    chosen: bool
    #: a thread was free
    idle: bool
    #: bytes of the task's inputs that were there, or promised to it
    has_bytes: float
    #: bytes of the task's inputs to be fetched, and in how many fetches
    missing_bytes: float
    missing_inputs: float
    #: other inputs were on their way to it
    fetching: bool
    #: how much longer than usual it takes for the same task
    slowness: float
    #: work already assigned to it
    queue_seconds: float
    #: inbound traffic, then the missing inputs
    inputs_seconds: float
    #: until a disk, its own or that of the worker that sends an input, has read what is not in memory
    read_seconds: float
    #: a little for fetches that its queue hides, so that of equals the nearer one is chosen
    hidden_seconds: float
    compute_seconds: float
    #: what does not count, as there is other work for everybody for that long
    excused_seconds: float
    #: writing out what would no longer fit into memory
    overflow_seconds: float
    #: what the transfer costs everybody else
    moved_seconds: float
    #: ``max(max(queue, inputs) + hidden, read) + compute - excused + overflow + moved``; the smallest is chosen
    total_seconds: float


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a task ran where it ran, and what came of it. Prints as text; `to_dict` gives plain values."""

    key: str
    #: ``cost``, one of `ROOTS`, ``stock``, ``fallback``, ``shadow`` (stock, and `chosen` by cost was only recorded);
    #: ``scattered``, ``waiting`` and ``failed`` (an input of it did) when nothing was decided
    kind: str
    #: why stock Dask decided; None when it did not
    reason: str | None
    #: the task's state on the scheduler now; None when it is forgotten there
    state: str | None
    #: of the decision, in seconds since 1970
    time: float | None
    #: the task may run on some workers only
    restricted: bool | None
    #: workers in the cluster then
    workers: int | None
    #: ``{"bytes", "count"}``
    inputs: Mapping[str, float] | None
    candidates: tuple[Candidate, ...]
    #: address
    chosen: str | None
    #: ``wait_seconds`` (the larger of ``queue_seconds`` and ``inputs_seconds``), ``compute_seconds``,
    #: ``finish_seconds`` from the decision to the result, ``moved_bytes``
    predicted: Mapping[str, float] | None
    #: the same as far as it is known, and ``worker``, ``stolen_from``, ``outcome``, ``transfer_seconds``
    actual: Mapping[str, Any] | None
    #: of a task that failed, or whose input did: ``key`` of the task that raised, and the ``text`` of what it raised
    failed: Mapping[str, str] | None = None

    @classmethod
    def from_story(cls, story: Mapping[str, Any]) -> Explanation:
        """From the plain values of `DecisionLog.story` and the task's ``state``."""
        candidates = tuple(Candidate(**c) for c in story.get("candidates", ()))
        names = ("key", "kind", "reason", "state", "time", "restricted", "workers", "inputs", "chosen", "predicted")
        rest = {name: story.get(name) for name in (*names, "failed")}
        return cls(candidates=candidates, actual=story.get("actual"), **rest)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values, and ``because``: the sentence."""
        return {**dataclasses.asdict(self), "because": self.because}

    @property
    def worker(self) -> str | None:
        """Where it ran or was sent to; None when it was not assigned."""
        return None if self.actual is None else self.actual["worker"]

    @property
    def because(self) -> str:
        """One sentence."""
        if self.kind == "scattered":
            return "It is data that a client put into the cluster; no decision was made."
        if self.kind == "waiting":
            return f"It was not assigned to a worker yet; its state is {self.state!r}."
        if self.kind == "failed":
            return f"It was not assigned to a worker{self._failure()}."
        return f"{self._went()} because {self._why()}{self._afterwards()}{self._failure()}."

    def _went(self) -> str:
        actual = self.actual
        if self.kind == "cost" or self.kind in ROOTS:
            if actual is None:
                return f"It is to go to {self.chosen}"
            if actual["worker"] == self.chosen and actual["outcome"] in ("memory", "erred"):
                return f"It ran on {self.chosen}"
            return f"It was sent to {self.chosen}"
        if actual is None:
            return "It was left to stock Dask, which has not assigned it yet,"
        if actual["stolen_from"] is not None:
            return f"It was sent to {actual['stolen_from']}"
        return f"It {'ran on' if actual['outcome'] in ('memory', 'erred') else 'was sent to'} {actual['worker']}"

    def _why(self) -> str:
        if self.kind == "cost":
            return _compared(self)
        if self.kind in ROOTS:
            return ROOTS[self.kind]
        if self.kind == "shadow":
            return (
                "placement only looks on (gpurt.placement.shadow), so Dask's own rule decided; by cost it would have "
                f"gone to {self.chosen}, because {_compared(self)}"
            )
        if self.kind == "fallback":
            return f"placement failed and stock Dask decided ({self.reason})"
        return STOCK_REASONS.get(self.reason or "", f"it was left to stock Dask ({self.reason})")

    def _afterwards(self) -> str:
        actual = self.actual
        if actual is None:
            return ""
        if actual["stolen_from"] is not None:
            return f"; work stealing moved it from there to {actual['worker']}"
        if self.kind != "shadow" and self.chosen is not None and actual["worker"] != self.chosen:
            return f"; in the end it was {actual['worker']} that got it"
        return ""

    def _failure(self) -> str:
        if self.failed is None:
            return ""
        if self.failed["key"] == self.key:
            return f"; it raised {self.failed['text']}"
        return f"; {self.failed['key']}, which it needs, raised {self.failed['text']}"

    # ------------------------------------------------------------------ printing

    def __repr__(self) -> str:
        lines = [self._headline(), f"  {self.because}"]
        for title, columns, rows, left, _ in self._tables():
            lines += ["", f"  {title}", *text_table(columns, rows, left)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        out = [f"<h4>{html.escape(self._headline())}</h4><p>{html.escape(self.because)}</p>"]
        for title, columns, rows, left, bold in self._tables():
            out.append(f"<p>{html.escape(title)}</p>{html_table(columns, rows, left, bold)}")
        return "".join(out)

    def _headline(self) -> str:
        how = {"cost": "placed by cost", "root group": "placed with its group", "stock": "left to stock Dask"}
        how |= {"root at home": "placed where its input is", "tiny root": "sent without a queue"}
        how |= {"fallback": "fell back to stock Dask", "scattered": "scattered data", "shadow": "left to stock Dask"}
        how |= dict.fromkeys(("waiting", "failed"), "not assigned")
        when = "" if self.time is None else time.strftime(" at %H:%M:%S", time.localtime(self.time))
        outcome = None if self.actual is None else self.actual["outcome"]
        now = {None: "not finished", "memory": "finished"}.get(outcome, str(outcome)) if self.actual else self.state
        return f"{self.key}: {how.get(self.kind, self.kind)}{when}; {now or 'forgotten'}"

    def _tables(self) -> list[tuple[str, list[str], list[list[str]], int, int | None]]:
        """(title, columns, rows, columns aligned left, row set off)"""
        out: list[tuple[str, list[str], list[list[str]], int, int | None]] = []
        if self.candidates:
            ordered = sorted(self.candidates, key=lambda c: (not c.chosen, c.total_seconds))
            rows = [
                [
                    "->" if c.chosen else "",
                    c.address,
                    WHYS.get(c.why, c.why),
                    bytes_said(c.missing_bytes),
                    *(f"{getattr(c, f'{name}_seconds') * 1e3:,.2f}" for name in _TERMS),
                    f"{c.total_seconds * 1e3:,.2f}",
                ]
                for c in ordered
            ]
            limits = ", of those that it may run on" if self.restricted else ""
            title = (
                f"compared: {len(rows)} of {self.workers} worker{'s' if self.workers != 1 else ''}{limits}; "
                "milliseconds, total = max(max(queue, inputs) + hidden, read) + compute - excused + overflow + moved:"
            )
            out.append((title, ["", "candidate", "why", "to fetch", *_TERMS, "total"], rows, 3, 0))
        rows = self._outcome()
        if rows:
            out.append(("predicted and actual:", ["", "predicted", "actual"], rows, 1, None))
        return out

    def _outcome(self) -> list[list[str]]:
        if self.actual is None or self.actual["outcome"] is None:
            return []
        p: Mapping[str, Any] = self.predicted or {}
        a = self.actual
        rows = [
            ("until it computes", seconds_said(p.get("wait_seconds")), seconds_said(a["wait_seconds"])),
            ("of that, transfers", seconds_said(p.get("inputs_seconds")), seconds_said(a["transfer_seconds"])),
            ("compute", seconds_said(p.get("compute_seconds")), seconds_said(a["compute_seconds"])),
            ("decision to result", seconds_said(p.get("finish_seconds")), seconds_said(a["finish_seconds"])),
            ("inputs moved", bytes_said(p.get("moved_bytes")), bytes_said(a["moved_bytes"])),
        ]
        return [list(row) for row in rows if row[1] != "-" or row[2] != "-"]


def _compared(e: Explanation) -> str:
    chosen = next(c for c in e.candidates if c.chosen)
    others = sorted((c for c in e.candidates if not c.chosen), key=lambda c: c.total_seconds)
    if not others:
        return "it is the only worker that it may run on" if e.restricted else "it was the only worker to compare"
    return f"{_own_merit(chosen, e)}; {_lost(others[0], chosen, e)}"


def _own_merit(c: Candidate, e: Explanation) -> str:
    """What speaks for the chosen worker."""
    holds = "it holds or is already fetching" if c.fetching else "it holds"
    total = e.inputs["bytes"] if e.inputs else 0.0
    if c.missing_inputs < 0.5:
        return f"{holds} all of its inputs ({bytes_said(total)})"
    if c.why == "holder":
        return f"{holds} {bytes_said(c.has_bytes)} of its {bytes_said(total)} of inputs"
    fetch = f"fetching {bytes_said(c.missing_bytes)} takes {seconds_said(c.inputs_seconds)}"
    if c.idle:
        return f"it was idle and {fetch}"
    return f"its queue was short ({seconds_said(c.queue_seconds)}) and {fetch}"


def _lost(other: Candidate, chosen: Candidate, e: Explanation) -> str:
    """What the best of the others lost by."""
    name = other.address
    differences = {
        "queue": max(0.0, other.queue_seconds - max(chosen.queue_seconds, chosen.inputs_seconds)),
        "inputs": max(0.0, other.inputs_seconds - max(chosen.queue_seconds, chosen.inputs_seconds))
        + max(0.0, other.moved_seconds - chosen.moved_seconds)
        + max(0.0, other.hidden_seconds - chosen.hidden_seconds),
        "read": max(0.0, other.read_seconds - max(chosen.queue_seconds, chosen.inputs_seconds, chosen.read_seconds)),
        "compute": other.compute_seconds - chosen.compute_seconds,
        "overflow": other.overflow_seconds - chosen.overflow_seconds,
    }
    term = max(differences, key=lambda name: differences[name])
    if other.total_seconds - chosen.total_seconds <= 1e-9 or differences[term] <= 0:
        return f"{name} would have cost the same and holds at least as much data"
    if term == "inputs":
        if other.missing_inputs < 0.5:
            return f"{name} would have had to wait {seconds_said(other.inputs_seconds)} for data on its way"
        them = "them" if chosen.missing_inputs < 0.5 and other.why != "holder" else bytes_said(other.missing_bytes)
        idle = "was idle but " if other.idle else ""
        return f"{name} {idle}would have needed {seconds_said(other.inputs_seconds)} to fetch {them}"
    if term == "read":
        return f"{name} would have had to wait {seconds_said(other.read_seconds)} for inputs to be read from disk"
    if term == "queue":
        holds = "has more of its inputs but " if other.has_bytes > chosen.has_bytes else ""
        return f"{name} {holds}was busy for another {seconds_said(other.queue_seconds)}"
    if term == "compute":
        return f"{name} takes {other.slowness / chosen.slowness:.2g} times as long for the same task"
    return f"{name} would have had to write data out to disk ({seconds_said(other.overflow_seconds)})"
