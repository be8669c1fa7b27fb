"""`JoinSide`: what one side of a hash join does with the keys of the other. Pure; decided once, before the side starts.

Theory of operation. A row may be dropped before it is sent if the join loses it anyway when no key of the other side
equals its own:

=============  =========================  ===================================================
join           sides whose rows may go    why not the others
=============  =========================  ===================================================
inner          both
leftsemi       both                       Dask makes it an inner join with distinct right rows
left           right                      every left row is in the result
right          left                       every right row is in the result
outer, others  none                       every row is
=============  =========================  ===================================================

Nor may rows of a side go that has categories which its meta does not know: each input brings its own, and those of an
input whose rows are all dropped would be missing from the result (``observed=False`` shows them).

A filter of some keys of a side says nothing: a key that is absent so far may come with the next input. So only the
filter of *all* inputs of a side is used (`covers`), which is there once that side's barrier is reached. Whether parts
of it came from attempts that count makes no difference: the rows of an input are the same whenever it is split, by
Dask's contract, and more keys than there are only let more rows pass.

So every row that is dropped could not match. An input may be split again with another filter or with none, and its
rows for different outputs may come from different attempts: each output has all of the rows that can match, and some
that cannot. The merge drops those.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle.rows.join_keys import exact

if TYPE_CHECKING:
    from collections.abc import Collection

    import pandas as pd

    from dask_gpurt.shuffle.rows.key_filter import KeyFilter

#: how -> (left rows may be dropped, right rows may be dropped)
DROPS = {"inner": (True, True), "leftsemi": (True, True), "left": (False, True), "right": (True, False)}


@dataclasses.dataclass(frozen=True)
class Join:
    """What Dask's task of an output says of its join."""

    left: str
    right: str
    how: str
    left_on: Any
    right_on: Any
    left_index: bool
    right_index: bool


@dataclasses.dataclass
class JoinSide:
    """One side of a join; goes to the workers with the spec of its shuffle."""

    #: id of the other side's shuffle
    partner: str
    #: names of the key columns
    columns: tuple[Any, ...]
    #: input partitions of this side
    inputs: int
    partner_inputs: int
    #: its rows may be dropped
    drops: bool
    #: its keys are collected for the other side: that may drop rows, and is not known to be the smaller one
    builds: bool
    #: the keys of the other side, once they are known
    filter: KeyFilter | None = dataclasses.field(default=None, repr=False)


def droppers(join: Join) -> frozenset[str]:
    """Shuffle ids of the sides that may lose rows; the others of the two may make a filter."""
    may = DROPS.get(join.how, (False, False))
    return frozenset(name for name, drops in zip((join.left, join.right), may, strict=True) if drops)


def side_of(
    join: Join,
    shuffle_id: str,
    metas: dict[str, pd.DataFrame],
    inputs: dict[str, int],
    collecting: Collection[str] | None = None,
) -> tuple[JoinSide | None, str]:
    """(what a side does, "") or (None, why there is no filter).

    Parameters
    ----------
    metas
        Shuffle id -> empty input partition, of both sides.
    inputs
        Shuffle id -> number of input partitions, of both sides.
    collecting
        Ids of the sides whose keys are collected, if they may be; None: those with no more inputs than the other.
    """
    drops = droppers(join)
    if not drops:
        return None, f"{join.how} join"
    if join.left == join.right:
        return None, "joined with itself"
    if join.left_index or join.right_index:
        return None, "joined on an index"
    keys = {join.left: _names(join.left_on), join.right: _names(join.right_on)}
    if len(keys[join.left]) != len(keys[join.right]) or not keys[join.left]:
        return None, "keys are not columns"
    for name_of_side, names in keys.items():
        columns = metas[name_of_side].columns
        if any(name not in columns or list(columns).count(name) != 1 for name in names):
            return None, "keys are not columns"
    for left, right in zip(keys[join.left], keys[join.right], strict=True):
        one, other = metas[join.left].dtypes[left], metas[join.right].dtypes[right]
        if one != other:
            return None, "keys of two dtypes"
        if not exact(one):
            return None, f"keys of dtype {one}"
    drops = frozenset(name for name in drops if not _brings_categories(metas[name]))
    if not drops:
        return None, "categories that are not known"
    partner = join.right if shuffle_id == join.left else join.left
    small = inputs[shuffle_id] <= inputs[partner] if collecting is None else shuffle_id in collecting
    builds = partner in drops and small
    side = JoinSide(partner, keys[shuffle_id], inputs[shuffle_id], inputs[partner], shuffle_id in drops, builds)
    return side, ""


def _brings_categories(meta: pd.DataFrame) -> bool:
    """Whether the inputs of a side have categories that its meta does not know."""
    from dask.dataframe.utils import UNKNOWN_CATEGORIES

    kinds = (getattr(dtype, "categories", None) for dtype in meta.dtypes)
    return any(categories is not None and UNKNOWN_CATEGORIES in categories for categories in kinds)


def _names(on: Any) -> tuple[Any, ...]:
    if on is None:
        return ()
    return tuple(on) if isinstance(on, list) else (on,)


def covers(parts: Collection[Collection[int]], inputs: int) -> bool:
    """Whether workers that hold the keys of these inputs hold the keys of all."""
    return len(set().union(*parts)) == inputs
