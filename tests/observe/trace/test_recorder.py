"""The recorder on the scheduler's loop: it blocks nothing, and is bounded."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from distributed import Event
from distributed.utils_test import gen_cluster

from dask_gpurt.client import recording
from dask_gpurt.errors import TraceError
from dask_gpurt.observe.trace import writer as writer_module
from dask_gpurt.observe.trace.reader import Trace
from dask_gpurt.observe.trace.recorder import EARLIER, TraceRecorder
from dask_gpurt.observe.trace.samples import IDLE_TICKS
from dask_gpurt.observe.trace.summary import summary

if TYPE_CHECKING:
    from pathlib import Path


def _scheduler(tasks: int) -> Any:
    """A scheduler with tasks in a row, each of which needs the one before."""
    states: dict[Any, Any] = {}
    for i in range(tasks):
        before = [states["t", i - 1]] if i else []
        states["t", i] = SimpleNamespace(
            key=("t", i), run_spec=True, state="waiting", who_has=None, nbytes=-1, dependencies=before, priority=(i,),
            prefix=SimpleNamespace(name="t"), worker_restrictions=None, host_restrictions=None,
            resource_restrictions=None, loose_restrictions=False, actor=False, _queueable=True, processing_on=None,
        )  # fmt: skip
    worker = SimpleNamespace(
        address="tcp://a:1", host="a", name="a", nthreads=1, memory_limit=0, metrics={"memory": 1}, processing=set()
    )
    return SimpleNamespace(
        tasks=states, workers={"tcp://a:1": worker}, bandwidth=1.0, task_prefixes={}, cumulative_worker_metrics={}
    )


def test_tasks_that_were_there_are_written_in_several_turns(tmp_path: Path) -> None:
    """And what happens to them before their turn is in the trace, as is a graph that comes meanwhile."""
    scheduler = _scheduler(4 * EARLIER)
    recorder = TraceRecorder(str(tmp_path / "t"))

    async def go() -> None:
        recorder.open(scheduler, {"policy": "stock"})
        assert recorder.statistics()["records"] < 2 * EARLIER, "the loop is blocked by all of them"
        early, gone = scheduler.tasks["t", 3 * EARLIER], ("t", 4 * EARLIER - 1)
        early.state, early.processing_on = "processing", scheduler.workers["tcp://a:1"]
        recorder.transition(early.key, "waiting", "processing")
        early.state = "memory"
        recorder.transition(early.key, "processing", "memory", worker="tcp://a:1", nbytes=7, startstops=[])
        del scheduler.tasks[gone]
        recorder.transition(gone, "released", "forgotten")
        new = _scheduler(1).tasks["t", 0]
        new.key, new.dependencies = "new", [scheduler.tasks["t", 2 * EARLIER]]
        scheduler.tasks["new"] = new
        recorder.update_graph(scheduler, client="c", keys=["new"], tasks=["new"])
        for _ in range(10):
            await asyncio.sleep(0)
        writer = recorder.stop()
        assert writer is not None
        writer.close(recorder.last)

    asyncio.run(go())
    assert (recorder.errors, recorder.last_error) == (0, None)
    trace = Trace.load(tmp_path / "t")
    tasks = {task.key: task for task in trace.tasks.values()}
    assert len(tasks) == len(trace.tasks) == 4 * EARLIER
    assert all(trace.tasks[number].key == ("t", key[1] - 1) for key in tasks if key != "new" and key[1]
               for number in tasks[key].dependencies)  # fmt: skip
    early = tasks["t", 3 * EARLIER]
    assert (early.data, early.runs, early.nbytes, early.worker) == (False, 1, 7, 0)
    assert [key for key, task in tasks.items() if task.graph is not None] == ["new"]


def test_a_recording_that_ends_at_once_has_what_its_tasks_depend_on(tmp_path: Path) -> None:
    scheduler = _scheduler(4 * EARLIER)
    recorder = TraceRecorder(str(tmp_path / "t"))

    async def go() -> None:
        recorder.open(scheduler, {"policy": "stock"})
        far = scheduler.tasks["t", 3 * EARLIER]
        far.state, far.processing_on = "processing", scheduler.workers["tcp://a:1"]
        far.resource_restrictions = {"GPU": np.int64(2)}
        recorder.transition(far.key, "waiting", "processing")
        writer = recorder.stop()
        assert writer is not None
        writer.close(recorder.last)

    asyncio.run(go())
    assert [t.restrictions for t in Trace.load(tmp_path / "t").tasks.values() if t.restrictions] == [
        {"resources": {"GPU": 2}}
    ]
    keys = {task.key for task in Trace.load(tmp_path / "t").tasks.values()}
    assert {("t", 3 * EARLIER), ("t", 3 * EARLIER - 1)} <= keys


@pytest.mark.parametrize(
    ("size", "recorded"),
    [
        (np.int64(7), 7),
        (7.5, 7),
        (np.float32(7), 7),
        (None, None),
        (math.nan, None),
        (math.inf, None),
        (2**64, 2**63 - 1),
    ],
    ids=str,
)
def test_sizes_of_any_type_are_recorded(tmp_path: Path, size: Any, recorded: int | None) -> None:
    """What a user's `sizeof` returns may be no size, or not be packed by msgpack; figures of workers are sums of it."""
    scheduler = _scheduler(2)
    data, task = scheduler.tasks.values()
    data.run_spec, data.nbytes = None, -1 if size is None else size
    task.priority = (2**70,)
    scheduler.workers["tcp://a:1"].metrics = {"memory": 1, "managed_bytes": size, "gpurt": {"host_bytes": size}}
    recorder = TraceRecorder(str(tmp_path / "t"))

    async def go() -> None:
        recorder.open(scheduler, {"policy": "stock"})
        task.processing_on = scheduler.workers["tcp://a:1"]
        recorder.transition(task.key, "processing", "memory", worker="tcp://a:1", nbytes=size, startstops=[])
        writer = recorder.stop()
        assert writer is not None
        writer.close(recorder.last)
        assert writer.error is None

    asyncio.run(go())
    assert (recorder.errors, recorder.last_error) == (0, None)
    trace = Trace.load(tmp_path / "t")
    tasks = {task.key: task for task in trace.tasks.values()}
    assert (tasks["t", 0].nbytes, tasks["t", 1].nbytes) == (recorded or 0, recorded)
    assert any("managed_bytes" in sample.figures for sample in trace.samples)
    assert "results" in summary(trace)


def test_idle_workers_are_sampled_now_and_then(tmp_path: Path) -> None:
    """A setting records for weeks: an idle cluster must not fill the disk."""
    scheduler = _scheduler(0)
    recorder = TraceRecorder(str(tmp_path / "t"))

    async def go() -> None:
        recorder.open(scheduler, {"policy": "stock"})
        for _ in range(3 * IDLE_TICKS):
            recorder._tick()
        worker = scheduler.workers["tcp://a:1"]
        worker.processing.add("t")
        for _ in range(5):
            recorder._tick()
        worker.processing.clear()
        recorder._tick()  # what the last task has left
        recorder._tick()
        writer = recorder.stop()
        assert writer is not None
        writer.close(recorder.last)

    asyncio.run(go())
    of_workers = [sample for sample in Trace.load(tmp_path / "t").samples if sample.worker is not None]
    assert len(of_workers) == 3 + 5 + 1 + 1, "the last one is that of the end"


def test_a_recording_ends_with_a_whole_file_of_the_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "MAX_BYTES", 100)
    recorder, scheduler = TraceRecorder(str(tmp_path / "t")), _scheduler(3)

    async def go() -> None:
        recorder.open(scheduler, {"policy": "stock"})
        recorder._tick()
        while recorder.statistics()["recording"]:  # noqa: ASYNC110 (a thread ends it)
            await asyncio.sleep(0.001)
        recorder._tick()
        assert recorder._ticks is not None
        assert not recorder._ticks.is_running()
        assert "100 are allowed" in recorder.statistics()["error"]
        assert caplog.text.count("has ended") == 1
        # The plugin stays until its client comes for the file, and costs nothing more.
        with mock.patch.object(recorder, "_guarded") as guarded:
            recorder.update_graph(scheduler, client="c", keys=[("t", 1)], tasks=[("t", 1)])
            for start, finish in (("waiting", "processing"), ("processing", "memory"), ("memory", "forgotten")):
                recorder.transition(("t", 1), start, finish)
            recorder.add_worker(scheduler, "tcp://a:1")
            recorder.remove_worker(scheduler, "tcp://a:1")
        assert not guarded.called
        assert (recorder._block, recorder._tasks) == ([], {})
        writer = recorder.stop()
        assert writer is not None
        writer.close(recorder.last)
        assert writer.remedy == "record a shorter part of the run"

    asyncio.run(go())
    trace = Trace.load(tmp_path / "t")
    assert len(trace.tasks) == 3
    assert trace.lost_records


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (None, "the disk was too slow; 3 records .* Remedy: a --local-directory of the scheduler on a faster disk"),
        (
            OSError(28, "No space left on device"),
            r"No space left.* Remedy: room in the scheduler's --local-directory\.",
        ),
        (TypeError("cannot pack"), r"TypeError: cannot pack; .* Remedy: report this"),
        ("hook", r"TypeError: in a hook; .* Remedy: report this"),
        ("full", r"are allowed; .* Remedy: record a shorter part of the run\."),
    ],
    ids=str,
)
def test_the_remedy_is_for_what_a_recording_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: Any, said: str
) -> None:
    recorder = TraceRecorder(str(tmp_path / "t"), name="one")
    if lacks == "full":
        monkeypatch.setattr(writer_module, "MAX_BYTES", 1)
    elif isinstance(lacks, Exception):
        monkeypatch.setattr(writer_module, "pack", mock.Mock(side_effect=lacks))
    elif lacks == "hook":
        recorder.errors, recorder.last_error = 1, "TypeError: in a hook"

    async def go() -> dict[str, Any]:
        scheduler = _scheduler(1)
        recorder.open(scheduler, {"policy": "stock"})
        scheduler.plugins = {"one": recorder}
        assert recorder._writer is not None
        if lacks is None:
            recorder._writer.lost = 3
        return await recording._end(scheduler, "one")

    ended = recording.record(None, tmp_path / "u")  # type: ignore[arg-type]
    ended.summary = asyncio.run(go())
    with pytest.warns(UserWarning, match=said):
        ended._warn()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_task_that_is_retried_has_not_failed(c: Any, s: Any, a: Any, tmp_path: Path) -> None:
    recorder = TraceRecorder(str(tmp_path / "t"))
    recorder.open(s, {"policy": "stock"})
    s.add_plugin(recorder, name=recorder.name)
    first = c.submit(lambda: 1 / Event("mended").is_set(), key="first", pure=False)
    second = c.submit(lambda x: x, first, key="second")
    await c.gather([first, second], errors="skip")
    await Event("mended").set()
    await c.retry([second])
    assert await second
    del s.plugins[recorder.name]
    writer = recorder.stop()
    assert writer is not None
    writer.close(recorder.last)
    trace = Trace.load(tmp_path / "t")
    assert {task.key: (task.erred, task.runs) for task in trace.tasks.values()} == {
        "first": (None, 1),
        "second": (None, 1),
    }
    assert "2 tasks, 2 finished, 0 failed" in summary(trace)


def test_a_scheduler_without_its_folder_says_so(tmp_path: Path) -> None:
    """An error that it raised would be taken for a lost connection."""
    scheduler: Any = SimpleNamespace(plugins={}, local_directory=str(tmp_path / "gone"))
    assert "gone" in str(recording._begin(scheduler, "trace", "client"))


def test_a_file_that_was_cleaned_up_meanwhile_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        recorder = TraceRecorder(str(tmp_path / "cleaned"))
        recorder.open(_scheduler(1), {"policy": "stock"})
        os.unlink(recorder.path)
        scheduler: Any = SimpleNamespace(plugins={"trace": recorder})

        async def ask(client: Any, function: Any, *, timeout: float, **kwargs: Any) -> Any:
            return await function(scheduler, "trace")

        monkeypatch.setattr(recording, "ask_scheduler", ask)
        with pytest.raises(TraceError, match=r"cleaned.*Remedy"):
            await recording.record(None, tmp_path / "t")._end(SimpleNamespace())  # type: ignore[arg-type]
        assert not scheduler.plugins

    asyncio.run(go())


def test_a_recording_is_fetched_into_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not into one that is there: in containers all processes may have one number."""
    source = tmp_path / "scheduler" / "run.trace"
    source.parent.mkdir()
    source.write_bytes(b"whole")
    other = tmp_path / f"t.part-{os.getpid()}"
    other.write_bytes(b"half of another")

    async def ask(client: Any, function: Any, *, timeout: float, **kwargs: Any) -> Any:
        if function is recording._end:
            return {"path": str(source), "bytes": 5}
        answer = function(SimpleNamespace(plugins={}), **kwargs)
        return await answer if inspect.isawaitable(answer) else answer

    monkeypatch.setattr(recording, "ask_scheduler", ask)
    asyncio.run(recording.record(None, tmp_path / "t")._end(SimpleNamespace()))  # type: ignore[arg-type]
    assert (tmp_path / "t").read_bytes() == b"whole"
    assert other.read_bytes() == b"half of another"
    assert sorted(os.listdir(tmp_path)) == ["t", other.name]
