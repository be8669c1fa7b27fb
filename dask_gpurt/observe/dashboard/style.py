"""Colours, axes and legends that the plots share.

Dask's theme leaves the background of plots transparent and has no dark variant; its pages are light, a JupyterLab panel
may be dark. So no background is set here, text and lines are of a grey that is read on both, and areas are of middle
lightness. They differ for all common forms of colour blindness, too; no plot says anything by colour alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.models import AdaptiveTicker, CustomJSTickFormatter, Legend, Range1d, Title

if TYPE_CHECKING:
    from bokeh.models import Axis, LegendItem
    from bokeh.plotting import figure

#: of figures and of what holds them: the panel that they are in has the size
SIZING = "stretch_both"
#: text, axes
INK = "#6e7681"
GRID = "#8b949e"
#: first, second, third series
TEAL, ORANGE, PURPLE = "#1b9e96", "#d08338", "#8a6fc4"
#: a fourth, where there is one
GREEN = "#7aa63c"
#: a mark on bars of any colour: the first, with the second around it
MARK, HALO = "#24292f", "#ffffff"

#: steps of an axis of bytes
BYTES_TICKER = {"base": 1024, "mantissas": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]}
#: "64 MiB"; NumeralJS, which Bokeh brings, leaves no space between number and unit
BYTES_JS = """
const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
let i = 0
while (tick >= 1024 && i < units.length - 1) { tick /= 1024; i++ }
return `${+tick.toFixed(1)} ${units[i]}`
"""


def dress(fig: figure, headline: Title | None) -> None:
    """Give a figure the common looks: title and a line of text below it, where it has them; quiet axes."""
    fig.toolbar_location = None
    if fig.title is not None:
        fig.title.text_font_size = "14px"
        fig.title.text_color = INK
    if headline is not None:
        fig.add_layout(headline, "above")
    fig.outline_line_color = None
    fig.grid.grid_line_color = GRID
    fig.grid.grid_line_alpha = 0.25
    fig.min_border_left = 40
    fig.min_border_right = 24
    for axis in fig.axis:
        axis.axis_line_color = GRID
        axis.major_tick_line_color = GRID
        axis.minor_tick_line_color = None
        axis.major_label_text_color = INK
        axis.axis_label_text_color = INK
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = "12px"


def headline() -> Title:
    """The line below the title, empty."""
    return Title(text="", text_font_size="12px", text_font_style="normal", text_color=INK)


def bytes_axis(axis: Axis, *, per_second: bool = False) -> None:
    """Label an axis in bytes of 1024."""
    axis.ticker = AdaptiveTicker(desired_num_ticks=4, **BYTES_TICKER)
    axis.formatter = CustomJSTickFormatter(code=BYTES_JS)
    if per_second:
        axis.axis_label = "bytes per second"


def legend(fig: figure, items: list[tuple[str, list[Any]]]) -> None:
    """A legend in one line between headline and plot, where it covers nothing."""
    fig.add_layout(
        Legend(
            items=items,
            orientation="horizontal",
            border_line_color=None,
            background_fill_alpha=0.0,
            label_text_color=INK,
            label_text_font_size="12px",
            padding=0,
            margin=2,
            spacing=12,
            glyph_width=14,
            glyph_height=14,
        ),
        "above",
    )


def visible(entry: LegendItem, there: bool) -> None:
    """Show an entry of a legend only with something to explain; without data it would lack its colour, too."""
    if entry.visible != there:
        entry.visible = there


def from_zero() -> Range1d:
    """A range whose end is set by `fit`."""
    return Range1d(start=0, end=1)


def fit(extent: Range1d, highest: float) -> None:
    """Let a range from zero end a little above the highest value; 1 when there is none."""
    end = highest * 1.08 if highest > 0 else 1.0
    if extent.end != end:
        extent.end = end


def short(name: str, longest: int = 18) -> str:
    """A worker's name for an axis: without protocol, and its end when it is long, where addresses differ."""
    name = name.rsplit("://", 1)[-1]
    return name if len(name) <= longest else "…" + name[-(longest - 1) :]
