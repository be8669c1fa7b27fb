"""What the name of an expression leaves out: `is_named` and `order_of` look at its operands, `alike` compares two.

Dask leaves out the order of a dict, which is the order of an aggregation's columns; how an array of several dimensions
lies in memory; and where a text in an array of objects ends. What has such an array is not held. What has a dict is
held with its order: it is found again only by an expression with its dicts in that order, made of the same expressions.
The same goes for all that is built on it, as its name tells no more.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from dask._task_spec import Dict
from dask.delayed import DelayedLeaf

#: operands that Dask has made of a data set; known to be small whatever they are
DATA_SET = frozenset(("_dataset_info_cache", "filesystem", "fs"))
#: operands whose dicts mean the same in any order, or which Dask has made
_UNORDERED = DATA_SET.union(
    ("_meta", "arrow_to_pandas", "chunk_kwargs", "columns", "combine_kwargs", "decimals", "dtypes"),
    ("meta", "parent_meta", "storage_options", "value"),
)
#: what may have a dict or an array in it, or is one; most operands are not
_DEEP = (dict, list, tuple, np.ndarray, functools.partial, Dict, DelayedLeaf)
#: attribute of an expression that is held: whether anything in it has an order (`has_order`)
_ORDERED = "_gpurt_ordered"


def is_named(name: str, operand: Any) -> bool:
    """Whether the name of an expression tells all of an operand but the order of dicts."""
    return all(not isinstance(v, np.ndarray) or (v.ndim < 2 and not v.dtype.hasobject) for v in _leaves(name, operand))


def order_of(expression: Any) -> tuple[tuple[int, tuple[Any, ...]], ...]:
    """(place of the operand, keys in their order) of each dict of two keys or more in its own operands."""
    names = type(expression)._parameters
    return tuple(
        (i, tuple(value))
        for i, operand in enumerate(expression.operands)
        for value in _leaves(names[i] if i < len(names) else "", operand)
        if isinstance(value, dict) and len(value) > 1
    )


def has_order(expression: Any) -> bool:
    """Whether anything that an expression is made of has a dict whose order its name leaves out. Kept with it."""
    known: bool | None = vars(expression).get(_ORDERED)
    if known is None:
        known = bool(order_of(expression)) or any(map(has_order, expression.dependencies()))
        vars(expression)[_ORDERED] = known
    return known


def is_ordered(expression: Any) -> bool:
    """What `has_order` has kept. False for an expression that is not held: Dask finds it by its name, as ever."""
    return bool(vars(expression).get(_ORDERED))


def alike(found: Any, asked: Any) -> bool:
    """Whether an ordered expression may stand for one of its name that was just made; `asked` is None if unknown."""
    if type(asked) is not type(found) or order_of(asked) != order_of(found):
        return False
    pairs = zip(found.dependencies(), asked.dependencies(), strict=True)
    return all(one is other or not has_order(one) for one, other in pairs)


def _leaves(name: str, operand: Any) -> list[Any]:
    """An operand and all that is in it, as far as a user has chosen it and its order may count."""
    if not isinstance(operand, _DEEP) or name in _UNORDERED:
        return []
    if name == "aggregate_kwargs":
        operand = operand.get("spec") if isinstance(operand, dict) else None
    elif name == "kwargs" and isinstance(operand, dict):
        operand = list(operand.values())
    out = [operand]
    for value in out:  # grows
        if isinstance(value, dict):
            out += value.values()
        elif isinstance(value, functools.partial):
            out += (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, Dict):
            out.append(value.args)
        elif isinstance(value, DelayedLeaf):
            out.append(value._obj)
        elif isinstance(value, list | tuple):
            out += value
    return out
