"""Reads the logs of `active` and `on_cluster`: in which tests was the extension really active, and did it fail to
start?"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Activity:
    """What the log of one suite says."""

    #: ``dask_setup`` calls that returned, by role, for each test id.
    setups: dict[str, Counter[str]] = field(default_factory=dict)
    #: Computes sent to the session cluster, for each test id.
    computes: Counter[str] = field(default_factory=Counter)
    #: P2P barriers in these computes, for each test id.
    barriers: Counter[str] = field(default_factory=Counter)
    #: Whether ``dask_setup`` returned on the scheduler of the session cluster.
    session: bool = False
    #: Test and ``role: exception`` of each ``dask_setup`` that raised.
    errors: list[tuple[str, str]] = field(default_factory=list)

    def active_tests(self) -> set[str]:
        """Tests with at least one cluster, of their own or of the session, in which the extension started."""
        tests = {t for t, roles in self.setups.items() if roles}
        # the session cluster starts inside the first test, which may never compute on it
        return (tests - {""}) | set(self.computes) if self.session else tests - {""}

    def roles(self) -> Counter[str]:
        """Activations by role over all tests."""
        total: Counter[str] = Counter()
        for roles in self.setups.values():
            total += roles
        return total


def test_id(nodeid: str) -> str:
    """The id that pytest's junit file has for a node id: ``a/b.py::C::f[p]`` is ``a.b.C::f[p]``."""
    head, bracket, params = nodeid.partition("[")
    names = head.split("::")
    names[0] = names[0].removesuffix(".py").replace("/", ".")
    return f"{'.'.join(names[:-1])}::{names[-1]}{bracket}{params}"


def read(path: Path) -> Activity:
    """Reads one log; a missing one is empty. A torn line (a process killed while writing) is an error of the run."""
    activity = Activity()
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            activity.errors.append(("", f"unreadable line in {path.name}: {line[:80]!r}"))
            continue
        test = test_id(record["test"]) if record["test"] else ""
        if "computes" in record:
            activity.computes[test] += record["computes"]
            activity.barriers[test] += record["barriers"]
        elif "session" in record:
            # written right after the cluster started, by the same test
            activity.session = activity.setups.get(test, Counter())["scheduler"] > 0
        elif record["ok"]:
            activity.setups.setdefault(test, Counter())[record["role"]] += 1
        else:
            activity.errors.append((test or "outside a test", f"{record['role']}: {record['error']}"))
    return activity
