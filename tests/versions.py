"""Marks of tests that some supported versions cannot run, as `ci/older.sh` does."""

from __future__ import annotations

import dask
import distributed
import pandas as pd
import pytest
from packaging.version import Version

PANDAS_3 = int(pd.__version__.partition(".")[0]) >= 3

#: text of dtype ``str``, copy on write; planning in the client is off without them
needs_pandas_3 = pytest.mark.skipif(not PANDAS_3, reason="pandas is below 3")
#: `persist` asks a client that is none of distributed's only in newer releases of dask.
needs_persist_of_any_client = pytest.mark.skipif(
    Version(dask.__version__) < Version("2026.1.2"), reason="older dask asks distributed's clients only"
)
#: A nanny whose process ends before its worker is there waits for ever in older releases, without the extension too.
needs_nannies_that_end = pytest.mark.skipif(
    Version(distributed.__version__) < Version("2026.7.0"), reason="nannies of distributed below 2026.7 do not end"
)
