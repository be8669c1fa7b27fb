"""Name the cause of a failure in the error that a shuffle's task raises.

Dask's tasks raise ``RuntimeError: P2P ... failed during transfer phase`` for whatever failed, and the cause is some
tracebacks above it. `phase` puts the cause into that one line. Type and text begin as Dask's, so code that looks for
them finds them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dask_gpurt.errors import GpurtError
from dask_gpurt.shuffle import seam

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.shuffle.worker.host import RunHost


class PhaseError(seam.P2PConsistencyError):
    """A `RuntimeError` that Dask's tasks hand on as it is, as they do its base class."""

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[object, ...]]:
        # For clients that do not have this package.
        return RuntimeError, self.args


@contextlib.contextmanager
def phase(host: RunHost, name: str, what: str = "") -> Iterator[None]:
    """Raise errors as a `PhaseError` with text, phase (as Dask calls it) and partition; answers to Dask pass."""
    try:
        yield
    except (seam.Reschedule, seam.P2PConsistencyError):
        raise
    except Exception as e:
        # An error of ours cannot be unpickled by a client without this package: its text must do.
        cause = None if isinstance(e, GpurtError) else e
        where = f"{what}: " if what else ""
        raise PhaseError(f"P2P {host.id} failed during {name} phase: {where}{type(e).__name__}: {e}") from cause
