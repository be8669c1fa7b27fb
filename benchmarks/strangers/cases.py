"""All cases of the simulated net by name, and their workloads."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import zlib
from typing import TYPE_CHECKING, Any

import dask

from benchmarks import data
from benchmarks.strangers import arrays, frames, graphs, iterate, patterns, random_graphs, record, reductions
from benchmarks.strangers.catalogue import PROGRAMS, Scale, set_of
from benchmarks.strangers.record import workload
from dask_gpurt.simulate import model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.simulate.model import Workload

#: modules that register programs when they are imported
SOURCES = (arrays, reductions, frames, graphs, iterate)
#: edge of a chunk when a program is recorded: 128 kB
GRAIN = 128
#: bytes of an ordinary chunk in the simulation; which one follows from the name
LARGEST = (4_000_000, 32_000_000, 128_000_000)
#: programs that two clients run side by side
PAIRS = {
    "two_clients_svd_and_notebook": ("svd_tall", "explore_one_frame"),
    "two_clients_k_means_and_tree": ("k_means", "tree_of_sums"),
    "two_clients_same_sums": ("standardise", "moments"),
    "two_clients_frames_and_overlap": ("groupby_tree", "overlap_2d"),
    "two_clients_iterations": ("gradient_descent", "power_iteration"),
    "two_clients_pipelines": ("pipelines_of_stages", "skewed_sizes"),
}


def names(which: str, randoms: int) -> list[str]:
    """Cases of a set; of the random graphs the first `randoms`."""
    chosen = [n for n in random_graphs.NAMES if set_of(n) == which][:randoms]
    return [n for n in (*PROGRAMS, *PAIRS, *patterns.NAMES) if set_of(n) == which] + chosen


def build(name: str, workers: int) -> Workload:
    """The workload of a case; recorded programs are kept in `data.OUT`, for as long as their sources do not change."""
    if name not in PROGRAMS:
        return make(name, workers)
    path = os.path.join(data.OUT, "strangers", f"{name}-{workers}-{_version()}.pickle")
    if os.path.exists(path):
        with open(path, "rb") as f:
            kept: Workload = pickle.load(f)
            return kept
    load = make(name, workers)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.{os.getpid()}", "wb") as f:
        pickle.dump(load, f)
    os.replace(f"{path}.{os.getpid()}", path)
    return load


@functools.cache
def _version() -> str:
    text = f"{dask.__version__} {GRAIN} {LARGEST}"
    for module in (record, model, *SOURCES):
        with open(str(module.__file__)) as f:
            text += f.read()
    return f"{zlib.crc32(text.encode()):08x}"


def make(name: str, workers: int) -> Workload:
    """The workload of a case, made anew.

    Raises
    ------
    ValueError
        There is no such case.
    """
    if name.startswith("random-"):
        return random_graphs.build(name, workers)
    if name.startswith("taskbench_"):
        return patterns.build(name, workers)
    if name in PAIRS:
        return together(name, [build(part, workers) for part in PAIRS[name]])
    if name not in PROGRAMS:
        raise ValueError(f"case is {name!r}, must be one of {', '.join((*PROGRAMS, *PAIRS))}, or a pattern or random-N")
    run, scale = PROGRAMS[name].run, Scale(workers, GRAIN)
    largest = LARGEST[zlib.crc32(name.encode()) // 7 % len(LARGEST)]
    return workload(name, lambda: run(scale), GRAIN * GRAIN * 8, largest)


def together(name: str, parts: Sequence[Workload]) -> Workload:
    """Several workloads on one cluster, each by a client of its own."""
    tasks: dict[Any, Any] = {}
    steps, outputs = [], []
    for i, part in enumerate(parts):
        new = {k: _key(k, i) for k in part.tasks}
        tasks |= {new[k]: t._replace(dependencies=tuple(new[d] for d in t.dependencies)) for k, t in part.tasks.items()}
        outputs += [new[k] for k in part.outputs]
        for step in part.steps:
            keys, outs, releases = ([new[k] for k in ks] for ks in (step.keys, step.outputs, step.releases))
            steps.append(step._replace(keys=keys, outputs=outs, releases=releases, client=i))
    return dataclasses.replace(parts[0], name=name, tasks=tasks, outputs=outputs, steps=steps)


def _key(key: Any, client: int) -> Any:
    # A number at the end keeps the prefix that dask cuts out of a key.
    return (f"{key[0]}-{client}", *key[1:]) if isinstance(key, tuple) else f"{key}-{client}"
