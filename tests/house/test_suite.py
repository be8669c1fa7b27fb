"""`ci/suite.py`: each test runs once, the last lines name what failed, and nothing stays behind when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "ci" / "suite.py"
#: those that the command names
NAMED = ("shuffle", "cluster", "preflight", "quarantine", "tiers")

#: of the folder with that name
_TESTS = """
import pathlib
def test_it():
    with pathlib.Path("ran").open("a") as out:
        out.write("FOLDER ")
    assert FINE, "the reason, which with the name does not fit into a line of eighty columns"
"""

#: Two processes that no signal but SIGKILL ends, each in a session of its own; the parent of the second is gone.
_LASTING = """
import subprocess, sys, time
code = "import os, signal, sys, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; "
code += "print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(1000)"
def test_lasts():
    start = [sys.executable, "-c", code]
    subprocess.Popen([*start, "pid-1"], start_new_session=True)
    subprocess.run(["bash", "-c", '"$@" & disown', "bash", *start, "pid-2"], start_new_session=True)
    time.sleep(1000)
"""


def start(directory: Path, sources: dict[str, str]) -> subprocess.Popen[str]:
    """`ci/suite.py` on a checkout of its own; `sources`: folder of tests -> what is in its file."""
    (directory / "setup.cfg").write_text("[tool:pytest]\naddopts = -ra\ntestpaths = tests\n")
    for name in NAMED:
        (directory / "tests" / name).mkdir(parents=True)
    for name, source in sources.items():
        (directory / "tests" / name).mkdir(exist_ok=True)
        (directory / "tests" / name / f"test_{name}.py").write_text(source)
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take longer to import than all else
    return subprocess.Popen([sys.executable, str(SUITE)], cwd=directory, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("fails", ["", "planning"])
def test_each_test_is_run_once_and_one_that_fails_is_named(tmp_path: Path, fails: str) -> None:
    folders = (*NAMED, "planning", "docs", "placement")
    process = start(
        tmp_path, {name: _TESTS.replace("FOLDER", name).replace("FINE", str(name != fails)) for name in folders}
    )
    printed = process.communicate(timeout=120)[0]
    assert sorted((tmp_path / "ran").read_text().split()) == sorted(folders)
    assert 0 < printed.index("tests/shuffle/test_shuffle.py") < printed.index("1 passed") < printed.index("--ignore")
    if not fails:
        assert (process.returncode, "FAILED" in printed) == (0, False)
    else:
        assert process.returncode == 1
        assert printed.splitlines()[-1] == (
            "FAILED tests/planning/test_planning.py::test_it - "
            "AssertionError: the reason, which with the name does not fit into a line of eighty columns"
        )


def test_a_part_that_dies_is_a_failure(tmp_path: Path) -> None:
    process = start(tmp_path, {"docs": "import os\ndef test_x():\n    os.kill(os.getpid(), 9)\n"})
    printed = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 1
    # The other parts have no test here: an error as well, or a selection that finds nothing would pass.
    assert printed[-3] == "ERROR .pytest_cache/shuffle.log - pytest ended with exit code 5"
    assert printed[-2] == "ERROR .pytest_cache/clusters.log - pytest ended with exit code 5"
    assert printed[-1] == "ERROR .pytest_cache/others.log - pytest ended with signal 9"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopping_it_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, {"docs": _LASTING})
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
