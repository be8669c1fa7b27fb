"""How fast each worker is, next to the median worker, for the same tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.models import ColumnDataSource, CustomJSTickFormatter, HoverTool, Span
from bokeh.plotting import figure

from dask_gpurt.observe.dashboard import style
from dask_gpurt.observe.dashboard.axes import BARS, WorkerAxis
from dask_gpurt.observe.dashboard.component import NO_WORKERS, GpurtPlot, fill
from dask_gpurt.observe.dashboard.placement import OFF

if TYPE_CHECKING:
    from dask_gpurt.observe.feed import Feed

#: of the median worker's speed: below that a worker is slow, comes first, and is named
SLOW = 0.8


class WorkerSpeeds(GpurtPlot):
    """Speed relative to the median worker. Slow workers come first, in a colour of their own."""

    TITLE = "Workers: speed relative to the median"
    NAME = "gpurt_worker_speeds"

    def _build(self, **kwargs: Any) -> Any:
        self.fast, self.slow = (ColumnDataSource({"y": [], "name": [], "address": [], "speed": []}) for _ in range(2))
        self.sources = [self.fast, self.slow]
        fig = figure(title=self.TITLE, name=self.NAME, tools="", x_range=style.from_zero(), **kwargs)
        self.axis = WorkerAxis(fig)
        bars = [
            fig.hbar(y="y", right="speed", height=BARS, color=color, line_color=None, source=source)
            for color, source in ((style.TEAL, self.fast), (style.ORANGE, self.slow))
        ]
        fig.add_layout(Span(location=1, dimension="height", line_color=style.INK, line_width=2, line_dash=[4, 3]))
        fig.xaxis.formatter = CustomJSTickFormatter(code="return `${+tick.toFixed(2)}x`")
        style.legend(fig, [("usual", [bars[0]]), (f"slow: below {SLOW:g}x", [bars[1]])])
        style.dress(fig, self.headline)
        fig.add_tools(
            HoverTool(
                renderers=bars, tooltips=[("worker", "@name"), ("address", "@address"), ("speed", "@speed{0.00}x")]
            )
        )
        self.slow_entry = fig.legend[0].items[1]
        self.figure = fig
        return fig

    def _draw(self, feed: Feed) -> str:
        placement = feed.latest.get("placement")
        speeds = (placement or {}).get("speeds") or {}
        every = feed.rows()
        known = [(row.name, row.address, float(speeds[row.address])) for row in every if row.address in speeds]
        slow = sorted((w for w in known if w[2] < SLOW), key=lambda w: w[2])
        rows = [*slow, *(w for w in known if w[2] >= SLOW)]
        self.axis.show([name for name, _, _ in rows])
        for source, first, part in ((self.slow, 0, slow), (self.fast, len(slow), rows[len(slow) :])):
            fill(
                source,
                {
                    "y": [first + i for i in range(len(part))],
                    "name": [name for name, _, _ in part],
                    "address": [address for _, address, _ in part],
                    "speed": [round(speed, 3) for _, _, speed in part],
                },
            )
        style.visible(self.slow_entry, bool(slow))
        style.fit(self.figure.x_range, max([1.0, *(speed for _, _, speed in rows)]))
        if not placement:
            return OFF
        if not every:
            return NO_WORKERS
        if not rows:
            return "no worker has been compared with others yet"
        unknown = len(every) - len(rows)
        rest = f" · {unknown} to be measured" if unknown else ""
        if slow:
            name, _, speed = slow[0]
            return f"{len(slow)} slow of {len(rows)} · slowest {style.short(name)}: {speed:.2f}x{rest}"
        low, high = (pick(speed for _, _, speed in rows) for pick in (min, max))
        return f"none slow of {len(rows)} · from {low:.2f}x to {high:.2f}x{rest}"
