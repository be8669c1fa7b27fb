"""Where the bytes are, worker by worker, and how fast they move to and from disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.models import ColumnDataSource
from bokeh.plotting import figure
from dask.utils import format_bytes

from dask_gpurt.observe.dashboard import style
from dask_gpurt.observe.dashboard.axes import BARS, TimeAxis, WorkerAxis
from dask_gpurt.observe.dashboard.component import NO_FIGURES, NO_WORKERS, GpurtPlot, fill
from dask_gpurt.observe.figures.history import POINTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bokeh.models import LayoutDOM

    from dask_gpurt.observe.figures.history import Feed
#: share of its limit from which a worker is called full
FULL = 0.9


class TierOccupancy(GpurtPlot):
    """Bytes in host memory and on disk per worker, with the limits of both."""

    TITLE = "Memory tiers: bytes held per worker"
    NAME = "gpurt_tier_occupancy"

    def _build(self) -> LayoutDOM:
        self.bars = ColumnDataSource(
            {key: [] for key in ("y", "name", "host", "end", "disk", "host_limit_text", "disk_limit_text")}
        )
        self.limits = ColumnDataSource({"x": [], "y0": [], "y1": []})
        self.sources = [self.bars, self.limits]
        fig = figure(tools="", x_range=style.from_zero(), sizing_mode=style.SIZING)
        self.axis = WorkerAxis(fig)
        # Without outlines: that of a bar of no length would still be drawn.
        host = fig.hbar(y="y", left=0, right="host", height=BARS, color=style.TEAL, line_color=None, source=self.bars)
        disk = fig.hbar(
            y="y", left="host", right="end", height=BARS, color=style.ORANGE, line_color=None, source=self.bars
        )
        halo, limit = (
            fig.segment(x0="x", x1="x", y0="y0", y1="y1", color=color, line_width=width, source=self.limits)
            for color, width in ((style.HALO, 5), (style.MARK, 2))
        )
        style.bytes_axis(fig.xaxis, "bytes held")
        style.legend(fig, [("host memory", [host]), ("disk", [disk]), ("limit of host memory", [halo, limit])])
        style.dress(fig)
        fig.add_tools(
            style.hover(
                [host, disk],
                [
                    ("worker", "@name"),
                    ("host memory", "@host{0.0 ib} of @host_limit_text"),
                    ("disk", "@disk{0.0 ib} of @disk_limit_text"),
                ],
                "Results that do not fit below the limit are written to disk, those needed last first, and read back "
                "when a task needs them.",
            )
        )
        self.figure = fig
        return fig

    def _draw(self, feed: Feed) -> str:
        every = feed.rows()
        rows = [(row.name, row.figures) for row in every if row.figures is not None]
        self.axis.show([name for name, _ in rows])
        host = [_number(f, "host_bytes") for _, f in rows]
        disk = [_number(f, "disk_bytes") for _, f in rows]
        end = [h + d for h, d in zip(host, disk, strict=True)]
        marks = [(i, f["host_limit_bytes"]) for i, (_, f) in enumerate(rows) if f.get("host_limit_bytes")]
        fill(
            self.bars,
            {
                "y": list(range(len(rows))),
                "name": [name for name, _ in rows],
                "host": host,
                "end": end,
                "disk": disk,
                "host_limit_text": [_limit(f.get("host_limit_bytes")) for _, f in rows],
                "disk_limit_text": [_limit(f.get("disk_limit_bytes")) for _, f in rows],
            },
        )
        fill(
            self.limits,
            {
                "x": [limit for _, limit in marks],
                "y0": [i - BARS / 2 for i, _ in marks],
                "y1": [i + BARS / 2 for i, _ in marks],
            },
        )
        style.fit(self.figure.x_range, max([*end, *(limit for _, limit in marks)], default=0))
        if not every:
            return NO_WORKERS
        if not rows:
            return NO_FIGURES
        stock = len(every) - len(rows)
        full = sum(host[i] >= FULL * limit for i, limit in marks)
        said = _held(len(rows), full, sum(n > 0 for n in disk), any(end))
        return (
            f"{said}\n"
            f"host {format_bytes(int(sum(host)))} · disk {format_bytes(int(sum(disk)))} · {_workers(len(rows))}"
            + (f" · {stock} without dask-gpurt" if stock else "")
        )


class TierHistory(GpurtPlot):
    """Bytes in each tier over time, all workers together, the fastest tier at the bottom."""

    TITLE = "Memory tiers: bytes held"
    NAME = "gpurt_tier_history"
    #: of `history.LEVELS`; a tier that no worker has is in neither plot nor legend
    TIERS = (
        ("device_bytes", "device memory", style.GREEN),
        ("host_bytes", "host memory", style.TEAL),
        ("disk_bytes", "disk", style.ORANGE),
        ("object_bytes", "object store", style.PURPLE),
    )

    def _build(self) -> LayoutDOM:
        keys = [key for key, _, _ in self.TIERS]
        self.lines = ColumnDataSource({key: [] for key in ("ago", *keys, "total")})
        self.sources = [self.lines]
        fig = figure(tools="", y_range=style.from_zero(), sizing_mode=style.SIZING)
        self.axis = TimeAxis(fig)
        areas = fig.varea_stack(keys, x="ago", color=[c for *_, c in self.TIERS], fill_alpha=0.85, source=self.lines)
        total = fig.line(x="ago", y="total", line_color=style.INK, line_width=1, source=self.lines)
        style.bytes_axis(fig.yaxis, "bytes held")
        style.legend(fig, [(label, [area]) for (_, label, _), area in zip(self.TIERS, areas, strict=True)])
        self.entries = list(fig.legend[0].items)
        style.dress(fig)
        fig.add_tools(
            style.hover(
                [total],
                [
                    ("seconds ago", "@ago{0}"),
                    *((label, f"@{key}{{0.0 ib}}") for key, label, _ in self.TIERS),
                ],
                "Results held by all workers. A band of disk that keeps growing: they do not fit into memory.",
                mode="vline",
            )
        )
        self.figure = fig
        return fig

    def _draw(self, feed: Feed) -> str:
        ago, levels = feed.levels()
        none = [0.0] * len(ago)
        data = {key: levels.get(key, none) for key, _, _ in self.TIERS}
        total = [sum(at) for at in zip(*data.values(), strict=True)]
        fill(self.lines, {"ago": [round(s, 1) for s in ago], **data, "total": total})
        self.axis.show(ago)
        style.fit(self.figure.y_range, max(total, default=0))
        there = {key: key in levels for key, _, _ in self.TIERS}
        for (key, _, _), entry in zip(self.TIERS, self.entries, strict=True):
            style.visible(entry, there[key])
        if not feed.rows():
            return NO_WORKERS
        if not levels:
            return NO_FIGURES
        tiers = [key for key, _, _ in self.TIERS if there[key]]
        now = [f"{key.removesuffix('_bytes')} {format_bytes(int(levels[key][-1]))}" for key in tiers]
        figures = " · ".join([*now, f"peak {format_bytes(int(max(total)))}"])
        return f"{_below(levels)}\n{figures}"


class DiskRates(GpurtPlot):
    """Bytes per second written to and read from disk, all workers together."""

    TITLE = "Memory tiers: to and from disk"
    NAME = "gpurt_disk_rates"

    def _build(self) -> LayoutDOM:
        self.lines = ColumnDataSource({"ago": [], "written": [], "read": []})
        self.sources = [self.lines]
        fig = figure(tools="", y_range=style.from_zero(), sizing_mode=style.SIZING)
        self.axis = TimeAxis(fig)
        items = []
        for key, label, color in (("written", "written", style.ORANGE), ("read", "read", style.TEAL)):
            area = fig.varea(x="ago", y1=0, y2=key, fill_color=color, fill_alpha=0.25, source=self.lines)
            line = fig.line(x="ago", y=key, line_color=color, line_width=2, source=self.lines)
            items.append((label, [line, area]))
        style.bytes_axis(fig.yaxis, "bytes per second")
        style.legend(fig, items)
        style.dress(fig)
        fig.add_tools(
            style.hover(
                [items[0][1][0]],
                [
                    ("seconds ago", "@ago{0}"),
                    ("written", "@written{0.0 ib}/s"),
                    ("read", "@read{0.0 ib}/s"),
                ],
                "Written: results that had to leave memory. Read: those that a task needed again. Reading much of what "
                "was written is the price of too little memory.",
                mode="vline",
            )
        )
        self.figure = fig
        return fig

    def _draw(self, feed: Feed) -> str:
        ago, rates = feed.rates(("written_bytes", "read_bytes"), points=POINTS)
        written, read = rates["written_bytes"], rates["read_bytes"]
        fill(self.lines, {"ago": ago, "written": written, "read": read})
        self.axis.show(ago)
        style.fit(self.figure.y_range, max([*written, *read], default=0))
        total = feed.history[-1].sums if feed.history else {}
        return (
            f"{_moving(written, read)}\nso far written {format_bytes(int(total.get('written_bytes', 0)))}"
            f" · read {format_bytes(int(total.get('read_bytes', 0)))}"
        )


def _number(figures: Mapping[str, Any], key: str) -> float:
    return float(figures.get(key) or 0)


def _limit(limit: float | None) -> str:
    return "no limit" if limit is None else str(format_bytes(int(limit)))


def _workers(n: int) -> str:
    return "1 worker" if n == 1 else f"{n} workers"


def _held(workers: int, full: int, spilled: int, anything: bool) -> str:
    """How the workers stand to their limits, in words."""
    if not anything:
        return "The workers hold nothing."
    held = f"{_of(spilled, workers)} with data on disk" if spilled else "nothing is on disk"
    return f"{_of(full, workers) if full else 'None'} at the limit of memory, {held}."


def _of(n: int, workers: int) -> str:
    return f"{n} of {_workers(workers)}"


def _below(levels: Mapping[str, Sequence[float]]) -> str:
    """Which share is below memory, in words."""
    total = sum(values[-1] for values in levels.values())
    below = sum(levels[key][-1] for key in ("disk_bytes", "object_bytes") if key in levels)
    if not total:
        return "Nothing is held."
    if not below:
        return "All data is in memory."
    return f"{below / total:.0%} of the data does not fit into memory and was moved out of it."


def _moving(written: Sequence[float], read: Sequence[float]) -> str:
    """What goes to and from disk now, in words."""
    out, back = (int(values[-1]) if values else 0 for values in (written, read))
    if not out and not back:
        return "Quiet: nothing goes to or comes from disk."
    way = "Spilling" if out >= back else "Reading back"
    return f"{way}: now {format_bytes(out)}/s to disk, {format_bytes(back)}/s from it."
