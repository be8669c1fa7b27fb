"""Bad input gets an error that says the value, what is allowed, and the remedy; before anything is started."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import compare, data
from dask_gpurt.bench import facts
from dask_gpurt.bench.progress import Bar
from dask_gpurt.bench.tpch import cli, generate, queries, reference
from dask_gpurt.bench.tpch.clusters import (
    ClusterError,
    ProcessCluster,
    environment,
    memory_limit_bytes,
    parse_engines,
)
from dask_gpurt.cli import gpurt


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1,3,5", [1, 3, 5]), ("5-7,1", [5, 6, 7, 1]), ("2,2", [2]), ("all", list(range(1, 23))), (" 4 ", [4])],
)
def test_query_lists(text: str, numbers: list[int]) -> None:
    assert queries.parse(text) == numbers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("23", "no query 23; TPC-H has 1 to 22"),
        ("0", "no query 0"),
        ("x", "'x' is not a number"),
        ("7-5", "empty range"),
        ("", "''"),
    ],
)
def test_bad_query_lists(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="queries: ") as e:
        queries.parse(text)
    assert says in str(e.value)


@pytest.mark.parametrize("scale", [0, -1, 1e9, float("nan"), float("inf")])
def test_bad_scale(scale: float) -> None:
    with pytest.raises(ValueError, match=r"scale is .* must be a number from 0\.001 to 1000"):
        generate.check_scale(scale)


def test_engines() -> None:
    assert parse_engines("stock,gpurt") == ["stock", "gpurt"]
    assert parse_engines("stock,stock,stock") == ["stock", "stock#2", "stock#3"]
    with pytest.raises(ValueError, match="'fast' is unknown; there are stock, stock-inf, gpurt, gpurt-stock"):
        parse_engines("stock,fast")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scale", "-3"], "scale is -3.0"),
        (["--queries", "99"], "no query 99"),
        (["--engines", "turbo"], "'turbo' is unknown"),
        (["--runs", "0"], "--runs is 0, must be at least 1"),
        (["--workers", "0"], "--workers is 0"),
        (["--threads", "0"], "--threads is 0"),
        (["--memory-limit", "lots"], "--memory-limit is 'lots'"),
        (["--memory-limit", "-5"], "--memory-limit is '-5', must be bytes above 0"),
        (["--memory-limit", "0"], "--memory-limit is '0', must be bytes above 0"),
        (["--kill-worker", "-1"], "--kill-worker is -1.0"),
        (["--kill-worker", "nan"], "--kill-worker is nan"),
        (["--query-limit", "0"], "--query-limit is 0.0, must be a number above 0"),
        (["--price-per-hour", "nan"], "--price-per-hour is nan"),
        (["--beside", "spark"], "invalid choice: 'spark'"),
    ],
)
def test_command_refuses(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["--engines", "stock", *arguments])
    assert e.value.code == 2
    assert says in capsys.readouterr().err


def test_too_little_memory_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="Remedy: fewer --engines or --workers"):
        memory_limit_bytes(2**30, clusters=2, workers=2)
    assert memory_limit_bytes(8 * 2**30, clusters=2, workers=2) == int(1.5 * 2**30)


def test_cores_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which files say it, of cgroups v1 or v2, is known to Dask."""
    monkeypatch.setattr("dask.system._try_extract_cgroup_cpu_quota", lambda: (100_000, 100_000))
    assert facts.cores() == 1


@pytest.mark.parametrize(
    ("folder", "limit", "used", "cached"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_the_cache_of_files_is_free_memory_of_a_container(
    tmp_path: Path, folder: str, limit: str, used: str, cached: str
) -> None:
    """4 MiB of which 3 are in use, 2 of them by files that were read: 3 are free. No machine has less."""
    group = tmp_path / "sys" / "fs" / "cgroup" / folder
    group.mkdir(parents=True)
    (group / limit).write_text(f"{4 << 20}\n")
    (group / used).write_text(f"{3 << 20}\n")
    (group / "memory.stat").write_text(f"anon {1 << 20}\n{cached} {2 << 20}\nslab 5\n")
    assert facts.free_memory_bytes(str(tmp_path)) == 3 << 20
    (group / limit).write_text("max\n")
    assert facts.free_memory_bytes(str(tmp_path)) > 4 << 20


def test_stock_processes_do_not_get_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__PRELOAD", "['dask_gpurt.preload']")
    monkeypatch.setenv("DASK_GPURT__POLICY", "gpurt")
    stock = environment("stock#2")
    assert stock["DASK_DISTRIBUTED__SCHEDULER__PRELOAD"] == "[]"
    assert "DASK_GPURT__POLICY" not in stock
    assert environment("gpurt-stock")["DASK_GPURT__POLICY"] == "stock"
    assert environment("gpurt-verify")["DASK_GPURT__TRANSFERS__VERIFY"] == "true"
    assert environment("gpurt-join")["DASK_GPURT__SHUFFLE__JOIN_FILTER"] == "auto"


def test_generate_refuses_a_directory_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("x")
    with pytest.raises(ValueError, match="is not a data directory"):
        generate.ensure(str(tmp_path), 0.01)
    assert (tmp_path / "photo.jpg").exists()


def interrupted(*args: object) -> None:
    raise KeyboardInterrupt


def test_generate_removes_only_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own TPC-H has folders of the same names, and may be put where an earlier run was interrupted."""
    theirs = tmp_path / "lineitem" / "part.0.parquet"
    theirs.parent.mkdir()
    theirs.write_text("x")
    with pytest.raises(ValueError, match="is not a data directory"):
        generate.ensure(str(tmp_path), 0.01)
    assert theirs.exists()
    monkeypatch.setattr(generate, "_generate", interrupted)
    later = tmp_path / "later"
    for _ in range(2):  # what is left by the first does not stop the second
        with pytest.raises(KeyboardInterrupt):
            generate.ensure(str(later), 0.01)
        assert os.listdir(later) == ["dask-gpurt-unfinished"]
    theirs.parent.rename(later / "lineitem")
    with pytest.raises(ValueError, match="is not a data directory"):
        generate.ensure(str(later), 0.01)
    assert (later / "lineitem" / "part.0.parquet").exists()


def test_without_its_generator_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match="tpchgen-cli was found neither"):
        generate.ensure(str(tmp_path / "data"), 0.01)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("moved", range(9))
def test_an_interrupted_move_of_tables_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int) -> None:
    """`moved` tables are in their places, or all and not the stamp. The next run makes no table again."""

    def written(raw: str, directory: str, *args: object) -> None:
        for table in reference.TABLES:
            os.makedirs(os.path.join(directory, table, "made by us"))

    rename, calls = os.rename, iter(range(100))

    def some(source: str, target: str) -> None:
        if next(calls) == moved:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(generate, "_generate", lambda *args: None)
    monkeypatch.setattr(generate, "_rewrite", written)
    where = str(tmp_path / "data")
    with monkeypatch.context() as patched:
        patched.setattr("os.rename", some)
        if moved == len(reference.TABLES):
            patched.setattr("os.replace", lambda s, t: interrupted() if os.path.dirname(t) == where else rename(s, t))
        with pytest.raises(KeyboardInterrupt):
            generate.ensure(where, 0.01)
    assert len(os.listdir(where)) == moved + 1
    with pytest.raises(ValueError, match=r"holds TPC-H at scale 0\.01"):
        generate.ensure(where, 0.02)
    monkeypatch.setattr(generate, "_rewrite", interrupted)
    if moved < len(reference.TABLES):
        theirs = os.path.join(where, reference.TABLES[-1])
        os.makedirs(theirs)
        with pytest.raises(ValueError, match="is not of this benchmark"):
            generate.ensure(where, 0.01)
        os.rmdir(theirs)
    assert generate.ensure(where, 0.01) == where
    assert sorted(os.listdir(where)) == sorted([*reference.TABLES, "complete.json"])
    assert all(os.listdir(os.path.join(where, table)) == ["made by us"] for table in reference.TABLES)


@pytest.mark.parametrize("name", ["prices.parquet", "scheduler.log"])
def test_a_cluster_empties_only_a_directory_of_its_own(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "stock" / name
    theirs.parent.mkdir()
    theirs.write_text("x")
    cluster = ProcessCluster("stock", workers=0, threads=1, memory_limit_bytes=2**29, directory=str(theirs.parent))
    try:
        with pytest.raises(ClusterError, match="is not a directory of this benchmark"):
            cluster.launch()
    finally:
        cluster.close()
    assert theirs.exists()


def test_what_the_machine_cannot_do_is_no_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 would say that an answer differs, and a traceback says nothing."""
    pytest.importorskip("duckdb")

    def full(*args: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generate, "_generate", full)
    where = ["--engines", "stock", "--memory-limit", "1GiB", "--out", str(tmp_path / "out"), "--data"]
    assert cli.main([*where, str(tmp_path / "data")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    gone = tmp_path / "gone"
    gone.mkdir()
    (gone / "complete.json").write_text(json.dumps({"scale": 1.0, "layout": 2, "parts": generate.parts(1.0)}))
    assert cli.main([*where, str(gone)]) == 2
    assert "DuckDB cannot read region" in capsys.readouterr().err


def test_a_kill_that_a_finalizer_swallowed_ends_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(options: object) -> int:
        with contextlib.suppress(SystemExit):  # as an interpreter does in a finalizer
            os.kill(os.getpid(), signal.SIGTERM)
        Bar(cli._interrupted)(0, 1, "q01")
        return 0

    monkeypatch.setattr(cli, "run", killed)
    assert cli.main(["--engines", "stock", "--memory-limit", "1GiB", "--out", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_under_nohup_the_end_of_the_terminal_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hung_up(options: object) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    monkeypatch.setattr(cli, "run", hung_up)
    arguments = ["--engines", "stock", "--memory-limit", "1GiB", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as e:
        cli.main(arguments)
    assert e.value.code == 128 + signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli.main(arguments) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_cluster_that_is_left_to_run_keeps_its_scratch(tmp_path: Path) -> None:
    """The command closes all clusters at its end, that of --keep-running too; its workers spill into their scratch."""
    left = ProcessCluster("stock", workers=0, threads=1, memory_limit_bytes=2**29, directory=str(tmp_path))
    spilled = tmp_path / "scratch" / "worker-0" / "value"
    spilled.parent.mkdir(parents=True)
    spilled.write_text("x")
    left.leave()
    left.close()
    assert spilled.exists()


def test_the_directory_of_a_cluster_that_runs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that --keep-running left, or that of another benchmark; when it has ended, the directory is free."""
    sleeps = tmp_path / "python"
    sleeps.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeps.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(sleeps))
    clusters = [
        ProcessCluster("stock", workers=1, threads=1, memory_limit_bytes=2**29, directory=str(tmp_path / "stock"))
        for _ in range(2)
    ]
    try:
        clusters[0].launch()
        with pytest.raises(ClusterError, match="is in use by a cluster that runs"):
            clusters[1].launch()
        assert (tmp_path / "stock" / "worker-0.log").exists()
        clusters[0].close()
        clusters[1].launch()
    finally:
        for cluster in clusters:
            cluster.close()


def test_a_second_interrupt_leaves_no_process(tmp_path: Path) -> None:
    class Interrupted:
        def close(self, timeout: float) -> None:
            raise KeyboardInterrupt

    cluster = ProcessCluster("stock", workers=0, threads=1, memory_limit_bytes=2**29, directory=str(tmp_path))
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        cluster._processes = [("scheduler", process)]
        cluster._client = Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            cluster.close()
        assert process.poll() is not None
    finally:
        process.kill()
        process.wait()


def test_generate_refuses_another_scale(tmp_path: Path) -> None:
    (tmp_path / "complete.json").write_text(json.dumps({"scale": 1.0, "layout": 2, "parts": {}}))
    with pytest.raises(ValueError, match=r"holds TPC-H at scale 1\.0"):
        generate.ensure(str(tmp_path), 0.01)


def test_large_tables_stay_divided_at_every_scale() -> None:
    for scale in (0.001, 0.01, 1, 100):
        n = generate.parts(scale)
        assert n["lineitem"] >= 4
        assert n["orders"] >= 2
        assert n["nation"] == n["region"] == 1
    assert generate.parts(100)["lineitem"] == 800


def test_fraction_of_query_11_follows_the_scale() -> None:
    assert "* 0.0001 from" in reference.sql(11, 1)
    assert "* 0.01 from" in reference.sql(11, 0.01)
    assert "* 0.000001 from" in reference.sql(11, 100)


def test_turns_take_turns() -> None:
    assert list(compare.turns(["a", "b"], 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    with pytest.raises(ValueError, match="runs is 0"):
        list(compare.turns(["a"], 0))
    with pytest.raises(ValueError, match="no case"):
        list(compare.turns([], 1))


def test_paired_runs_every_case_in_every_round() -> None:
    calls: list[str] = []
    results = compare.paired({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b", "b", "a"]
    assert [len(c.seconds) for c in results.values()] == [2, 2]


def test_ratio_is_the_median_of_the_rounds() -> None:
    base, case = compare.Case("base", (1.0, 2.0, 10.0)), compare.Case("case", (2.0, 1.0, 30.0))
    assert case.ratio(base) == 2.0
    assert compare.table({"base": base, "case": case})["case"]["max_s"] == 30.0
    assert compare.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_results_carry_what_they_were_measured_on(tmp_path: Path) -> None:
    found = data.facts("a test")
    assert found["exercised_on"] == "a test"
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_bytes"] > 2**20
    assert found["versions"]["distributed"][0].isdigit()
    path = data.write_json(str(tmp_path / "deep" / "r.json"), found)
    assert json.loads(Path(path).read_text())["exercised_on"] == "a test"
    with pytest.raises(ValueError, match="exercised_on"):
        data.write_json(str(tmp_path / "r.json"), {"a": 1})


def test_the_command_of_the_wheel_hands_its_arguments_on() -> None:
    shown = CliRunner().invoke(gpurt, ["bench", "tpch", "--help"])
    assert shown.exit_code == 0
    assert "--price-per-hour" in shown.output
    refused = CliRunner().invoke(gpurt, ["bench", "tpch", "--runs", "0"])
    assert refused.exit_code == 2


def test_a_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "duckdb" else found(name))
    refused = CliRunner().invoke(gpurt, ["bench", "tpch"])
    assert refused.exit_code == 1
    assert "duckdb not installed, which the benchmark needs. Remedy: pip install 'dask-gpurt[bench]'" in refused.output


def test_commit_is_of_this_package_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed below another project's checkout, its commit is not ours."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    copy = tmp_path / "facts.py"
    copy.write_text("")
    monkeypatch.setattr("dask_gpurt.bench.facts.__file__", str(copy))
    assert data.commit() == "unknown"
