"""The runner, findings as text and JSON, exit codes, entry points."""

from __future__ import annotations

import configparser
import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.doctor import rapids
from dask_gpurt.doctor.check import Check, Node, run
from dask_gpurt.doctor.finding import Finding, State, as_json, exit_code, fail, findings_of, na, ok, text, warn
from dask_gpurt.doctor.registry import CHECKS
from dask_gpurt.errors import GpurtError

from .trees import node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.doctor.finding import Verdict

ROOT = Path(__file__).parents[2]


def check(look: object, id: str = "X1", **fields: object) -> Check:
    known = {"id": id, "name": "Test", "looks_at": "nothing", "fails_when": "never", "remedy": "none", "look": look}
    return Check(**{**known, **fields})  # type: ignore[arg-type]


def good(node: Node) -> Iterator[Verdict]:
    yield ok("fine")


def slow(found: str) -> Verdict:
    return warn(found, expected="fast", meaning="It takes longer", remedy="wait")


def broken(found: str) -> Verdict:
    return fail(found, expected="whole", meaning="It does not work", remedy="mend it")


def test_a_check_that_hangs_is_a_finding_and_is_not_started_again() -> None:
    release, begun = threading.Event(), []

    def hang(node: Node) -> Iterator[Verdict]:
        begun.append(threading.current_thread())
        release.wait(60)
        yield ok("at last")

    checks = [check(hang, "X1", limit_seconds=0.05), check(good, "X2")]
    first, other = run(checks, node())
    assert (first.state, other.state) == (State.FAIL, State.OK)
    assert "no answer after" in first.found
    assert first.expected == "an answer within 0.05 s"
    assert run(checks, node())[0].state is State.FAIL
    assert len(begun) == 1
    release.set()
    begun[0].join(10)
    assert run(checks, node())[0].found == "at last"
    assert len(begun) == 2


def test_a_check_that_computes_past_its_limit_is_slow_and_does_not_hang() -> None:
    """As one that reads all installed libraries on a machine with ten times the work it has processors for."""
    release = threading.Event()

    def compute(node: Node) -> Iterator[Verdict]:
        while not release.is_set():
            pass
        yield ok("at last")

    try:
        (found,) = run([check(compute, "C1", limit_seconds=1.0)], node())
    finally:
        release.set()
    assert (found.state, found.expected) == (State.WARN, "an answer")
    assert found.found.startswith("no answer after")


def test_all_checks_together_have_a_limit() -> None:
    release = threading.Event()

    def hang(node: Node) -> Iterator[Verdict]:
        release.wait(60)
        yield ok("at last")

    started = time.monotonic()
    checks = [check(hang, f"L{i}", limit_seconds=50, alone=bool(i % 2)) for i in range(8)]
    try:
        found = run(checks, node(), total_seconds=0.2)
    finally:
        release.set()
    # None had the time that it may take, so nothing says that it hangs.
    assert {f.state for f in found} == {State.WARN}
    assert {f.expected for f in found} == {"an answer"}
    assert time.monotonic() - started < 40  # one of them alone would take 50


def test_a_check_that_raises_is_a_finding() -> None:
    def raises(node: Node) -> Iterator[Verdict]:
        yield ok("so far")
        raise SystemExit("out of\n order")

    (found,) = run([check(raises)], node())
    assert found.state is State.WARN
    assert found.found == "the check ended with SystemExit: out of order"


def test_a_check_without_a_thread_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose limit of processes is reached."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "gpurt-doctor-N1":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    lacks, other = run([check(good, "N1"), check(good, "N2")], node())
    assert (lacks.state, lacks.found) == (State.WARN, "the check ended with RuntimeError: can't start new thread")
    assert other.state is State.OK


@pytest.mark.parametrize("hangs", [False, True])
def test_what_was_found_before_is_kept(hangs: bool) -> None:
    release = threading.Event()

    def look(node: Node) -> Iterator[Verdict]:
        yield broken("it is gone")
        if not hangs:
            raise KeyError("spec")
        release.wait(60)

    try:
        first, second = run([check(look, f"K{hangs}", limit_seconds=0.2)], node())
    finally:
        release.set()
    assert (first.state, first.found) == (State.FAIL, "it is gone")
    assert second.found.startswith("no answer after" if hangs else "the check ended with KeyError")


def test_what_measures_runs_while_nothing_else_does() -> None:
    running: set[str] = set()
    beside: list[set[str]] = []

    def look(name: str) -> object:
        def inner(node: Node) -> Iterator[Verdict]:
            running.add(name)
            beside.append(running - {name}) if name.startswith("M") else None
            time.sleep(0.02)
            running.discard(name)
            yield ok(name)

        return inner

    checks = [check(look("A"), "A"), check(look("M1"), "M1", alone=True), check(look("M2"), "M2", alone=True)]
    assert [f.id for f in run(checks, node())] == ["A", "M1", "M2"]
    assert beside == [set(), set()]


@pytest.mark.parametrize(
    ("verdicts", "states", "code"),
    [
        ([na("no card")], ["n/a"], 0),
        ([], ["n/a"], 0),
        ([na("no card"), ok("fine")], ["ok"], 0),
        ([ok("fine"), slow("slow")], ["warn"], 1),
        ([slow("slow"), broken("gone"), ok("fine")], ["warn", "fail"], 2),
    ],
)
def test_states_and_exit_codes(verdicts: list[Verdict], states: list[str], code: int) -> None:
    found = findings_of("X1", "Test", verdicts, 0.5)
    assert [f.state for f in found] == states
    assert exit_code(found) == code


def test_text_and_json() -> None:
    found = findings_of("X1", "Test", [broken("it is gone")], 0.25) + findings_of("X2", "Other", [ok("fine")], 0)
    lines = text(found).splitlines()
    assert lines[0] == "ok    X2      Other: fine"
    assert lines[1] == "fail  X1      Test: it is gone"
    assert lines[2].strip() == "expected: whole. It does not work. Remedy: mend it"
    assert lines[3] == "1 ok, 1 fail"
    first = json.loads(json.dumps(as_json(found)))["checks"][0]
    required = {"id", "name", "state", "found", "expected", "meaning", "remedy", "seconds"}
    assert required <= set(first)
    assert (first["state"], first["seconds"]) == ("fail", 0.25)
    assert {f.name for f in dataclasses.fields(Finding)} == set(first)


def test_all_checks_are_entry_points_of_rapids_doctor() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["rapids_doctor_check"].strip().splitlines()
    assert lines == [f"{name} = dask_gpurt.doctor.rapids:{name}" for name in rapids.ENTRIES]
    assert len(lines) == len(CHECKS) == len({c.id for c in CHECKS})
    assert all(getattr(rapids, name) is function for name, function in rapids.ENTRIES.items())


def test_an_entry_point_returns_warns_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Verdict] = []
    function = rapids._entry(check(lambda node: said, "X9"))
    said[:] = [ok("fine")]
    assert function() == "fine"
    assert function(verbose=True, other=1).startswith("Test: fine (ok, ")
    said[:] = [slow("it is slow")]
    with pytest.warns(UserWarning, match=r"it is slow; expected: fast\. It takes longer\. Remedy: wait"):
        function()
    said[:] = [broken("it is gone")]
    with pytest.raises(GpurtError, match=r"it is gone.*Remedy: mend it"):
        function(verbose=True)


def test_the_command_looks_at_this_machine_within_ten_seconds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dask", "gpurt", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)["checks"]
    assert {f["id"] for f in found} == {c.id for c in CHECKS}
    assert done.returncode == max({"n/a": 0, "ok": 0, "warn": 1, "fail": 2}[f["state"]] for f in found), done.stderr
    # What each took, by its own clock; they run beside each other.
    assert all(f["seconds"] < 10 for f in found)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--recorded", "setup.cfg"], "is not a recording"),
        (["tcp://127.0.0.1:1", "--record", "x"], "without ADDRESS"),
        (["tcp://127.0.0.1:1", "--timeout", "1"], "no scheduler answers at 'tcp://127.0.0.1:1'"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], text: str) -> None:
    from click.testing import CliRunner

    from dask_gpurt.cli import gpurt

    got = CliRunner().invoke(gpurt, ["doctor", *arguments])
    assert got.exit_code in (1, 2)
    assert text in got.output
    assert "Traceback" not in got.output
