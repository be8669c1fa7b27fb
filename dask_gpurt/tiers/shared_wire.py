"""What both halves of the sharing of stored copies agree on.

From a worker, on its stream to the scheduler: ``{"op": REPORT, "prefix": ..., "copies": [copy, ...]}``: these keys of
mine have a copy (see `Copy`). From the scheduler, on the worker's stream: ``{"op": TELL, "hello": True}`` once, before
which a worker says nothing (an unknown op ends the stream), ``{"op": TELL, "prefix": ..., "adopt": copies}``: keep
these from now on, and ``{"op": TELL, "bye": True}``.

A worker that understands says so in its heartbeats: ``metrics["gpurt"]["shared_copies"]`` is `PROTOCOL`.
"""

from __future__ import annotations

from typing import Any

REPORT = "gpurt-copies"
TELL = "gpurt-shared"
PROTOCOL = 1
#: field of `wire.HEARTBEAT_NAME`
HEARTBEAT_FIELD = "shared_copies"

#: key, name of the object, bytes of the value in memory, bytes of the object, digest of its layout
Copy = tuple[Any, str, int, int, int]
