"""Colours, axes and legends that the plots share.

Dask's theme leaves the background of plots transparent and has no dark variant; its pages are light, a JupyterLab panel
may be dark. So no background is set here, text and lines are of a grey that is read on both, and areas are of middle
lightness. They differ for all common forms of colour blindness, too; no plot says anything by colour alone.
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

from bokeh.models import AdaptiveTicker, CustomJSTickFormatter, Div, HoverTool, Legend, Range1d

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bokeh.models import Axis, CustomJSHover, GlyphRenderer, LegendItem
    from bokeh.plotting import figure

#: the first character of a mark that begins a formula: ``$$``, ``\[`` or ``\(``
_FORMULA = re.compile(r"\$(?=\$)|\\(?=[\[(])")
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


def dress(fig: figure) -> None:
    """Give a figure the common looks: quiet axes, and no toolbar."""
    fig.toolbar_location = None
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


def heading(title: str) -> Div:
    """Title, verdict and figures of a plot, as text that wraps in a narrow panel."""
    return Div(
        text=heading_text(title, ""),
        # Names of a user's are in it, and TeX can be a link that runs a script.
        disable_math=True,
        sizing_mode="stretch_width",
        margin=(4, 8, 2, 12),
        styles={"color": INK, "font-family": "system-ui, sans-serif", "line-height": "1.35"},
    )


def heading_text(title: str, said: str) -> str:
    """HTML of a heading: of `said`, the first line is the verdict, the others are its figures."""
    verdict, _, figures = said.partition("\n")
    lines = ((title, "font-size:14px;font-weight:600"), (verdict, "font-size:13px"), (figures, "font-size:12px"))
    return "".join(f'<div style="{css}">{html.escape(text)}</div>' for text, css in lines if text)


def hover(
    renderers: list[GlyphRenderer],
    rows: Sequence[tuple[str, str]],
    means: str,
    *,
    mode: str = "mouse",
    formatters: dict[str, CustomJSHover] | None = None,
) -> HoverTool:
    """What the pointer shows: (label, value) row by row, and below them a sentence on what they mean.

    Values are of Bokeh's form, such as ``@bytes{0.0 ib}``; columns hold plain text, which Bokeh escapes.
    """
    cells = "".join(
        f'<tr><td style="padding-right:8px;color:{INK};vertical-align:top">{html.escape(label)}</td>'
        f'<td style="white-space:pre-line">{html.escape(value)}</td></tr>'
        for label, value in rows
    )
    text = f'<div style="margin-top:4px;color:{INK}">{html.escape(means)}</div>'
    tooltips = f'<div style="max-width:270px;font-size:12px;color:{MARK}"><table>{cells}</table>{text}</div>'
    return HoverTool(renderers=renderers, mode=mode, tooltips=tooltips, formatters=formatters or {})


def bytes_axis(axis: Axis, label: str) -> None:
    """An axis of bytes, in steps of 1024; `label` says of what."""
    axis.ticker = AdaptiveTicker(desired_num_ticks=4, **BYTES_TICKER)
    axis.formatter = CustomJSTickFormatter(code=BYTES_JS)
    axis.axis_label = label


def legend(fig: figure, items: list[tuple[str, list[Any]]]) -> None:
    """A legend in one line above the plot, where it covers nothing."""
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
    cut = name if len(name) <= longest else "…" + name[-(longest - 1) :]
    # Bokeh draws a label as a formula where it has the marks of one; a space without width between them prevents it.
    return _FORMULA.sub("\\g<0>\u200b", cut)
