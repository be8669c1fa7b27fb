"""Shards by the owners of their outputs; views, any thread."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from dask_gpurt.shuffle.rows.partition import Shard


def by_owner(shard: Shard, owner_of: Callable[[int], Any]) -> Iterable[tuple[Any, Shard]]:
    """(owner, its rows) of neighbours with one owner; views."""
    ends = np.concatenate([[0], np.cumsum(shard.lengths, dtype=np.int64)])
    at = 0
    for owner, parts in itertools.groupby(shard.parts, lambda part: owner_of(int(part))):
        first, at = at, at + len(list(parts))
        yield (
            owner,
            dataclasses.replace(
                shard,
                table=shard.table.slice(int(ends[first]), int(ends[at] - ends[first])),
                parts=shard.parts[first:at],
                lengths=shard.lengths[first:at],
                known_bytes=-1,
                apart=None,
            ),
        )


def parted(shard: Shard, parts: Collection[int]) -> tuple[list[Shard], list[Shard]]:
    """(rows of some outputs, the rest); views."""
    inside = np.isin(shard.parts, list(parts))
    if not inside.any():
        return [], [shard]
    pieces = list(by_owner(shard, lambda part: part in parts))
    return [one for mine, one in pieces if mine], [one for mine, one in pieces if not mine]
