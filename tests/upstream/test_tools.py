"""The parts around the comparison: activation log, switch, selection of suites, isolation."""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import subprocess
import sys
import time
import types
from pathlib import Path

import click
import pytest

from . import active, activity, compare, isolate, run, runner, suites


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "active.jsonl"
    monkeypatch.setenv("UPSTREAM_ACTIVE_LOG", str(path))
    # the variable itself is pytest's, which sets it again before each phase
    monkeypatch.setattr(active, "current_test", lambda: "pkg/tests/test_a.py::TestC::test_t[a::b/c.py-1 2]")
    return path


def test_wrapper_changes_nothing_and_logs_the_end(log: Path) -> None:
    async def good(server: object) -> str:
        return "returned"

    async def bad(server: object) -> None:
        raise RuntimeError("no device")

    def sync(server: object, *, level: int) -> int:
        return level

    assert asyncio.run(active.wrap(good)(object())) == "returned"
    assert active.wrap(sync)(object(), level=3) == 3
    with pytest.raises(RuntimeError, match="no device"):
        asyncio.run(active.wrap(bad)(object()))
    got = activity.read(log)
    test = "pkg.tests.test_a.TestC::test_t[a::b/c.py-1 2]"
    assert got.setups == {test: {"object": 2}}
    assert got.active_tests() == {test}
    assert got.errors == [(test, "object: RuntimeError('no device')")]


def test_current_test_is_the_node_id(monkeypatch: pytest.MonkeyPatch) -> None:
    assert active.current_test().endswith("::test_current_test_is_the_node_id")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "a.py::t[x y] (setup)")
    assert active.current_test() == "a.py::t[x y]"
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert active.current_test() == ""


def test_only_a_failed_setup_is_not_active(log: Path) -> None:
    def bad(server: object) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        active.wrap(bad)(object())
    assert activity.read(log).active_tests() == set()


def test_a_cancelled_setup_is_neither_active_nor_at_fault(log: Path) -> None:
    async def cancelled(server: object) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(active.wrap(cancelled)(object()))
    assert not log.exists()


def test_install_wraps_once_and_keeps_click_commands(log: Path) -> None:
    @click.command()
    @click.option("--level", default=1)
    def setup(server: object, level: int) -> int:
        return level

    module = types.SimpleNamespace(dask_setup=setup)
    active.install(module)
    active.install(module)
    assert isinstance(module.dask_setup, click.Command)
    assert module.dask_setup.callback(object(), level=4) == 4  # type: ignore[misc]
    assert len(log.read_text().splitlines()) == 1
    with pytest.raises(AttributeError):
        active.install(types.SimpleNamespace())


def test_session_cluster_counts_where_something_was_computed(log: Path) -> None:
    def lines(setup_ok: bool) -> str:
        records = [
            {"test": "a.py::t1", "role": "scheduler", "ok": setup_ok, "error": "E"},
            {"test": "a.py::t1", "session": "a.py::t1"},
            {"test": "a.py::t2", "computes": 1, "barriers": 2},
            {"test": "a.py::t2", "computes": 1, "barriers": 0},
        ]
        return "".join(json.dumps(r) + "\n" for r in records)

    log.write_text(lines(True))
    got = activity.read(log)
    assert "a::t2" in got.active_tests()
    assert (got.computes["a::t2"], got.barriers["a::t2"]) == (2, 2)
    log.write_text(lines(False))
    assert activity.read(log).active_tests() == set()


def test_a_torn_line_is_reported(log: Path) -> None:
    log.write_text('{"test": "a.py::t", "ro')
    assert "unreadable line" in activity.read(log).errors[0][1]


@pytest.mark.parametrize("rest", ["::test_a", "::TestC::test_a[x]", "::test_a[b::c/d.py-1.5]"])
def test_ids_go_from_node_to_junit_and_back(rest: str) -> None:
    suite = suites.Suite("pkg/tests/test_a.py")
    assert runner._below_file(suite, activity.test_id(suite.path + rest)) == rest


def test_select() -> None:
    assert suites.select(None) == list(suites.SUITES)
    assert {s.path for s in suites.select("shuffle/*rechunk, test_spill")} == {
        "distributed/shuffle/tests/test_rechunk.py",
        "distributed/tests/test_spill.py",
    }
    with pytest.raises(ValueError, match=r"no suite matches 'spil\.x'.*\n  dask/"):
        suites.select("spil.x")


def test_source_version(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkout"):
        suites.source_version(tmp_path)
    (tmp_path / "distributed/shuffle/tests").mkdir(parents=True)
    for pin, version in (("dask >=2026.7.1,<2026.7.2", "2026.7.1"), ("dask == 2025.9.1", "2025.9.1")):
        (tmp_path / "pyproject.toml").write_text(f'dependencies = ["click", "{pin}"]')
        assert suites.source_version(tmp_path) == version
    (tmp_path / "pyproject.toml").write_text('dependencies = ["dask"]')
    with pytest.raises(ValueError, match="does not pin dask"):
        suites.source_version(tmp_path)


def test_only_tests_of_the_installed_version_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "distributed/shuffle/tests").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('dependencies = ["dask >=2026.7.1,<2026.7.2"]')
    args = argparse.Namespace(wide=False, distributed_src=tmp_path, only="test_spill,test_concat")
    notes: list[str] = []
    monkeypatch.setattr(suites, "versions", lambda: {"distributed": "2026.8.0"})
    with pytest.raises(ValueError, match=r"is distributed 2026\.7\.1, but 2026\.8\.0 is installed"):
        run.choose(args, notes)
    monkeypatch.setattr(suites, "versions", lambda: {"distributed": "2026.7.1"})
    assert {s.package for s in run.choose(args, notes)} == {"dask", "distributed"}
    assert notes == []
    args.distributed_src = None
    assert {s.package for s in run.choose(args, notes)} == {"dask"}
    assert "1 files of distributed were not run" in notes[0]


def test_a_file_without_the_module_it_needs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = (suites.Suite("dask/a.py", needs="no_such_module"), suites.Suite("dask/b.py", needs="json"))
    monkeypatch.setattr(suites, "SUITES", made)
    notes: list[str] = []
    assert run.choose(argparse.Namespace(wide=False, distributed_src=None, only=None), notes) == [made[1]]
    assert "dask/a.py was not run: all its tests need no_such_module" in notes[0]


def test_environment_of_a_test_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__VALIDATE", "false")
    monkeypatch.setenv("DASK_GPURT__X", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    place = runner.Place(tmp_path, tmp_path / "root", True, False, 1)
    suite = suites.Suite("dask/a.py")
    for mode in (runner.Mode("stock", None), runner.Mode("extension", "ext")):
        env = runner._environment(place, mode, suite, tmp_path, tmp_path / "log")
        assert "DASK_DISTRIBUTED__SCHEDULER__VALIDATE" not in env
        assert env["DASK_GPURT__X"] == "1"
        assert env["PYTHONPATH"].split(":") == [str(tmp_path / d) for d in ("overlay/dask", "support", "root")]
        assert env.get("UPSTREAM_EXTENSION") == mode.extension
        plugins = [x for x in runner._command(place, mode, suite, "t", tmp_path) if x.startswith(runner.SUPPORT)]
        assert (plugins[0] == f"{runner.SUPPORT}.ext_everywhere") is (mode.extension is not None)


def test_isolation_runs_the_command_and_says_what_it_got(tmp_path: Path) -> None:
    status = isolate.probe()
    command = [sys.executable, isolate.__file__]
    if status["network"] != "own":
        command.append("--shared-network")
    code = (
        "from socket import *; s = socket(AF_INET, SOCK_DGRAM); s.connect(('8.8.8.8', 80)); print(s.getsockname()[0])"
    )
    done = subprocess.run(
        [*command, sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    said = json.loads(done.stderr.splitlines()[0])
    if status["network"] == "own":
        assert said == status
        assert done.stdout.strip() == isolate.ADDRESS, "not the namespace's own network"
    else:
        assert said["network"].startswith("shared")


CASES = """
import sys
import time
from distributed import Client, LocalCluster
from distributed.utils_test import gen_cluster, cluster, loop, loop_in_thread, cleanup

@gen_cluster(client=True)
async def test_gen_cluster(c, s, a, b):
    assert "upstream-noop" in s.plugins and "upstream-noop" in a.plugins

def test_processes(loop):
    with cluster(nanny=True) as (s, [a, b]), Client(s["address"], loop=loop) as c:
        assert c.run_on_scheduler(lambda dask_scheduler: "upstream-noop" in dask_scheduler.plugins)

@gen_cluster(client=True, config={"distributed.scheduler.preload": [], "distributed.worker.preload": []})
async def test_without(c, s, a, b):
    assert "upstream-noop" not in s.plugins
"""


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)  # four runs of pytest, two of which start processes
def test_a_file_runs_with_the_extension_everywhere_and_stock_without(tmp_path: Path) -> None:
    """One made-up suite in both modes: activation per test and role, differences, a re-run alone, a dead process."""
    place = runner.Place(
        out=tmp_path,
        root=Path(__file__).resolve().parent.parent.parent,
        own_network=isolate.probe()["network"] == "own",
        runslow=False,
        limit_seconds=600,
    )
    suite = suites.Suite("dask/tests/test_made_up.py")
    suites.make_overlay("dask", place.overlay("dask"), Path(__file__).with_name("pytest-dask.ini"))
    runner.make_support(place)
    (place.overlay("dask") / suite.path).write_text(CASES)
    stock, ours = runner.Mode("stock", None), runner.Mode("extension", f"{runner.SUPPORT}.noop")

    one_test = "dask.tests.test_made_up::test_gen_cluster"
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        ran = [
            pool.submit(runner.run_file, place, stock, suite),
            pool.submit(runner.run_file, place, ours, suite),
            pool.submit(runner.run_file, place, ours, suite, one_test, tmp_path / "rerun"),
        ]
        before, after, alone = (future.result()[0] for future in ran)
    found = {d.test.rpartition("::")[2]: (d.stock.outcome, d.ours.outcome) for d in compare.differences(before, after)}
    expected = dict.fromkeys(("test_gen_cluster", "test_processes"), ("failed", "passed"))
    assert found == expected, (place.out / "extension" / f"{suite.slug}.log").read_text()
    assert not place.log(stock, suite).exists()
    got = activity.read(place.log(ours, suite))
    assert got.errors == []
    one = {"scheduler": 1, "worker": 2}
    assert got.setups == {f"dask.tests.test_made_up::{t}": one for t in expected}

    assert {t: r.outcome for t, r in alone.items()} == {one_test: "passed"}

    (place.overlay("dask") / suite.path).write_text("def test_dies():\n    import os\n    os._exit(3)\n")
    dead, _ = runner.run_file(place, stock, suite)
    assert compare.is_crash(dead)
    assert "ended with 3" in next(iter(dead.values())).message


def test_an_interrupted_run_ends_its_files(tmp_path: Path) -> None:
    """The file would sleep for 100 s; it ends when the run does, and counts as dead, not as passed."""
    place = runner.Place(tmp_path, tmp_path, isolate.probe()["network"] == "own", False, 100)
    suite = suites.Suite("dask/test_sleeps.py")
    made = place.overlay("dask") / suite.path
    made.parent.mkdir(parents=True)
    begun = tmp_path / "begun"
    made.write_text(f"def test_t():\n    import time\n    open({str(begun)!r}, 'w').close()\n    time.sleep(100)\n")
    (place.overlay("dask") / "pytest.ini").write_text("[pytest]\n")
    runner.make_support(place)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(runner.run_file, place, runner.Mode("stock", None), suite)
        while not begun.exists() and not future.done():
            time.sleep(0.05)
        runner.end_all()
        results, _ = future.result()
    assert "ended with 9" in next(iter(results.values())).message
