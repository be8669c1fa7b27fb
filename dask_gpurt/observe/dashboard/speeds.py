"""How fast each worker is, next to the median worker, for the same tasks, and what class of node it is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bokeh.models import ColumnDataSource, CustomJSTickFormatter, Span
from bokeh.plotting import figure

from dask_gpurt.observe.dashboard import style
from dask_gpurt.observe.dashboard.axes import BARS, NAMED, WorkerAxis
from dask_gpurt.observe.dashboard.component import NO_WORKERS, GpurtPlot, fill
from dask_gpurt.observe.dashboard.placement import OFF

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

    from dask_gpurt.observe.figures.history import Feed

#: of the median worker's speed: below that a worker is slow, comes first, and is named
SLOW = 0.8
KEYS = ("y", "name", "address", "speed", "kind", "said", "said_alpha")


class WorkerSpeeds(GpurtPlot):
    """Speed relative to the median worker. Slow workers come first, in a colour of their own; then class by class."""

    TITLE = "Workers: speed and class of node"
    NAME = "gpurt_worker_speeds"

    def _build(self) -> LayoutDOM:
        self.fast, self.slow = (ColumnDataSource({key: [] for key in KEYS}) for _ in range(2))
        self.sources = [self.fast, self.slow]
        fig = figure(tools="", x_range=style.from_zero(), sizing_mode=style.SIZING)
        self.axis = WorkerAxis(fig)
        bars = [
            fig.hbar(y="y", right="speed", height=BARS, color=color, line_color=None, source=source)
            for color, source in ((style.TEAL, self.fast), (style.ORANGE, self.slow))
        ]
        fig.add_layout(Span(location=1, dimension="height", line_color=style.INK, line_width=2, line_dash=[4, 3]))
        for source in self.sources:
            fig.text(
                x=0, y="y", text="said", x_offset=5, text_baseline="middle", text_font_size="11px",
                text_color=style.MARK, background_fill_color=style.HALO, background_fill_alpha="said_alpha",
                padding=3, source=source,
            )  # fmt: skip
        fig.xaxis.axis_label = "speed, 1x: that of the median worker"
        fig.xaxis.formatter = CustomJSTickFormatter(code="return `${+tick.toFixed(2)}x`")
        style.legend(fig, [("usual", [bars[0]]), (f"slow: below {SLOW:g}x", [bars[1]])])
        style.dress(fig)
        fig.add_tools(
            style.hover(
                bars,
                [
                    ("worker", "@name"),
                    ("address", "@address"),
                    ("class", "@kind"),
                    ("speed", "@speed{0.00}x"),
                ],
                "Time of the median worker over this worker's, for the same tasks. Slow workers are given less.",
            )
        )
        self.slow_entry = fig.legend[0].items[1]
        self.figure = fig
        return fig

    def _draw(self, feed: Feed) -> str:
        placement = feed.latest.get("placement")
        speeds = (placement or {}).get("speeds") or {}
        every = feed.rows()
        known = [
            (row.name, row.address, float(speeds[row.address]), row.node_class)
            for row in every
            if row.address in speeds
        ]
        slow = sorted((w for w in known if w[2] < SLOW), key=lambda w: w[2])
        rows = [*slow, *sorted((w for w in known if w[2] >= SLOW), key=lambda w: w[3])]
        # A class is said once for the workers that follow each other, and only where there is room for names.
        named = len(rows) <= NAMED
        said = [kind if named and (i == 0 or rows[i - 1][3] != kind) else "" for i, (*_, kind) in enumerate(rows)]
        self.axis.show([name for name, *_ in rows])
        for source, first, part in ((self.slow, 0, slow), (self.fast, len(slow), rows[len(slow) :])):
            fill(
                source,
                {
                    "y": [first + i for i in range(len(part))],
                    "name": [name for name, *_ in part],
                    "address": [address for _, address, *_ in part],
                    "speed": [round(speed, 3) for _, _, speed, _ in part],
                    "kind": [kind for *_, kind in part],
                    "said": said[first : first + len(part)],
                    "said_alpha": [0.9 if text else 0.0 for text in said[first : first + len(part)]],
                },
            )
        style.visible(self.slow_entry, bool(slow))
        style.fit(self.figure.x_range, max([1.0, *(speed for _, _, speed, _ in rows)]))
        if not placement:
            return OFF
        if not every:
            return NO_WORKERS
        if not rows:
            return "no worker has been compared with others yet"
        unknown = len(every) - len(rows)
        kinds = len({kind for *_, kind in rows})
        figures = [f"{kinds} class{'es' if kinds != 1 else ''} of node"]
        low, high = (pick(speed for _, _, speed, _ in rows) for pick in (min, max))
        figures.append(f"{low:.2f}x to {high:.2f}x")
        if unknown:
            figures.append(f"{unknown} to be measured")
        verdict = f"No worker of {len(rows)} is slow."
        if slow:
            name, _, speed, _ = slow[0]
            verdict = f"{len(slow)} of {len(rows)} workers slow; slowest is {style.short(name)} at {speed:.2f}x."
        return f"{verdict}\n{' · '.join(figures)}"
