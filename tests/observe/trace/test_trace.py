"""Traces: what is written is what happened, damage is told, and recording disturbs nothing."""

from __future__ import annotations

import io
import json
import os
import struct
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import dask
import msgpack
import pytest
import xxhash
from click.testing import CliRunner
from distributed import Client, LocalCluster, wait
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt import local_cluster, record
from dask_gpurt.cli import gpurt
from dask_gpurt.client.recording import _end
from dask_gpurt.errors import GpurtError, SeamMismatch, TraceError
from dask_gpurt.observe.trace import format as format_module
from dask_gpurt.observe.trace import writer as writer_module
from dask_gpurt.observe.trace.chrome import events, write
from dask_gpurt.observe.trace.format import MAGIC, Kind, pack, plain_key, read, write_header
from dask_gpurt.observe.trace.reader import Trace
from dask_gpurt.observe.trace.recorder import TraceRecorder
from dask_gpurt.observe.trace.writer import Writer

from .chrome_rules import check


def _file(*blocks: list[list[Any]]) -> bytes:
    out = io.BytesIO()
    write_header(out)
    return out.getvalue() + b"".join(pack(b) for b in blocks)


BEGIN = [int(Kind.BEGIN), 1000.0, {"versions": {}, "config": {"policy": "gpurt"}}]
SMALL = [
    BEGIN,
    [int(Kind.WORKER), 0, 0, "tcp://a:1", "a", "one", 2, 10**9],
    [int(Kind.WORKER), 1, 0, "tcp://b:1", "b", "two", 2, 10**9],
    [int(Kind.PREFIX), 0, "add"],
    [int(Kind.DATA), 0, "scattered", 100, [1]],
    [int(Kind.TASK), 1, ["add-x", 0], 0, [0, 1, 2], [0], None],
    [int(Kind.GRAPH), 5, "client", 1, [1]],
    [int(Kind.ASSIGNED), 1, 0, 10],
    [int(Kind.DECISION), 1, "cost", 0, 0.5],
    [int(Kind.FINISHED), 1, 0, 3_000_000, 77, 1_000_000, 3_000_000, [[500_000, 900_000, 1]], [[2_000_000, 2_500_000]]],
    [int(Kind.RELEASED), 1, 4_000_000],
    [int(Kind.SAMPLE), 2_000_000, 0, {"memory": 5}],
]
END = [int(Kind.END), 5_000_000, len(SMALL), 0]


def test_boxes_that_touch_do_not_overlap(tmp_path: Path) -> None:
    """Tasks that follow each other within less than a microsecond, or end before they begin by the clocks' error."""
    done: list[list[Any]] = []
    for n, (start, stop) in enumerate([(0, 10), (10, 10), (10, 20), (15, 12), (20, 30), (-3, 4)], 10):
        done.append([int(Kind.TASK), n, ["t", n], 0, [0, 0, n], [], None])
        done.append([int(Kind.FINISHED), n, 0, 50, 8, start, stop, [], []])
    path = tmp_path / "t"
    path.write_bytes(_file([*SMALL, *done], [END]))
    out = io.StringIO()
    write(Trace.load(path), out)
    document = json.loads(out.getvalue())
    assert sum(e["ph"] == "X" and e["cat"] == "compute" for e in document["traceEvents"]) == 7
    assert check(document) == []


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"ph": "X", "name": "a", "pid": 0, "tid": 1, "ts": 5, "dur": 9, "args": {}}, "overlap"),
        ({"ph": "X", "name": "a", "pid": 0, "tid": 9, "ts": 5, "dur": 9, "args": {}}, "no name"),
        ({"ph": "X", "name": "a", "pid": 0, "tid": 1, "ts": 50, "dur": 0, "args": {}}, "dur > 0"),
        ({"ph": "X", "name": "a", "pid": 0, "tid": 1, "ts": 5.5, "dur": 1, "args": {}}, "whole microseconds"),
        ({"ph": "C", "name": "a", "pid": 0, "ts": 5, "args": {"x": "1"}}, "needs numbers"),
        ({"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "x"}}, "a second thread_name"),
        ({"ph": "B", "name": "a", "pid": 0, "tid": 1, "ts": 5, "args": {}}, "unknown kind"),
        ({"ph": "X", "name": "a", "args": {}}, "needs a pid"),
    ],
)
def test_what_perfetto_would_leave_out_is_found(event: dict[str, Any], said: str) -> None:
    good = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "w"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "compute 0"}},
        {"ph": "X", "name": "a", "pid": 0, "tid": 1, "ts": 0, "dur": 10, "args": {}},
    ]
    assert check({"traceEvents": good, "displayTimeUnit": "ms"}) == []
    found = check({"traceEvents": [*good, event], "displayTimeUnit": "ms"})
    assert len(found) == 1
    assert said in found[0]
    assert check({"traceEvents": good})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(_file(SMALL, [END]))
    trace = Trace.load(path)
    task = trace.tasks[1]
    assert (task.key, task.prefix, task.dependencies, task.graph, task.worker) == (("add-x", 0), "add", (0,), 0, 0)
    assert (task.nbytes, task.finished_seconds, task.released_seconds, task.runs) == (77, 3.0, 4.0, 1)
    assert task.compute_seconds == 1.5  # two seconds less the half spent reading
    assert task.transfers[0].source == 1
    assert task.decision == ("cost", 0, 0.5)
    assert trace.tasks[0].data
    assert trace.tasks[0].holders == (1,)
    assert trace.samples[0].figures == {"memory": 5}
    assert (trace.seconds, trace.lost_records, trace.damage) == (5.0, 0, None)


@given(where=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_every_flipped_bit_is_found(where: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = bytearray(_file(SMALL, [END]))
    where %= len(whole)
    if 10 <= where < 16:  # the header's reserved bytes mean nothing
        return
    whole[where] ^= 1 << bit
    path = tmp_path_factory.mktemp("flip") / "t"
    path.write_bytes(whole)
    with pytest.raises(TraceError):
        Trace.load(path)


def test_a_file_that_was_cut_off_is_good_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "t"
    whole = _file(SMALL, [[int(Kind.RELEASED), 1, 4_500_000]], [END])
    first = len(_file(SMALL))
    for length in range(16, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError) as e:
            Trace.load(path)
        assert ("damaged=True" in str(e.value)) == (length >= first)  # before that nothing of it is good
    path.write_bytes(whole[: first + 3])
    trace = Trace.load(path, damaged=True)
    assert trace.tasks[1].released_seconds == 4.0
    assert trace.damage is not None
    assert "cut off" in trace.damage


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"PK\x03\x04 something else")
    for damaged in (False, True):  # the first must not advise the second
        with pytest.raises(TraceError, match=r"not a trace: .*Remedy: a file that dask_gpurt\.record or") as e:
            Trace.load(path, damaged=damaged)
        assert "damaged" not in str(e.value)
    path.write_bytes(struct.pack("<8sH6x", MAGIC, 99))
    with pytest.raises(TraceError, match="version 99"):
        Trace.load(path, damaged=True)
    path.write_bytes(_file([BEGIN, [250, 1]]))
    with pytest.raises(TraceError, match="250"):
        Trace.load(path)
    path.write_bytes(_file([BEGIN, [int(Kind.TASK), 1]]))
    with pytest.raises(TraceError, match="not one of this version"):
        Trace.load(path)


def test_a_length_that_is_too_large_is_not_allocated() -> None:
    out = io.BytesIO()
    write_header(out)
    file = io.BytesIO(out.getvalue() + struct.pack("<IQ", 2**32 - 1, 0))
    with pytest.raises(TraceError, match="at most"):
        list(read(file, "t"))


def _raw(plain: bytes) -> bytes:
    """A block of these bytes, with the right checksum."""
    body = zlib.compress(plain, 9)
    return struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body)) + body


@pytest.mark.parametrize(
    "content",
    [
        5,
        [1, 2],
        [[]],
        [BEGIN, [int(Kind.BEGIN), "now", {}]],
        [BEGIN, [int(Kind.WORKER_GONE), 7, 1]],
        [BEGIN, [int(Kind.PREFIX), 0, "p"], [int(Kind.TASK), 0, [[1]], 0, [1], [], None]],
        [BEGIN, [int(Kind.PREFIX), 0, "p"], [int(Kind.TASK), 0, "k", 0, ["x"], [], None]],
        [BEGIN, [int(Kind.PREFIX), 0, "p"], [int(Kind.TASK), 0, "k", 0, [1], [[2]], None]],
        [BEGIN, [int(Kind.DATA), 0, "k", "many", []]],
        [BEGIN, [int(Kind.GRAPH), 0, "c", 1, [None]]],
        [BEGIN, [int(Kind.WORKER), 0, 0, "tcp://a", "a", "a", "two", 10]],
        [BEGIN, [int(Kind.FINISHED), 0, 0, 1, 8, 0, 1, [], None]],
        [[int(Kind.BEGIN), 1.0, {"versions": [1]}]],
        [[int(Kind.BEGIN), 1.0, {"durations": {"add": "long"}}]],
        [BEGIN, [int(Kind.PREFIX), 0, "p"], [int(Kind.TASK), 0, "k", 0, [1], [], {"workers": 5}]],
        [BEGIN, [int(Kind.WORKER), 0, 0, "tcp://a", "a", "a", 0, 10]],
        [BEGIN, [int(Kind.END), 10**400, 1, 0]],
        b"\x91" * 5000 + b"\xc0",
        b"\x91\x81\x90\x01",
    ],
    ids=str,
)
def test_what_is_no_record_is_refused_as_such(content: Any, tmp_path: Path) -> None:
    plain = content if isinstance(content, bytes) else msgpack.packb(content, default=str)
    (tmp_path / "t").write_bytes(_file([BEGIN]) + _raw(plain))
    with pytest.raises(TraceError):
        Trace.load(tmp_path / "t")
    assert Trace.load(tmp_path / "t", damaged=True).damage is not None


def test_a_file_does_not_expand_beyond_bounds(tmp_path: Path) -> None:
    """600 kB of zeros in zlib's best case are 600 MB; what is read of them is a few blocks at most."""
    bomb = b"\xdd" + struct.pack(">I", 2) + b"\xc6" + struct.pack(">I", 64 << 20) + bytes(64 << 20)
    (tmp_path / "t").write_bytes(_file([BEGIN]) + _raw(bomb))
    samples = msgpack.packb([[int(Kind.SAMPLE), 0, None, {"x": "0" * 1000}]] * 4000)
    (tmp_path / "u").write_bytes(_file([BEGIN]) + _raw(samples) * 40)
    for name, says in (("t", "a block that expands to more than"), ("u", "expands to more than 100 times")):
        tracemalloc.start()
        with pytest.raises(TraceError, match=says):
            Trace.load(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 6 * format_module.MAX_BLOCK_BYTES
        tracemalloc.stop()


def test_a_block_at_the_limit_is_read_and_a_larger_one_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [BEGIN, *([int(Kind.SAMPLE), i, None, {}] for i in range(100)), [int(Kind.END), 1, 101, 0]]
    size = len(msgpack.packb(records))
    for limit in (size, size - 1, 100):
        monkeypatch.setattr(format_module, "MAX_BLOCK_BYTES", limit)
        (tmp_path / "t").write_bytes(_file(records))
        assert [s.seconds for s in Trace.load(tmp_path / "t").samples] == [i / 1e6 for i in range(100)]


@pytest.mark.parametrize(
    ("key", "plain"),
    [
        ("x", "x"),
        (("x", 1, "y"), ["x", 1, "y"]),
        (("x", (1, 2)), "('x', (1, 2))"),
        (("x", 2**64), f"('x', {2**64})"),
        (3.5, "3.5"),
        (b"x", "b'x'"),
    ],
)
def test_keys(key: Any, plain: Any) -> None:
    assert plain_key(key) == plain


def test_the_writer_drops_and_counts_when_the_disk_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    gate = threading.Event()
    packed = writer_module.pack

    def slow(records: list[list[Any]]) -> bytes:
        assert gate.wait(30)
        return packed(records)

    monkeypatch.setattr(writer_module, "pack", slow)
    w = Writer(str(tmp_path / "t"))
    w.put([BEGIN])
    while w._queue.qsize():  # the thread has taken it and waits in `slow`
        time.sleep(0.001)
    for _ in range(writer_module.MAX_WAITING + 5):
        w.put([[int(Kind.GRAPH), 0, "c", 0, []]])
    assert w.lost == 5
    w.put([[int(Kind.WORKER), 0, 0, "tcp://a:1", "a", "a", 1, 10], [int(Kind.PREFIX), 0, "add"]])
    assert w.lost == 5, "what names others is kept"
    gate.set()
    while w._queue.qsize():
        time.sleep(0.001)
    w.put([[int(Kind.TASK), 0, "add-1", 0, [0], [], None], [int(Kind.WORKER_GONE), 0, 1]])
    w.close(lambda records, lost: [int(Kind.END), 1, records, lost])
    trace = Trace.load(tmp_path / "t")
    assert trace.lost_records == 5
    assert len(trace.graphs) == writer_module.MAX_WAITING
    assert (trace.tasks[0].prefix, trace.workers[0].left_seconds) == ("add", 1e-6)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording_only(tmp_path: Path) -> None:
    w = Writer(str(tmp_path / "t"))
    w._file.close()
    w._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (the writer closes it)
    w.put([BEGIN])
    w.put([BEGIN])
    w.close(lambda records, lost: [int(Kind.END), 1, records, lost])
    assert w.error is not None
    assert "No space left" in w.error
    w.put([BEGIN])
    assert w.records + w.lost == 3


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """A setting is read at each start: the second start must neither fail nor take the first one's run away."""
    (tmp_path / "run.trace").write_text("mine")
    for name in ("run-2.trace", "run-3.trace"):
        w = Writer(str(tmp_path / "run.trace"))
        w.put([BEGIN])
        w.close(lambda records, lost: [int(Kind.END), 1, records, lost])
        assert w.path == str(tmp_path / name)
        assert Trace.load(w.path).lost_records == 0
    assert (tmp_path / "run.trace").read_text() == "mine"


# ---------------------------------------------------------------------- live


def _work(client: Client) -> None:
    x = client.scatter(b"x" * 1000, hash=False)  # by a name of its own: the one before is still being released
    parts = [dask.delayed(lambda data, i: data * i, pure=False)(x, i, dask_key_name=("part", i)) for i in range(20)]
    total = dask.delayed(lambda parts: sum(map(len, parts)), pure=False)(parts, dask_key_name="total")
    assert client.compute(total).result() == 1000 * sum(range(20))


def _check(path: Path) -> Trace:
    trace = Trace.load(path)
    by_key = {t.key: t for t in trace.tasks.values()}
    total = by_key["total"]
    assert total.runs == 1
    assert {trace.tasks[n].key for n in total.dependencies} == {("part", i) for i in range(20)}
    sizes = sorted(t.nbytes or 0 for t in by_key.values() if t.prefix == "part")
    assert [s - sizes[0] for s in sizes] == [1000 * i for i in range(20)]
    data = [t for t in trace.tasks.values() if t.data]
    assert len(data) == 1
    assert data[0].holders
    assert all(t.worker in trace.workers and t.compute_seconds is not None for t in by_key.values() if not t.data)
    assert trace.graphs[0].tasks == 21
    assert trace.graphs[0].wanted == (total.number,)
    assert trace.makespan_seconds() > 0
    assert trace.lost_records == 0
    return trace


@pytest.mark.cluster
@pytest.mark.parametrize("ours", [True, False], ids=["extension", "stock"])
def test_record_a_run(tmp_path: Path, ours: bool) -> None:
    make = local_cluster if ours else LocalCluster
    path = tmp_path / "run.trace"
    made = make(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0")
    with made as cluster, Client(cluster) as c:
        recording = record(c, path)
        with recording:
            _work(c)
        assert not list(Path(cluster.scheduler.local_directory).glob("trace-*"))
        assert not [name for name in cluster.scheduler.plugins if "trace" in name]
        assert recording.summary["error"] is None
        trace = _check(path)
        assert any(t.decision is not None for t in trace.tasks.values()) == ours
        shown = CliRunner().invoke(gpurt, ["trace", str(path), "--chrome", str(tmp_path / "chrome.json")])
        assert shown.exit_code == 0, shown.output
        assert "20 x part" in shown.output
        drawn = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
        assert sum(e["ph"] == "X" and e["cat"] == "compute" for e in drawn) == 21
        assert check(json.loads((tmp_path / "chrome.json").read_text())) == []
        assert len(events(trace)) == len(drawn)


@pytest.mark.cluster
def test_the_setting_records_the_whole_life_of_a_scheduler(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    for name in ("run.trace", "run-2.trace"):
        made = local_cluster(
            settings={"trace.path": str(path)},
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address=":0",
        )
        with made as cluster, Client(cluster) as c:
            _work(c)
            told = cluster.scheduler.plugins["gpurt"].statistics()["trace"]
            assert told["recording"]
            assert told["path"] == str(tmp_path / name)
        _check(tmp_path / name)


@pytest.mark.cluster
def test_a_detach_that_is_refused_leaves_the_trace_running(tmp_path: Path) -> None:
    from dask_gpurt import detach
    from dask_gpurt.errors import InstallError

    made = local_cluster(
        settings={"trace.path": str(tmp_path / "run.trace")}, n_workers=1, processes=False, dashboard_address=":0"
    )
    with made as cluster, Client(cluster) as c:
        plugin, active = cluster.scheduler.plugins["gpurt"], cluster.scheduler.plugins["shuffle"].active_shuffles
        active["x"] = None
        with pytest.raises(InstallError, match="1 shuffles are active"):
            detach(c)
        active.clear()
        assert set(plugin.parts.state.values()) == {"on"}
        assert plugin.statistics()["trace"]["recording"]
        _work(c)
        detach(c)
        assert plugin.trace is None
    _check(tmp_path / "run.trace")


@pytest.mark.cluster
def test_a_trace_that_cannot_be_made_is_told_at_the_start(tmp_path: Path) -> None:
    from dask_gpurt import attach
    from dask_gpurt.errors import InstallError

    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster, Client(cluster) as c:
        with pytest.raises(InstallError, match="a directory that exists"):
            attach(c, settings={"trace.path": str(tmp_path / "missing" / "t")})
        assert "gpurt" not in cluster.scheduler.plugins
        with pytest.raises(FileNotFoundError, match="missing"):
            record(c, tmp_path / "missing" / "t")
        with (
            mock.patch("dask_gpurt.observe.seam.check_tasks", side_effect=SeamMismatch("injected")),
            pytest.raises(GpurtError, match="cannot record: injected"),
            record(c, tmp_path / "t"),
        ):
            pass
        assert not list(Path(cluster.scheduler.local_directory).glob("trace-*"))


@pytest.mark.cluster
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_user_hears_of_a_disk_that_was_full(tmp_path: Path) -> None:
    def fill() -> None:
        (recorder,) = [p for p in cluster.scheduler.plugins.values() if isinstance(p, TraceRecorder)]
        assert recorder._writer is not None
        while not recorder._writer.bytes:  # the first block is good
            time.sleep(0.01)
        recorder._writer._file = full

    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster, Client(cluster) as c:
        with open("/dev/full", "wb", buffering=0) as full:
            recording = record(c, tmp_path / "t")

            def run() -> None:
                with recording:
                    fill()
                    _work(c)

            with pytest.warns(UserWarning, match=r"is not whole: .*No space left.* records are missing at least"):
                run()
        assert recording.summary["error"]
        assert Trace.load(tmp_path / "t", damaged=True).damage
        with open("/dev/full", "wb", buffering=0) as full, mock.patch.object(writer_module.os, "fdopen") as opened:
            opened.return_value = full
            with pytest.raises(TraceError, match=r"could record nothing: .*No space left"), record(c, tmp_path / "u"):
                _work(c)
        assert not list(Path(cluster.scheduler.local_directory).glob("trace-*"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]


@pytest.mark.cluster
@pytest.mark.parametrize("ended", [False, True], ids=["recording", "fetching"])
def test_a_client_that_leaves_takes_its_recording_along(tmp_path: Path, ended: bool) -> None:
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster:
        with Client(cluster) as c:
            recording = record(c, tmp_path / "t").__enter__()
            if ended:
                assert c.run_on_scheduler(_end, name=recording._name)["bytes"]
            assert list(Path(cluster.scheduler.local_directory).glob("trace-*"))
        deadline = time.monotonic() + 30
        while list(Path(cluster.scheduler.local_directory).glob("trace-*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not [name for name in cluster.scheduler.plugins if "trace" in name]
        assert not (tmp_path / "t").exists()


@pytest.mark.cluster
def test_a_worker_that_dies_and_errors_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as c:
        with record(c, path):
            bad = c.submit(lambda: 1 / 0, key="bad", pure=False)
            wait(bad)
            futures = c.map(lambda i: i, range(10), key=[f"n-{i}" for i in range(10)])
            wait(futures)
            victim = next(iter(c.scheduler_info()["workers"]))
            c.run(lambda: os.kill(os.getpid(), 9), workers=[victim], on_error="ignore")
            assert c.gather(futures) == list(range(10))
        trace = Trace.load(path)
    by_key = {t.key: t for t in trace.tasks.values()}
    assert "ZeroDivisionError" in str(by_key["bad"].erred)
    gone = [w for w in trace.workers.values() if w.left_seconds is not None]
    assert [w.address for w in gone] == [victim]
