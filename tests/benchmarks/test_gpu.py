"""`benchmarks.gpu` without a GPU: its plan, its processes, and experiments rehearsed on the stand-in.

``ci/gpu/dry.sh`` rehearses all of it, beside cuDF and dask-cuda; here are those that take a second or two.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as main
from benchmarks.gpu import plan, runs, shuffle, tests
from benchmarks.gpu.target import NotHere, get, missing

ROOT = Path(__file__).parents[2]
CASES = [case for cases in plan.CALLS.values() for case in cases]


def test_the_plan_fits_into_its_limits() -> None:
    assert len(set(map(str, CASES))) == len(CASES)
    for case in CASES:
        assert callable(importlib.import_module(f"benchmarks.gpu.{case.experiment}").run)
        assert 0 < case.seconds <= 300
    assert plan.PARTS == {0: 0, 2: 1}  # each once, before what needs it


def test_a_case_is_a_process_of_its_own_with_its_environment() -> None:
    show = "import os, json; print('noise'); print(json.dumps({'spill': os.environ['CUDF_SPILL']}))"
    assert runs.apart(["-c", show], 60, {"CUDF_SPILL": "on"}) == {"spill": "on"}


def test_what_fails_crashes_or_hangs_is_a_result() -> None:
    raised = runs.apart(["-c", "raise RuntimeError('no room')"], 60)
    assert raised["failed"] == "exit 1: RuntimeError: no room"
    assert "Traceback" in raised["errors"]
    assert runs.apart(["-c", "import os; os.abort()"], 60)["failed"].startswith("exit -6: ")
    hung = runs.apart(["-c", "import time; time.sleep(600)"], 1)
    assert hung["failed"] == "not done within 1 s"
    assert 'File "<string>", line 1 in <module>' in hung["errors"]  # faulthandler says where
    assert "no JSON" in runs.apart(["-c", "print('done')"], 60)["failed"]


def test_cases_go_on_after_a_failure_and_end_in_time() -> None:
    cases = [plan.Case("oom", name, 60) for name in "abcd"]
    results: dict[str, dict[str, Any]] = {
        "a": {"failed": "exit -11: a fault"},
        "b": {"not_here": "not installed: x"},
        "c": {"problem": "wrong"},
        "d": {},
    }
    written: list[int] = []
    out = main.carry_out(cases, lambda case: results[case.name], 600, lambda done: written.append(len(done)))
    assert [r["outcome"] for r in sorted(out, key=lambda r: r["case"])] == ["failed", "not here", "failed", "ok"]
    assert written == [1, 2, 3, 4]
    late = main.carry_out(cases[:1], lambda case: {}, 20, lambda done: None)
    assert late[0]["failed"] == "not begun, 20 s were left"


def test_what_measures_runs_alone_and_last() -> None:
    cases = [plan.Case("oom", name, 60, alone=name in "bd") for name in "abcd"]
    running: list[str] = []
    beside: dict[str, int] = {}

    def run(case: plan.Case) -> dict[str, Any]:
        running.append(case.name)
        time.sleep(0.05)
        beside[case.name] = len(running)
        running.remove(case.name)
        return {}

    out = main.carry_out(cases, run, 600, lambda done: None)
    assert sorted(r["case"] for r in out[:2]) == ["oom:a", "oom:c"]
    assert [r["case"] for r in out[2:]] == ["oom:b", "oom:d"]
    assert (beside["b"], beside["d"]) == (1, 1)


def test_other_partitions_are_seen() -> None:
    case = {"case": "shuffle:tasks-ucx-text-2", "digests": [[3, 1, 5, 7], [2, 1, 5, 7]]}
    other = {**case, "case": "shuffle:p2p-text-2", "digests": case["digests"][::-1]}
    assert shuffle.agree([case, dict(case)]) == []
    assert shuffle.agree([case, other]) == ["shuffle:p2p-text-2"]
    assert shuffle.agree([case, {**other, "case": "shuffle:p2p-text-1"}, {"case": "oom:storm"}]) == []


def test_a_report_of_tests_is_read(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        "<testsuite><testcase classname='a' name='b'/><testcase classname='a' name='c'><failure message='no'/>"
        "</testcase><testcase classname='a' name='d'><skipped message='no GPU'/></testcase></testsuite>"
    )
    got = tests.read(str(report), 1)
    assert (got["tests_passed"], got["tests_failed"], got["tests_skipped"]) == (1, 1, 1)
    assert got["failures"] == ["a::c: no"]
    assert "1 tests failed" in got["problem"]
    report.write_text("<testsuite/>")
    assert tests.read(str(report), 5)["problem"] == "no test ran"


def test_what_is_missing_is_not_passed() -> None:
    missing("json")
    with pytest.raises(NotHere, match="not installed: no_such_module"):
        missing("json", "no_such_module")


def test_a_machine_without_a_gpu_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from dask_gpurt.backends.ucx_device import has_device

    if has_device():
        pytest.skip("there is a GPU")
    assert main.main(["--case", "machine:facts", "--out", str(tmp_path)]) == 3
    assert "there is no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["--case", "machine:all"])
    assert "must be one of tests:core" in capsys.readouterr().err


def test_machine_code_of_other_gpus_is_left_out_of_the_wheels(tmp_path: Path) -> None:
    """Sizes and places stay; what only looks like the beginning of a fat binary is left as it is."""
    spec = importlib.util.spec_from_file_location("pack", ROOT / "ci" / "gpu" / "pack.py")
    assert spec is not None
    assert spec.loader is not None
    pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)

    def entry(kind: int, architecture: int, body: bytes) -> bytes:
        head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(body), 0, 0, 0, 0, architecture)
        return head.ljust(64, b"h") + body

    entries = entry(2, 80, b"a" * 24) + entry(2, 90, b"b" * 16) + entry(1, 120, b"c" * 8)
    binary = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    lookalike = struct.pack("<IHHQ", 0xBA55ED50, 7, 16, 8) + b"d" * 8
    path = tmp_path / "lib.so"
    before = b"code" + lookalike + binary + b"more" + binary
    path.write_bytes(before)
    assert pack.for_one_gpu(path, 90)
    after = path.read_bytes()
    assert len(after) == len(before)
    assert after == before.replace(b"a" * 24, bytes(24)).replace(b"c" * 8, bytes(8))
    path.write_bytes(b"no code of a GPU" + lookalike)
    assert not pack.for_one_gpu(path, 90)


REHEARSED = ["machine:pinned", "oom:storm", "leaving:shared", "primitives:text"]


def test_experiments_on_the_stand_in(tmp_path: Path) -> None:
    """In processes, as on a GPU; each finds what it must, and the file says what it ran on."""
    pytest.importorskip("rmm")
    given = [word for name in REHEARSED for word in ("--case", name)]
    assert main.main([*given, "--on", "stand-in", "--out", str(tmp_path)]) == 0
    report: dict[str, Any] = json.loads((tmp_path / "cases.json").read_text())
    assert sorted(r["case"] for r in report["cases"]) == sorted(REHEARSED)
    assert {r["outcome"] for r in report["cases"]} == {"ok"}
    assert "no figure of a GPU" in report["exercised_on"]
    assert {"when", "machine", "versions", "gpu_versions", "gpu", "commit"} <= set(report)
    storm = next(r for r in report["cases"] if r["case"] == "oom:storm")
    assert storm["lost"] == 0
    assert storm["out_of_memory"]["calls"] > 0


def test_a_shuffle_of_the_stand_in_in_this_process() -> None:
    """The input's partitions and digests, without a cluster."""
    pytest.importorskip("rmm")
    frame = shuffle.part(1, 50, "text", get("stand-in").name)
    row = shuffle.digest(frame).iloc[0]
    assert row["rows"] == 50
    assert row["ids"] == sum(range(50, 100))
    assert shuffle.digest(frame.iloc[::-1]).iloc[0].equals(row)
    swapped = frame.copy()
    swapped.loc[swapped.index[:2], "v3"] = swapped["v3"].iloc[[1, 0]].to_numpy()
    assert not shuffle.digest(swapped).iloc[0].equals(row)
