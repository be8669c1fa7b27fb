"""pytest plugin: every compute of a suite that uses the local schedulers runs on one cluster, shuffles by P2P.

dask's own DataFrame and array suites compute with ``scheduler="sync"``. They hold far more result checks for
shuffles, merges and group-bys than distributed's, so they are worth having on a cluster. The named local schedulers
are replaced by ``Client.get`` of one session-wide LocalCluster (2 workers in this process, 2 threads each), and the
default shuffle method is ``p2p``. The fixture ``shuffle_method`` asks for ``disk`` and ``tasks``: its ``disk``
becomes ``p2p``, as ``disk`` cannot work on a cluster of more than one machine. (The test ids still say ``disk``.)

A compute started inside a task keeps its local scheduler: it would wait, in a worker's thread, for a free worker
thread.

Some tests may fail on a cluster by design (inputs that cannot be pickled, messages of local schedulers): so sets are
compared with a stock run under the same plugin, no zero is expected.

For each test the numbers of computes and of P2P barriers sent to the cluster go into the log of `active`.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from .active import current_test, note

if TYPE_CHECKING:
    from collections.abc import Generator

_LOCAL = ("sync", "synchronous", "single-threaded", "threads", "threading")
_KEPT = ("workers", "resources", "priority", "retries", "optimize_graph")


def _barriers(dsk: Any) -> int:
    """Number of P2P barrier tasks in what is about to be computed; an expression is asked for its graph."""
    graph = dsk.__dask_graph__() if hasattr(dsk, "__dask_graph__") else dsk
    names = (k[0] if isinstance(k, tuple) else k for k in graph)
    return sum(isinstance(n, str) and n.startswith("shuffle-barrier-") for n in names)


@pytest.fixture(scope="session", autouse=True)
def _session_cluster() -> Generator[None]:
    import dask
    import dask.base
    from distributed import Client, LocalCluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = LocalCluster(
            n_workers=2,
            threads_per_worker=2,
            processes=False,
            dashboard_address=None,
            memory_limit="4GiB",
            silence_logs=50,
        )
        client = Client(cluster, set_as_default=False)
    local = dict(dask.base.named_schedulers)
    main = threading.main_thread()

    def on_cluster(own: Any) -> Any:
        def get(dsk: Any, keys: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not main:
                return own(dsk, keys, **kwargs)
            try:
                barriers = _barriers(dsk)
            except Exception:  # the count is only for the report; the compute below shows the fault, if it is one
                barriers = 0
            note(computes=1, barriers=barriers)
            # Some suites forbid the pickling of expressions while they build a graph; a sort computes its divisions
            # there, which a local scheduler does without pickling and a cluster cannot.
            with dask.config.set({"dask-expr-no-serialize": False}):
                return client.get(dsk, keys, **{k: v for k, v in kwargs.items() if k in _KEPT})

        return get

    for name in _LOCAL:
        dask.base.named_schedulers[name] = on_cluster(local[name])
    dask.config.set({"scheduler": "sync", "dataframe.shuffle.method": "p2p"})
    note(session=current_test())
    yield
    dask.base.named_schedulers.clear()
    dask.base.named_schedulers.update(local)
    client.close()
    cluster.close()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
    """Turns the parameter ``disk`` of the fixture ``shuffle_method`` into ``p2p``."""
    if fixturedef.argname == "shuffle_method" and getattr(request, "param", None) == "disk":
        request.param = "p2p"
    return (yield)
