"""What placement decided, how well it predicted, and what it has learned about the links that it decides by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FixedTicker, NumeralTickFormatter, Range1d
from bokeh.plotting import figure
from dask.utils import format_bytes

from dask_gpurt.observe.dashboard import style
from dask_gpurt.observe.dashboard.axes import TimeAxis
from dask_gpurt.observe.dashboard.component import GpurtPlot, fill
from dask_gpurt.observe.figures import history as feeds

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

    from dask_gpurt.observe.figures.history import Feed

#: where the axes have ticks, and what is written there
BANDWIDTHS: dict[float, str] = {
    2.0**20: "1 MiB/s",
    2.0**24: "16 MiB/s",
    2.0**28: "256 MiB/s",
    2.0**32: "4 GiB/s",
    2.0**36: "64 GiB/s",
}
LATENCIES: dict[float, str] = {1e-4: "0.1 ms", 1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "100 ms", 1.0: "1 s"}

OFF = "placement is not installed (gpurt.placement.enabled)"
#: actual over predicted time of the median task, up to which predictions are called good, either way
GOOD_RATIO = 1.5


class PlacementDecisions(GpurtPlot):
    """Tasks placed per second, stacked by what became of them."""

    TITLE = "Placement: tasks per second"
    NAME = "gpurt_placement_decisions"
    SERIES = (
        ("local", "all inputs there", style.TEAL),
        ("moved", "inputs moved", style.ORANGE),
        ("stock", "left to Dask", style.PURPLE),
    )

    def _build(self) -> LayoutDOM:
        keys = [key for key, _, _ in self.SERIES]
        self.lines = ColumnDataSource({key: [] for key in ("ago", *keys, "total")})
        self.sources = [self.lines]
        fig = figure(tools="", y_range=style.from_zero(), sizing_mode=style.SIZING)
        self.axis = TimeAxis(fig)
        areas = fig.varea_stack(keys, x="ago", color=[c for *_, c in self.SERIES], fill_alpha=0.85, source=self.lines)
        total = fig.line(x="ago", y="total", line_color=style.INK, line_width=1, source=self.lines)
        fig.yaxis.formatter = NumeralTickFormatter(format="0.[0]a")
        fig.yaxis.axis_label = "tasks per second"
        style.legend(fig, [(label, [area]) for (_, label, _), area in zip(self.SERIES, areas, strict=True)])
        style.dress(fig)
        fig.add_tools(
            style.hover(
                [total],
                [("seconds ago", "@ago{0}"), *((label, f"@{key}{{0.0}}/s") for key, label, _ in self.SERIES)],
                "Inputs moved: another worker was so much less busy that it fetches them. Left to Dask: on purpose, "
                "such as tasks without inputs.",
                mode="vline",
            )
        )
        self.figure = fig
        return fig

    def _draw(self, feed: Feed) -> str:
        ago, rates = feed.rates(("local", "moved", "stock"), points=feeds.POINTS)
        total = [sum(at) for at in zip(*rates.values(), strict=True)]
        fill(self.lines, {"ago": ago, **rates, "total": total})
        self.axis.show(ago)
        style.fit(self.figure.y_range, max(total, default=0))
        placement = feed.latest.get("placement")
        if not placement:
            return OFF
        decisions = placement["decisions"]
        fallbacks = feeds.fallbacks(placement)
        median = placement["microseconds"]["median"]
        return (
            f"{_placed({key: sum(values) for key, values in rates.items()})}\n"
            f"local {decisions['local']:,} · moved {decisions['moved']:,}"
            f" · left {sum(placement['declined'].values()):,}"
            f" · fallbacks {fallbacks:,} · {median:.0f} µs/task"
        )


class PlacementAccuracy(GpurtPlot):
    """Seconds from the decision to the result, predicted against actual, for the newest tasks placed by cost."""

    TITLE = "Placement: predicted and actual seconds"
    NAME = "gpurt_placement_accuracy"
    SERIES = (("local", "all inputs there", style.TEAL), ("moved", "inputs moved", style.ORANGE))
    #: seconds; what is outside is drawn at the edge
    LOW, HIGH = 1e-4, 1e3
    TICKS: ClassVar[dict[float, str]] = {
        1e-4: "0.1 ms", 1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "0.1 s", 1.0: "1 s", 10.0: "10 s", 100.0: "100 s",
    }  # fmt: skip

    def _build(self) -> LayoutDOM:
        self.points = {key: ColumnDataSource({"predicted": [], "actual": []}) for key, _, _ in self.SERIES}
        self.sources = list(self.points.values())
        fig = figure(
            tools="",
            x_axis_type="log",
            y_axis_type="log",
            x_range=Range1d(1e-3, 1.0),
            y_range=Range1d(1e-3, 1.0),
            sizing_mode=style.SIZING,
        )
        ends = [self.LOW / 10, self.HIGH * 10]
        same = fig.line(ends, ends, line_color=style.INK, line_width=1, line_dash=[4, 3])
        for axis, label in ((fig.xaxis, "predicted"), (fig.yaxis, "actual")):
            axis.ticker = FixedTicker(ticks=list(self.TICKS))
            axis.major_label_overrides = dict(self.TICKS)
            axis.axis_label = f"{label}, seconds"
        dots = [
            fig.scatter(
                x="predicted", y="actual", size=6, fill_color=color, fill_alpha=0.55, line_color=None,
                source=self.points[key],
            )
            for key, _, color in self.SERIES
        ]  # fmt: skip
        items = [(label, [dot]) for (_, label, _), dot in zip(self.SERIES, dots, strict=True)]
        style.legend(fig, [*items, ("as predicted", [same])])
        style.dress(fig)
        fig.add_tools(
            style.hover(
                dots,
                [("predicted", "@predicted{0.0000} s"), ("actual", "@actual{0.0000} s")],
                "From the decision to the result, waiting included. Above the line: it took longer than predicted.",
            )
        )
        self.figure = fig
        return fig

    def _draw(self, feed: Feed) -> str:
        placement = feed.latest.get("placement") or {}
        decisions = placement.get("decisions") or {}
        parts: dict[str, list[tuple[float, float]]] = {key: [] for key, _, _ in self.SERIES}
        for predicted, actual, moved_bytes in decisions.get("newest") or ():
            where = parts["moved" if moved_bytes else "local"]
            where.append((self._inside(predicted), self._inside(actual)))
        for key, pairs in parts.items():
            fill(self.points[key], {"predicted": [p for p, _ in pairs], "actual": [a for _, a in pairs]})
        values = [v for pairs in parts.values() for pair in pairs for v in pair]
        for extent in (self.figure.x_range, self.figure.y_range):
            # By whole powers of ten: it does not move with each point.
            low = 10.0 ** math.floor(math.log10(min(values, default=1e-3)))
            high = 10.0 ** math.ceil(math.log10(max(values, default=1.0)) + 0.01)
            if (extent.start, extent.end) != (low, high):
                extent.update(start=low, end=high)
        if not decisions:
            return OFF
        if not values:
            return "no task has ended that was placed by cost"
        ratio = decisions.get("median_ratio")
        found = "unknown" if ratio is None else f"{ratio:.2f}"
        return f"{_trust(ratio)}\nactual / predicted: median {found} of {decisions.get('finished') or 0:,} tasks"

    def _inside(self, seconds: float) -> float:
        return float(f"{min(self.HIGH, max(self.LOW, seconds)):.4g}")


class LinkEstimates(GpurtPlot):
    """Latency and bandwidth of each class of link; hollow where nothing was measured yet."""

    TITLE = "Links: bandwidth and latency by kind"
    NAME = "gpurt_link_estimates"
    #: nearest on top
    CLASSES = ("process", "host", "rack", "network")

    def _build(self) -> LayoutDOM:
        self.dots = ColumnDataSource(
            {
                key: []
                for axis in ("latency", "bandwidth")
                for key in ("y", "samples", "alpha", axis, f"{axis}_text", f"{axis}_align", f"{axis}_offset")
            }
        )
        self.sources = [self.dots]
        self.bandwidth = self._axis("bandwidth", BANDWIDTHS)
        style.dress(self.bandwidth)
        self.latency = self._axis("latency", LATENCIES)
        style.dress(self.latency)
        return column(self.bandwidth, self.latency, name=self.NAME, sizing_mode=style.SIZING)

    def _axis(self, key: str, ticks: dict[float, str]) -> figure:
        low, high = min(ticks), max(ticks)
        fig = figure(
            tools="",
            x_axis_type="log",
            x_range=Range1d(low, high),
            y_range=list(reversed(self.CLASSES)),
            min_height=90,
            sizing_mode=style.SIZING,
        )
        fig.xaxis.ticker = FixedTicker(ticks=list(ticks))
        fig.xaxis.major_label_overrides = dict(ticks)
        fig.xaxis.axis_label = key
        fig.yaxis.axis_label = "kind of link"
        fig.ygrid.grid_line_dash = [2, 4]
        dots = fig.scatter(
            x=key,
            y="y",
            size=13,
            line_width=2,
            line_color=style.TEAL,
            fill_color=style.TEAL,
            fill_alpha="alpha",
            source=self.dots,
        )
        fig.text(
            x=key,
            y="y",
            text=f"{key}_text",
            text_align=f"{key}_align",
            x_offset=f"{key}_offset",
            text_baseline="middle",
            text_font_size="12px",
            text_color=style.INK,
            source=self.dots,
        )
        fig.add_tools(
            style.hover(
                [dots],
                [
                    ("link", "@y"),
                    ("bandwidth", "@bandwidth_text"),
                    ("latency", "@latency_text"),
                    ("transfers measured", "@samples{0,0}"),
                ],
                "What placement takes a transfer of that kind to cost, learned from transfers between workers.",
            )
        )
        return fig

    def _draw(self, feed: Feed) -> str:
        placement = feed.latest.get("placement")
        if not placement:
            self._clear()
            return OFF
        links = [(c, placement["links"][c]) for c in self.CLASSES if c in placement["links"]]
        data: dict[str, list[Any]] = {
            "y": [c for c, _ in links],
            "latency": [f["latency_seconds"] for _, f in links],
            "bandwidth": [f["bytes_per_second"] for _, f in links],
            "latency_text": [_seconds(f["latency_seconds"]) for _, f in links],
            "bandwidth_text": [f"{format_bytes(int(f['bytes_per_second']))}/s" for _, f in links],
            "samples": [f["samples"] for _, f in links],
            "alpha": [0.9 if f["samples"] else 0.0 for _, f in links],
        }
        for key, ticks in (("latency", LATENCIES), ("bandwidth", BANDWIDTHS)):
            # The figure stands on the side of its dot where there is room.
            middle = math.sqrt(min(ticks) * max(ticks))
            data[f"{key}_align"] = ["left" if x < middle else "right" for x in data[key]]
            data[f"{key}_offset"] = [12 if x < middle else -12 for x in data[key]]
        fill(self.dots, data)
        measured = " · ".join(f"{c} {f['samples']:,}" for c, f in links if f["samples"])
        said = _known([(c, f) for c, f in links if f["samples"]])
        return f"{said}\ntransfers measured: {measured or 'none'} · hollow: assumed"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _placed(rates: dict[str, float]) -> str:
    """What became of most tasks, in words."""
    total = sum(rates.values())
    if not total:
        return "No task was placed lately."
    most = max(rates, key=lambda key: rates[key])
    words = {
        "local": "run where all their inputs are",
        "moved": "run where some of their inputs have to be fetched",
        "stock": "are left to Dask's own placement",
    }
    return f"{rates[most] / total:.0%} of the tasks {words[most]}."


def _trust(ratio: float | None) -> str:
    """Whether predictions hold, in words."""
    if ratio is None:
        return "Too few tasks to judge the predictions."
    if 1 / GOOD_RATIO <= ratio <= GOOD_RATIO:
        return f"Predictions are good: the median task takes {ratio:.2f}x the time predicted."
    way = "optimistic" if ratio > 1 else "pessimistic"
    return f"Predictions are too {way}: the median task takes {ratio:.2f}x the time predicted."


def _known(measured: list[tuple[str, dict[str, float]]]) -> str:
    """Which kinds of link are measured, in words."""
    if not measured:
        return "Nothing is measured yet: these are assumptions."
    speeds = ", ".join(f"{c} {format_bytes(int(f['bytes_per_second']))}/s" for c, f in measured)
    return f"Measured: {speeds}."
