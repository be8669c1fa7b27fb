"""What shuffles moved, worker by worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from dask_gpurt.observe.dashboard import style
from dask_gpurt.observe.dashboard.axes import BARS, WorkerAxis
from dask_gpurt.observe.dashboard.component import NO_FIGURES, NO_WORKERS, GpurtPlot, fill

if TYPE_CHECKING:
    from dask_gpurt.observe.feed import Feed

OFF = "the shuffle is not installed (gpurt.shuffle.enabled)"


class ShuffleTraffic(GpurtPlot):
    """Bytes sent to and received from peers and kept by the worker itself, since it started."""

    TITLE = "Shuffle: bytes per worker"
    NAME = "gpurt_shuffle_traffic"
    SERIES = (
        ("sent", "sent", style.ORANGE),
        ("received", "received", style.TEAL),
        ("kept", "kept by itself", style.PURPLE),
    )

    def _build(self, **kwargs: Any) -> Any:
        keys = [key for key, _, _ in self.SERIES]
        self.bars = ColumnDataSource({key: [] for key in ("name", *keys, *(f"y_{key}" for key in keys), "active")})
        self.sources = [self.bars]
        fig = figure(title=self.TITLE, name=self.NAME, tools="", x_range=style.from_zero(), **kwargs)
        self.axis = WorkerAxis(fig)
        bars = [
            fig.hbar(y=f"y_{key}", right=key, height=BARS / 3, color=color, source=self.bars)
            for key, _, color in self.SERIES
        ]
        style.bytes_axis(fig.xaxis)
        style.legend(fig, [(label, [bar]) for (_, label, _), bar in zip(self.SERIES, bars, strict=True)])
        style.dress(fig, self.headline)
        fig.add_tools(
            HoverTool(
                renderers=bars,
                tooltips=[
                    ("worker", "@name"),
                    *((label, f"@{key}{{0.0 ib}}") for key, label, _ in self.SERIES),
                    ("active runs", "@active"),
                ],
            )
        )
        self.figure = fig
        return fig

    def _draw(self, feed: Feed) -> str:
        every = feed.rows()
        rows = [(row.name, row.figures) for row in every if row.figures is not None]
        self.axis.show([name for name, _ in rows])
        data: dict[str, list[Any]] = {
            "name": [name for name, _ in rows],
            "active": [int(f.get("shuffle_active_runs") or 0) for _, f in rows],
        }
        for at, (key, _, _) in enumerate(self.SERIES):
            data[key] = [float(f.get(f"shuffle_{key}_bytes") or 0) for _, f in rows]
            data[f"y_{key}"] = [i + (at - 1) * BARS / 3 for i in range(len(rows))]
        fill(self.bars, data)
        style.fit(self.figure.x_range, max((v for key, _, _ in self.SERIES for v in data[key]), default=0))
        shuffle = feed.latest.get("shuffle")
        if not every:
            return NO_WORKERS
        if not shuffle:
            return OFF
        if not rows:
            return NO_FIGURES
        left = sum(n for reason, n in shuffle["fallbacks"].items() if reason != "rechunk")
        return f"active {shuffle['active']:,} · runs so far {shuffle['runs']:,} · left to Dask {left:,}"
