"""`Where`: which workers hold a key, on which tier, which of them are fetching it and which tasks want it.

Two views are put together. The scheduler knows holders, the task's state and its dependents. Only a worker knows
whether its copy is in memory or on disk. They are asked one after the other, so a copy may move in between: a worker
that no longer has what the scheduler listed is shown with the tier ``gone``.
"""

from __future__ import annotations

import dataclasses
import html
from collections import Counter
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.render.text import bytes_said, html_table, text_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dask.typing import Key

#: keys printed; `to_dict` has all of them
SHOWN = 20
#: tiers of which bytes are printed, and how
_TIERS = {
    "device": "on device",
    "memory": "in memory",
    "pinned": "pinned",
    "disk": "on disk",
    "object": "in store",
}


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of a value on one worker."""

    address: str
    #: ``memory``, ``disk``, ``object``; of device values ``device`` and ``pinned``; ``lost`` (its last copy was
    #: unreadable), ``gone`` (it has just left), ``unknown`` (the worker did not answer)
    tier: str
    #: what the value takes in memory
    nbytes: int | None
    #: what its copy on disk takes; a value in memory may have one too, None when there is none
    disk_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one key is."""

    key: str
    #: the task's state on the scheduler; ``unknown`` when it has none of that name
    state: str
    #: what the value takes in memory; None when it was never computed
    nbytes: int | None
    copies: tuple[Copy, ...]
    #: the worker that it is assigned to, or that computes it
    processing: str | None
    #: workers that fetch it, for a task that was assigned to them
    fetching: tuple[str, ...]
    #: clients that want it
    clients: tuple[str, ...]
    #: tasks that need it and are not done
    waiters: int


@dataclasses.dataclass(frozen=True)
class Where:
    """Where some keys are. Prints as text; `to_dict` gives plain values."""

    places: tuple[Place, ...]
    #: address of a worker that did not answer -> why
    silent: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_replies(
        cls,
        scheduler: Mapping[Any, Mapping[str, Any]],
        workers: Mapping[str, Mapping[Any, Mapping[str, Any]] | Exception],
    ) -> Where:
        """From the scheduler's reply by key, and those of workers by address and key; an exception: no answer."""
        places = []
        for key, facts in scheduler.items():
            copies = []
            for address in facts["holders"]:
                reply = workers.get(address)
                if reply is None or isinstance(reply, Exception):
                    copies.append(Copy(address, "unknown", facts["nbytes"], None))
                else:
                    here = reply.get(key)
                    copies.append(Copy(address, "gone", None, None) if here is None else Copy(address, **here))
            places.append(
                Place(
                    key=str(key),
                    state=facts["state"],
                    nbytes=facts["nbytes"],
                    copies=tuple(copies),
                    processing=facts["processing"],
                    fetching=tuple(facts["fetching"]),
                    clients=tuple(facts["clients"]),
                    waiters=facts["waiters"],
                )
            )
        silent = {address: str(reply) for address, reply in workers.items() if isinstance(reply, Exception)}
        return cls(tuple(places), silent)

    def __getitem__(self, key: Key) -> Place:
        """The place of a key.

        Raises
        ------
        KeyError
            It was not asked for.
        """
        text = str(getattr(key, "key", key))
        for place in self.places:
            if place.key == text:
                return place
        raise KeyError(key)

    def to_dict(self) -> dict[str, Any]:
        """``{"keys": {key: {state, nbytes, copies: [...], ...}}, "workers": {address: {tier: bytes}}}``"""
        keys = {p.key: {k: v for k, v in dataclasses.asdict(p).items() if k != "key"} for p in self.places}
        return {"keys": keys, "workers": self.workers()}

    def workers(self) -> dict[str, dict[str, int]]:
        """Bytes by worker and tier: as they are in memory or on the device, and below as they are there."""
        out: dict[str, Counter[str]] = {}
        for copy in (c for p in self.places for c in p.copies):
            nbytes = copy.disk_bytes if copy.tier in ("pinned", "disk", "object") else copy.nbytes
            out.setdefault(copy.address, Counter())[copy.tier] += nbytes or 0
        return {address: dict(tiers) for address, tiers in sorted(out.items())}

    def __repr__(self) -> str:
        lines = [self._headline(), *self._silent()]
        for columns, rows, left in self._tables():
            lines += ["", *text_table(columns, rows, left)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        tables = "".join(html_table(*table) for table in self._tables())
        silent = "".join(f"<p>{html.escape(line)}</p>" for line in self._silent())
        return f"<h4>{html.escape(self._headline())}</h4>{silent}{tables}"

    def _silent(self) -> list[str]:
        return [
            f"  no answer from {address}: {why}; what it holds may be on disk" for address, why in self.silent.items()
        ]

    def _headline(self) -> str:
        if len(self.places) == 1:
            (p,) = self.places
            return f"{p.key}: {p.state}" + ("" if p.nbytes is None else f", {bytes_said(p.nbytes)}")
        states = ", ".join(f"{n} {state}" for state, n in Counter(p.state for p in self.places).most_common())
        return f"{len(self.places)} keys: {states}; {bytes_said(sum(p.nbytes or 0 for p in self.places))}"

    def _tables(self) -> list[tuple[list[str], list[list[str]], int]]:
        rows: list[list[str]] = []
        several = len(self.places) > 1
        for p in self.places[:SHOWN]:
            lines = [[c.address, c.tier, bytes_said(c.nbytes), bytes_said(c.disk_bytes)] for c in p.copies]
            if p.processing is not None:
                lines.append([p.processing, "computed there", "-", "-"])
            lines += [[address, "being fetched", "-", "-"] for address in p.fetching]
            wanted = _wanted(p)
            for i, line in enumerate(lines or [["nowhere", "-", "-", "-"]]):
                name = [p.key, p.state] if i == 0 else ["", ""]
                rows.append([*(name if several else []), *line, wanted if i == 0 else ""])
        names = ["key", "state"] if several else []
        columns = [*names, "worker", "tier", "bytes", "on disk", "wanted by"]
        if len(self.places) > SHOWN:
            rows.append([f"... and {len(self.places) - SHOWN} more", *[""] * (len(columns) - 1)])
        tables = [(columns, rows, len(names) + 2)]
        if several:
            workers = self.workers()
            used = {tier for tiers in workers.values() for tier in tiers}
            shown = {t: name for t, name in _TIERS.items() if t in used or t not in ("device", "pinned")}
            sums = [[a, *(bytes_said(t[tier]) if tier in t else "-" for tier in shown)] for a, t in workers.items()]
            if sums:
                tables.append((["worker", *shown.values()], sums, 1))
        return tables


def _wanted(p: Place) -> str:
    out = []
    if p.clients:
        out.append(f"{len(p.clients)} client{'s' if len(p.clients) > 1 else ''}")
    if p.waiters:
        out.append(f"{p.waiters} task{'s' if p.waiters > 1 else ''}")
    return ", ".join(out) or "no client or task"
