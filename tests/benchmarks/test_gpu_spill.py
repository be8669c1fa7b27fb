"""The plan of `benchmarks.gpu_spill`, without a GPU: processes of their own, limits of time, what failed."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import pytest

from benchmarks import gpu_runs, gpu_spill


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_run_is_a_process_of_its_own_with_its_environment() -> None:
    show = python("import os, json; print('noise'); print(json.dumps({'spill': os.environ['CUDF_SPILL']}))")
    assert gpu_runs.apart(show, 60, {"CUDF_SPILL": "on"}) == {"spill": "on"}


def test_what_fails_crashes_or_hangs_is_a_result() -> None:
    assert gpu_runs.apart(python("raise RuntimeError('no room')"), 60) == {"failed": "exit 1: RuntimeError: no room"}
    crashed = gpu_runs.apart(python("import os; os.abort()"), 60)
    assert crashed["failed"].startswith("exit -6: ")
    assert gpu_runs.apart(python("import time; time.sleep(600)"), 0.5) == {"failed": "not done within 0.5 s"}


def test_systems_take_turns_and_do_only_what_they_can() -> None:
    cells = gpu_runs.plan(gpu_spill.SYSTEMS, [2, 4], 2)
    assert len(cells) == 2 * 2 * 5
    assert ("cudf-spill", "cupy", 2) not in cells
    assert cells[:2] == [("gpurt", "cupy", 2), ("device-host-file", "cupy", 2)]
    assert cells[10:12] == [("device-host-file", "cupy", 2), ("gpurt", "cupy", 2)]


@pytest.mark.parametrize(("seconds", "each", "done"), [(540, 20, 27), (540, 10, 30), (540, 60, 9), (5, 60, 1)])
def test_it_ends_in_time(seconds: float, each: float, done: int) -> None:
    now = [0.0]

    def run(cell: gpu_runs.Cell) -> dict[str, Any]:
        now[0] += each
        return {"seconds": each, "correct": True}

    runs = gpu_runs.carry_out(gpu_runs.plan(gpu_spill.SYSTEMS, [2, 4], 3), run, seconds, lambda: now[0])
    assert len(runs) == done
    assert now[0] <= max(seconds, each)
    assert json.dumps(gpu_runs.summary(runs))


def test_a_run_needs_only_its_own_packages() -> None:
    assert "cudf" not in gpu_spill.lacking("gpurt", "cupy")
    assert "dask_cuda" not in gpu_spill.lacking("gpurt", "cudf")
    missing = set(gpu_spill.lacking("device-host-file", "cudf"))
    assert missing == {name for name in ("rmm", "cupy", "cudf", "dask_cuda") if importlib.util.find_spec(name) is None}


def test_a_machine_without_what_it_needs_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if gpu_spill.has_device():
        pytest.skip("there is a GPU")
    assert gpu_spill.main([]) == 3
    assert "gpu_spill needs a GPU: " in capsys.readouterr().err
