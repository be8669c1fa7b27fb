"""The exported figures (`dask_gpurt.observe.figures.figure`) in the ``/metrics`` page that Dask serves.

Dask's page shows the process-wide registry of ``prometheus_client``. A process may hold several servers (in-process
clusters, tests), and a registry refuses a second collector of the same names ("Duplicated timeseries"). So there is
one collector for the process, which asks every server that is provided; the label ``address`` tells them apart. It is
in the registry exactly while there is a server to ask.

Without ``prometheus_client`` nothing happens. A server whose figures cannot be read is left out of that scrape and
counted: an exception would take Dask's own metrics with it.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

import dask

from dask_gpurt.observe.figures.figure import Figure, exported, full_name
from dask_gpurt.observe.figures.table import OWN, SCHEDULER, WORKER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed.core import Server
    from prometheus_client.core import Metric

logger = logging.getLogger("distributed.gpurt")


class _Collector:
    """What the registry calls on every scrape."""

    def __init__(self) -> None:
        #: server -> (its figures, how to read them)
        self.sources: weakref.WeakKeyDictionary[Any, tuple[tuple[Figure, ...], Callable[[], dict[str, Any]]]] = (
            weakref.WeakKeyDictionary()
        )
        self.errors = 0

    def describe(self) -> list[Metric]:
        """No names are claimed: otherwise the registry would scrape while it registers."""
        return []

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        namespace = dask.config.get("distributed.dashboard.prometheus.namespace", default="dask")
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}

        def add(figure: Figure, labels: list[str], values: list[str], number: float) -> None:
            name = full_name(figure, namespace)
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
                family = families[name] = kind(name, figure.about, labels=labels)
            family.add_metric(values, number)

        for server, (figures, read) in list(self.sources.items()):
            try:
                tree, address = read(), str(server.address)
            except Exception:
                self.errors += 1
                if self.errors == 1:
                    logger.warning("dask-gpurt: the figures for Prometheus could not be read", exc_info=True)
                continue
            for figure in figures:
                labels = ["address", *(name for name, _ in figure.labels)]
                for values, number in figure.samples(tree):
                    add(figure, labels, [address, *values], number)
        add(OWN, [], [], self.errors)
        yield from families.values()


_collector: _Collector | None = None


def provide_scheduler(server: Server, read: Callable[[], dict[str, Any]]) -> bool:
    """Show a scheduler's figures; False without ``prometheus_client``."""
    return _provide(server, exported(SCHEDULER), read)


def provide_worker(server: Server, read: Callable[[], dict[str, Any]]) -> bool:
    """Show a worker's figures; False without ``prometheus_client``."""
    return _provide(server, exported(WORKER), read)


def _provide(server: Server, figures: tuple[Figure, ...], read: Callable[[], dict[str, Any]]) -> bool:
    global _collector
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return False
    if _collector is None:
        made = _Collector()
        try:
            REGISTRY.register(made)
        except Exception:
            logger.warning("dask-gpurt: Prometheus does not take the figures, they are not shown", exc_info=True)
            return False
        _collector = made
    _collector.sources[server] = (figures, read)
    return True


def withdraw(server: Server) -> None:
    """Stop showing a server's figures. No error when they are not shown."""
    global _collector
    if _collector is None:
        return
    _collector.sources.pop(server, None)
    if not _collector.sources:
        from prometheus_client import REGISTRY

        with contextlib.suppress(KeyError):  # a program has emptied the registry, as tests of users do
            REGISTRY.unregister(_collector)
        _collector = None
