"""The feed adds up growth, whatever workers come, go and start over, and never fails its caller."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from dask_gpurt.observe.collect.causes import CAUSES
from dask_gpurt.observe.figures import history
from tests.observe.fakes import Clock, FakeScheduler, figures, heartbeat


def _feed(scheduler: FakeScheduler) -> tuple[history.Feed, Clock]:
    clock = Clock()
    return history.Feed(scheduler, lambda: figures(local=10, moved=5, declined=2, fallbacks=1), clock), clock


def test_sums_never_fall() -> None:
    scheduler = FakeScheduler()
    made, _ = _feed(scheduler)
    a = scheduler.add("a", heartbeat(written_bytes=100))
    b = scheduler.add("b", heartbeat(written_bytes=10))
    made.tick()
    assert made.history[-1].sums["written_bytes"] == 110
    scheduler.workers[a].metrics["gpurt"] = heartbeat(written_bytes=150)
    del scheduler.workers[b]
    made.tick()
    assert made.history[-1].sums["written_bytes"] == 160  # b's ten stay counted
    scheduler.workers[a].metrics["gpurt"] = heartbeat(written_bytes=30)  # restarted under its address
    made.tick()
    assert made.history[-1].sums["written_bytes"] == 190
    sums = [sample.sums["written_bytes"] for sample in made.history]
    assert sums == sorted(sums)


def test_placement_is_counted_once() -> None:
    made, _ = _feed(FakeScheduler())
    made.tick()
    made.tick()
    sums = made.history[-1].sums
    assert (sums["local"], sums["moved"], sums["stock"], sums["fallbacks"]) == (10, 5, 2, 1)


def test_rates_are_growth_over_time() -> None:
    scheduler = FakeScheduler()
    made, clock = _feed(scheduler)
    a = scheduler.add("a", heartbeat())
    for i in range(5):
        scheduler.workers[a].metrics["gpurt"] = heartbeat(read_bytes=i * 1000)
        made.tick()
        clock.now += 2
    ago, rates = made.rates(("read_bytes",))
    assert ago == [8.0, 6.0, 4.0, 2.0]
    assert rates["read_bytes"] == [500.0] * 4


def test_history_is_bounded() -> None:
    made, clock = _feed(FakeScheduler())
    for _ in range(history.KEEP + 10):
        made.tick()
        clock.now += 1
    assert len(made.history) == history.KEEP
    assert len(made.rates(("local",))[0]) == history.KEEP - 1


def test_two_looks_at_one_moment_are_no_rate() -> None:
    made, _ = _feed(FakeScheduler())
    made.tick()
    made.tick()
    assert made.rates(("local",)) == ([], {"local": []})


def test_workers_without_the_extension() -> None:
    scheduler = FakeScheduler()
    scheduler.add("stock", None)
    scheduler.add(7, heartbeat(host_bytes=5))
    scheduler.add("empty", {})
    made, _ = _feed(scheduler)
    made.tick()
    assert made.errors == 0
    assert [(row.name, row.figures is None) for row in made.rows()] == [("stock", True), ("7", False), ("empty", True)]


def test_an_exception_is_counted_and_the_next_look_works() -> None:
    answers: list[Any] = [figures(local=1), RuntimeError("no figures today"), figures(local=4)]

    def read() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    scheduler = FakeScheduler()  # the feed holds it weakly
    made = history.Feed(scheduler, read, Clock())
    for _ in range(3):
        made.tick()
    assert made.errors == 1
    assert "no figures today" in made.last_error
    assert [sample.sums["local"] for sample in made.history] == [1, 4]


def test_a_feed_does_not_keep_its_scheduler() -> None:
    scheduler = FakeScheduler()
    made, _ = _feed(scheduler)
    seen = weakref.ref(scheduler)
    del scheduler
    gc.collect()
    assert seen() is None
    assert made.rows() == []


def test_shuffles_that_cannot_be_read_cost_nothing_else() -> None:
    scheduler = FakeScheduler()
    scheduler.plugins = {"shuffle": type("Odd", (), {"active_shuffles": {"s": None}})()}  # type: ignore[attr-defined]
    scheduler.tasks = {"shuffle-barrier-s": None, "x": None}  # type: ignore[attr-defined]
    made, _ = _feed(scheduler)
    made.tick()
    assert made.errors == 0, "its barrier is not there yet"
    scheduler.tasks["shuffle-barrier-s"] = 1  # type: ignore[attr-defined]
    made.tick()
    assert made.errors == 1
    assert len(made.history) == 2


def _ledger(slots: float, busy: float, **causes: float) -> dict[str, Any]:
    return {"ledger": {"slot_seconds": slots, "busy_seconds": busy, "causes": {**dict.fromkeys(CAUSES, 0.0), **causes}}}


def test_a_small_fall_of_work_is_not_taken_for_a_new_ledger() -> None:
    told = [_ledger(10, 8, network=2), _ledger(12, 7.5, network=4), _ledger(14, 10, network=4), _ledger(2, 1, skew=1)]
    answers = iter(told)
    scheduler = FakeScheduler()
    made = history.Feed(scheduler, lambda: next(answers), Clock())
    for _ in told:
        made.tick()
    assert made.errors == 0
    assert [s.sums["busy"] for s in made.history] == [8, 8, 10, 11]
    assert [s.sums["network"] for s in made.history] == [2, 4, 4, 4]
    assert [s.sums["skew"] for s in made.history] == [0, 0, 0, 1]


def test_levels_are_as_they_were_and_only_of_tiers_that_are_there() -> None:
    scheduler = FakeScheduler()
    made, clock = _feed(scheduler)
    a = scheduler.add("a", heartbeat(host_bytes=5, disk_bytes=1))
    scheduler.add("b", heartbeat(host_bytes=2))
    scheduler.add("stock", None)
    made.tick()
    clock.now += 1
    scheduler.workers[a].metrics["gpurt"] = {"host_bytes": 1, "object_bytes": 9}
    made.tick()
    assert made.levels() == (
        [1.0, 0.0],
        {"host_bytes": [7.0, 3.0], "disk_bytes": [1.0, 0.0], "object_bytes": [0.0, 9.0]},
    )


def test_a_plot_gets_no_more_points_than_it_asks_for_and_they_stay_the_same() -> None:
    scheduler = FakeScheduler()
    made, clock = _feed(scheduler)
    a = scheduler.add("a", heartbeat())
    shown: set[float] = set()
    for i in range(history.KEEP + 50):
        scheduler.workers[a].metrics["gpurt"] = heartbeat(read_bytes=i * 7, host_bytes=i)
        made.tick()
        if i > history.KEEP:
            ago, rates = made.rates(("read_bytes",), points=100)
            assert len(ago) <= 102
            assert set(rates["read_bytes"]) == {7.0}
            at = {round(clock.now - s) for s in ago[:-1]}
            assert not shown or len(at - shown) <= 1, "points come and go at the ends only"
            shown = at
            assert len(made.levels(points=100)[0]) <= 102
            assert made.levels(points=100)[1]["host_bytes"][-1] == i
        clock.now += 1
