"""Fused graphs: the same answers with fewer tasks, nothing run twice, and what is left as it is."""

from __future__ import annotations

import functools
import operator
import random
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import dask.dataframe as dd
import pandas as pd
import pytest
from dask._expr import FinalizeCompute
from dask.base import collections_to_expr
from dask.core import flatten
from dask.order import order
from dask.task_spec import Task
from distributed.scheduler import _materialize_graph

from dask_gpurt.placement.decide import steps

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from pathlib import Path

PARTS = 6
ROWS = 20


def make(part: int) -> pd.DataFrame:
    at = range(part * ROWS, (part + 1) * ROWS)
    numbers = {"k": [i % 3 for i in at], "x": at, "y": [i * i % 11 for i in at]}
    return pd.DataFrame({**numbers, "name": [f"n{i}" for i in at]})


def frame(parts: int = PARTS) -> Any:
    return dd.from_map(make, range(parts))


def sent(*collections: Any) -> tuple[Any, dict[Any, Any]]:
    """What a client sends of a computation, and the graph that a scheduler makes of it."""
    expression = FinalizeCompute(collections_to_expr(collections)).optimize()
    return expression, _materialize_graph(expression, False)[0]


def fuse(
    *collections: Any, known: Container[str] = (), annotated: Any = (), threads: int = 2
) -> tuple[dict[Any, Any], dict[Any, Any], list[Any]]:
    """The graph before and after, and the keys asked for."""
    expression, graph = sent(*collections)
    keys = list(flatten(expression.__dask_keys__()))
    found = steps.fused(graph, steps.Steps(expression), asked=keys, annotated=annotated, known=known, threads=threads)
    return graph, found, keys


def runs(graph: dict[Any, Any], keys: list[Any]) -> list[Any]:
    return list(dask.get(graph, keys))


def same(a: list[Any], b: list[Any]) -> bool:
    return all(p.equals(q) if isinstance(p, (pd.DataFrame, pd.Series)) else p == q for p, q in zip(a, b, strict=True))


QUERIES: dict[str, Callable[[Any], Any]] = {
    "a chain": lambda d: d.map_partitions(lambda p: p[p.x > 7]).map_partitions(lambda p: p.x * 2).sum(),
    "a filter": lambda d: (d[d.x > 7].assign(z=lambda p: p.x * 2).z + 1).sum(),
    "two columns apart": lambda d: (d.x * 2 + d.y * 3).max(),
    "groups": lambda d: d[d.y < 9].groupby("k").agg({"x": "sum", "y": "max"}),
    "a join with itself": lambda d: d.merge(d.groupby("k").x.sum().reset_index(), on="k").x_y.sum(),
    "the mean taken off": lambda d: (d.x - d.x.mean()).abs().sum(),
    "a frame": lambda d: d.assign(z=d.x + d.y)[["k", "z"]],
    "a small frame": lambda d: d.merge(pd.DataFrame({"k": [0, 1], "w": [5, 6]}), on="k").w.sum(),
    "a function": lambda d: d.map_partitions(lambda p: p.assign(z=p.x % 4)).z.value_counts(),
    "neighbours": lambda d: d.map_overlap(lambda p: p.tail(len(p) - 1), 3, 0).map_partitions(len).sum(),
    "some partitions": lambda d: d.partitions[1:4].x.sum(),
    "the first rows": lambda d: d[d.x > 2].head(5, compute=False),
    "cumulative": lambda d: d.x.cumsum().max(),
    "fewer partitions": lambda d: (d.repartition(npartitions=2).x + 1).sum(),
}


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize("threads", [1, 100])
def test_the_answer_is_the_same(name: str, threads: int) -> None:
    graph, found, keys = fuse(QUERIES[name](frame()), threads=threads)
    assert same(runs(found, keys), runs(graph, keys))
    assert len(found) <= len(graph)
    assert found.keys() <= graph.keys()  # a task that stays keeps its key


def test_a_chain_is_one_task_a_partition() -> None:
    graph, found, _ = fuse(QUERIES["a chain"](frame()), threads=100)
    assert len(graph) >= 5 * PARTS
    assert len(found) == PARTS + 1


@pytest.mark.parametrize("seed", range(30))
def test_nothing_runs_twice(seed: int) -> None:
    """Random programs over one frame, several results at once."""
    rnd, calls = random.Random(seed), list[int]()

    def counted(part: int) -> pd.DataFrame:
        calls.append(part)
        return make(part)[["k", "x", "y"]]

    frames = [dd.from_map(counted, range(PARTS), meta=make(0)[["k", "x", "y"]].iloc[:0])]
    for _ in range(rnd.randrange(2, 7)):
        d = rnd.choice(frames)
        frames.append(
            rnd.choice(
                [
                    lambda d: d[d.x > 3],
                    lambda d: d.assign(x=d.x * 2 + d.y),
                    lambda d: d[["k", "x", "y"]] + 1,
                    lambda d: d.map_partitions(lambda p: p.sort_values("y")),
                    lambda d: d.assign(y=d.y - d.y.min()),
                ]
            )(d)
        )
    wanted = [rnd.choice([lambda d: d.x.sum(), lambda d: d.groupby("k").y.max(), lambda d: d])(d) for d in frames[-3:]]
    graph, found, keys = fuse(*wanted, threads=rnd.choice([1, 100]))
    expected = runs(graph, keys)
    stock = len(calls)
    assert same(runs(found, keys), expected)
    assert len(calls) == 2 * stock


def apart(d: Any, columns: int) -> Any:
    """So many columns, each of which several others read."""
    made = [d.x * (i + 1) for i in range(columns)]
    products = [a * b for i, a in enumerate(made) for b in made[:i]]
    return functools.reduce(operator.add, products).sum()


@pytest.mark.parametrize("columns", [2, 8, 12])
def test_a_task_does_not_hold_many_results_at_a_time(columns: int) -> None:
    graph, found, keys = fuse(apart(frame(), columns), threads=1)
    assert len(found) < len(graph) - 2 * PARTS
    assert max(held(task) for task in found.values()) <= steps.MOST_ALIVE
    assert same(runs(found, keys), runs(graph, keys))
    if columns == 2:
        assert len(found) == PARTS + 1


def table(folder: Path, columns: int) -> Any:
    """Of so many columns of numbers and one of text, in files."""
    for part in range(PARTS):
        numbers = {f"c{i}": range(part, part + ROWS) for i in range(columns)}
        pd.DataFrame({**numbers, "name": make(part).name}).to_parquet(folder / f"part.{part}.parquet")
    return dd.read_parquet(folder)


def test_a_condition_on_many_columns_is_one_task_with_its_reading(tmp_path: Path) -> None:
    """They are small beside the frame, which a filter has twice. The values of an `isin` are no reason to wait."""
    d = table(tmp_path, 5)
    wanted = d.name.isin(["n1", "n3", "n25"]) & (d.c0 <= d.c1) & (d.c1 <= d.c2) & (d.c3 >= 2) & (d.c4 < 20)
    graph, found, keys = fuse(d[wanted][["c0", "name"]].assign(more=lambda p: p.c0 * 2).more.sum())
    assert len(graph) > 15 * PARTS
    assert len(found) == PARTS + 2  # the sum, and the values
    assert same(runs(found, keys), runs(graph, keys))


@pytest.mark.parametrize("columns", [4, 8, 12])
def test_a_task_holds_hardly_more_columns_than_its_largest_step(tmp_path: Path, columns: int) -> None:
    """The largest is the reading of all columns: products of all pairs are not to be held beside them."""
    d = table(tmp_path, columns)
    made = [d[f"c{i}"] * (i + 1) for i in range(columns)]
    products = [a * b for i, a in enumerate(made) for b in made[:i]]
    graph, found, keys = fuse(functools.reduce(operator.add, products).sum(), threads=1)
    for task in found.values():
        most = held(task, lambda key: columns if str(key[0]).startswith("read_parquet") else 1)
        assert most <= max(steps.MOST_ALIVE, steps.MOST_COLUMNS * columns)
    assert same(runs(found, keys), runs(graph, keys))


def held(task: Any, weight: Callable[[Any], float] = lambda key: 1) -> float:
    """Results of its parts that a task holds at most, if it forgets each after its last use."""
    if not steps.is_fused(task):
        return 1
    inner, places = task.args[0], order(task.args[0])
    now: set[Any] = set()
    most = 0.0
    done: set[Any] = set()
    for key in sorted(inner, key=places.__getitem__):
        now.add(key)
        done.add(key)
        most = max(most, sum(map(weight, now)))
        now -= {k for k in now if k != key and all(j in done for j, t in inner.items() if k in t.dependencies)}
    return most


def test_what_two_results_share_stays_a_task() -> None:
    d = frame()
    shared = d[d.x > 7].assign(z=lambda p: p.x * 2)
    _, found, _ = fuse(shared.z.sum(), shared.map_partitions(len), threads=1)
    readers = [sum(key in task.dependencies for task in found.values()) for key in found]
    assert readers.count(2) == PARTS


def test_steps_side_by_side_need_as_many_partitions_as_threads() -> None:
    query = QUERIES["two columns apart"](frame())
    graph, few, _ = fuse(query, threads=PARTS + 1)
    _, enough, _ = fuse(query, threads=PARTS)
    apart = sum(isinstance(key, tuple) and key[0].startswith("mul") for key in few)
    assert apart == 2 * PARTS
    assert len(enough) < len(few) <= len(graph)


def user(p: Any) -> Any:
    return p


def long(p: Any) -> Any:
    return p


def starts(graph: dict[Any, Any], name: str) -> list[Any]:
    return [key for key in graph if isinstance(key, tuple) and str(key[0]).startswith(name)]


LATE = {
    "a frame to join with": lambda d: d.merge(dd.from_map(make, [0])[["k", "y"]], on="k"),
    "a mean": lambda d: d.assign(x=d.x - dd.from_map(make, [0]).x.mean()),
    "a value": lambda d: d.map_partitions(lambda p, v: p + v, dask.delayed(len)([1, 2]), meta=d),
    "another frame": lambda d: d + dd.from_delayed([dask.delayed(make)(i) for i in range(PARTS)], meta=make(0)),
}


@pytest.mark.parametrize("name", LATE)
def test_what_can_run_before_an_input_is_there_does(name: str) -> None:
    d = frame().map_partitions(long)[["k", "x"]]
    graph, found, keys = fuse(LATE[name](d).map_partitions(user).k.sum())
    reads = [key for key in starts(found, "long") if not found[key].dependencies]
    reads += [key for key in starts(found, "getitem") if not found[key].dependencies]
    assert len(reads) >= PARTS  # reading and the long step need nothing
    assert len(found) < len(graph)
    assert same(runs(found, keys), runs(graph, keys))


def test_a_small_frame_of_the_client_is_no_reason_to_wait() -> None:
    _, found, _ = fuse(QUERIES["a small frame"](frame().map_partitions(long)))
    assert not starts(found, "long")


@pytest.mark.parametrize("frames", [3, 6, 10])
def test_inputs_that_a_task_would_hold_count(frames: int) -> None:
    """A sum of many frames has two of them in hand. As one task it would have all."""
    made = [dd.from_delayed([dask.delayed(make)(i) for i in range(PARTS)], meta=make(0)) for _ in range(frames)]
    total = functools.reduce(operator.add, (m.x for m in made))
    graph, found, keys = fuse(total.sum())
    assert max(len(task.dependencies) for key, task in found.items() if isinstance(key, tuple)) <= max(PARTS, 3)
    assert all(len(task.dependencies) <= 3 for task in found.values() if steps.is_fused(task))
    assert same(runs(found, keys), runs(graph, keys))


@pytest.mark.parametrize(("name", "more"), [("long", True), ("x", False)])
def test_long_steps_side_by_side_need_full_rounds(name: str, more: bool) -> None:
    """Five partitions on four threads: the last one leaves three without work."""
    d = frame(5)
    a, b = (d.map_partitions(long).x, d.map_partitions(user).y) if more else (d.x * 2, d.y * 3)
    _, uneven, _ = fuse((a + b).sum(), threads=4)
    assert bool(starts(uneven, "long")) == more
    _, even, _ = fuse((a + b).sum(), threads=5)
    assert not starts(even, "long")


def test_long_steps_one_below_the_other_are_a_chain() -> None:
    d = frame(5).map_partitions(long)
    query = (d.x * 2 + d.y * 3).map_partitions(user).sum()
    _, found, _ = fuse(query, threads=4)
    assert not starts(found, "long")


def test_a_step_that_the_scheduler_has_stays() -> None:
    d = frame()
    step = d[d.x > 7]
    query = step.assign(z=step.x * 2).z.sum()
    graph, _, _ = fuse(query)
    name = next(key[0] for key in graph if isinstance(key, tuple) and key[0].startswith("gt"))
    _, found, _ = fuse(query, known={name})
    assert sum(key[0] == name for key in found if isinstance(key, tuple)) == PARTS


def test_a_step_with_a_wish_stays() -> None:
    query = QUERIES["a filter"](frame())
    graph, _, _ = fuse(query)
    one = next(key for key in graph if isinstance(key, tuple) and key[0].startswith("gt"))
    _, found, _ = fuse(query, annotated=[one])
    assert one in found


def test_data_of_the_client_stays_apart() -> None:
    """A task of it says by itself that it carries data."""
    graph, found, keys = fuse((dd.from_pandas(make(0), npartitions=4).x + 1).sum())
    data = [key for key in graph if isinstance(key, tuple) and key[0].startswith("frompandas")]
    assert len(data) == 4
    assert set(data) <= set(found)
    assert same(runs(found, keys), runs(graph, keys))


def test_other_graphs_are_left() -> None:
    for other in (da.ones(10, chunks=2).sum(), dask.delayed(sum)([1, 2])):
        graph, found, _ = fuse(other)
        assert found is graph


def test_a_task_that_something_else_reads_stays() -> None:
    """Whatever an expression says, the graph decides."""
    expression, graph = sent(QUERIES["a filter"](frame()))
    keys = list(flatten(expression.__dask_keys__()))
    one = next(key for key in graph if isinstance(key, tuple) and key[0].startswith("gt"))
    graph["other"] = Task("other", len, graph[one].ref())
    found = steps.fused(graph, steps.Steps(expression), asked=[*keys, "other"], annotated=(), known=(), threads=1)
    assert one in found
    assert runs(found, [*keys, "other"])[1] == ROWS
