"""Which shuffles a task depends on, and which share their outputs: the sides of a join. On the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam

if TYPE_CHECKING:
    from collections.abc import Iterator


def sources(plugin: Any, ts: Any) -> Iterator[tuple[Any, Any]]:
    """(shuffle, its active run or None) of the barriers that a task depends on."""
    for other in ts.dependencies:
        if (name := seam.id_from_key(other.key)) is not None:
            yield name, plugin.active_shuffles.get(name)


def partner(plugin: Any, barrier: Any, shuffle_id: Any) -> dict[int, str]:
    """Owners in the shuffles that share outputs with this one."""
    found: dict[int, str] = {}
    for ts in barrier.dependents:
        for name, state in sources(plugin, ts):
            if name != shuffle_id and state is not None:
                found.update(state.run_spec.worker_for)
        break  # all outputs of a join depend on the same two barriers
    return found


def joined(plugin: Any, shuffle_id: Any) -> list[Any]:
    """Shuffles of ours that share outputs with this one, and whose barrier has passed."""
    amender = plugin.amender
    barrier = amender.barrier_of(shuffle_id)
    ts = None if barrier is None else next(iter(barrier.dependents), None)
    return [
        name
        for name, state in (sources(plugin, ts) if ts is not None else ())
        if name != shuffle_id and amender.barrier_of(name).state == "memory" and amender.ours(state)
    ]
