"""What was fetched from whom by whom, and how fast, as a matrix."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from bokeh.models import ColumnDataSource, FixedTicker, Range1d
from bokeh.plotting import figure
from dask.utils import format_bytes

from dask_gpurt.observe.collect import fetch_matrix
from dask_gpurt.observe.dashboard import style
from dask_gpurt.observe.dashboard.component import NO_FIGURES, NO_WORKERS, GpurtPlot, fill

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

    from dask_gpurt.observe.collect.fetch_matrix import Cell, Matrix
    from dask_gpurt.observe.figures.history import Feed

#: rows up to which the figures are written into the cells
WRITTEN = 4
#: of the median bandwidth of all pairs: below that, a pair is slow
SLOW = 0.5
#: bytes of a pair that say something about its bandwidth; less is mostly latency
TELLING_BYTES = 4 * 2**20


class LinkMatrix(GpurtPlot):
    """Inputs of tasks fetched since the workers started: the darker, the more bytes; slow pairs in another colour."""

    TITLE = "Links: inputs fetched, source by destination"
    NAME = "gpurt_link_matrix"

    def _build(self) -> LayoutDOM:
        self.usual, self.slow = (ColumnDataSource({key: [] for key in _COLUMNS}) for _ in range(2))
        self.sources = [self.usual, self.slow]
        fig = figure(
            tools="",
            x_range=Range1d(start=-0.5, end=0.5),
            y_range=Range1d(start=0.5, end=-0.5),
            sizing_mode=style.SIZING,
        )
        cells = []
        for source, color in ((self.usual, style.TEAL), (self.slow, style.ORANGE)):
            cells.append(
                fig.rect(
                    x="x",
                    y="y",
                    width=0.94,
                    height=0.94,
                    fill_color=color,
                    fill_alpha="alpha",
                    line_color=None,
                    source=source,
                )
            )
            fig.text(
                x="x", y="y", text="text", text_align="center", text_baseline="middle", text_font_size="11px",
                text_color=style.MARK, background_fill_color=style.HALO, background_fill_alpha="label_alpha",
                padding=3, source=source,
            )  # fmt: skip
        fig.grid.visible = False
        for axis in fig.axis:
            axis.ticker = FixedTicker(ticks=[])
        style.legend(fig, [("usual", [cells[0]]), ("slow", [cells[1]])])
        style.dress(fig)
        for axis in fig.axis:
            axis.major_tick_line_color = None
        fig.add_tools(
            style.hover(
                cells,
                [
                    ("from", "@source"),
                    ("to", "@target"),
                    ("fetched", "@bytes_text"),
                    ("bandwidth", "@measured"),
                    ("network card", "@nominal"),
                    ("fetches", "@requests{0,0}"),
                ],
                "Inputs of tasks that one worker fetched from the other: the darker, the more bytes. Slow: under half "
                "of the median bandwidth of all pairs.",
            )
        )
        self.slow_entry = fig.legend[0].items[1]
        self.figure = fig
        self._names: list[str] | None = None
        return fig

    def _draw(self, feed: Feed) -> str:
        every = feed.rows()
        matrix = fetch_matrix.matrix((row.name, row.address, row.figures) for row in every if row.figures is not None)
        self._name(matrix)
        most = max((cell.bytes for cell in matrix.cells), default=0) or 1
        speeds = [speed for cell in matrix.cells if cell.bytes >= TELLING_BYTES and (speed := cell.bytes_per_second)]
        median = statistics.median(speeds) if speeds else None
        parts: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for cell in matrix.cells:
            speed = cell.bytes_per_second
            slow = median is not None and speed is not None and cell.bytes >= TELLING_BYTES and speed < SLOW * median
            parts[slow].append(_row(cell, matrix.names, most))
        for source, part in ((self.usual, parts[False]), (self.slow, parts[True])):
            fill(source, {key: [row[key] for row in part] for key in _COLUMNS})
        style.visible(self.slow_entry, bool(parts[True]))
        if not every:
            return NO_WORKERS
        if not matrix.names:
            return NO_FIGURES
        said = _verdict(len(parts[True]), len(matrix.cells), median)
        return f"{said}\n{_headline(matrix, median)}"

    def _name(self, matrix: Matrix) -> None:
        names = [style.short(name, 14) for name in matrix.names]
        if names == self._names:
            return
        self._names = names
        fig, end = self.figure, max(len(names), 1) - 0.5
        fig.x_range.end, fig.y_range.start = end, end
        what = "host" if matrix.by_host else "worker"
        for axis, way in ((fig.xaxis[0], f"to {what}"), (fig.yaxis[0], f"from {what}")):
            axis.major_label_overrides = dict(enumerate(names))
            axis.ticker.ticks = list(range(len(names)))
            axis.axis_label = way
        # Long names would run into each other.
        fig.xaxis[0].major_label_orientation = "vertical" if max(map(len, names), default=0) > 4 else "horizontal"


_COLUMNS = (
    *("x", "y", "alpha", "text", "source", "target", "bytes_text", "measured", "nominal"),
    *("requests", "moved_bytes", "label_alpha"),
)


def _row(cell: Cell, names: list[str], most: float) -> dict[str, Any]:
    speed = cell.bytes_per_second
    measured = "unknown" if speed is None else f"{format_bytes(int(speed))}/s"
    if cell.nominal is not None:
        share = "" if speed is None else f", of which {speed / cell.nominal:.0%} measured"
        nominal = f"{cell.nominal * 8e-9:.3g} Gbit/s{share}"
    else:
        nominal = "none: within a host" if cell.within_host else "unknown"
    size = str(format_bytes(int(cell.bytes)))
    share = f" ({speed / cell.nominal:.0%})" if speed is not None and cell.nominal is not None else ""
    return {
        "x": cell.target,
        "y": cell.source,
        "alpha": round(0.08 + 0.62 * (cell.bytes / most) ** 0.5, 3),
        "text": f"{size}\n{measured}{share}" if len(names) <= WRITTEN else "",
        "source": names[cell.source],
        "target": names[cell.target],
        "bytes_text": size,
        "measured": measured,
        "nominal": nominal,
        "requests": cell.requests,
        "moved_bytes": cell.bytes,
        "label_alpha": 0.85 if len(names) <= WRITTEN else 0.0,
    }


def _verdict(slow: int, pairs: int, median: float | None) -> str:
    if not pairs:
        return "Nothing was fetched from another worker."
    if median is None:
        return "Too little was fetched to judge the links."
    if not slow:
        return "No link is slow: all pairs have at least half of the median bandwidth."
    return f"{slow} of {pairs} pairs slow: under half of the median bandwidth."


def _headline(matrix: Matrix, median: float | None) -> str:
    total = sum(cell.bytes for cell in matrix.cells)
    speed = "" if median is None else f" · median {format_bytes(int(median))}/s"
    cards = sorted({cell.nominal for cell in matrix.cells if cell.nominal is not None})
    if cards:
        slowest = f"{cards[0] * 8e-9:.3g} to " if len(cards) > 1 else ""
        nominal = f"{slowest}{cards[-1] * 8e-9:.3g} Gbit/s"
    elif matrix.cells and all(cell.within_host for cell in matrix.cells):
        nominal = "none: one host"
    else:
        nominal = "unknown"
    return f"{format_bytes(int(total))}{speed} · nominal {nominal}"
