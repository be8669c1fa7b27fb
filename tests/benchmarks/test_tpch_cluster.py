"""The main job on real processes: all 22 queries against DuckDB, the meters, survival, and nothing left over."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
import pytest
from distributed import wait

from benchmarks.data import ROOT
from dask_gpurt.bench.tpch import cli, generate, queries, report, runner, tables
from dask_gpurt.bench.tpch.clusters import ClusterError, ProcessCluster
from dask_gpurt.bench.tpch.meters import Meters, Snapshot, Traffic, difference
from dask_gpurt.bench.tpch.reference import Reference, sql

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

pytest.importorskip("duckdb")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCALE = 0.01
LIMIT = 1 << 30
FACTS = {"scale": SCALE, "exercised_on": "a test", "commit": "?", "when": "?"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return generate.ensure(str(tmp_path_factory.mktemp("tpch") / "data"), SCALE)


@pytest.fixture(scope="module")
def expected(directory: str) -> dict[int, pa.Table]:
    reference = Reference(directory, SCALE)
    try:
        return reference.answers(queries.QUERIES)
    finally:
        reference.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, directory: str) -> Iterator[ProcessCluster]:
    where = str(tmp_path_factory.mktemp("cluster"))
    with ProcessCluster("stock", workers=2, threads=1, memory_limit_bytes=LIMIT, directory=where) as started:
        runner.warm_up(started, directory)
        yield started
        pids = started.pids
    assert not any(map(psutil.pid_exists, pids))
    assert not left_over(where)


def left_over(where: str) -> list[str]:
    """Processes that mention `where` on their command line."""
    out = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if where in line and process.pid != os.getpid():
            out.append(line)
    return out


def ignore(step: int, steps: int, what: str) -> None:
    pass


@pytest.mark.slow
def test_all_22_queries_equal_duckdb(cluster: ProcessCluster, directory: str, expected: dict[int, pa.Table]) -> None:
    outcome = runner.run([cluster], directory, SCALE, list(queries.QUERIES), expected, runs=1, progress=ignore)
    assert [str(d) for d in outcome.differences] == []
    assert {q: cell.errors for (q, _), cell in outcome.cells.items() if cell.errors} == {}
    assert outcome.numbers == list(range(1, 23))
    # The check is worth something: most answers have rows, and joins did shuffle.
    assert sum(expected[q].num_rows > 0 for q in outcome.numbers) == 22
    assert report.totals(outcome)["stock"]["shuffled_bytes"] > 0


def test_money_stays_decimal(directory: str) -> None:
    t = tables.open_tables(directory, SCALE)
    assert str(t.lineitem.l_extendedprice.dtype) == "decimal128(15, 2)[pyarrow]"
    assert str(t.lineitem.l_shipdate.dtype) == "date32[day][pyarrow]"
    assert "string_view" not in {str(d) for d in t.part.dtypes}
    assert str(queries.QUERIES[6](t).dtypes["revenue"]) == "decimal128(38, 4)[pyarrow]"


def test_query_11_and_its_reference_have_the_same_threshold(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a scale by which 0.0001 does not divide too: a row between two thresholds would be a wrong answer."""
    given: list[Any] = []
    monkeypatch.setattr(queries.queries_09_15, "keep", lambda frame, *more: given.append(more[-1]) or frame)
    queries.QUERIES[11](tables.open_tables(directory, 3.0))
    found = re.search(r"\* (0\.0*[1-9]\d*) from", sql(11, 3.0))
    assert found is not None
    assert given == [Decimal(found[1])]


def test_a_wrong_and_a_failing_query_are_told(
    cluster: ProcessCluster, directory: str, expected: dict[int, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(t: tables.Tables) -> Any:
        return queries.queries_01_08.q06(t).assign(revenue=1)

    def failing(t: tables.Tables) -> Any:
        return t.nation.map_partitions(lambda frame: 1 / 0, meta=t.nation._meta)

    monkeypatch.setitem(queries.QUERIES, 6, wrong)
    monkeypatch.setitem(queries.QUERIES, 4, failing)
    outcome = runner.run([cluster], directory, SCALE, [4, 6, 14], expected, runs=1, progress=ignore)
    assert not outcome.ok
    assert outcome.cells[14, "stock"].ok
    assert "ZeroDivisionError" in outcome.cells[4, "stock"].errors[0]
    (found,) = outcome.differences
    assert (found.query, found.row, found.column, found.got) == (6, 0, "revenue", 1)
    lines = {line[0]: line for line in (report.row(q, {"stock": outcome.cells[q, "stock"]}) for q in outcome.numbers)}
    assert (lines["q04"][1], lines["q04"][-1]) == ("failed", "ERROR")
    assert lines["q06"][-1] == "DIFFERENT"
    document = report.page(outcome, FACTS, [], {})
    assert "column revenue: expected Decimal" in document.render().replace("&#x27;", "'")


@pytest.mark.slow
def test_a_query_without_an_answer_is_given_up(
    directory: str, expected: dict[int, pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cluster is started anew, and the queries behind it are answered."""

    def stuck(t: tables.Tables) -> Any:
        import time

        return t.nation.map_partitions(lambda frame: time.sleep(600), meta=t.nation._meta)

    monkeypatch.setitem(queries.QUERIES, 4, stuck)
    with ProcessCluster(
        "stock", workers=1, threads=1, memory_limit_bytes=LIMIT, directory=str(tmp_path / "c")
    ) as started:
        before = started.pids
        outcome = runner.run(
            [started], directory, SCALE, [4, 6], expected, runs=2, progress=ignore, cold=True, limit_s=8
        )
        assert started.restarts == 1
        assert not set(before) & set(started.pids)
        assert os.path.exists(tmp_path / "c" / "scheduler.log")
    stopped, fine = outcome.cells[4, "stock"], outcome.cells[6, "stock"]
    assert stopped.timed_out
    assert stopped.errors == ["no answer in 8 s"]  # once: its second run was left out
    assert fine.ok
    assert len(fine.seconds) == 2
    assert "no answer to q04 in 8 s; its cluster was restarted" in outcome.notes[0]
    assert not left_over(str(tmp_path))


def test_meters_count_fetched_keys(cluster: ProcessCluster) -> None:
    a, b = cluster.client.scheduler_info(n_workers=-1)["workers"]
    meters = Meters(cluster.client)
    meters.start()
    x = cluster.client.submit(np.ones, 10_000_000 // 8, workers=[a], pure=False)
    cluster.client.submit(np.sum, x, workers=[b], pure=False).result()
    traffic = meters.stop()
    assert traffic.keys == pytest.approx(10_000_000, rel=0.01)
    assert (traffic.shards_received, traffic.shuffled, traffic.spilled, traffic.complete) == (0, 0, 0, True)


def shuffle_some(cluster: ProcessCluster) -> Traffic:
    """Shuffles four partitions of 12.5 MB: 3.1 million rows of a key and a value, 50 MB."""

    def some_rows(i: int) -> pd.DataFrame:  # local, so that it travels by value: workers do not have the tests
        return pd.DataFrame({"a": np.random.default_rng(i).integers(0, 10_000, 780_000), "b": 1.0})

    meters = Meters(cluster.client)
    meters.start()
    with cluster.client.as_current():
        shuffled = dd.from_map(some_rows, range(4)).shuffle("a").map_partitions(len)
        assert sum(cluster.client.compute(shuffled).result()) == 4 * 780_000
    return meters.stop()


def test_meters_count_a_shuffle(cluster: ProcessCluster) -> None:
    """With two workers and a uniform key half of the shards change worker; stock puts all of them into files."""
    traffic = shuffle_some(cluster)
    assert 50e6 < traffic.shuffled < 120e6
    assert traffic.shards_received == pytest.approx(traffic.shuffled / 2, rel=0.1)
    assert traffic.shards_spilled == pytest.approx(traffic.shuffled, rel=0.2)
    assert traffic.network == traffic.keys + traffic.shards_received


@pytest.mark.skipif(importlib.util.find_spec("dask_gpurt.preload") is None, reason="the extension is not here")
def test_all_22_queries_and_the_meters_on_the_extension(
    directory: str, expected: dict[int, pa.Table], tmp_path: Path
) -> None:
    with ProcessCluster("gpurt", workers=2, threads=1, memory_limit_bytes=LIMIT, directory=str(tmp_path)) as extended:
        outcome = runner.run([extended], directory, SCALE, list(queries.QUERIES), expected, runs=1, progress=ignore)
        assert [str(d) for d in outcome.differences] == []
        assert {q: cell.errors for (q, _), cell in outcome.cells.items() if cell.errors} == {}
        status = cli.status_of(extended)
        assert status["installed"], status
        traffic = shuffle_some(extended)
        assert 45e6 < traffic.shuffled < 120e6
        assert traffic.shards_received == pytest.approx(traffic.shuffled / 2, rel=0.25)
        page = report.page(outcome, FACTS, [], {"gpurt": status})
        assert "State of the extension on gpurt" in page.render()


def test_meters_count_spilled_keys(cluster: ProcessCluster) -> None:
    """Ten times 150 MB do not fit in two workers of 1 GiB, 60 % of it for keys. Noise, as files are compressed."""
    meters = Meters(cluster.client)
    meters.start()
    kept = cluster.client.map(lambda i: np.random.default_rng(i).random(150_000_000 // 8), range(10), pure=False)
    with cluster.client.as_current():
        wait(kept)
    traffic = meters.stop()
    spilled = traffic.keys_spilled
    assert spilled > 150e6
    assert 300e6 < traffic.peak < 1.2 * LIMIT
    del kept
    for _ in range(200):  # workers free the values, by which no memory is at its peak any more
        meters.start()
        if meters.stop().peak < traffic.peak - 100e6:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the peak is that of what came before")
    assert spilled == pytest.approx(round(spilled / 150e6) * 150e6, rel=0.01)


def test_queries_survive_a_killed_worker(
    cluster: ProcessCluster, directory: str, expected: dict[int, pa.Table]
) -> None:
    before = set(cluster.client.run(os.getpid).values())
    with runner.Killer(cluster, 0.3) as killer:
        outcome = runner.run([cluster], directory, SCALE, [1, 3, 5, 9, 21], expected, runs=1, progress=ignore)
    assert "was killed (SIGKILL)" in killer.note
    assert not all(t.complete for cell in outcome.cells.values() for t in cell.traffic)
    assert outcome.ok
    cluster.client.wait_for_workers(2, timeout=120)
    assert len(before - set(cluster.client.run(os.getpid).values())) == 1


def test_a_restarted_worker_counts_from_zero() -> None:
    zero = dict.fromkeys(("keys", "shards_received", "shuffled", "keys_spilled", "shards_spilled", "kept", "peak"), 0)
    before: Snapshot = {"tcp://a": ("one", {**zero, "keys": 100}), "tcp://b": ("two", {**zero, "keys": 50})}
    after: Snapshot = {
        "tcp://a": ("one", {**zero, "keys": 130, "peak": 5}),
        "tcp://b": ("three", {**zero, "keys": 7, "peak": 9}),
    }
    traffic = difference(before, after)
    assert (traffic.keys, traffic.peak, traffic.complete) == (37, 9, False)
    assert difference(before, before, fetched=5).keys == 0


def test_a_cluster_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        __import__("dask_gpurt.bench.tpch.clusters", fromlist=["ENGINES"]).ENGINES, "stock", (("--no-such-option",), {})
    )
    broken = ProcessCluster("stock", workers=1, threads=1, memory_limit_bytes=LIMIT, directory=str(tmp_path / "c"))
    with pytest.raises(ClusterError, match="the scheduler ended with 2") as e:
        broken.start()
    assert "no-such-option" in str(e.value)
    assert not left_over(str(tmp_path))


def command(directory: str, out: Path, *arguments: str) -> list[str]:
    start = [sys.executable, "-m", "benchmarks.tpch", "--engines", "stock", "--scale", str(SCALE)]
    return [*start, "--data", directory, "--out", str(out), "--memory-limit", "1GiB", *arguments]


@pytest.mark.slow
def test_interrupt_leaves_nothing_running(directory: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(directory, tmp_path / "run", "--runs", "1000"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("query"):
                break
        assert left_over(str(tmp_path / "run"))
        process.send_signal(signal.SIGINT)
        assert "interrupted" in process.communicate(timeout=120)[0]
        assert process.returncode == 130
    finally:
        process.kill()
    assert not left_over(str(tmp_path / "run"))


@pytest.mark.slow
def test_keep_running_leaves_a_cluster_and_says_how_to_stop_it(directory: str, tmp_path: Path) -> None:
    from distributed import Client

    figures = tmp_path / "figures.json"
    arguments = ("--queries", "6", "--keep-running", "--json", str(figures))
    done = subprocess.run(
        command(directory, tmp_path / "run", *arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^q06 .* equal$", done.stdout, re.M)
    assert figures.exists()
    assert (tmp_path / "run" / "report.html").exists()
    stop = re.search(r"stop: +(kill -TERM -- .*)", done.stdout)
    connect = re.search(r"Client\('(tcp://[^']+)'\)", done.stdout)
    assert stop
    assert connect
    try:
        with Client(connect[1], timeout=20) as client:
            assert client.submit(lambda: 42).result(timeout=20) == 42
    finally:
        subprocess.run(["bash", "-c", stop[1]], check=True)
    deadline = time.monotonic() + 20
    while left_over(str(tmp_path / "run")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_over(str(tmp_path / "run"))


@pytest.mark.slow
def test_exit_code_of_a_wrong_answer(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(queries.QUERIES, 6, lambda t: queries.queries_01_08.q06(t).assign(revenue=1))
    code = cli.main(command(directory, tmp_path / "run", "--queries", "6,14")[3:])
    printed = capsys.readouterr().out
    assert code == 1
    assert "DIFFERENT on stock: query 6, row 0, column revenue: expected Decimal(" in printed
    assert "got 1" in printed
    assert not left_over(str(tmp_path / "run"))
