"""Tested sets: the file itself, what is outside of it, and the line at the start of real processes."""

from __future__ import annotations

import configparser
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dask_gpurt import config_schema
from dask_gpurt.backends.nvml import Device, Snapshot
from dask_gpurt.doctor import compat
from dask_gpurt.doctor.compat import CHECK, table, untested
from dask_gpurt.doctor.finding import State
from tests.cluster.processes import processes, wait_text

from .trees import Gpus, node, told

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
GOOD = {"python": "3.11.9", "dask": "2026.8.0", "distributed": "2026.8.0", "pandas": "3.1.4", "ucxx-cu13": "0.52.0"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"pandas": "3.10.0"}, ["pandas 3.10.0 (tested: 3.1)"]),
        ({"lz4": "1.0"}, []),
        ({"ucxx-cu13": "0.53.1", "python": "3.14.0"}, ["python 3.14.0 (tested: 3.11)", "ucxx 0.53.1 (tested: 0.52)"]),
        ({"dask": "2026.7.1", "distributed": "2026.7.1"}, []),
        ({"distributed": "2026.7.1"}, ["distributed 2026.7.1 (tested: 2026.8.0)"]),  # a mixture of two sets
    ],
)
def test_what_is_outside(changed: Mapping[str, str], expected: list[str]) -> None:
    assert untested("cpu", {**GOOD, **changed}) == expected


def test_the_sets_are_what_can_be_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    (bounds,) = [line.removeprefix("distributed") for line in lines if line.startswith("distributed")]
    specifiers = pytest.importorskip("packaging.specifiers").SpecifierSet(bounds)
    assert set(table()) == {"cpu", "cuda", "rocm"}
    for sets in table().values():
        for tested in sets:
            assert tested["distributed"] == tested["dask"]
            assert all(isinstance(v, str) for name, allowed in tested.items() if name != "note" for v in allowed)
            assert all(v in specifiers for v in tested["distributed"])
    assert untested("cuda", GOOD) == ["any node of class cuda"]


def test_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "versions", lambda: GOOD)
    assert [v.state for v in CHECK.look(node())] == [State.OK]
    monkeypatch.setattr(compat, "versions", lambda: {**GOOD, "pandas": "4.0"})
    (found,) = told(CHECK, node(), State.WARN)
    assert found.found == "untested: pandas 4.0 (tested: 3.1)"


def test_a_worker_for_cpus_on_a_node_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "versions", lambda: GOOD)
    gpu = Gpus(Snapshot(devices=(Device(0, "GPU-a", "H200", "0000:3b:00.0"),)))
    for setting, state in (("0", State.WARN), ("", State.OK)):
        assert told(CHECK, node(gpu=gpu, environ={"CUDA_VISIBLE_DEVICES": setting}), state)


def test_a_damaged_installation_is_no_failure_of_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config_schema, "_HERE", str(tmp_path))
    table.cache_clear()
    try:
        compat.warn_once(logging.getLogger("damaged"), "cpu")
    finally:
        table.cache_clear()
    assert "which versions were tested is not known: FileNotFoundError" in caplog.text


@pytest.mark.cluster
def test_one_warning_at_the_start(tmp_path: Path) -> None:
    other = tmp_path / "other" / "pandas-4.0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: pandas\nVersion: 4.0.0\n")
    with processes(tmp_path, {"PYTHONPATH": os.pathsep.join([str(other.parent), *sys.path])}) as p:
        address = p.scheduler("--preload", "dask_gpurt.preload")
        (_, log), *_ = p.running
        said = wait_text(log, "dask-gpurt: untested here: ")
        assert "pandas 4.0.0 (tested: " in said
        assert said.count("untested here") == 1
        _, worker = p.worker(address, "--no-nanny")
        assert wait_text(worker, "dask-gpurt 0.1.0: ").count("untested here") == 1
