"""Which expressions that call a function of a user may be held."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
from dask._task_spec import Dict
from dask.delayed import DelayedLeaf

#: operands that can change in place, or hold something that can
CHANGING = (list, dict, set, np.ndarray, pd.DataFrame, pd.Series, pd.Index, Dict, DelayedLeaf)


def may_hold(expression: Any) -> bool:
    """Whether a `MapPartitions` may be held, as far as its function is concerned."""
    # Without the empty frame of its results, Dask would call the function to find out.
    return isinstance(expression.operand("meta"), pd.DataFrame | pd.Series | pd.Index) and not _may_change(expression)


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
