"""`Finding`: what a check says. `exit_code`, `text`: all of them as a result, and as lines.

A check yields a `Verdict` per thing that it looks at. `check.run` adds which check it was and how long it took.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class State(enum.StrEnum):
    """How a check ended. Not applicable: what it looks at is not here."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    NA = "n/a"


_GRAVITY = {State.NA: 0, State.OK: 1, State.WARN: 2, State.FAIL: 3}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One thing that a check says. All texts are for people."""

    state: State
    found: str
    expected: str = ""
    #: what follows from it for work on this node
    meaning: str = ""
    remedy: str = ""


def ok(found: str) -> Verdict:
    """It is as it should be."""
    return Verdict(State.OK, found)


def na(found: str) -> Verdict:
    """There is nothing to look at, and why."""
    return Verdict(State.NA, found)


def warn(found: str, *, expected: str, meaning: str, remedy: str) -> Verdict:
    """It works, and costs something."""
    return Verdict(State.WARN, found, expected, meaning, remedy)


def fail(found: str, *, expected: str, meaning: str, remedy: str) -> Verdict:
    """It does not work, or will not."""
    return Verdict(State.FAIL, found, expected, meaning, remedy)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A `Verdict` with the check that it is from; the fields are those of ``--json``."""

    id: str
    name: str
    state: State
    found: str
    expected: str
    meaning: str
    remedy: str
    #: that the check took
    seconds: float
    #: addresses that it is about; empty: this machine, or the cluster as a whole
    workers: tuple[str, ...] = ()

    @classmethod
    def of(cls, id: str, name: str, verdict: Verdict, seconds: float) -> Finding:
        """What a check said."""
        return cls(id, name, **vars(verdict), seconds=round(seconds, 3))


def findings_of(id: str, name: str, verdicts: Sequence[Verdict], seconds: float) -> list[Finding]:
    """A finding per problem; without one a single finding that is good, or not applicable."""
    problems = [v for v in verdicts if v.state in (State.WARN, State.FAIL)]
    if not problems:
        good = [v for v in verdicts if v.state is State.OK]
        state = State.OK if good else State.NA
        problems = [Verdict(state, "; ".join(v.found for v in good or verdicts) or "nothing to look at")]
    return [Finding.of(id, name, v, seconds) for v in problems]


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing to do; 1: a warning; 2: a failure."""
    worst = max((_GRAVITY[f.state] for f in findings), default=0)
    return max(0, worst - 1)


def text(findings: Sequence[Finding]) -> str:
    """A line per finding, with the remedy below those that need one; the worst ones last, where a terminal stops."""
    lines = []
    for f in sorted(findings, key=lambda f: _GRAVITY[f.state]):
        lines.append(f"{f.state:<4}  {f.id:<6}  {f.name}: {f.found}")
        if f.state in (State.WARN, State.FAIL):
            lines.append(f"{'':14}expected: {f.expected}. {f.meaning}. Remedy: {f.remedy}")
    counts = {state: sum(f.state is state for f in findings) for state in State}
    lines.append(", ".join(f"{n} {state}" for state, n in counts.items() if n) or "no checks")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> dict[str, list[dict[str, object]]]:
    """What ``--json`` prints."""
    return {"checks": [dataclasses.asdict(f) for f in findings]}
