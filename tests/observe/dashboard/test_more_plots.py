"""What the plots of stalls, tiers over time, accuracy, links, speeds and shuffle progress draw."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bokeh")

from bokeh.document import Document

from dask_gpurt.observe.collect.causes import CAUSES
from dask_gpurt.observe.dashboard import pages, stalls
from dask_gpurt.observe.figures.history import POINTS, USES
from dask_gpurt.observe.figures.shuffle_progress import Progress
from tests.observe.fakes import FakeScheduler, MiB, figures, give_feed, heartbeat

from .documents import called_back


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


def test_stalls_stack_to_the_number_of_slots(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    told = figures()
    feed, clock = give_feed(scheduler, lambda: told, monkeypatch)
    for i in range(40):
        causes = {**dict.fromkeys(CAUSES, 0.0), "network": float(i), "skew": 0.5 * i}
        told["ledger"] |= {"slot_seconds": 4.0 * i, "busy_seconds": 2.5 * i, "causes": causes}
        feed.tick()
        clock.now += 1
    made = pages.StallCauses(scheduler)
    made.update()
    data = made.lines.data
    assert set(data["busy"]) == {2.5}
    assert set(data["network"]) == {1.0}
    assert set(data["memory"]) == {0.0}
    assert set(data["total"]) == {4.0}
    assert made.said == (
        "Busy 62% of the time; most is lost to “waiting for input”: a task is here, and its inputs are on their way "
        "from other workers.\nlast 30 s: busy 62% · waiting for input 25% · skewed task 12%"
    )
    # The legend has what is there, and nothing else.
    assert [text in made.legend.text for text, *_ in stalls.GROUPS] == [True, True, False, True, False, False]
    assert set(data["group1"]) == {1.0}
    assert set(data["group3"]) == {0.5}


def test_lumps_of_slot_seconds_do_not_change_the_number_of_slots(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = scheduler.add("a", heartbeat())
    scheduler.workers[a].nthreads = 4
    told = figures()
    feed, clock = give_feed(scheduler, lambda: told, monkeypatch)
    for i in range(20):
        seconds = 7 * (i // 7)  # a heartbeat each seven seconds
        causes = {**dict.fromkeys(CAUSES, 0.0), "network": 1.0 * seconds}
        told["ledger"] |= {"slot_seconds": 4.0 * seconds, "busy_seconds": 3.0 * seconds, "causes": causes}
        feed.tick()
        clock.now += 1
    made = pages.StallCauses(scheduler)
    made.update()
    assert set(made.lines.data["total"]) == {0.0, 4.0}
    assert set(made.lines.data["busy"]) == {0.0, 3.0}


def test_tiers_over_time_show_only_tiers_that_are_there(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = scheduler.add("a", heartbeat(host_bytes=5 * MiB, disk_bytes=MiB))
    feed, clock = give_feed(scheduler, figures, monkeypatch)
    feed.tick()
    made = pages.TierHistory(scheduler)
    made.update()
    assert [entry.visible for entry in made.entries] == [False, True, True, False]
    assert made.said == (
        "17% of the data does not fit into memory and was moved out of it.\n"
        "host 5.00 MiB · disk 1.00 MiB · peak 6.00 MiB"
    )
    scheduler.workers[a].metrics["gpurt"] = {"host_bytes": MiB, "disk_bytes": 0, "device_bytes": 7 * MiB}
    clock.now += 1
    feed.tick()
    made.update()
    assert [entry.visible for entry in made.entries] == [True, True, True, False]
    assert made.lines.data["device_bytes"] == [0.0, 7 * MiB]
    assert made.lines.data["total"] == [6 * MiB, 8 * MiB]


def test_accuracy_shows_the_newest_by_what_they_moved(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = figures()
    told["placement"]["decisions"] |= {
        "newest": [[0.02, 0.05, 0], [3.0, 2.0, 10.0], [0.0, 1e9, 0]],
        "median_ratio": 1.25,
        "finished": 1000,
    }
    give_feed(scheduler, lambda: told, monkeypatch)[0].tick()
    made = pages.PlacementAccuracy(scheduler)
    made.update()
    assert made.points["local"].data == {"predicted": [0.02, 1e-4], "actual": [0.05, 1e3]}  # the last at the edges
    assert made.points["moved"].data == {"predicted": [3.0], "actual": [2.0]}
    assert (made.figure.x_range.start, made.figure.x_range.end) == (pytest.approx(1e-4), pytest.approx(1e4))
    assert made.said == (
        "Predictions are good: the median task takes 1.25x the time predicted.\n"
        "actual / predicted: median 1.25 of 1,000 tasks"
    )


def test_a_slow_link_has_a_colour_of_its_own(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(seconds: float, *sources: str) -> dict[str, Any]:
        return {s: {"bytes": 100 * MiB, "seconds": seconds, "requests": 3} for s in sources}

    a, b, c = (f"tcp://10.0.0.2:{4000 + i}" for i in range(3))
    for name, table in (("a", fetched(1, b, c)), ("b", fetched(1, a)), ("c", fetched(4, a))):
        scheduler.add(name, heartbeat(fetched=table))
    give_feed(scheduler, figures, monkeypatch)[0].tick()
    made = pages.LinkMatrix(scheduler)
    made.update()
    assert [(s, t) for s, t in zip(made.slow.data["source"], made.slow.data["target"], strict=True)] == [("a", "c")]
    assert made.slow.data["measured"] == ["25.00 MiB/s"]
    assert len(made.usual.data["x"]) == 3
    assert made.said == (
        "1 of 4 pairs slow: under half of the median bandwidth.\n"
        "400.00 MiB · median 100.00 MiB/s · nominal none: one host"
    )


def test_measured_stands_next_to_nominal(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "tcp://10.0.0.9:1"
    table = {other: {"bytes": 625 * MiB, "seconds": 1.0, "requests": 3}}
    scheduler.add("a", heartbeat(fetched=table, nic_bytes_per_second=1250 * MiB))
    scheduler.workers[other] = type(next(iter(scheduler.workers.values())))(
        "b", heartbeat(fetched={}, nic_bytes_per_second=1250e6)
    )
    give_feed(scheduler, figures, monkeypatch)[0].tick()
    made = pages.LinkMatrix(scheduler)
    made.update()
    assert made.usual.data["text"] == ["625.00 MiB\n625.00 MiB/s (52%)"]
    assert made.usual.data["nominal"] == ["10 Gbit/s, of which 52% measured"]
    assert made.said.endswith("nominal 10 Gbit/s")


def test_slow_workers_come_first_and_are_named(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    told = figures()
    addresses = [scheduler.add(f"w{i}", heartbeat()) for i in range(5)]
    told["placement"]["speeds"] = dict(zip(addresses, (1.0, 0.7, 1.1, 0.4), strict=False))
    give_feed(scheduler, lambda: told, monkeypatch)[0].tick()
    made = pages.WorkerSpeeds(scheduler)
    made.update()
    assert made.slow.data["name"] == ["w3", "w1"]
    assert made.slow.data["y"] == [0, 1]
    assert made.fast.data["name"] == ["w0", "w2"]
    assert made.fast.data["y"] == [2, 3]
    assert made.said == (
        "2 of 4 workers slow; slowest is w3 at 0.40x.\n1 class of node · 0.40x to 1.10x · 1 to be measured"
    )
    told["placement"]["speeds"] = dict.fromkeys(addresses, 1.0)
    made.update()
    assert made.slow.data["name"] == []
    assert made.said == "No worker of 5 is slow.\n1 class of node · 1.00x to 1.00x"


def test_progress_of_runs_and_sizes_of_outputs(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    told = figures()
    told["ledger"]["output_bytes"] = [0, *[MiB] * 9, 20 * MiB]
    feed, _ = give_feed(scheduler, lambda: told, monkeypatch)
    feed.tick()  # runs that it does not see have ended
    feed.shuffles._runs["old", 1] = Progress("old", 1, 4, 4, 2, 2, active=False)
    feed.shuffles._runs["new", 1] = Progress("new", 1, 8, 2, 4, 0, bytes=7)
    made = pages.ShuffleProgress(scheduler)
    made.update()
    assert made.bars.data["inputs"] == [25.0, 100.0], "the newest on top"
    assert made.bars.data["outputs"] == [0.0, 100.0]
    assert made.bars.data["text"][0] == "2/8 inputs · 0/4 outputs · 7 B"
    assert sum(made.bins.data["count"]) == 10
    assert made.bins.data["count"] == [9, 1]
    assert made.said == (
        "1 shuffle under way; outputs are uneven, the largest 20.0x the median.\n"
        "outputs: median 1.00 MiB, largest 20.0x"
    )


def test_the_overview_of_a_hundred_workers_is_bounded(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overview(workers: int, seconds: int) -> tuple[int, int, int]:
        while len(scheduler.workers) < workers:
            i = len(scheduler.workers)
            sources = {
                f"tcp://10.0.{k}.2:{4000 + k}": {"bytes": k * MiB, "seconds": 1.0, "requests": 1} for k in range(32)
            }
            address = scheduler.add(i, heartbeat(host_bytes=i, fetched=sources))
            told["placement"]["speeds"][address] = 1.0
        for _ in range(seconds):
            feed.tick()
            clock.now += 1
        doc = Document()
        pages.overview(scheduler, {"prefix": "/", "pages": [], "plots": []}, doc)
        called_back(doc)
        sources_of = [m for m in doc.models if type(m).__name__ == "ColumnDataSource"]
        assert not [m.text for m in doc.models if type(m).__name__ == "Title" and "not shown" in m.text]
        cells = sum(sum(len(column) for column in s.data.values()) for s in sources_of)
        rows = max(len(column) for s in sources_of for column in s.data.values())
        return len(doc.models), cells, rows

    told = figures()
    told["placement"]["decisions"]["newest"] = [[0.1, 0.2, i % 2] for i in range(200)]
    told["ledger"]["output_bytes"] = list(range(1, 201))
    feed, clock = give_feed(scheduler, lambda: told, monkeypatch)
    models, _, _ = overview(1, 3)
    many, cells, rows = overview(100, 2 * POINTS + 10)
    assert many == models, "no model per worker or per point"
    assert rows <= POINTS + 2
    assert cells <= (len(USES) + 40) * (POINTS + 2) + 100 * 40
