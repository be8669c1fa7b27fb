"""Values of columns of objects that Arrow takes and makes something else of: `changes_in` finds them.

Text beside bytes becomes bytes, moments beside dates become dates, times of a day lose their zones, moments without a
zone get that of others, and moments and spans lose their nanoseconds. Integers become floats where an output has nulls,
and floats cannot hold the large ones. Which other inputs have nulls no worker knows that splits one, so a column with
large integers never goes as Arrow's.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd
    import pyarrow as pa

#: the largest integer up to which floats hold all
_EXACT = 1 << 53


def changes_in(kind: pa.DataType) -> Callable[[pd.Series | pd.Index], bool] | None:
    """Whether Arrow changed values that became this type is asked of what is returned; None: it changes none."""
    import pyarrow as pa

    is_a = pa.types
    tests = (
        (is_a.is_binary, _has_text),
        (is_a.is_date, _has_moments),
        (is_a.is_time, _has_zones),
        (is_a.is_timestamp, _has_moments_that_change),
        (is_a.is_duration, _has_nanoseconds),
        (is_a.is_integer, _has_large_integers),
    )
    return next((test for of_type, test in tests if of_type(kind)), None)


def _has_text(values: pd.Series | pd.Index) -> bool:
    import pandas as pd

    if pd.api.types.infer_dtype(values, skipna=True) == "bytes":
        return False
    return any(isinstance(value, str) for value in values)


def _has_moments(values: pd.Series | pd.Index) -> bool:
    """Whether there are times of a day beside dates: Arrow makes dates of them where a date comes first."""
    import pandas as pd

    kinds = set(map(type, values)) - {type(pd.NaT)}
    return any(issubclass(kind, datetime.datetime) for kind in kinds)


def _has_zones(values: pd.Series | pd.Index) -> bool:
    """Whether times of a day have zones, which Arrow's have not."""
    return any(getattr(value, "tzinfo", None) is not None for value in values)


def _has_moments_that_change(values: pd.Series | pd.Index) -> bool:
    """Whether Arrow changes some moments: it gives all a zone or none, and `_has_nanoseconds`."""
    import pandas as pd

    moments = (value for value in values if isinstance(value, datetime.datetime) and value is not pd.NaT)
    return len({moment.tzinfo is None for moment in moments}) > 1 or _has_nanoseconds(values)


def _has_nanoseconds(values: pd.Series | pd.Index) -> bool:
    """Whether some moments or spans of pandas' have nanoseconds: Arrow's of objects have microseconds."""
    import pandas as pd

    return any(
        (isinstance(value, pd.Timestamp) and value.nanosecond)
        or (isinstance(value, pd.Timedelta) and value.nanoseconds)
        for value in values
    )


def _has_large_integers(values: pd.Series | pd.Index) -> bool:
    """Whether some integers have no float that is equal to them."""
    return any(isinstance(value, (int, np.integer)) and abs(int(value)) > _EXACT for value in values)
