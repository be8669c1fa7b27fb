"""The verdict of a whole run as JSON, Markdown and an exit code.

Besides unmatched differences these end a run with 1, because a comparison would otherwise be empty and look like a
pass: a file whose process left no results in both modes, a file in which nothing passed in stock, a file in which the
extension was never active, and a ``dask_setup`` that raised.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .compare import Difference, Result, Verdict, counts, is_crash

if TYPE_CHECKING:
    from .activity import Activity
    from .suites import Suite


@dataclass
class SuiteRun:
    """Both runs of one file."""

    suite: Suite
    stock: dict[str, Result]
    ours: dict[str, Result]
    activity: Activity
    #: Wall seconds of the process, by mode; None where an earlier stock result was reused.
    seconds: dict[str, float | None]

    def faults(self) -> list[str]:
        """Why this file proves nothing; empty if it does."""
        name, found = self.suite.path, []
        if is_crash(self.stock):
            found.append(f"{name}: no results from stock: {next(iter(self.stock.values())).message}")
        elif not any(r.outcome == "passed" for r in self.stock.values()):
            found.append(f"{name}: no test passed in the stock run, so nothing is compared")
        if self.suite.clusters and not is_crash(self.ours) and not self.activity.active_tests():
            found.append(f"{name}: the extension was not active in any test")
        # one cause usually hits every server: told once, with the first test
        first: dict[str, str] = {}
        for test, what in self.activity.errors:
            first.setdefault(what, test)
        times = Counter(what for _, what in self.activity.errors)
        found += [f"{name}: dask_setup failed {times[w]} times: {w} (first in {t})" for w, t in first.items()]
        return found


@dataclass
class Report:
    """Everything that a run found out."""

    extension: str
    versions: dict[str, str]
    isolation: dict[str, str]
    #: Wall time of the whole run, seconds.
    seconds: float
    runs: list[SuiteRun]
    verdict: Verdict
    #: What was left out, and why.
    notes: list[str] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Faults of all files."""
        return [f for r in self.runs for f in r.faults()]

    def ok(self) -> bool:
        """Whether nothing is unexplained."""
        return not self.faults() and not self.verdict.unmatched

    def as_dict(self) -> dict[str, Any]:
        """For the JSON summary."""

        def difference(d: Difference, pairs: list[tuple[str, str]] | None = None) -> dict[str, Any]:
            text = {"test": d.test, "stock": asdict(d.stock), "ours": asdict(d.ours)}
            return text if pairs is None else {**text, "reruns": [{"stock": s, "ours": o} for s, o in pairs]}

        v = self.verdict
        return {
            "ok": self.ok(),
            "extension": self.extension,
            "versions": self.versions,
            "isolation": self.isolation,
            "seconds": round(self.seconds, 1),
            "notes": self.notes,
            "faults": self.faults(),
            "suites": [
                {
                    "path": r.suite.path,
                    "on_cluster": r.suite.on_cluster,
                    "stock": counts(r.stock),
                    "ours": counts(r.ours),
                    "seconds": r.seconds,
                    "active_tests": len(r.activity.active_tests()),
                    "activations": dict(r.activity.roles()),
                    "cluster_computes": sum(r.activity.computes.values()),
                    "p2p_barriers": sum(r.activity.barriers.values()),
                }
                for r in self.runs
            ],
            "unmatched": [difference(d, p) for d, p in v.unmatched],
            "allowed": [{**difference(d), "reason": e.reason} for d, e in v.allowed],
            "flaky": [difference(d, p) for d, p in v.flaky],
            "stale": [{"test": e.test, "reason": e.reason} for e in v.stale],
        }

    def markdown(self) -> str:
        """A short summary for a terminal or a CI page."""
        total_stock, total_ours, active = Counter[str](), Counter[str](), 0
        lines = [
            f"# Upstream suites with {self.extension}: {'no unexplained difference' if self.ok() else 'FAILED'}",
            "",
            ", ".join(f"{k} {v}" for k, v in self.versions.items()),
            "",
            (
                f"Wall time {self.seconds / 60:.1f} min; network: {self.isolation['network']}; "
                f"rights: {self.isolation['rights']}. Counts are passed/failed/skipped; errors and crashes count "
                "as failed, expected failures as skipped."
            ),
            "",
            "| file | stock | extension | active in | p2p barriers | seconds |",
            "|---|---|---|---|---|---|",
        ]
        for r in self.runs:
            stock, ours = counts(r.stock), counts(r.ours)
            total_stock.update(stock)
            total_ours.update(ours)
            n = len(r.activity.active_tests())
            active += n
            where = n if r.suite.clusters else "no clusters"
            seconds = " / ".join("reused" if s is None else f"{s:.0f}" for s in r.seconds.values())
            barriers = sum(r.activity.barriers.values()) if r.suite.on_cluster else "-"
            lines.append(f"| {r.suite.path} | {_short(stock)} | {_short(ours)} | {where} | {barriers} | {seconds} |")
        lines += [f"| **sum** | {_short(total_stock)} | {_short(total_ours)} | {active} | | |", ""]
        v = self.verdict
        lines += _section("Faults", self.faults())
        lines += _section("Unexplained differences", [f"{d}{_pairs(p)}" for d, p in v.unmatched])
        lines += _section("Allowed differences", [f"{d}. Reason: {e.reason}" for d, e in v.allowed])
        flaky = [f"{d}{_pairs(p)}" for d, p in v.flaky]
        lines += _section("Flaky: differed once, agreed when run again alone in both modes", flaky)
        lines += _section("Stale entries of differences.toml (test run, no such difference)", [e.test for e in v.stale])
        lines += _section("Notes", self.notes)
        return "\n".join(lines)


def _short(c: dict[str, int] | Counter[str]) -> str:
    def of(*names: str) -> int:
        return sum(c.get(n, 0) for n in names)

    return f"{of('passed')}/{of('failed', 'error', 'crashed')}/{of('skipped', 'xfailed')}"


def _pairs(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"; again: stock {s}, extension {o}" for s, o in pairs)


def _section(title: str, items: list[str]) -> list[str]:
    return [f"## {title} ({len(items)})", "", *(f"- {i}" for i in items), ""] if items else []
