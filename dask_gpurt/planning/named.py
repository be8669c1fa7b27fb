"""What the name of an expression leaves out: `untold` finds it in the operands, `alike` compares two expressions by it.

Dask leaves out, among others, the order of a dict, which is the order of an aggregation's columns; which of a
function's named arguments has which value; the unit of a timestamp; how text is stored; which column of a frame has
which type; where pyarrow reads files, their columns, and that they were written again with the same size and time; how
an array of several dimensions lies in memory; and where a text in an array of objects ends. So an expression with such
an operand is found again only by one with the same operand, made of the same expressions. The same goes for all that is
built on it, as its name tells no more.

What a name may leave out is compared by its pickle. An operand that is pickled differently each time, or not at all,
costs a lookup that finds nothing.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import functools
import pickle
import types
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
from dask._expr import Expr
from dask._task_spec import Dict
from dask.delayed import DelayedLeaf
from dask.utils import itemgetter, methodcaller

from dask_gpurt.planning import files

if TYPE_CHECKING:
    from collections.abc import Sequence

#: operands that Dask has made of a data set; known to be small whatever they are
DATA_SET = frozenset(("_dataset_info_cache", "filesystem", "fs"))
#: operands that Dask has made of others
_MADE = DATA_SET.union(("_meta", "meta", "parent_meta", "storage_options"))
#: operands whose dicts mean the same in any order, or which Dask has made
_UNORDERED = frozenset(("arrow_to_pandas", "chunk_kwargs", "columns", "combine_kwargs", "decimals", "dtypes", "value"))
#: exact types of which a name tells all; most operands are of them
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, decimal.Decimal))
_DAYS = frozenset((datetime.date, datetime.time, datetime.datetime, datetime.timedelta))
#: kinds of which it tells all; a function is known by its place
_TOLD = (
    *(Expr, type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodType),
    *(np.ufunc, methodcaller),
)
#: kinds of which it tells all, if it does so of what they are made of
_PARTED = (functools.partial, DelayedLeaf, itemgetter)
_SEQUENCES = frozenset((list, tuple, slice))
#: attribute of an expression that is held: whether a name leaves out something of it (`has_untold`)
_UNTOLD = "_gpurt_untold"


def untold(expression: Any, among: Sequence[int] | None = None) -> tuple[tuple[int, Any], ...]:
    """(place of the operand, what a name leaves out) of an expression's own operands; to be compared.

    `among`: the places of those that are neither atoms nor expressions, where they are known.
    """
    names = type(expression)._parameters
    operands = expression.operands
    out: list[tuple[int, Any]] = []
    for i in range(len(operands)) if among is None else among:
        operand = operands[i]
        if type(operand) in ATOMS or isinstance(operand, Expr):
            continue
        name = names[i] if i < len(names) else ""
        if name == "_dataset_info_cache":
            out += ((i, fact) for fact in files.facts(expression, operand))
            continue
        # The only empty frame that a user gives.
        if name in _MADE and (name, type(expression).__name__) != ("meta", "MapPartitions"):
            continue
        out += ((i, fact) for fact in _facts(name, operand))
    return tuple(out)


def has_untold(expression: Any, among: Sequence[int] | None = None) -> bool:
    """Whether a name leaves out something of an expression, or of what it is made of. Kept with it. See `untold`."""
    known: bool | None = vars(expression).get(_UNTOLD)
    if known is None:
        known = bool(untold(expression, among)) or any(map(has_untold, _made_of(expression)))
        vars(expression)[_UNTOLD] = known
    return known


def is_untold(expression: Any) -> bool:
    """What `has_untold` has kept. False for an expression that is not held: Dask finds it by its name, as ever."""
    return bool(vars(expression).get(_UNTOLD))


def alike(found: Any, asked: Any) -> bool:
    """Whether such an expression may stand for one of its name that was just made; `asked` is None if unknown."""
    if type(asked) is not type(found) or untold(asked) != untold(found):
        return False
    pairs = zip(_made_of(found), _made_of(asked), strict=True)
    return all(one is other or not has_untold(one) for one, other in pairs)


def _made_of(expression: Any) -> list[Any]:
    return [v for v in expression.operands if isinstance(v, Expr)]  # `dependencies` leaves out what was fused


def _facts(name: str, operand: Any) -> list[Any]:
    """What a name leaves out of an operand and of all that is in it."""
    if name == "aggregate_kwargs":
        operand = operand.get("spec") if isinstance(operand, dict) else None
    left = [operand]
    ordered = name not in _UNORDERED
    out: list[Any] = []
    for value in left:  # grows
        kind = type(value)
        if kind in ATOMS or isinstance(value, _TOLD) or (kind in _DAYS and getattr(value, "tzinfo", None) is None):
            continue
        if kind is dict:
            left += (*value, *value.values())
            if ordered and len(value) > 1:
                out.append(tuple(value))
        elif kind is slice:
            left += (value.start, value.stop, value.step)
        elif kind in _SEQUENCES:
            left += value
        elif kind is Dict:
            # Arguments by their names. To Dask they are a heap of names and values, in any order.
            if value.args:
                out.append(pickled(value.args))
        elif isinstance(value, _PARTED):
            left += _parts(value)
        elif not _is_told(value):
            out.append((kind, pickled(value)))
    return out


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, functools.partial):
        return value.func, *value.args, value.keywords
    return (value._obj,) if isinstance(value, DelayedLeaf) else (value.index,)


def _is_told(value: Any) -> bool:
    """Whether a name tells all of a value that is none of the plain ones."""
    if type(value) is np.ndarray:
        return value.ndim < 2 and value.dtype.names is None and not value.dtype.hasobject
    if isinstance(value, set | frozenset):
        return ATOMS.issuperset(map(type, value))
    if type(value) is OrderedDict:
        return ATOMS.issuperset(map(type, value.values()))
    # Those of a number or a text may be written as what they derive from.
    return isinstance(value, np.generic) and not isinstance(value, float | complex | str | bytes)


def pickled(value: Any) -> object:
    """The pickle of a value, to be compared."""
    try:
        # Of a copy: a part of a larger frame and a copy of it are pickled differently.
        return pickle.dumps(copy.deepcopy(value), protocol=5)
    except Exception:  # whatever a part of it raises
        return object()  # like nothing else
