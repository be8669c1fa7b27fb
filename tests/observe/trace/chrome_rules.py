"""What Chrome's format of trace events asks for, and what Perfetto leaves out of what it is given."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def check(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a document of Chrome's trace events; empty: nothing.

    Rules of the format for the kinds of event that `events` makes, and what Perfetto's import would count as an error.
    """
    wrong: list[str] = []
    made = document.get("traceEvents")
    if not isinstance(made, list) or document.get("displayTimeUnit") not in ("ms", "ns"):
        return ["traceEvents must be a list, displayTimeUnit 'ms' or 'ns'"]
    named: dict[str, set[Any]] = {"process_name": set(), "thread_name": set()}
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, event in enumerate(made):
        problem = _problem(event)
        if problem:
            wrong.append(f"event {i}: {problem}: {event!r}")
            continue
        place = (event["pid"], event["tid"]) if "tid" in event else event["pid"]
        if event["ph"] == "M":
            if event["name"] in named and place in named[event["name"]]:
                wrong.append(f"event {i}: a second {event['name']} of {place}")
            named.setdefault(event["name"], set()).add(place)
        elif event["ph"] == "X":
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row, boxes in spans.items():
        if row not in named["thread_name"] or row[0] not in named["process_name"]:
            wrong.append(f"row {row} or its process has no name")
        boxes.sort()
        wrong += [f"boxes {a} and {b} of row {row} overlap" for a, b in pairwise(boxes) if b[0] < a[1]]
    return wrong


def _problem(event: object) -> str:
    """Of one event by itself."""
    if not isinstance(event, dict) or not isinstance(event.get("name"), str) or not isinstance(event.get("args"), dict):
        return "needs a name and args"
    if not isinstance(event.get("pid"), int):
        return "needs a pid"
    kind = event.get("ph")
    if kind == "M":
        return "" if event["args"] else "says nothing"
    if not isinstance(event.get("ts"), int) or event["ts"] < 0:
        return "needs ts, in whole microseconds, not negative"
    if kind == "X":
        whole = isinstance(event.get("dur"), int) and event["dur"] > 0 and isinstance(event.get("tid"), int)
        return "" if whole else "needs tid and dur > 0"
    if kind == "C":
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in event["args"].values())
        return "" if numbers and event["args"] else "a counter needs numbers"
    return f"unknown kind {kind!r}"
