"""Charts of a report: HTML that scales with the page, SVG only where there are many rectangles.

Text is never inside of what is scaled, so that it has the same size at 400 pixels as on a wall. Rectangles are
bounded: tasks of one kind that follow each other within less than a pixel of a wide screen are drawn as one.
Every colour has its name in a legend, and every bar its figure in a table beside it or in its title.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from dask_gpurt.observe.collect.causes import BUSY, CAUSES, label
from dask_gpurt.observe.render.html import Drawing
from dask_gpurt.observe.render.text import seconds_said

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dask_gpurt.observe.report.facts import WorkerRun
    from dask_gpurt.observe.report.tasks import Task

#: workers drawn in a timeline, at most, and kinds of task with a colour of their own
WORKERS, KINDS = 40, 9
#: threads drawn for each of them
LANES = 32
#: widest screen, in pixels: what is narrower there is not drawn
PIXELS = 1600

#: use of a slot -> CSS class; one colour each, in light and dark
_CLASS = {BUSY: "u0", **{cause: f"u{i + 1}" for i, cause in enumerate(CAUSES)}}
_LIGHT = (
    *("#2e7d32", "#1565c0", "#ef6c00", "#c62828", "#6a1b9a", "#ad1457", "#00838f"),
    *("#f9a825", "#827717", "#5d4037", "#9e9d24", "#90a4ae", "#dfe3e8"),
)
_DARK = (
    *("#66bb6a", "#64b5f6", "#ffb74d", "#ef5350", "#ba68c8", "#f06292", "#4dd0e1"),
    *("#fff176", "#c0ca33", "#a1887f", "#e6ee9c", "#607d8b", "#2b323a"),
)
_TASKS = ("#3a6ea5", "#c06a2b", "#4f8f4f", "#a04a8f", "#8a7a1f", "#2f8f8f", "#b04a4a", "#6a5acd", "#7a6652", "#8795a3")

STYLE = (
    ":root {"
    + "".join(f"--u{i}: {c};" for i, c in enumerate(_LIGHT))
    + "".join(f"--k{i}: {c};" for i, c in enumerate(_TASKS))
    + "} @media (prefers-color-scheme: dark) { :root {"
    + "".join(f"--u{i}: {c};" for i, c in enumerate(_DARK))
    + "} }"
    + "".join(f".u{i} {{ background: var(--u{i}); }} " for i in range(len(_LIGHT)))
    + "".join(f".k{i} {{ background: var(--k{i}); fill: var(--k{i}); }} " for i in range(len(_TASKS)))
    + """
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.card { background: var(--band); border-radius: 6px; padding: .55rem .8rem; }
.card b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.card span { color: var(--dim); font-size: .85rem; }
ol.advice { padding-left: 1.4rem; max-width: 52rem; } ol.advice li { margin: .7rem 0; }
ol.advice b { display: inline-block; margin-right: .5rem; }
ol.advice .share { color: var(--dim); font-variant-numeric: tabular-nums; font-size: .9rem; }
ol.advice .remedy { color: var(--dim); display: block; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0; font-size: .85rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem;
  vertical-align: -.08rem; outline: 1px solid var(--line); }
.rows { display: grid; grid-template-columns: minmax(5rem, 12rem) 1fr; gap: .3rem .7rem; align-items: center;
  margin: .6rem 0; }
.rows > .name { font-size: .85rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; text-align: right; }
.stack { display: flex; height: 1.25rem; border-radius: 3px; overflow: hidden; background: var(--band); }
.stack > span { min-width: 0; }
.lane { display: block; width: 100%; background: var(--band); border-radius: 2px; }
.axis { display: flex; justify-content: space-between; color: var(--dim); font-size: .8rem; grid-column: 2;
  font-variant-numeric: tabular-nums; }
.columns { display: flex; align-items: flex-end; gap: 1px; height: 7rem; border-bottom: 1px solid var(--line);
  max-width: 50rem; }
.columns > span { flex: 1; background: var(--s1); min-width: 1px; }
@media (max-width: 600px) { body { padding: 1rem .7rem 3rem; } .rows { grid-template-columns: 1fr; gap: .15rem; }
  .rows > .name { text-align: left; margin-top: .35rem; } .axis { grid-column: 1; } th, td { padding: .2rem .45rem; } }
"""
)


def cards(values: Sequence[tuple[str, str]]) -> Drawing:
    """(figure, what it is)."""
    inner = "".join(f"<div class=card><b>{_e(big)}</b><span>{_e(small)}</span></div>" for big, small in values)
    return Drawing(f"<div class=cards>{inner}</div>")


def stacks(rows: Sequence[tuple[str, float, Mapping[str, float]]]) -> Drawing:
    """One bar a row of (name, busy seconds, cause -> seconds), each filling the width; with a legend."""
    used: set[str] = set()
    body = []
    for name, busy, causes in rows:
        parts = [(use, seconds) for use, seconds in {BUSY: busy, **causes}.items() if seconds > 0]
        total = sum(seconds for _, seconds in parts) or 1.0
        used.update(use for use, seconds in parts if seconds / total > 0.001)
        spans = "".join(
            f'<span class={_CLASS[use]} style="flex:{seconds / total:.5f} 1 0" '
            f'title="{_e(label(use))}: {seconds_said(seconds)} ({seconds / total:.1%})"></span>'
            for use, seconds in parts
        )
        body.append(f'<div class=name title="{_e(name)}">{_e(name)}</div><div class=stack>{spans}</div>')
    legend = [(_CLASS[use], label(use)) for use in (BUSY, *CAUSES) if use in used]
    return Drawing(f"{_legend(legend)}<div class=rows>{''.join(body)}</div>")


def timeline(workers: Sequence[WorkerRun], tasks: Sequence[Task], start: float, stop: float) -> Drawing:
    """What ran when: a strip per worker with a line per thread, coloured by the kind of task."""
    span = max(stop - start, 1e-9)
    weight: dict[str, float] = {}
    by_worker: dict[str, list[Task]] = {}
    for task in tasks:
        weight[task.prefix] = weight.get(task.prefix, 0.0) + task.seconds
        by_worker.setdefault(task.address, []).append(task)
    kinds = sorted(weight, key=lambda prefix: -weight[prefix])
    colour = {prefix: min(i, KINDS) for i, prefix in enumerate(kinds)}
    body = []
    for worker in workers[:WORKERS]:
        lanes = min(LANES, max(1, worker.threads))
        rects = "".join(
            f"<rect class=k{kind} x={x:.2f} y={lane * 10 + 1} width={width:.2f} height=8>"
            f"<title>{_e(title)}</title></rect>"
            for kind, x, lane, width, title in _rectangles(
                by_worker.get(worker.address, ()), colour, lanes, start, span
            )
        )
        height = max(1.1, 0.7 * lanes)
        body.append(
            f'<div class=name title="{_e(worker.address)}">{_e(worker.title)}</div>'
            f'<svg class=lane role=img aria-label="tasks of {_e(worker.name)}" style="height:{height:.2f}rem" '
            f'viewBox="0 0 {PIXELS} {lanes * 10}" preserveAspectRatio=none>{rects}</svg>'
        )
    ticks = "".join(f"<span>{_e(seconds_said(span * i / 4) if i else '0 s')}</span>" for i in range(5))
    legend = [(f"k{i}", prefix) for i, prefix in enumerate(kinds[:KINDS])]
    if len(kinds) > KINDS:
        legend.append((f"k{KINDS}", f"{len(kinds) - KINDS} other kinds"))
    return Drawing(f"{_legend(legend)}<div class=rows>{''.join(body)}<div class=axis>{ticks}</div></div>")


def _rectangles(
    tasks: Sequence[Task], colour: Mapping[str, int], lanes: int, start: float, span: float
) -> list[tuple[int, float, int, float, str]]:
    """(kind, x, lane, width, title). Threads are not known: a task takes the first line that is free."""
    ends = [float("-inf")] * lanes
    out: list[tuple[int, float, int, float, str]] = []
    #: lane -> [kind, x, right end, tasks, title]
    pending: list[tuple[int, float, float, int, str] | None] = [None] * lanes

    def flush(lane: int) -> None:
        last = pending[lane]
        if last is not None:
            kind, x, right, count, title = last
            text = title if count == 1 else f"{title} and {count - 1} more"
            out.append((kind, x, lane, max(0.6, right - x), text))

    for task in sorted(tasks, key=lambda t: t.start):
        lane = next((i for i, end in enumerate(ends) if end <= task.start + 1e-4), None)
        if lane is None:
            lane = min(range(lanes), key=ends.__getitem__)
        ends[lane] = task.stop
        kind = colour[task.prefix]
        x = max(0.0, (task.start - start) / span * PIXELS)
        right = min(float(PIXELS), max(x, (task.stop - start) / span * PIXELS))
        last = pending[lane]
        # Drawn as one: neighbours of one kind, whatever is within one pixel, and what overlaps (a task that has given
        # its thread away is beside others, and there is no line for it).
        if last is not None and (
            (last[0] == kind and x - last[2] < 1 and (right - last[1] < 3 or right - x < 1))
            or right - last[1] < 1
            or x < last[2] - 1
        ):
            pending[lane] = (last[0], last[1], max(right, last[2]), last[3] + 1, last[4])
            continue
        flush(lane)
        pending[lane] = (kind, x, right, 1, f"{task.prefix}: {seconds_said(task.seconds)}")
    for lane in range(lanes):
        flush(lane)
    return out


def histogram(values: Sequence[int]) -> Drawing:
    """Sizes in order, largest first; groups of neighbours when there are many."""
    ordered = sorted(values, reverse=True)
    step = max(1, -(-len(ordered) // 60))
    heights = [max(ordered[i : i + step]) for i in range(0, len(ordered), step)]
    top = max(heights, default=0) or 1
    bars = "".join(f'<span style="height:{max(0.5, 100 * h / top):.1f}%" title="{h:,} bytes"></span>' for h in heights)
    return Drawing(f'<div class=columns role=img aria-label="sizes of shuffle outputs">{bars}</div>')


def advice(findings: Sequence[tuple[str, str, str, str]]) -> Drawing:
    """(cause, share, text, remedy), in order."""
    items = "".join(
        f"<li><b>{_e(cause)}</b><span class=share>{_e(share)}</span><br>{_e(text)}"
        f"<span class=remedy>{_e(remedy)}</span></li>"
        for cause, share, text, remedy in findings
    )
    return Drawing(f"<ol class=advice>{items}</ol>")


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return (
        "<div class=legend>"
        + "".join(f"<span><i class={name}></i>{_e(text)}</span>" for name, text in entries)
        + "</div>"
    )


def _e(text: str) -> str:
    return html.escape(str(text), quote=True)
