"""How much host memory and disk the values of one worker may take: `limits_of`.

What the user set in distributed's configuration is respected:

==========================================  ==================================================================
``memory_limit`` 0 or None                  nothing is ever spilled
``distributed.worker.memory.target: false`` no budget of managed bytes
``target`` changed, ``host-limit`` not      ``target`` is the budget
``distributed.worker.memory.spill: false``  the resident set is not watched
both false                                  nothing is ever spilled; values stay in memory
``distributed.worker.memory.max-spill``     the disk limit, unless ``gpurt.tiers.disk-limit`` is set
==========================================  ==================================================================

Where ``worker.data`` is left alone, the budget is that of the shards of shuffles: a quarter of the usual one, as task
results fill the rest. What the user set about spilling *values* does not count there, and a worker without a memory
limit takes its part of the system's memory for it (as ``memory_limit="auto"`` does). Dask's own shuffle writes every
byte to disk, whatever these settings are. So with shards in memory without limit, a shuffle could end a worker that
would have lived.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dask.system import CPU_COUNT
from distributed import system

from dask_gpurt.config import DEFAULTS

if TYPE_CHECKING:
    from distributed.worker import Worker

    from dask_gpurt.config import TierSettings

#: distributed's default
_STOCK_TARGET = 0.6
#: share of the budget for shards where worker.data stays with distributed, which fills its own 60 %
_SHARDS_ONLY = 0.25

#: share of the limit; between two looks a process may grow by what its threads allocate in a tenth of a second
_CEILING = 0.8
#: how far below distributed's mark for pausing a worker values have to stay, as a share of the limit: a pause of a
#: tenth of a second costs more than the values that it makes room for
_BELOW_PAUSE = 0.05


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the tiers of one worker may take, in bytes; None: no limit."""

    budget_bytes: int | None
    disk_limit_bytes: int | None
    #: None: see `storage.disk.quota.reserve_of`
    disk_reserve_bytes: int | None
    #: resident set of the process at which values go to disk, and until which
    watch_high_bytes: int | None
    watch_low_bytes: int | None
    #: resident set of the process that values may fill it up to; below where distributed's nanny ends it
    ceiling_bytes: int | None
    #: columns of files that are kept while memory is free
    reads_bytes: int
    #: tasks use again what others freed
    reuse: bool
    interval_seconds: float
    #: task results are not ours
    shards_only: bool


def limits_of(worker: Worker, settings: TierSettings, *, shards_only: bool) -> Limits:
    """Combine what a worker and our settings say; see the table above. `shards_only`: ``worker.data`` is left alone."""
    manager = worker.memory_manager
    limit = manager.memory_limit
    target, spill = manager.memory_target_fraction, manager.memory_spill_fraction
    share = settings.host_limit
    if target and target != _STOCK_TARGET and share == DEFAULTS["gpurt"]["tiers"]["host-limit"]:
        share = target
    budget = int(limit * share) if limit and target else None
    if shards_only:
        memory = limit or system.MEMORY_LIMIT * min(1, worker.state.nthreads / CPU_COUNT)
        budget = int(memory * share * _SHARDS_ONLY)
    disk = settings.disk_limit
    if disk is None and manager.max_spill is not False:
        disk = int(manager.max_spill)
    watched = bool(limit and spill)
    pause = manager.memory_pause_fraction
    # Nor do they fill it up to the mark of the watch: to be moved out again, a tenth of the limit at a time, are then
    # also those that were just read ahead.
    ceiling = min(_CEILING, spill or 1, pause - _BELOW_PAUSE if pause else 1)
    return Limits(
        budget_bytes=budget,
        disk_limit_bytes=disk,
        disk_reserve_bytes=settings.disk_reserve,
        watch_high_bytes=int(limit * spill) if watched else None,
        watch_low_bytes=int(limit * (target or spill)) if watched else None,
        ceiling_bytes=int(limit * ceiling) if watched else None,
        reads_bytes=int(limit * settings.read_cache) if watched and not shards_only else 0,
        reuse=settings.reuse,
        interval_seconds=manager.memory_monitor_interval or 0.1,
        shards_only=shards_only,
    )
