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

from typing import Any

from dask_gpurt.tiers.storage.object.leases import is_object

REPORT = "gpurt-copies"
TELL = "gpurt-shared"
PROTOCOL = 2
#: field of `scheduler_plugin.HEARTBEAT_NAME`
HEARTBEAT_FIELD = "shared_copies"

#: key, name of the object, bytes of the value in memory, bytes of the object, digest of its layout
Copy = tuple[Any, str, int, int, int]


def is_copy(copy: Any, prefix: str) -> bool:
    """Say whether this is a `Copy` of an object below `prefix`. It came over the network."""
    if not isinstance(copy, (list, tuple)) or len(copy) != 5:
        return False
    key, name, *numbers = copy
    return (
        isinstance(key, (str, bytes, int, float, tuple))
        and isinstance(name, str)
        and is_object(name, prefix)
        and all(isinstance(n, int) and n >= 0 for n in numbers)
    )
