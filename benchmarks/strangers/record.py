"""Turn a program that uses dask into a `Workload`: run it on small chunks, note every graph, task and size.

`Recorder` stands in for a client: dask hands it each graph that the program computes or persists, with keys and after
the optimisations that a real client gets. It runs the tasks one after the other, measures the size of each result, and
answers `persist` with stand-ins for futures. A key is released when its last stand-in is gone, as with real futures.

Chunks are small so that recording takes seconds. Results of `SMALL` bytes or more are scaled up to what the case asks
for; smaller ones (scalars, the factors of a tall matrix) are what they are. Durations are a model, not a measurement,
and so the same on every machine: bytes read and written over a rate that depends on the kind of task, and an overhead.
"""

from __future__ import annotations

import gc
import math
import random
import re
import zlib
from typing import TYPE_CHECKING, Any

import dask
import dask.order
from dask._task_spec import DataNode, TaskRef, convert_legacy_graph
from dask.base import collections_to_expr
from dask.core import flatten
from dask.sizeof import sizeof
from dask.utils import key_split

from dask_gpurt.simulate.model import Step, TaskSpec, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: results below this many bytes do not grow with the chunks
SMALL = 1_500
#: seconds that any task takes besides its bytes
OVERHEAD = 1e-3
#: words in a key's prefix -> bytes/s, first match; of input and output together, or of the output only
RATES: tuple[tuple[str, float, bool], ...] = (
    (r"random|normal|uniform|timeseries|read|from-zarr|open_dataset|make|load|create", 200e6, False),
    (r"getitem|split|alias|barrier|finalize|store|rename|projection|column|filter|transpose|reshape", 4e9, False),
    (r"svd|qr|lu|cholesky|solve|inv|lstsq|sort|percentile|quantile|median|fit", 150e6, True),
    (r"dot|matmul|einsum|tensordot|fft|merge|join|groupby|shuffle|unique|drop_duplicates|rolling", 400e6, True),
    (r"concat|assign|astype|where|sum|mean|max|min|add|sub|mul|div|truediv", 2e9, True),
    (r".", 1e9, True),
)
_PATTERNS = [(re.compile(words), rate, both) for words, rate, both in RATES]
#: standard deviation of the logarithm: of a prefix's rate, and of a task's duration
PREFIX_SPREAD, TASK_SPREAD = 0.4, 0.15
#: seconds between a client's steps, and per task of a graph that it makes and sends
CLIENT_SECONDS, CLIENT_SECONDS_PER_TASK = 0.01, 50e-6


class Held(TaskRef):
    """Stands in for the future of one key."""

    __slots__ = ("_recorder", "value")

    def __init__(self, key: Any, value: Any, recorder: Recorder) -> None:
        super().__init__(key)
        self.value = value
        self._recorder = recorder
        recorder.holds(key, 1)

    def __del__(self) -> None:
        self._recorder.holds(self.key, -1)

    __hash__ = TaskRef.__hash__


class Recorder:
    """What `dask.config.set(scheduler=recorder)` needs of a client, and the graphs that came."""

    def __init__(self) -> None:
        #: renamed key -> inputs, bytes of the result, declared as a source
        self.tasks: dict[Any, TaskSpec] = {}
        self.steps: list[Step] = []
        #: keys whose task is a value that came with the graph
        self.literals: set[Any] = set()
        self._names: dict[str, str] = {}
        self._held: dict[Any, int] = {}
        self._values: dict[Any, Any] = {}
        self._gone: list[Any] = []

    def holds(self, key: Any, change: int) -> None:
        """A stand-in for a key was made or has gone."""
        self._held[key] = self._held.get(key, 0) + change
        if not self._held[key]:
            del self._held[key]
            self._values.pop(key, None)
            self._gone.append(key)

    def __call__(self, expr: Any, keys: Any, **kwargs: Any) -> Any:
        """Compute: the client waits for the results, and lets go of the futures."""
        results = self._run(expr, list(flatten([keys])), waits=True)
        return _nested(keys, results)

    get = __call__

    def persist(self, collections: Any, optimize_graph: bool = True, **kwargs: Any) -> Any:
        """Persist: the client goes on, and holds the futures."""
        expr = collections_to_expr(collections, optimize_graph).optimize()
        keys = expr.__dask_keys__()
        results = self._run(expr, list(flatten(keys)), waits=False)
        held = {k: Held(k, v, self) for k, v in results.items()}
        self._values.update(results)
        out = []
        for collection, ks in zip(collections, keys, strict=True):
            rebuild, args = collection.__dask_postpersist__()
            out.append(rebuild({k: held[k] for k in flatten(ks)}, *args))
        return out

    def _run(self, expr: Any, keys: list[Any], *, waits: bool) -> dict[Any, Any]:
        gc.collect()
        self._let_go()
        graph = expr.__dask_graph__() if hasattr(expr, "__dask_graph__") else expr
        dsk = convert_legacy_graph(dict(graph))
        dsk = _needed(dsk, keys)
        uses: dict[Any, int] = dict.fromkeys(keys, 1)
        for node in dsk.values():
            for d in node.dependencies:
                uses[d] = uses.get(d, 0) + 1
        values: dict[Any, Any] = {}
        order = dask.order.order(dsk)
        names = []
        for key in sorted(dsk, key=order.__getitem__):
            if key in self._values and isinstance(dsk[key], DataNode):
                continue
            node = dsk[key]
            inputs = {d: values[d] if d in values else self._values[d] for d in node.dependencies}
            value = node(inputs)
            values[key] = value
            names.append(self._note(key, node, value))
            for d in node.dependencies:
                uses[d] -= 1
                if not uses[d]:
                    values.pop(d, None)
        outputs = [self._name(k) for k in keys]
        seconds = CLIENT_SECONDS + CLIENT_SECONDS_PER_TASK * len(names)
        self.steps.append(Step(tuple(names), tuple(outputs), tuple(outputs) if waits else (), waits, 0, seconds))
        return {k: values[k] if k in values else self._values[k] for k in keys}

    def _let_go(self) -> None:
        """Note with the last step what the program has let go of since."""
        gone, self._gone = self._gone, []
        if gone and self.steps:
            last = self.steps[-1]
            self.steps[-1] = last._replace(releases=(*last.releases, *(self._name(k) for k in gone)))

    def _note(self, key: Any, node: Any, value: Any) -> Any:
        name = self._name(key)
        dependencies = tuple(self._name(d) for d in sorted(node.dependencies, key=str))
        spec = TaskSpec(dependencies, 0.0, int(sizeof(value)), bool(getattr(node, "data_producer", False)))
        old = self.tasks.get(name)
        if old is not None and old.dependencies != dependencies:
            raise ValueError(f"{key!r} was computed before from other inputs; give the collection another name")
        self.tasks[name] = spec
        if isinstance(node, DataNode):
            self.literals.add(name)
        return name

    def _name(self, key: Any) -> Any:
        """The same in every process: tokens become numbers in the order in which they came."""
        head = key[0] if isinstance(key, tuple) else key
        short = self._names.get(head)
        if short is None:
            short = self._names[head] = f"{key_split(head)}-{len(self._names):06d}"
        if not isinstance(key, tuple):
            return short
        return (short, *(p if isinstance(p, (int, str)) else str(p) for p in key[1:]))


def _needed(dsk: dict[Any, Any], keys: Iterable[Any]) -> dict[Any, Any]:
    work, out = list(keys), {}
    while work:
        key = work.pop()
        if key in out or key not in dsk:
            continue
        out[key] = dsk[key]
        work.extend(dsk[key].dependencies)
    return out


def _nested(keys: Any, results: dict[Any, Any]) -> Any:
    return [_nested(k, results) for k in keys] if isinstance(keys, list) else results[keys]


def spread(name: str, sigma: float) -> float:
    """A factor around 1 that depends on the name only."""
    return math.exp(random.Random(zlib.crc32(name.encode())).gauss(0.0, sigma))


def seconds(case: str, prefix: str, bytes_in: float, bytes_out: float) -> float:
    """Duration of a task by the model above."""
    for pattern, rate, both in _PATTERNS:
        if pattern.search(prefix):
            nbytes = bytes_out + bytes_in if both else bytes_out
            return OVERHEAD + nbytes / rate * spread(f"{case}/{prefix}", PREFIX_SPREAD)
    raise AssertionError("the last pattern matches everything")


def workload(name: str, program: Callable[[], Any], grain_bytes: float, largest_bytes: float) -> Workload:
    """Record a program.

    Parameters
    ----------
    grain_bytes
        Size of an ordinary chunk as the program makes it when recorded.
    largest_bytes
        Size that such a chunk shall have in the workload.
    """
    recorder = Recorder()
    with dask.config.set(scheduler=recorder):
        program()
    gc.collect()
    factor = largest_bytes / grain_bytes
    tasks = {}
    sizes = {k: round(t.nbytes * factor) if t.nbytes >= SMALL else t.nbytes for k, t in recorder.tasks.items()}
    for key, task in recorder.tasks.items():
        prefix = key_split(key)
        made: float = sizes[key]
        if isinstance(key, tuple) and not task.dependencies and key not in recorder.literals:
            made = max(made, largest_bytes)  # a source fused with what comes after it still makes a chunk
        took = seconds(name, prefix, sum(sizes[d] for d in task.dependencies), made)
        tasks[key] = task._replace(seconds=took, nbytes=sizes[key])
    outputs = tuple(dict.fromkeys(k for step in recorder.steps for k in step.outputs))
    return Workload(name, tasks, outputs, jitter=TASK_SPREAD, steps=tuple(recorder.steps))


__all__ = ["Held", "Recorder", "seconds", "spread", "workload"]
