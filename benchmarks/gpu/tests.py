"""The tests that need a GPU, as a case: counts, and what failed. On the stand-in, those that do not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Tree
from typing import TYPE_CHECKING, Any

from benchmarks.data import ROOT

if TYPE_CHECKING:
    from benchmarks.gpu.target import Target

#: what -> (folders and files, what of them by name)
_ALONE = "test_two_workers_on_one_device"
_CORE = ["tests/gpu/test_device.py", "tests/gpu/test_ucx_device.py", "tests/gpu/test_dask_cuda.py"]
SUITES = {
    "core": (_CORE, f"not cudf and not {_ALONE}"),
    "alone": (_CORE, _ALONE),
    "cudf": (["tests/gpu", "tests/conformance/test_device_frames.py"], "cudf"),
}
#: processes that share the tests of a suite, where pytest-xdist is installed
PROCESSES = 6


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: core, without cuDF; alone, the test that takes most of the device's memory; cudf."""
    paths, names = SUITES[what]
    on_gpu = target.name == "gpu"
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
        command += ["--junitxml", report]
        if what != "alone" and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(PROCESSES), "--dist", "worksteal"]
        command += ["-m", "gpu", "-k", names, *paths] if on_gpu else ["-m", "not gpu and not cluster", "tests/gpu"]
        environment = {**os.environ, "GPURT_REQUIRE_GPU": "1"} if on_gpu else dict(os.environ)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if not os.path.exists(report):
            return {"problem": f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"}
        return read(report, done.returncode)


def read(report: str, status: int) -> dict[str, Any]:
    """Counts and failures of a JUnit report."""
    counts = {"tests_passed": 0, "tests_failed": 0, "tests_skipped": 0}
    failures, skipped = [], []
    for case in Tree.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        left = [child for child in case if child.tag == "skipped"]
        counts["tests_failed" if bad else "tests_skipped" if left else "tests_passed"] += 1
        name = f"{case.get('classname')}::{case.get('name')}"
        failures += [f"{name}: {(child.text or child.get('message') or '')[-1500:]}" for child in bad]
        skipped += [f"{name}: {(child.get('message') or '')[:120]}" for child in left]
    out: dict[str, Any] = {**counts, "failures": failures, "left_out": skipped[:40]}
    if counts["tests_failed"] or status not in (0, 5):
        out["problem"] = f"{counts['tests_failed']} tests failed, pytest ended with {status}"
    elif not counts["tests_passed"]:
        out["problem"] = "no test ran"
    return out
