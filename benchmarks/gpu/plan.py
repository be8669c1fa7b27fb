"""The run on a GPU: a quarter of an hour, in four calls, each a list of cases with a limit of time.

A *case* is a process of its own, so that a fault, a hang or what a library has set up ends with it. Cases that only ask
whether something works run side by side, first; those that measure run *alone*, after them. Calls are in the order of
worth: when time runs out, what is left is worth least. Calls 0 and 1 need no cuDF.
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
    alone
        It measures, or takes most of the device's memory: no other case runs meanwhile.
    """

    experiment: str
    name: str
    seconds: int = 60
    alone: bool = False

    def __str__(self) -> str:
        return f"{self.experiment}:{self.name}"


def _cases(experiment: str, names: str, seconds: int = 60, *, alone: bool = False) -> list[Case]:
    return [Case(experiment, name, seconds, alone) for name in names.split()]


#: of `benchmarks.gpu.ucx`: memory, processes, context of UCX's thread, who orders. These are as workers have it
_UCX_MEASURED = "malloc-two-with-ours async-two-with-ours"
_UCX = " ".join(
    f"{memory}-{processes}-{context}-{order}"
    for memory in ("malloc", "async")
    for processes in ("one", "two")
    for context in ("with", "without")
    for order in ("ours", "raw")
    if f"{memory}-{processes}-{context}-{order}" not in _UCX_MEASURED.split()
)
_SHUFFLES = " ".join(
    f"{system}-{keys}-{workers}"
    for workers, keys in ((2, "text"), (1, "integers"))
    for system in ("gpurt", "gpurt-ucx", "tasks", "p2p", "tasks-ucx")
    if workers > 1 or not system.endswith("ucx")
)

#: number of a call -> its cases
CALLS: dict[int, list[Case]] = {
    0: [
        *_cases("tests", "core", 120),
        *_cases("machine", "facts ucx_info"),
        *_cases("oom", "storm", 90),
        *_cases("dask_cuda", "plain rmm-async rmm-pool", 60),
        *_cases("ucx", _UCX, 40),
    ],
    1: [
        *_cases("tests", "alone", 60, alone=True),
        *_cases("two_workers", "share", 120, alone=True),
        *_cases("ucx", _UCX_MEASURED, 30, alone=True),
        *_cases("spill", "gpurt-cupy-2 device-host-file-cupy-2 gpurt-cupy-4 device-host-file-cupy-4", 60, alone=True),
        *_cases("machine", "copies pinned", 60, alone=True),
    ],
    2: [
        *_cases("tests", "cudf", 150),
        *_cases("leaving", "shared sliced", 60),
        *_cases("operations", "shuffle merge set_index sort_values groupby drop_duplicates", 90),
    ],
    3: [
        *_cases("shuffle", _SHUFFLES, 80, alone=True),
        *_cases("spill", "gpurt-cudf-2 device-host-file-cudf-2 cudf-spill-cudf-2", 60, alone=True),
        *_cases("primitives", "numbers text", 60, alone=True),
    ],
}
#: part of the wheels (`ci/gpu/pack.py`) that a call brings
PARTS = {0: 0, 2: 1}
