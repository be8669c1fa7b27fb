"""`ci/suite.py`: each test runs once, the last lines name what failed, and nothing stays behind when it is stopped."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.mark.expression import Expression

SUITE = Path(__file__).parents[2] / "ci" / "suite.py"

_TESTS = """
import pathlib, pytest
def ran(name):
    with pathlib.Path("ran").open("a") as out:
        out.write(name + " ")
@pytest.mark.cluster
def test_cluster():
    ran("cluster")
@pytest.mark.cluster
@pytest.mark.gpu
def test_both():
    ran("both")
def test_without_marks():
    ran("rest")
    assert FINE, "the reason, which with the name does not fit into a line of eighty columns"
"""

#: Two processes that no signal but SIGKILL ends, each in a session of its own; the parent of the second is gone.
_LASTING = """
import subprocess, sys, time
import pytest
code = "import os, signal, sys, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; "
code += "print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(1000)"
@pytest.mark.cluster
def test_lasts():
    start = [sys.executable, "-c", code]
    subprocess.Popen([*start, "pid-1"], start_new_session=True)
    subprocess.run(["bash", "-c", '"$@" & disown', "bash", *start, "pid-2"], start_new_session=True)
    time.sleep(1000)
def test_is_quick():
    pass
"""


def start(directory: Path, source: str) -> subprocess.Popen[str]:
    (directory / "setup.cfg").write_text("[tool:pytest]\naddopts = -ra\nmarkers =\n    cluster: x\n    gpu: x\n")
    (directory / "test_it.py").write_text(source)
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take longer to import than all else
    return subprocess.Popen([sys.executable, str(SUITE)], cwd=directory, env=env, stdout=subprocess.PIPE, text=True)


def test_each_test_belongs_to_one_half(pytestconfig: pytest.Config) -> None:
    spec = importlib.util.spec_from_file_location("suite", SUITE)
    assert spec is not None
    assert spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    halves = [Expression.compile(marks) for marks in suite.HALVES.values()]
    marks = [line.partition(":")[0] for line in pytestconfig.getini("markers") if "(" not in line.partition(":")[0]]
    assert {"cluster", "slow", "gpu"} <= set(marks)
    for chosen in itertools.product([False, True], repeat=3):
        has = dict(zip(("cluster", "slow", "gpu"), chosen, strict=True))

        def matches(name: str, /, has: dict[str, bool] = has, **_: Any) -> bool:
            return has[name]

        assert sum(half.evaluate(matches) for half in halves) == 1, has


@pytest.mark.parametrize("fine", [True, False])
def test_both_halves_are_run_and_one_that_fails_is_named(tmp_path: Path, fine: bool) -> None:
    process = start(tmp_path, _TESTS.replace("FINE", str(fine)))
    printed = process.communicate(timeout=120)[0]
    assert sorted((tmp_path / "ran").read_text().split()) == ["both", "cluster", "rest"]
    assert 0 < printed.index("== pytest -m 'cluster'") + 1 < printed.index("2 passed") < printed.index("not cluster")
    if fine:
        assert (process.returncode, "FAILED" in printed) == (0, False)
    else:
        assert process.returncode == 1
        assert printed.splitlines()[-1] == (
            "FAILED test_it.py::test_without_marks - "
            "AssertionError: the reason, which with the name does not fit into a line of eighty columns"
        )


def test_a_half_that_dies_is_a_failure(tmp_path: Path) -> None:
    process = start(tmp_path, "import os\ndef test_x():\n    os.kill(os.getpid(), 9)\n")
    printed = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 1
    # No test is marked `cluster` here: that half is an error as well, or a selection that finds nothing would pass.
    assert printed[-2] == "ERROR .pytest_cache/cluster.log - pytest ended with exit code 5"
    assert printed[-1] == "ERROR .pytest_cache/rest.log - pytest ended with signal 9"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, _LASTING)
    files = [tmp_path / "pid-1", tmp_path / "pid-2"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text().endswith("\n") for file in files):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    assert all(map(psutil.pid_exists, pids))
    os.kill(process.pid, number)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number
    assert "KeyboardInterrupt" in printed  # pytest itself ended its fixtures
    assert not any(map(psutil.pid_exists, pids))
