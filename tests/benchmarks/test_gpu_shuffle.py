"""`benchmarks.gpu_shuffle` rehearsed on frames in host memory: every line but cuDF's own runs before a GPU is there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import gpu_shuffle

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.cluster
def test_the_rehearsal_compares_three_systems(tmp_path: Path) -> None:
    out = tmp_path / "shuffle.json"
    size = ["--frames", "pandas", "--gigabytes", "0.001", "--runs", "1", "--workers", "2", "--minutes", "20"]
    assert gpu_shuffle.main([*size, "--run-seconds", "300", "--out", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["correct"]
    assert report["taken"]
    assert [(r["system"], r["workload"]) for r in report["runs"]] == [
        (system, workload) for workload in ("integers", "text") for system in ("gpurt", "p2p", "tasks")
    ]
    assert not [r for r in report["runs"] if "failed" in r]
    assert "no figure of a GPU" in report["exercised_on"]


def test_other_partitions_are_seen() -> None:
    run = {"workload": "text", "size": 2, "digests": [[3, 1, 5, 7], [2, 1, 5, 7]]}
    assert gpu_shuffle.agree([run, dict(run)])
    assert not gpu_shuffle.agree([run, {**run, "digests": run["digests"][::-1]}])
    assert gpu_shuffle.agree([run, {**run, "size": 1, "digests": []}, {"workload": "text", "size": 2, "failed": "x"}])


@pytest.mark.parametrize(("option", "value"), [("--runs", "0"), ("--gigabytes", "0")])
def test_bad_arguments_are_named(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_shuffle.main([option, value])
    assert f"{option} is {value}" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if gpu_shuffle.has_device():
        pytest.skip("there is a GPU")
    assert gpu_shuffle.main([]) == 3
    assert "gpu_shuffle needs a GPU: " in capsys.readouterr().out
