"""The run on a GPU: thirty minutes, in calls of at most ten, each a list of cases with a limit of time.

A *case* is a process of its own, so that a fault, a hang or what a library has set up ends with it. Calls are in the
order of worth: when time runs out, what is left is worth least. Calls 1 to 6 each bring one part of cuDF's wheels
(`ci/gpu/pack.py`), which are installed before call 7.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One process.

    Parameters
    ----------
    experiment
        Module of `benchmarks.gpu`.
    name
        What of it, for its `run`.
    seconds
        After which it is ended.
    """

    experiment: str
    name: str
    seconds: int = 60

    def __str__(self) -> str:
        return f"{self.experiment}:{self.name}"


def _cases(experiment: str, names: str, seconds: int = 60) -> list[Case]:
    return [Case(experiment, name, seconds) for name in names.split()]


#: of `benchmarks.gpu.ucx`: memory, processes, context of UCX's thread, who orders
_UCX = [
    f"{memory}-{processes}-{context}-{order}"
    for memory in ("malloc", "async")
    for processes in ("one", "two")
    for context in ("with", "without")
    for order in ("ours", "raw")
]

#: number of a call -> its cases
CALLS: dict[int, list[Case]] = {
    0: _cases("machine", "facts copies pinned ucx_info", 90),
    1: [Case("tests", "core", 300)],
    2: [Case("ucx", name, 30) for name in _UCX],
    3: _cases("dask_cuda", "plain rmm-async rmm-pool", 60),
    4: _cases("oom", "storm", 120),
    5: _cases("two_workers", "share", 120),
    6: _cases("spill", "gpurt-cupy-2 device-host-file-cupy-2 gpurt-cupy-4 device-host-file-cupy-4", 90),
    7: [
        Case("tests", "cudf", 180),
        *_cases("leaving", "shared sliced", 60),
        *_cases("primitives", "numbers text", 90),
        *_cases("spill", "gpurt-cudf-2 device-host-file-cudf-2 cudf-spill-cudf-2", 60),
    ],
    8: [
        Case("shuffle", f"{system}-{keys}-{workers}", 60)
        for workers in (1, 2)
        for keys in ("integers", "text")
        for system in ("gpurt", "p2p", "tasks", "tasks-ucx")
    ],
}
#: cuDF's part that a call brings; call 7 needs all of them
PARTS = {call: call - 1 for call in range(1, 8)}
