"""What the two parts that speak with workers from the scheduler have in common (`scheduler`, `scheduler`).

A worker that understands a message says so in its heartbeats: ``metrics["gpurt"]`` has a field per protocol. Others
must never get it, as an unknown op closes them.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import SeamMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: entry of ``worker.metrics`` with a field per protocol
HEARTBEAT_NAME = "gpurt"


def speaks(worker_state: Any, field: str, protocol: int) -> bool:
    """Has the last heartbeat of a worker said that it understands this protocol?"""
    ours = worker_state.metrics.get(HEARTBEAT_NAME)
    return isinstance(ours, dict) and ours.get(field) == protocol


def check_scheduler(
    scheduler: Any,
    calls: Mapping[str, tuple[Sequence[Any], Mapping[str, Any]]],
    names: Mapping[type, Sequence[str]],
    attributes: Sequence[str],
    remedy: str,
) -> None:
    """Raise `SeamMismatch` unless the scheduler is as we rely on.

    Parameters
    ----------
    calls
        Method -> arguments that it must take.
    names
        Class -> what its instances must have.
    attributes
        What the scheduler itself must have.
    remedy
        What to do otherwise, beside another version of distributed.
    """
    remedy = f"Nothing was changed. Remedy: use distributed >= 2026.7.1, < 2026.9, or {remedy}"
    for method, (args, kwargs) in calls.items():
        try:
            inspect.signature(getattr(scheduler, method)).bind(*args, **kwargs)
        except (AttributeError, TypeError, ValueError) as e:
            raise SeamMismatch(f"Scheduler.{method} cannot be called as this package relies on ({e}). {remedy}") from e
    wanted = [(owner.__name__, owner, name) for owner, of_owner in names.items() for name in of_owner]
    for title, owner, name in [*wanted, *(("Scheduler", scheduler, name) for name in attributes)]:
        if not hasattr(owner, name):
            raise SeamMismatch(f"distributed has no {title}.{name}. {remedy}")
