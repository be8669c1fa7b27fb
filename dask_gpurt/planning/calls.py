"""Which expressions that call a function of a user may be held.

Only what maps one over partitions is, and only with the empty frame of its results. All others that are given one call
it while a query is planned: what it reads beside its arguments, such as a dict of its module, may have changed since.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
from dask._task_spec import Dict
from dask.delayed import DelayedLeaf

#: those of pandas that Dask has, too
ACCESSORS = frozenset(("cat", "dt", "list", "str", "struct"))
#: operands that can change in place, or hold something that can
CHANGING = (list, dict, set, np.ndarray, pd.DataFrame, pd.Series, pd.Index, Dict, DelayedLeaf)


def may_hold(expression: Any) -> bool:
    """Whether an expression may be held, as far as the function of a `MapPartitions` or an accessor is concerned."""
    if maps(expression):
        # Without the empty frame of its results, Dask would call the function to find out.
        meta = expression.operand("meta")
        return isinstance(meta, pd.DataFrame | pd.Series | pd.Index) and not _may_change(expression)
    # Users register accessors of their own, and again.
    return "accessor" not in type(expression)._parameters or expression.operand("accessor") in ACCESSORS


def maps(expression: Any) -> bool:
    """Whether it maps a function over partitions."""
    return type(expression).__name__ == "MapPartitions"


def _may_change(expression: Any) -> bool:
    """Whether the function has an argument that it can change in place.

    In threads of this process it is given what is held, and the next query would start with what it left.
    """
    arguments = expression.operands[len(expression._parameters) :]
    left = [expression.operand("func"), *arguments, *(expression.operand("kwargs") or {}).values()]
    for value in left:  # grows
        if isinstance(value, functools.partial):
            left += (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, tuple):
            left += value
        elif isinstance(value, CHANGING):
            return True
    return False
