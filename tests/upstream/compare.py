"""Compares the outcomes of a stock run and of a run with the extension, test by test.

Theory: upstream's suites are not expected to pass in full (some need another user, a network, a newer pandas). The
claim that can be checked is *the extension changes nothing but what is listed*. So the outcome of each test is
compared with stock, in both directions: a test that newly passes is a difference as well, and so is one that is newly
skipped or not collected any more.

A difference counts unless

- an entry of ``differences.toml`` allows it: test id pattern, both outcomes and the versions must fit; or
- it does not repeat: the test is run again, alone, in both modes, up to two times, and the outcomes agree in one of
  these pairs. It is then reported as flaky, never dropped. A pair in which the test was not found in either mode
  proves nothing.

A file whose process died has no results at all; that is one difference under the name ``module::<process>`` (and not
one for each of its tests), which is not run again. A file that died in both modes, or in which nothing passed in
stock, compares nothing and is a failure of its own, as is a file in which the extension was never active: see
`report`.
"""

from __future__ import annotations

import re
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

#: Best first. A test reported twice (body and teardown) counts with the worst.
OUTCOMES = ("passed", "xfailed", "skipped", "missing", "failed", "error", "crashed")

#: Stands for the process of a whole file.
PROCESS = "<process>"


@dataclass(frozen=True)
class Result:
    """How one test ended."""

    #: One of `OUTCOMES`.
    outcome: str
    #: Wall time of the test, seconds.
    seconds: float = 0.0
    #: First line of the failure, "" where it passed.
    message: str = ""


MISSING = Result("missing")


@dataclass(frozen=True)
class Difference:
    """One test that ended differently."""

    test: str
    stock: Result
    ours: Result

    def __str__(self) -> str:
        text = f"{self.test}: stock {self.stock.outcome}, extension {self.ours.outcome}"
        message = self.ours.message or self.stock.message
        return f"{text} ({message})" if message else text


@dataclass(frozen=True)
class Entry:
    """One allowed difference, from ``differences.toml``."""

    #: Test id; ``*`` stands for any text, nothing else is special (ids hold brackets).
    test: str
    stock: str
    ours: str
    reason: str
    #: Versions of distributed it holds for.
    versions: SpecifierSet
    #: Seen in some runs only, so its absence is not stale.
    sometimes: bool = False
    #: The only extension it holds for; "" for all.
    extension: str = ""

    def covers(self, test: str) -> bool:
        """Whether the id of ``test`` fits the pattern."""
        return re.fullmatch(".*".join(map(re.escape, self.test.split("*"))), test, re.DOTALL) is not None

    def allows(self, d: Difference) -> bool:
        """Whether this very change of outcome is the listed one."""
        return self.covers(d.test) and d.stock.outcome == self.stock and d.ours.outcome == self.ours


@dataclass
class Verdict:
    """What remains of the differences after the list and the re-runs."""

    allowed: list[tuple[Difference, Entry]] = field(default_factory=list)
    #: With the outcomes of each re-run pair, (stock, extension).
    flaky: list[tuple[Difference, list[tuple[str, str]]]] = field(default_factory=list)
    unmatched: list[tuple[Difference, list[tuple[str, str]]]] = field(default_factory=list)
    #: Entries that fit a test that was run, but no difference.
    stale: list[Entry] = field(default_factory=list)


def _outcome(case: ET.Element) -> Result:
    seconds = float(case.get("time") or 0.0)
    for tag, outcome in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            if tag == "skipped" and found.get("type") == "pytest.xfail":
                outcome = "xfailed"
            message = (found.get("message") or "").strip().splitlines()
            return Result(outcome, seconds, message[0][:200] if message else "")
    return Result("passed", seconds)


def read_junit(path: Path) -> dict[str, Result]:
    """Test id (``module.Class::name[param]``) to its result, from one junit file of pytest.

    Raises ValueError where the file is no complete junit file.
    """
    try:
        root = ET.parse(path).getroot()
    except ET.ParseError as e:
        raise ValueError(f"{path} is no complete junit file ({e}); remove it and run again") from e
    results: dict[str, Result] = {}
    for case in root.iter("testcase"):
        classname, name = case.get("classname") or "", case.get("name") or ""
        test = f"{classname}::{name}" if classname else name
        new, old = _outcome(case), results.get(test)
        if old is not None:
            worst = max(old, new, key=lambda r: OUTCOMES.index(r.outcome))
            new = Result(worst.outcome, old.seconds + new.seconds, worst.message)
        results[test] = new
    return results


def crashed(module: str, why: str) -> dict[str, Result]:
    """The results of a file whose process left none."""
    return {f"{module}::{PROCESS}": Result("crashed", message=why)}


def is_crash(results: Mapping[str, Result]) -> bool:
    """Whether these are the results of a dead process."""
    return any(test.endswith(f"::{PROCESS}") for test in results)


def load_entries(path: Path, distributed_version: str, extension: str) -> list[Entry]:
    """The allowed differences of this version with this extension.

    Raises ValueError with the entry and the remedy for a bad one.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as bad:
        raise ValueError(f"{path}: {bad}") from bad
    if unknown := sorted(set(raw) - {"difference"}):
        raise ValueError(f"{path}: unknown tables {unknown}; only [[difference]] is allowed")
    need, may = {"test", "stock", "ours", "reason", "versions"}, {"sometimes", "extension"}
    entries = []
    for i, e in enumerate(raw.get("difference", []), 1):
        where = f"{path}: difference {i} ({e.get('test', 'no test')!r})"
        if missing := sorted(need - set(e)):
            raise ValueError(f"{where} lacks {missing}")
        if extra := sorted(set(e) - need - may):
            raise ValueError(f"{where} has unknown keys {extra}; allowed are {sorted(need | may)}")
        for key in ("stock", "ours"):
            if e[key] not in OUTCOMES:
                raise ValueError(f"{where}: {key} = {e[key]!r}; allowed are {list(OUTCOMES)}")
        if e["stock"] == e["ours"]:
            raise ValueError(f"{where}: both outcomes are {e['ours']!r}, which is no difference; remove the entry")
        if not str(e["reason"]).strip():
            raise ValueError(f"{where}: the reason is empty; say why the outcome may differ")
        if not str(e["test"]).strip("*: "):
            raise ValueError(f"{where}: the pattern allows everything; name the test")
        try:
            versions = SpecifierSet(e["versions"])
        except InvalidSpecifier as bad:
            raise ValueError(
                f"{where}: versions = {e['versions']!r} is no version specifier such as '>=2026.7'"
            ) from bad
        of = str(e.get("extension", ""))
        if versions.contains(Version(distributed_version), prereleases=True) and of in ("", extension):
            sometimes = bool(e.get("sometimes", False))
            entries.append(Entry(e["test"], e["stock"], e["ours"], e["reason"], versions, sometimes, of))
    return entries


def differences(stock: Mapping[str, Result], ours: Mapping[str, Result]) -> list[Difference]:
    """The tests of one file that ended differently, in order of id."""
    if is_crash(stock) != is_crash(ours):
        return [
            Difference(test, stock.get(test, Result("passed")), ours.get(test, Result("passed")))
            for test in sorted((*stock, *ours))
            if test.endswith(f"::{PROCESS}")
        ]
    found = []
    for test in sorted(set(stock) | set(ours)):
        d = Difference(test, stock.get(test, MISSING), ours.get(test, MISSING))
        if d.stock.outcome != d.ours.outcome:
            found.append(d)
    return found


def judge(
    found: Iterable[Difference],
    entries: Iterable[Entry],
    ran: Iterable[str],
    rerun: Callable[[Difference], tuple[str, str]] | None = None,
    attempts: int = 2,
) -> Verdict:
    """Sorts the differences.

    ``ran`` are the ids of all tests; ``rerun`` runs one alone in both modes and returns (stock, extension).
    """
    entries, verdict, used = list(entries), Verdict(), set()
    for d in found:
        entry = next((e for e in entries if e.allows(d)), None)
        if entry is not None:
            used.add(id(entry))
            verdict.allowed.append((d, entry))
            continue
        pairs: list[tuple[str, str]] = []
        agreed = False
        if rerun is not None and not d.test.endswith(f"::{PROCESS}"):
            while len(pairs) < attempts and not agreed:
                pairs.append(rerun(d))
                agreed = pairs[-1][0] == pairs[-1][1] and pairs[-1][0] not in ("missing", "crashed")
        (verdict.flaky if agreed else verdict.unmatched).append((d, pairs))
    ran = list(ran)
    verdict.stale = [
        e for e in entries if id(e) not in used and not e.sometimes and any(e.covers(test) for test in ran)
    ]
    return verdict


def counts(results: Mapping[str, Result]) -> dict[str, int]:
    """Number of tests of each outcome, without the zeros."""
    total = dict.fromkeys(OUTCOMES, 0)
    for r in results.values():
        total[r.outcome] += 1
    return {k: v for k, v in total.items() if v}
