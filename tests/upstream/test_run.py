"""A whole run without processes: what `runner.run_file` returns is made up, everything else is real."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from . import isolate, run, runner, suites
from .compare import Result, crashed

if TYPE_CHECKING:
    from pathlib import Path

SUITE = suites.Suite("dask/tests/test_a.py")
M = SUITE.module


@dataclass
class Made:
    """Outcomes by mode; ``alone`` holds those of each re-run in turn."""

    stock: dict[str, str]
    extension: dict[str, str]
    alone: dict[str, list[str]] = field(default_factory=dict)
    active: bool = True
    calls: list[tuple[str, str | None]] = field(default_factory=list)

    def run_file(
        self,
        place: runner.Place,
        mode: runner.Mode,
        suite: suites.Suite,
        test: str | None = None,
        folder: object = None,
    ) -> tuple[dict[str, Result], float]:
        self.calls.append((mode.name, test))
        if test is not None:
            return {test: Result(self.alone[mode.name].pop(0))}, 0.1
        if mode.extension and self.active:
            place.log(mode, suite).parent.mkdir(parents=True, exist_ok=True)
            place.log(mode, suite).write_text(
                json.dumps({"test": f"{suite.path}::t", "role": "scheduler", "ok": True, "error": None}) + "\n"
            )
        made = getattr(self, mode.name)
        if not made:
            return crashed(M, "killed after 9 s"), 9.0
        if mode.name == "stock":
            cases = "".join(f'<testcase classname="{M}" name="{t}"/>' for t, o in made.items() if o == "passed")
            place.junit(mode, suite).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        return {f"{M}::{t}": Result(o) for t, o in made.items()}, 1.0


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    (tmp_path / "list.toml").write_text(
        "[[difference]]\n"
        f'test = "{M}::listed"\nstock = "passed"\nours = "failed"\nversions = ">=2025"\nreason = "why"\n'
    )
    monkeypatch.setattr(suites, "SUITES", (SUITE,))
    monkeypatch.setattr(suites, "make_overlay", lambda *a: None)
    monkeypatch.setattr(isolate, "probe", lambda: {"network": "own", "rights": "ordinary user"})

    def go(made: Made, *options: str) -> tuple[int, dict[str, object]]:
        monkeypatch.setattr(runner, "run_file", made.run_file)
        out = tmp_path / "out"
        code = run.main(["--out", str(out), "--differences", str(tmp_path / "list.toml"), *options])
        assert (out / "summary.md").read_text().startswith("# Upstream suites with dask_gpurt.preload")
        return code, json.loads((out / "summary.json").read_text())

    return go


def test_same_outcomes_pass(go) -> None:  # type: ignore[no-untyped-def]
    code, summary = go(Made({"t": "passed", "u": "failed"}, {"t": "passed", "u": "failed"}))
    assert (code, summary["ok"], summary["unmatched"]) == (0, True, [])


def test_a_listed_difference_passes_and_becomes_stale(go) -> None:  # type: ignore[no-untyped-def]
    made = Made({"t": "passed", "listed": "passed"}, {"t": "passed", "listed": "failed"})
    code, summary = go(made)
    assert (code, len(summary["allowed"]), summary["stale"]) == (0, 1, [])
    assert len(made.calls) == 2
    made.extension["listed"] = "passed"
    code, summary = go(made)
    assert (code, [e["test"] for e in summary["stale"]]) == (0, [f"{M}::listed"])


def test_a_difference_that_repeats_fails(go) -> None:  # type: ignore[no-untyped-def]
    made = Made(
        {"t": "passed", "u": "passed"},
        {"t": "passed", "u": "failed"},
        {"stock": ["passed", "passed"], "extension": ["failed", "failed"]},
    )
    code, summary = go(made)
    assert (code, [d["test"] for d in summary["unmatched"]]) == (1, [f"{M}::u"])
    assert made.calls.count(("extension", f"{M}::u")) == 2


def test_a_difference_that_does_not_repeat_is_flaky(go) -> None:  # type: ignore[no-untyped-def]
    made = Made(
        {"t": "passed", "u": "passed"}, {"t": "passed", "u": "failed"}, {"stock": ["passed"], "extension": ["passed"]}
    )
    code, summary = go(made)
    assert (code, [d["test"] for d in summary["flaky"]]) == (0, [f"{M}::u"])


def test_many_differences_are_not_run_again(go) -> None:  # type: ignore[no-untyped-def]
    tests = [f"t{i}" for i in range(run.MANY + 1)]
    made = Made(dict.fromkeys(tests, "passed"), dict.fromkeys(tests, "failed"))
    code, summary = go(made)
    assert (code, len(summary["unmatched"]), len(made.calls)) == (1, run.MANY + 1, 2)


@pytest.mark.parametrize("dead", ["stock", "extension", "both"])
def test_a_dead_process_fails(go, dead: str) -> None:  # type: ignore[no-untyped-def]
    good = {"t": "passed"}
    assert go(Made({} if dead != "extension" else good, {} if dead != "stock" else good))[0] == 1


def test_an_extension_that_was_never_active_fails(go) -> None:  # type: ignore[no-untyped-def]
    assert go(Made({"t": "passed"}, {"t": "passed"}, active=False))[0] == 1


def test_stock_is_reused_only_under_the_same_conditions(go) -> None:  # type: ignore[no-untyped-def]
    def made() -> Made:
        return Made({"t": "passed"}, {"t": "passed"})

    first, again, slow = made(), made(), made()
    go(first)
    assert go(again, "--skip-stock")[1]["suites"][0]["seconds"]["stock"] is None
    assert again.calls == [("extension", None)]
    go(slow, "--skip-stock", "--runslow")
    assert sorted(slow.calls) == [("extension", None), ("stock", None)]
