"""T4: whether threads that are at work keep processors and GPUs busy, and if not, what they wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import na, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.feed import Fed
    from dask_gpurt.doctor.finding import Verdict

#: seconds of tasks below which nothing is said
LEAST_SECONDS = 5.0
#: shares: of a GPU's time with kernels, of its link, of the threads' time that inputs are waited for
_KERNELS, _LINK, _STARVED = 0.3, 0.5, 0.25
#: processor time per time of tasks
_COMPUTED = 0.5
#: of the machine's processor time, unused: below it there is none to be had
_SPARE = 0.1
#: of one processor, from which a process of many threads runs one at a time
_ONE = 0.8


def _look(node: Node) -> Iterator[Verdict]:
    fed = node.fed
    if fed is None:
        yield na("no worker whose tasks are followed (dask gpurt doctor ADDRESS; gpurt.observe.enabled)")
        return
    if fed.busy < LEAST_SECONDS:
        yield na(f"tasks ran for {fed.busy:.1f} s of the last {fed.seconds:.0f} s, too little to judge by")
        return
    found = f"in the last {fed.seconds:.0f} s {fed.threads} threads ran tasks for {fed.busy:.0f} s"
    kinds = f" (mostly {', '.join(fed.kinds)})" if fed.kinds else ""
    idle_gpu = fed.kernels is not None and fed.kernels < _KERNELS
    if idle_gpu:
        yield _of_gpu(fed, f"{found}, and kernels of the GPU for {fed.kernels:.0%} of that{kinds}")
    if (fed.kernels is None or idle_gpu) and fed.computed < _COMPUTED * fed.busy:
        yield _of_processors(fed, f"{found}, and processors for {fed.computed:.1f} s{kinds}")
    gpu = "" if fed.kernels is None else f", kernels of the GPU for {fed.kernels:.0%} of that"
    yield ok(f"{found}, processors for {fed.computed:.0f} s{gpu}")


def _of_gpu(fed: Fed, found: str) -> Verdict:
    expected = f"at least {_KERNELS:.0%}"
    if fed.link is not None and fed.link > _LINK:
        return warn(
            f"{found}; its link to the host carries {fed.link:.0%} of what it can",
            expected=expected,
            meaning="Tasks copy between the host's memory and the GPU's",
            remedy="keep values on the GPU from task to task, read straight to it, convert less to pandas or numpy",
        )
    waited = fed.waiting / (fed.waiting + fed.busy)
    if waited > _STARVED:
        return warn(
            f"{found}; inputs were waited for {waited:.0%} of the time",
            expected=expected,
            meaning="Inputs come from peers or from disk more slowly than the GPU takes them",
            remedy="a faster way between workers (UCX), gpurt.tiers.device: auto, a faster spill folder",
        )
    return warn(
        found,
        expected=expected,
        meaning="Kernels are too small, or tasks work on processors between them",
        remedy="larger partitions; tasks that do not need the GPU on workers without one",
    )


def _of_processors(fed: Fed, found: str) -> Verdict:
    expected = f"at least {_COMPUTED:.0%} of the tasks' time"
    if fed.spare < _SPARE:
        return warn(
            f"{found}; {fed.spare:.0%} of the machine's processor time was left",
            expected=expected,
            meaning="Threads wait for processors: there are more of them than the machine has",
            remedy="fewer threads or workers (--nthreads, --nworkers), OMP_NUM_THREADS=1",
        )
    if fed.computed > _ONE * min(fed.seconds, fed.busy):
        return warn(
            f"{found}, one at a time",
            expected=expected,
            meaning="Tasks hold the interpreter's lock (GIL), so that only one thread computes",
            remedy="more workers of fewer threads (--nworkers, --nthreads), or code that releases the lock",
        )
    threads = max(2, round(fed.threads * min(4.0, fed.busy / max(fed.computed, 1e-3))))
    return warn(
        found,
        expected=expected,
        meaning="Tasks wait: for storage, a service, a lock, or they sleep",
        remedy=f"--nthreads {threads} if they wait for storage or services; else py-spy dump says what for",
    )


CHECK = Check(
    id="T4",
    name="Feed",
    looks_at="of the last minute of a worker: time of tasks (the ledger), processor time, kernels and link of its GPU",
    fails_when="warn: tasks use processors for less than half of their time, and kernels of the GPU run in less than "
    "30 % of it: copies (the link above 50 %), inputs (waited for above 25 %), or small kernels",
    remedy="more threads, fewer threads, larger partitions, by what is waited for",
    look=_look,
)
