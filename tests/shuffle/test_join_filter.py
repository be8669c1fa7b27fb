"""Filters of joins on live clusters: used, right, counted; not there, late or partial: right as well."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any
from unittest import mock

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Event
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.protocol import messages
from dask_gpurt.shuffle.scheduler import join_filters
from dask_gpurt.shuffle.scheduler.calls import AnswersFailed, Calls
from dask_gpurt.shuffle.worker.join_filter import SAMPLE_ROWS, KeyCollector, RowFilter
from tests.shuffle.helpers import ON, taken_over, until

FILTERS = dataclasses.replace(ON, join_filter="auto")
TWO: dict[str, Any] = {
    "client": True,
    "nthreads": [("127.0.0.1", 2)] * 2,
    "timeout": 120,
    "config": {"dataframe.shuffle.method": "p2p"},
}


def opened(gate: str) -> None:
    """Wait for an event, in one thread."""
    Event(gate).wait(timeout=60)


def part(i: int, n: int, spread: int, name: str, after: None = None) -> pd.DataFrame:
    """Keys below `spread`."""
    r = np.random.default_rng([i, spread])
    text = pd.array(r.integers(0, spread, n).astype("U9"), dtype="string[pyarrow]")
    return pd.DataFrame({f"{name}k": text, f"{name}v": np.arange(n) + i * n})


def side(name: str, parts: int, spread: int, gate: str = "", n: int = 500) -> tuple[Any, pd.DataFrame]:
    """A side as Dask's frame and as pandas'. With a gate, all inputs but two come when its event is set."""
    kwargs: dict[str, Any] = {"n": n, "spread": spread, "name": name}
    wait = dask.delayed(opened)(gate) if gate else None
    inputs = [dask.delayed(part)(i, after=wait if i > 1 else None, **kwargs) for i in range(parts)]
    meta = part(0, 2, spread, name).iloc[:0]
    frame = dd.from_delayed(inputs, meta=meta, verify_meta=False)
    return frame, pd.concat([part(i, **kwargs) for i in range(parts)])


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values(["lv", "rv"], ignore_index=True)


def sums(*workers: Any) -> dict[str, float]:
    stats = [worker_statistics(w) for w in workers]
    return {
        name: sum(one[name] for one in stats) for name in stats[0] if name.startswith("join_") and "given" not in name
    }


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["inner", "right"])
def test_rows_that_match_nothing_are_not_sent(how: Any) -> None:
    @gen_cluster(**TWO)
    async def check(c, s, a, b):
        async with taken_over(s, [a, b], settings=FILTERS) as (takeover, _):
            left, left_rows = side("l", 8, 4000, "left-gate")
            right, right_rows = side("r", 3, 60)
            got = c.compute(left.merge(right, left_on="lk", right_on="rk", how=how, broadcast=False))
            # The other inputs of the large side come when the filter is there.
            await until(lambda: sums(a, b)["join_filters"] == 2)
            await Event("left-gate").set()
            result = await got
            want = left_rows.merge(right_rows, left_on="lk", right_on="rk", how=how)
            pd.testing.assert_frame_equal(in_order(result), in_order(want), check_dtype=False)
            stats = takeover.statistics()
            assert stats["errors"] == 0, stats["last_error"]
            assert stats["join_filters"]["sent"] == 1
            counted = sums(a, b)
            # Which of its inputs come later depends on the threads; of their keys 60 of 4000 match.
            assert counted["join_rows_in"] >= 500
            assert counted["join_rows_dropped"] > 0.9 * counted["join_rows_in"]
            assert counted["join_bytes_dropped"] > 0
            # Of the other side, those that are split before it is known which is the smaller.
            assert 1500 <= counted["join_keys"] <= 2500
            await until(lambda: not takeover._plugin.active_shuffles)

    check()


@pytest.mark.cluster
@pytest.mark.parametrize(("how", "why"), [("outer", "outer join"), ("inner", "keys of dtype category")])
def test_joins_without_a_filter_say_why(how: Any, why: str) -> None:
    @gen_cluster(**TWO)
    async def check(c, s, a, b):
        async with taken_over(s, [a, b], settings=FILTERS) as (takeover, _):
            left, left_rows = side("l", 4, 400)
            right, right_rows = side("r", 2, 60)
            if how == "inner":
                left, left_rows = left.astype({"lk": "category"}), left_rows.astype({"lk": "category"})
                right, right_rows = right.astype({"rk": "category"}), right_rows.astype({"rk": "category"})
            result = await c.compute(left.merge(right, left_on="lk", right_on="rk", how=how, broadcast=False))
            assert len(result) == len(left_rows.merge(right_rows, left_on="lk", right_on="rk", how=how))
            assert takeover.statistics()["join_filters"]["none"] == {why: 1}
            assert sums(a, b)["join_keys"] == 0

    check()


@pytest.mark.cluster
@gen_cluster(**TWO)
async def test_the_side_with_fewer_rows_filters_though_it_has_more_inputs(c, s, a, b):
    async with taken_over(s, [a, b], settings=FILTERS) as (takeover, _):
        moved: list[str] = []
        takeover.moved = lambda tasks: moved.extend(str(ts.key) for ts in tasks)
        left, left_rows = side("l", 9, 4000, "rows-gate", n=4000)
        right, right_rows = side("r", 20, 60, n=3)
        got = c.compute(left.merge(right, left_on="lk", right_on="rk", broadcast=False))
        # The other inputs of the side with more rows come when the filter is there: one of each came before all others.
        await until(lambda: sums(a, b)["join_filters"] == 2)
        await Event("rows-gate").set()
        result = await got
        want = left_rows.merge(right_rows, left_on="lk", right_on="rk")
        pd.testing.assert_frame_equal(in_order(result), in_order(want), check_dtype=False)
        stats = takeover.statistics()
        assert stats["errors"] == 0, stats["last_error"]
        assert stats["join_filters"] | {"sent_bytes": 0} == {
            "sent": 1,
            "sent_bytes": 0,
            "reordered": 1,
            "changed": 1,
            "none": {},
        }
        assert len(moved) > 10
        counted = sums(a, b)
        # A worker may give its filter up by the processor time of its first inputs.
        assert counted["join_rows_in"] >= 4000
        assert counted["join_rows_dropped"] > 0.9 * counted["join_rows_in"]
        # Keys of the other side are collected until it is known which is the smaller.
        assert 60 <= counted["join_keys"] <= 60 + 2 * 4000


@pytest.mark.cluster
@gen_cluster(**TWO)
async def test_no_filter_is_made_where_a_sample_says_that_it_drops_nothing(c, s, a, b):
    async with taken_over(s, [a, b], settings=FILTERS) as (takeover, _):
        left, left_rows = side("l", 8, 50, "sample-gate", n=2000)
        right, right_rows = side("r", 3, 50)
        joins = takeover._plugin.joins
        sent = joins._sent

        async def late(record: Any, one: Any) -> str:
            # Both workers have split an input of the other side.
            await until(lambda: sum(worker_statistics(w)["inputs"] for w in (a, b)) >= 5)
            return await sent(record, one)

        joins._sent = late
        got = c.compute(left.merge(right, left_on="lk", right_on="rk", broadcast=False))
        with mock.patch.object(join_filters, "worth_asking", return_value=True):
            await until(lambda: joins.none)
        await Event("sample-gate").set()
        assert len(await got) == len(left_rows.merge(right_rows, left_on="lk", right_on="rk"))
        assert joins.none == {"it would drop too few rows": 1}
        assert joins.sent == sums(a, b)["join_filters"] == 0
        assert takeover.statistics()["errors"] == 0


@pytest.mark.cluster
@gen_cluster(**TWO)
async def test_off_and_in_safe_mode_there_is_none(c, s, a, b):
    async with taken_over(s, [a, b]) as (takeover, _):
        left, left_rows = side("l", 6, 400)
        right, right_rows = side("r", 2, 60)
        result = await c.compute(left.merge(right, left_on="lk", right_on="rk", broadcast=False))
        assert len(result) == len(left_rows.merge(right_rows, left_on="lk", right_on="rk"))
        none = {"sent": 0, "sent_bytes": 0, "reordered": 0, "changed": 0, "none": {}}
        assert takeover.statistics()["join_filters"] == none
        assert set(sums(a, b).values()) == {0}


@pytest.mark.cluster
@gen_cluster(**TWO | {"nthreads": [("127.0.0.1", 2)] * 3})
async def test_keys_that_a_lost_worker_took_with_it_make_no_filter_until_they_are_back(c, s, *workers):
    """The small side is split; a worker is lost before it is asked for the keys."""
    async with taken_over(s, workers, settings=FILTERS) as (takeover, _):
        plugin = takeover._plugin
        lost, why = asyncio.Event(), []
        sent = plugin.joins._sent

        async def late(record: Any, one: Any) -> str:
            await lost.wait()
            why.append((record.spec.join.inputs, await sent(record, one)))
            return why[-1][1]

        plugin.joins._sent = late
        left, left_rows = side("l", 8, 4000, "lost-gate")
        right, right_rows = side("r", 4, 60)
        got = c.compute(left.merge(right, left_on="lk", right_on="rk", broadcast=False))
        await until(lambda: any(record.join_asked for record in plugin.runs.all()))
        # One that holds keys, and does not wait for the event.
        holds = [w for w in workers if worker_statistics(w)["join_keys"]]
        waits = {ts.processing_on.address for ts in s.tasks.values() if ts.processing_on and "opened" in str(ts.key)}
        victim = next(w for w in holds if w.address not in waits)
        await victim.close(executor_wait=False)
        lost.set()
        # Its inputs are split again, the barrier is reached again, and then the keys are all there.
        await until(lambda: len(why) == 2)
        assert why == [(4, "the keys of some inputs are gone"), (4, "")]
        await Event("lost-gate").set()
        result = await got
        want = left_rows.merge(right_rows, left_on="lk", right_on="rk")
        pd.testing.assert_frame_equal(in_order(result), in_order(want), check_dtype=False)
        # The large side has keys too when the worker was lost before the sides were compared: too late to be of use.
        assert why[2:] in ([], [(8, "the other side was split first")])
        assert takeover.statistics()["errors"] == 0


@pytest.mark.cluster
@pytest.mark.parametrize("error", [AnswersFailed("it closes"), TimeoutError("it is stopped")])
def test_a_worker_that_does_not_answer_is_no_error_of_ours(error: Exception) -> None:
    """A few of these would leave all shuffles to Dask."""
    tell = Calls.tell

    async def no_answer(self: Any, record: Any, message: Any) -> Any:
        if isinstance(message, messages.AskJoinKeys):
            raise error
        return await tell(self, record, message)

    @gen_cluster(**TWO)
    async def check(c, s, a, b):
        async with taken_over(s, [a, b], settings=FILTERS) as (takeover, _):
            left, left_rows = side("l", 8, 4000, "never-answers")
            right, right_rows = side("r", 3, 60)
            with mock.patch.object(Calls, "tell", no_answer):
                got = c.compute(left.merge(right, left_on="lk", right_on="rk", broadcast=False))
                await until(lambda: takeover.statistics()["join_filters"]["none"] or takeover.statistics()["errors"])
                await Event("never-answers", client=c).set()
                result = await got
            pd.testing.assert_frame_equal(
                in_order(result), in_order(left_rows.merge(right_rows, left_on="lk", right_on="rk")), check_dtype=False
            )
            stats = takeover.statistics()
            assert stats["errors"] == 0, stats["last_error"]
            assert stats["join_filters"]["none"]["a worker did not answer"] == 1

    check()


def test_a_partition_unlike_its_meta_is_neither_hashed_nor_filtered() -> None:
    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.rows.key_filter import KeyFilter

    counters, meta = ShuffleCounters(), pd.DataFrame({"k": [1]})
    collector = KeyCollector(["k"], meta, counters)
    collector.add(0, meta)
    collector.add(1, pd.DataFrame({"k": [1.5]}))
    assert collector.known().inputs == frozenset()
    assert collector.bits(1) == b""
    rows = RowFilter(["k"], meta, counters)
    rows.take(KeyFilter(bytes(8), None))
    assert rows.keep(pd.DataFrame({"k": [1.5]})) is None
    assert rows.keep(meta) is not None
    assert counters.join_given_up == {"a partition is not like its meta": 2}


class NoSize(pd.arrays.IntegerArray):
    """A column that does not know its size."""

    @property
    def nbytes(self) -> int:
        raise NotImplementedError


def test_rows_whose_size_is_not_known_are_kept() -> None:
    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.rows.key_filter import KeyFilter

    counters, frame = ShuffleCounters(), pd.DataFrame({"k": [1], "x": NoSize(np.zeros(1, int), np.zeros(1, bool))})
    rows = RowFilter(["k"], frame, counters)
    rows.take(KeyFilter(bytes(8), None))
    assert rows.keep(frame) is None
    assert counters.join_given_up == {"error": 1}
    assert rows.keep(frame[["k"]]) is None


def test_a_filter_that_costs_more_than_it_saves_is_given_up() -> None:
    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.rows.join_keys import Keys
    from dask_gpurt.shuffle.rows.key_filter import KeyFilter, bits_of

    counters, frame = ShuffleCounters(), pd.DataFrame({"k": np.arange(1000)})
    keys = KeyFilter(bits_of([Keys.of(frame, ["k"]).hashes], 256), None)
    rows = RowFilter(["k"], frame, counters)
    rows.take(keys)
    assert rows.keep(frame) is None
    rows.note(1000, 1000, 0.1)
    assert counters.join_given_up == {"drops too few rows": 1}
    assert rows.keep(frame + 5000) is None
    rows = RowFilter(["k"], frame, counters)
    rows.take(keys)
    kept = rows.keep(frame + 500)
    assert kept is not None
    rows.note(1000, int(kept.sum()), 60.0)
    assert rows.keep(frame + 500) is not None
    assert counters.join_rows_dropped > 900


def test_a_filter_that_drops_nothing_looks_at_a_sample_only() -> None:
    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.rows.join_keys import Keys
    from dask_gpurt.shuffle.rows.key_filter import KeyFilter, bits_of

    counters, frame = ShuffleCounters(), pd.DataFrame({"k": np.arange(100_000)})
    rows = RowFilter(["k"], frame, counters)
    assert rows.keep(frame) is None
    rows.note(100_000, 100_000, 0.1)
    known = rows.known(messages.JoinKeys.none())
    assert (known.seen_inputs, known.seen_rows, known.split_rows, known.split_seconds) == (1, 100_000, 100_000, 0.1)
    sample = np.frombuffer(known.sample, dtype=np.uint32)
    assert SAMPLE_ROWS <= len(sample) <= 2 * SAMPLE_ROWS
    hashes = Keys.of(frame, ["k"]).hashes
    assert np.isin(sample, hashes).all()
    rows.take(KeyFilter(bits_of([hashes], 1 << 15), None))
    assert rows.keep(frame) is None
    assert SAMPLE_ROWS <= counters.join_rows_in <= 2 * SAMPLE_ROWS
    # Half of the rows: looked up, all of them.
    mask = rows.keep(frame + 50_000)
    assert mask is not None
    assert 45_000 < mask.sum() < 55_000
    rows.note(100_000, 10**9, 0.0)  # splitting a row costs nothing to speak of
    assert counters.join_given_up == {"drops too few rows": 1}
    # Given up for good: neither a filter that comes again nor a sample.
    rows.take(KeyFilter(bits_of([hashes], 1 << 15), None))
    assert rows.keep(frame + 100_000) is None
    assert rows.known(messages.JoinKeys.none()).sample == b""
