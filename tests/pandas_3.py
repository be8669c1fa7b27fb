"""Mark of tests whose frames only pandas 3 makes: text of dtype ``str``, copy on write; `ci/older.sh` skips these."""

from __future__ import annotations

import pandas as pd
import pytest

needs_pandas_3 = pytest.mark.skipif(int(pd.__version__.partition(".")[0]) < 3, reason="pandas is below 3")
