"""What shuffles moved, worker by worker, how far they are, and how even their outputs are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.layouts import column
from bokeh.models import BasicTicker, ColumnDataSource, FixedTicker, PrintfTickFormatter, Range1d
from bokeh.plotting import figure
from dask.utils import format_bytes

from dask_gpurt.observe.dashboard import style
from dask_gpurt.observe.dashboard.axes import BARS, WorkerAxis
from dask_gpurt.observe.dashboard.component import NO_FIGURES, NO_WORKERS, GpurtPlot, fill

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

    from dask_gpurt.observe.figures.history import Feed
    from dask_gpurt.observe.figures.shuffle_progress import Progress

OFF = "the shuffle is not installed (gpurt.shuffle.enabled)"
#: times the average (of workers) or the median (of outputs) from which one is called uneven
UNEVEN = 1.5


class ShuffleTraffic(GpurtPlot):
    """Bytes sent to and received from peers and kept by the worker itself, in the last minute."""

    TITLE = "Shuffle: bytes per worker, last minute"
    NAME = "gpurt_shuffle_traffic"
    SERIES = (
        ("sent", "sent", style.ORANGE),
        ("received", "received", style.TEAL),
        ("kept", "kept by itself", style.PURPLE),
    )

    def _build(self) -> LayoutDOM:
        keys = [key for key, _, _ in self.SERIES]
        self.bars = ColumnDataSource({key: [] for key in ("name", *keys, *(f"y_{key}" for key in keys), "active")})
        self.sources = [self.bars]
        fig = figure(tools="", x_range=style.from_zero(), sizing_mode=style.SIZING)
        self.axis = WorkerAxis(fig)
        bars = [
            fig.hbar(y=f"y_{key}", right=key, height=BARS / 3, color=color, line_color=None, source=self.bars)
            for key, _, color in self.SERIES
        ]
        style.bytes_axis(fig.xaxis, "bytes in the last minute")
        style.legend(fig, [(label, [bar]) for (_, label, _), bar in zip(self.SERIES, bars, strict=True)])
        style.dress(fig)
        fig.add_tools(
            style.hover(
                bars,
                [
                    ("worker", "@name"),
                    *((label, f"@{key}{{0.0 ib}}") for key, label, _ in self.SERIES),
                    ("active runs", "@active"),
                ],
                "Rows that a shuffle moved in the last minute. A worker that receives much more than the others has "
                "the frequent keys.",
            )
        )
        self.figure = fig
        return fig

    def _draw(self, feed: Feed) -> str:
        every = feed.rows()
        rows = [(row, row.figures) for row in every if row.figures is not None]
        names = [row.name for row, _ in rows]
        moved = [feed.shuffled(row) for row, _ in rows]
        self.axis.show(names)
        data: dict[str, list[Any]] = {
            "name": names,
            "active": [int(f.get("shuffle_active_runs") or 0) for _, f in rows],
        }
        for at, (key, _, _) in enumerate(self.SERIES):
            data[key] = [of[at] for of in moved]
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
        said = _even(names, [of[1] + of[2] for of in moved])
        return said + f"\nactive {shuffle['active']:,} · runs so far {shuffle['runs']:,} · left to Dask {left:,}"


#: bars of the histogram
BINS = 20


class ShuffleProgress(GpurtPlot):
    """How far each run is, and the sizes of the newest outputs of all runs."""

    TITLE = "Shuffle: progress, and sizes of outputs"
    NAME = "gpurt_shuffle_progress"

    #: where the text, the bar of inputs and that of outputs are within a row, from its middle; and the bars' thickness
    TEXT, INPUTS, OUTPUTS, THICK = -0.27, 0.07, 0.32, 0.22

    def _build(self) -> LayoutDOM:
        keys = ("y_text", "y_inputs", "y_outputs", "inputs", "outputs", "name", "text", "bytes", "workers", "alpha")
        self.bars = ColumnDataSource({key: [] for key in keys})
        self.bins = ColumnDataSource({"left": [], "right": [], "count": []})
        self.sources = [self.bars, self.bins]
        self.runs, self.sizes = self._runs(), self._sizes()
        return column(self.runs, self.sizes, name=self.NAME, sizing_mode=style.SIZING)

    def _runs(self) -> figure:
        """How far each run is."""
        runs = figure(tools="", x_range=Range1d(0, 100), sizing_mode=style.SIZING, min_height=110)
        self.axis = WorkerAxis(runs)
        bars = [
            runs.hbar(
                y=f"y_{key}",
                right=key,
                height=self.THICK,
                fill_color=color,
                fill_alpha="alpha",
                line_color=None,
                source=self.bars,
            )
            for key, color in (("inputs", style.TEAL), ("outputs", style.ORANGE))
        ]
        runs.text(
            x=0,
            y="y_text",  # above its bars: no colour is read on all of them
            text="text",
            x_offset=2,
            text_baseline="middle",
            text_font_size="11px",
            text_color=style.INK,
            source=self.bars,
        )
        runs.xaxis.ticker = FixedTicker(ticks=[0, 25, 50, 75, 100])
        runs.xaxis.formatter = PrintfTickFormatter(format="%d%%")
        runs.xaxis.axis_label = "share done"
        runs.xgrid.visible = False
        style.legend(runs, [("inputs split", [bars[0]]), ("outputs assembled", [bars[1]])])
        style.dress(runs)
        runs.add_tools(
            style.hover(
                bars,
                [("run", "@name"), ("done", "@text"), ("received", "@bytes{0.0 ib}"), ("workers", "@workers")],
                "A shuffle first splits every input, then assembles its outputs. Faint: it has ended, and leaves soon.",
            )
        )
        return runs

    def _sizes(self) -> figure:
        """The sizes of outputs."""
        sizes = figure(
            tools="",
            x_range=style.from_zero(),
            y_range=style.from_zero(),
            sizing_mode=style.SIZING,
            min_height=90,
        )
        quads = sizes.quad(
            left="left",
            right="right",
            bottom=0,
            top="count",
            fill_color=style.PURPLE,
            line_color=None,
            source=self.bins,
        )
        style.bytes_axis(sizes.xaxis, "size of an output")
        sizes.yaxis.axis_label = "number of outputs"
        sizes.yaxis.ticker = BasicTicker(min_interval=1)  # there is no half an output
        style.dress(sizes)
        sizes.add_tools(
            style.hover(
                [quads],
                [("size", "@left{0.0 ib} to @right{0.0 ib}"), ("outputs", "@count")],
                "The newest outputs by size. One far to the right of the others takes longest, and most memory.",
            )
        )
        return sizes

    def _draw(self, feed: Feed) -> str:
        runs = list(reversed(list(feed.shuffles)))
        self.axis.show([run.id[:6] for run in runs], what="run")
        fill(
            self.bars,
            {
                **{
                    key: [i + offset for i in range(len(runs))]
                    for key, offset in (("y_text", self.TEXT), ("y_inputs", self.INPUTS), ("y_outputs", self.OUTPUTS))
                },
                "inputs": [_percent(run.inputs_done, run.inputs) for run in runs],
                "outputs": [_percent(run.outputs_done, run.outputs) for run in runs],
                "name": [f"{run.id}, attempt {run.run_id}" for run in runs],
                "text": [_done(run) for run in runs],
                "bytes": [run.bytes for run in runs],
                "workers": [run.workers for run in runs],
                "alpha": [0.9 if run.active else 0.45 for run in runs],
            },
        )
        sizes = [n for n in (feed.latest.get("ledger") or {}).get("output_bytes") or [] if runs and n > 0]
        self._histogram(sizes)
        if not feed.latest.get("shuffle"):
            return OFF
        return _verdict(runs, sizes) + _evenness(sizes)

    def _histogram(self, sizes: list[int]) -> None:
        longest = max(sizes, default=0)
        counts = [0] * BINS
        for n in sizes:
            counts[min(BINS - 1, int(n / longest * BINS))] += 1
        at = [i for i, count in enumerate(counts) if count]
        fill(
            self.bins,
            {
                "left": [i * longest / BINS for i in at],
                "right": [(i + 0.94) * longest / BINS for i in at],
                "count": [counts[i] for i in at],
            },
        )
        style.fit(self.sizes.x_range, longest)
        style.fit(self.sizes.y_range, max(counts))


def _even(names: list[str], taken: list[float]) -> str:
    """Whether the workers take about the same, in words."""
    most = max(taken, default=0.0)
    if not most:
        return "No shuffle moved rows in the last minute."
    if len(taken) == 1:
        return "One worker: all rows stay on it."
    over = most / (sum(taken) / len(taken))
    name = style.short(names[taken.index(most)])
    if over > UNEVEN:
        return f"Uneven: {name} takes {over:.1f}x as many bytes as the average worker."
    return f"Even: no worker takes more than {over:.1f}x the average."


def _percent(done: int, every: int) -> float:
    return 100.0 * done / every if every else 0.0


def _done(run: Progress) -> str:
    done = f"{run.inputs_done:,}/{run.inputs:,} inputs · {run.outputs_done:,}/{run.outputs:,} outputs"
    return f"{done} · {format_bytes(run.bytes)}"


def _verdict(runs: list[Progress], sizes: list[int]) -> str:
    active = sum(run.active for run in runs)
    if not active:
        ended = f" {len(runs)} ended in the last minute." if runs else ""
        return "No shuffle is under way." + ended
    many = "1 shuffle" if active == 1 else f"{active} shuffles"
    over = max(sizes) / _median(sizes) if sizes else 1.0
    if over > UNEVEN:
        return f"{many} under way; outputs are uneven, the largest {over:.1f}x the median."
    return f"{many} under way" + ("; outputs are even." if sizes else ".")


def _median(sizes: list[int]) -> int:
    return sorted(sizes)[len(sizes) // 2]


def _evenness(sizes: list[int]) -> str:
    if not sizes:
        return ""
    median = _median(sizes)
    return f"\noutputs: median {format_bytes(median)}, largest {max(sizes) / median:.1f}x"
