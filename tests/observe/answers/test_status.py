"""`Status` adds over workers only what adds."""

from __future__ import annotations

import json
from typing import Any

from dask_gpurt.observe.answers.status import Status


def worker(**changes: Any) -> dict[str, Any]:
    share = changes.get("share", 0.5)
    return {
        "tiers": {
            "written": {"bytes": 5},
            "host_limit_bytes": 100,
            "hints": {"evictions_by_hint_share": share},
            "prefetch": {"share": 0.2, "queue": 1},
            "loop_blocked_seconds": {"sum": 2.0, "max": changes.get("blocked", 0.5)},
            "below": {"object": {"resting_seconds": 3.0, "writes": 1}},
        },
        "slots": {"fetched": {"tcp://10.0.0.1:5": {"bytes": 7}}},
        "shuffle": {
            "transport": {
                "receive": {"budget_bytes": 64, "peak_held_bytes": changes.get("peak", 1)},
                "links": [
                    {"peer": "x", "transport": "tcp", "stall_seconds": 0.5},
                    {"peer": "y", "transport": "tcp", "stall_seconds": 0.25},
                    {"peer": "y", "transport": "rpc", "stall_seconds": 2.0},
                ],
            }
        },
        "events": {"last": {"x": 1}},
    }


def test_only_what_adds_is_added() -> None:
    status = Status({}, {"a": worker(), "b": worker(share=0.9, blocked=0.75, peak=9), "c": {}, "d": {"error": "gone"}})
    assert status.totals() == {
        "tiers.written.bytes": 10,
        "tiers.host_limit_bytes": 200,
        "tiers.prefetch.queue": 2,
        "tiers.loop_blocked_seconds.sum": 4.0,
        "tiers.loop_blocked_seconds.max": 0.75,
        "tiers.below.object.resting_seconds": 3.0,
        "tiers.below.object.writes": 2,
        "slots.fetched.tcp://10.0.0.1:5.bytes": 14,
        "shuffle.transport.receive.peak_held_bytes": 9,
        "shuffle.transport.links.tcp.stall_seconds": 1.5,
        "shuffle.transport.links.rpc.stall_seconds": 4.0,
    }
    assert status.ranges() == {
        "tiers.hints.evictions_by_hint_share": (0.5, 0.9),
        "tiers.prefetch.share": (0.2, 0.2),
        "shuffle.transport.receive.budget_bytes": (64, 64),
    }
    assert json.loads(json.dumps(status.to_dict()))["ranges"]["tiers.prefetch.share"] == [0.2, 0.2]
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in repr(status).splitlines() if " " in line.strip()}
    assert lines["tiers.hints.evictions_by_hint_share"] == "0.5 to 0.9"
    assert lines["tiers.prefetch.share"] == "0.2"
    assert lines["shuffle.transport.receive.budget_bytes"] == "64 B"
