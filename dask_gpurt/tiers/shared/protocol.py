"""The messages about stored copies that outlive their worker, as both halves know them.

From the scheduler, on a worker's stream:

* ``{"op": TELL, "hello": True, "prefix": ...}`` once: write below this prefix from now on. Before it a worker sends
  nothing, as an unknown op ends the stream;
* ``{"op": TELL, "prefix": ..., "adopt": copies}``: keep these from now on;
* ``{"op": TELL, "bye": True}``: report no more.

From a worker, on its stream to the scheduler: ``{"op": REPORT, "prefix": ..., "copies": [copy, ...]}``: these keys have
a copy (see `Copy`) below the prefix that the scheduler gave. With an empty prefix the worker leaves.

The scheduler makes the prefixes because it deletes what is below them, and a message must not decide what is deleted.

A worker that understands says so in its heartbeats: ``metrics["gpurt"]["shared_copies"]`` is `PROTOCOL`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dask_gpurt.tiers.storage.object.leases import is_object

if TYPE_CHECKING:
    from dask.typing import Key

REPORT = "gpurt-copies"
TELL = "gpurt-shared"
PROTOCOL = 2
#: field of `scheduler_plugin.HEARTBEAT_NAME`
HEARTBEAT_FIELD = "shared_copies"


class Copy(NamedTuple):
    """An object that holds the value of a key. In messages it is a plain tuple."""

    key: Key
    #: of the object, below a prefix
    name: str
    #: of the value in memory
    nbytes: int
    #: of the object
    stored_bytes: int
    #: of the object's layout
    digest: int


def as_copy(item: object, prefix: str) -> Copy | None:
    """Check an item of a message, which came over the network; None unless it is an object below `prefix`."""
    if not isinstance(item, (list, tuple)) or len(item) != 5:
        return None
    copy = Copy(*item)
    good = (
        isinstance(copy.key, (str, bytes, int, float, tuple))
        and isinstance(copy.name, str)
        and is_object(copy.name, prefix)
        and all(isinstance(n, int) and n >= 0 for n in copy[2:])
    )
    return copy if good else None
