"""The comparison itself: each rule must be able to let something through, and to stop something."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from . import activity, compare, report, suites
from .compare import Difference, Result, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

M = "pkg.tests.test_a"
PASSED, FAILED = Result("passed"), Result("failed", message="boom")


def junit(path: Path, cases: dict[str, str]) -> Path:
    """A file like pytest's; a case is ``name`` or ``Class.name``, its content the inner XML."""
    body = ""
    for case, inner in cases.items():
        cls, _, name = case.rpartition(".")
        body += f'<testcase classname="{M}{"." + cls if cls else ""}" name="{name}" time="0.5">{inner}</testcase>'
    path.write_text(f'<?xml version="1.0"?><testsuites><testsuite name="pytest">{body}</testsuite></testsuites>')
    return path


def entries(tmp_path: Path, *rows: str, version: str = "2026.7.1", extension: str = "ext") -> list[compare.Entry]:
    path = tmp_path / "differences.toml"
    path.write_text("\n".join(f"[[difference]]\n{r}" for r in rows))
    return compare.load_entries(path, version, extension)


def row(test: str, stock: str = "passed", ours: str = "failed", versions: str = ">=2026.7", more: str = "") -> str:
    return f'test = "{test}"\nstock = "{stock}"\nours = "{ours}"\nreason = "why"\nversions = "{versions}"\n{more}'


def test_read_junit_outcomes(tmp_path: Path) -> None:
    path = junit(
        tmp_path / "a.xml",
        {
            "test_ok": "",
            "test_bad": '<failure message="first\nsecond">trace</failure>',
            "test_setup": '<error message="fixture"/>',
            "test_skip": '<skipped type="pytest.skip" message="no"/>',
            "test_x": '<skipped type="pytest.xfail" message="known"/>',
            "TestC.test_in_class[a-1]": "",
        },
    )
    got = {k.removeprefix(M): v.outcome for k, v in compare.read_junit(path).items()}
    assert got == {
        "::test_ok": "passed",
        "::test_bad": "failed",
        "::test_setup": "error",
        "::test_skip": "skipped",
        "::test_x": "xfailed",
        ".TestC::test_in_class[a-1]": "passed",
    }
    # XML turns the line break of an attribute into a blank
    assert compare.read_junit(path)[f"{M}::test_bad"].message == "first second"


def test_a_test_reported_twice_counts_with_the_worst(tmp_path: Path) -> None:
    path = junit(tmp_path / "a.xml", {"test_t": '<error message="leak"/>'})
    path.write_text(
        path.read_text().replace("</testsuite>", f'<testcase classname="{M}" name="test_t"/></testsuite>', 1)
    )
    assert compare.read_junit(path)[f"{M}::test_t"] == Result("error", 0.5, "leak")


def test_a_torn_junit_file_is_an_error(tmp_path: Path) -> None:
    path = junit(tmp_path / "a.xml", {"test_t": ""})
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"a\.xml is no complete junit file"):
        compare.read_junit(path)


def test_differences_in_both_directions_and_missing_tests() -> None:
    stock = {"m::same": PASSED, "m::worse": PASSED, "m::better": FAILED, "m::gone": PASSED}
    ours = {"m::same": PASSED, "m::worse": FAILED, "m::better": PASSED, "m::new": PASSED}
    assert [(d.test, d.stock.outcome, d.ours.outcome) for d in compare.differences(stock, ours)] == [
        ("m::better", "failed", "passed"),
        ("m::gone", "passed", "missing"),
        ("m::new", "missing", "passed"),
        ("m::worse", "passed", "failed"),
    ]


def test_a_dead_process_is_one_difference() -> None:
    stock = {f"m::t{i}": PASSED for i in range(50)}
    (d,) = compare.differences(stock, compare.crashed("m", "killed"))
    assert (d.test, d.stock.outcome, d.ours.outcome) == ("m::<process>", "passed", "crashed")
    verdict = compare.judge([d], [], stock, rerun=lambda _: ("passed", "passed"))
    assert verdict.unmatched == [(d, [])], "a file cannot be re-run into innocence"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("m::t[a-1]", True),
        ("m::t*", True),
        ("m::*[a-*]", True),
        ("m::t[b-1]", False),
        ("m::t", False),
        ("m::t[a-?]", False),
        ("*::x", False),
    ],
)
def test_pattern(tmp_path: Path, pattern: str, matches: bool) -> None:
    (entry,) = entries(tmp_path, row(pattern))
    assert entry.covers("m::t[a-1]") is matches


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (row("m::t"), True),
        (row("m::t", ours="error"), False),
        (row("m::t", stock="skipped"), False),
        (row("m::other"), False),
        (row("m::t", versions=">=2026.8"), False),
    ],
)
def test_an_entry_allows_only_what_it_says(tmp_path: Path, text: str, allowed: bool) -> None:
    d = Difference("m::t", PASSED, FAILED)
    verdict = compare.judge([d], entries(tmp_path, text), ["m::t"])
    assert (len(verdict.allowed), len(verdict.unmatched)) == ((1, 0) if allowed else (0, 1))


def test_stale_entries(tmp_path: Path) -> None:
    listed = entries(
        tmp_path, row("m::used"), row("m::fixed"), row("other::not_run"), row("m::rare", more="sometimes = true")
    )
    ran = ["m::used", "m::fixed", "m::rare"]
    verdict = compare.judge([Difference("m::used", PASSED, FAILED)], listed, ran)
    assert [e.test for e in verdict.stale] == ["m::fixed"]


def script(pairs: list[tuple[str, str]]) -> Callable[[Difference], tuple[str, str]]:
    queue = list(pairs)
    return lambda _: queue.pop(0)


@pytest.mark.parametrize(
    ("pairs", "flaky", "runs"),
    [
        ([("passed", "passed")], True, 1),
        ([("failed", "failed")], True, 1),
        ([("passed", "failed"), ("passed", "passed")], True, 2),
        ([("passed", "failed"), ("passed", "failed")], False, 2),
        ([("missing", "missing"), ("missing", "missing")], False, 2),
        ([("crashed", "crashed"), ("crashed", "crashed")], False, 2),
    ],
)
def test_reruns(pairs: list[tuple[str, str]], flaky: bool, runs: int) -> None:
    d = Difference("m::t", PASSED, FAILED)
    verdict = compare.judge([d], [], ["m::t"], script(pairs))
    kept = verdict.flaky if flaky else verdict.unmatched
    assert kept == [(d, pairs[:runs])]
    assert not (verdict.unmatched if flaky else verdict.flaky)


def test_an_allowed_difference_is_not_run_again(tmp_path: Path) -> None:
    def never(_: Difference) -> tuple[str, str]:
        raise AssertionError("ran")

    verdict = compare.judge([Difference("m::t", PASSED, FAILED)], entries(tmp_path, row("m::t")), ["m::t"], never)
    assert len(verdict.allowed) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('test = "m::t"\nstock = "passed"', "lacks"),
        (row("m::t", ours="broken"), "allowed are"),
        (row("m::t", ours="passed"), "no difference"),
        (row("*"), "allows everything"),
        (row("m::t").replace('"why"', '" "'), "reason is empty"),
        (row("m::t", versions="new"), "version specifier"),
        (row("m::t", more='owner = "x"'), "unknown keys"),
        ("test = ", "differences.toml"),
    ],
)
def test_bad_entries_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entries(tmp_path, text)


def test_an_entry_may_be_of_one_extension(tmp_path: Path) -> None:
    rows = row("m::t"), row("m::u", more='extension = "other"')
    assert [e.test for e in entries(tmp_path, *rows)] == ["m::t"]
    assert [e.test for e in entries(tmp_path, *rows, extension="other")] == ["m::t", "m::u"]


def test_the_shipped_list_is_valid() -> None:
    path = Path(__file__).with_name("differences.toml")
    for version in ("2026.7.1", "2026.8.0"):
        listed = compare.load_entries(path, version, "dask_gpurt.preload")
        assert any(e.test.endswith("::test_bad_disk") for e in listed)
        assert all(len(e.reason) > 40 for e in listed)


def run_of(
    stock: dict[str, Result], ours: dict[str, Result], active: activity.Activity | None = None, *, clusters: bool = True
) -> report.SuiteRun:
    return report.SuiteRun(
        suites.Suite("pkg/tests/test_a.py", clusters=clusters),
        stock,
        ours,
        active or activity.Activity(),
        {"stock": 1.0, "extension": 2.0},
    )


def active_in(*tests: str) -> activity.Activity:
    return activity.Activity(setups={t: Counter(scheduler=1, worker=2) for t in tests})


def whole(run: report.SuiteRun, verdict: Verdict | None = None) -> report.Report:
    isolation = {"network": "own", "rights": "ordinary user"}
    return report.Report("ext", {"dask": "1"}, isolation, 60.0, [run], verdict or Verdict())


def test_report_passes_only_what_was_compared() -> None:
    good = {"m::t": PASSED}
    assert whole(run_of(good, good, active_in("m::t"))).ok()
    assert whole(run_of(good, good, clusters=False)).ok()
    dead = compare.crashed("m", "killed after 9 s")
    bad_setup = active_in("m::t")
    bad_setup.errors += [("m::t", "worker: ValueError()")] * 2
    for bad, text in (
        (run_of(good, good), "not active in any test"),
        (run_of(dead, dead), "killed after 9 s"),
        (run_of({"m::t": FAILED}, {"m::t": FAILED}, active_in("m::t")), "no test passed in the stock run"),
        (run_of(good, good, bad_setup), "dask_setup failed 2 times: worker: ValueError() (first in m::t)"),
    ):
        assert not whole(bad).ok()
        assert text in whole(bad).markdown()


def test_report_names_an_unmatched_difference() -> None:
    d = Difference("m::t", PASSED, FAILED)
    made = whole(
        run_of({"m::t": PASSED}, {"m::t": FAILED}, active_in("m::t")), Verdict(unmatched=[(d, [("passed", "failed")])])
    )
    assert not made.ok()
    assert "m::t: stock passed, extension failed (boom); again: stock passed, extension failed" in made.markdown()
    assert made.as_dict()["unmatched"][0]["reruns"] == [{"stock": "passed", "ours": "failed"}]
    assert "| pkg/tests/test_a.py | 1/0/0 | 0/1/0 | 1 | - | 1 / 2 |" in made.markdown()
