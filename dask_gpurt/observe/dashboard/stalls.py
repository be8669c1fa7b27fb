"""What the slots of the cluster do, and why they do nothing, over time."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, CustomJSHover, Div
from bokeh.plotting import figure

from dask_gpurt.observe.collect.causes import BUSY, CAUSES, label
from dask_gpurt.observe.dashboard import style
from dask_gpurt.observe.dashboard.axes import TimeAxis
from dask_gpurt.observe.dashboard.component import GpurtPlot, fill
from dask_gpurt.observe.figures.history import POINTS, SLOTS, THREADS, USES

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

    from dask_gpurt.observe.figures.history import Feed

OFF = "the stall ledger is off (gpurt.observe.enabled)"
WAITING = "no worker has reported its slots yet"
#: seconds that the shares above the plot are of
HEADLINE_SECONDS = 30
#: share of the time from which slots are called busy, or idle for want of work
MOSTLY = 0.8

#: what is drawn, from the bottom: label, colour, and the uses in it. Six areas can be told apart, thirteen cannot; the
#: pointer shows the uses one by one
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("busy", "#4a9c5b", (BUSY,)),
    ("waiting for input", "#3f7fd0", ("network",)),
    ("memory, unspilling", "#e0862f", ("unspill", "memory")),
    ("shuffle barrier, skew", "#8a6fc4", ("shuffle_barrier", "skew")),
    (
        "scheduling, overhead",
        "#d6ab24",
        ("queued_elsewhere", "scheduler", "planning", "serialisation", "resources"),
    ),
    ("nothing to run", "#a9b4bd", ("no_ready_task", "no_work")),
)
assert sorted(use for *_, uses in GROUPS for use in uses) == sorted(USES)

#: the uses at the pointer, most first
_USES_JS = """
const at = Array.from(source.data.ago).indexOf(value)
return uses.map(([use, label]) => [label, source.data[use][at]]).filter(([, slots]) => slots >= 0.005)
  .sort((a, b) => b[1] - a[1]).map(([label, slots]) => `${label}: ${slots.toFixed(2)}`).join("\\n")
"""


class StallCauses(GpurtPlot):
    """Slots by what they do, stacked: busy at the bottom, then the causes of idleness. The height is all slots."""

    TITLE = "Stalls: what slots do"
    NAME = "gpurt_stall_causes"

    def _build(self) -> LayoutDOM:
        drawn = [_column(i) for i in range(len(GROUPS))]
        self.lines = ColumnDataSource({key: [] for key in ("ago", *USES, *drawn, "total")})
        self.sources = [self.lines]
        fig = figure(tools="", y_range=style.from_zero(), sizing_mode=style.SIZING)
        self.axis = TimeAxis(fig)
        fig.varea_stack(drawn, x="ago", color=[colour for _, colour, _ in GROUPS], fill_alpha=0.9, source=self.lines)
        total = fig.line(x="ago", y="total", line_color=style.INK, line_width=1, source=self.lines)
        fig.yaxis.axis_label = "slots"
        style.dress(fig)
        uses = CustomJSHover(code=_USES_JS, args={"source": self.lines, "uses": [[use, label(use)] for use in USES]})
        fig.add_tools(
            style.hover(
                [total],
                [("seconds ago", "@ago{0}"), ("slots", "@ago{custom}")],
                "A slot is a thread of a worker. Idle slots are counted under the cause that keeps them idle.",
                mode="vline",
                formatters={"@ago": uses},
            )
        )
        self.figure = fig
        # Outside of the figure, where it breaks into as many lines as a panel needs.
        styles = {"font-size": "12px", "color": style.INK}
        self.legend = Div(text="", sizing_mode="stretch_width", styles=styles, disable_math=True)
        return column(fig, self.legend, sizing_mode=style.SIZING)

    def _draw(self, feed: Feed) -> str:
        ago, rates = feed.rates((*USES, THREADS), over=5, points=POINTS)
        threads = rates.pop(THREADS)
        # Heartbeats bring slot-seconds in lumps, of more time than has passed or of less. Their shares are right.
        known = [sum(at) for at in zip(*rates.values(), strict=True)]
        scale = [t / k if t > 0 and k > 0 else 1.0 for t, k in zip(threads, known, strict=True)]
        data: dict[str, list[Any]] = {
            use: [round(v * s, 3) for v, s in zip(values, scale, strict=True)] for use, values in rates.items()
        }
        data["total"] = [round(sum(at), 3) for at in zip(*data.values(), strict=True)]
        for i, (_, _, uses) in enumerate(GROUPS):
            data[_column(i)] = [sum(at) for at in zip(*(data[use] for use in uses), strict=True)]
        fill(self.lines, {"ago": [round(s, 1) for s in ago], **data})
        self.axis.show(ago)
        highest = max(data["total"], default=0)
        style.fit(self.figure.y_range, highest)
        self._explain([i for i in range(len(GROUPS)) if max(data[_column(i)], default=0) > 0.005 * highest])
        if not feed.latest.get("ledger"):
            return OFF
        return _shares(feed) or WAITING

    def _explain(self, shown: list[int]) -> None:
        """The legend: what has been there, in the order of the stack."""
        text = "".join(
            '<span style="display:inline-block;white-space:nowrap;margin:0 12px 2px 0">'
            f'<i style="display:inline-block;width:12px;height:12px;margin-right:4px;vertical-align:-1px;'
            f'background:{GROUPS[i][1]}"></i>{html.escape(GROUPS[i][0])}</span>'
            for i in shown
        )
        text = f'<div style="padding:0 8px 0 12px">{text}</div>'
        if self.legend.text != text:
            self.legend.text = text

    def _clear(self) -> None:
        super()._clear()
        self.legend.text = ""


def _column(group: int) -> str:
    """The column of a group; one with a single use is drawn from a column of its own as well."""
    return f"group{group}"


def _shares(feed: Feed) -> str:
    """Verdict and shares of the last seconds; empty without any."""
    if not feed.history:
        return ""
    new = feed.history[-1]
    old = next((s for s in feed.history if new.time - s.time <= HEADLINE_SECONDS), new)
    if old is new:
        return ""
    grown = {use: new.sums[use] - old.sums[use] for use in USES}
    every = sum(grown.values())
    if new.sums[SLOTS] <= 0 or every <= 0:
        return ""
    share = {use: seconds / every for use, seconds in grown.items()}
    idle = sorted((use for use in CAUSES if share[use] > 0.005), key=lambda use: -share[use])
    parts = [f"busy {share[BUSY]:.0%}", *(f"{label(use)} {share[use]:.0%}" for use in idle[:3])]
    return f"{_verdict(share, idle)}\nlast {HEADLINE_SECONDS} s: {' · '.join(parts)}"


def _verdict(share: dict[str, float], idle: list[str]) -> str:
    if share["no_work"] >= MOSTLY:
        return "Idle: nothing is submitted."
    if share[BUSY] >= MOSTLY or not idle:
        return "Busy: little time is lost."
    return f"Busy {share[BUSY]:.0%} of the time; most is lost to “{label(idle[0])}”: {CAUSES[idle[0]][1]}."
