"""The memory tiers, fastest first."""

from __future__ import annotations

import enum


class Tier(enum.IntEnum):
    """Where a copy of a value can be. Smaller is nearer to the processor that computes on it.

    A node has the tiers its hardware has: a CPU node starts at HOST.
    """

    DEVICE = 0
    PINNED = 1
    HOST = 2
    DISK = 3
    OBJECT = 4
