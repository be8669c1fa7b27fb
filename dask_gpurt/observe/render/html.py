"""A small writer of self-contained HTML pages: no script, no font, no address outside the file.

A `Page` is a list of sections, each already escaped when it is added; `render` only joins them. Nothing that is given
ends up in the page unescaped; the one way in for markup is a `Drawing`, which our own chart functions make. Colours are
CSS variables that follow the reader's light or dark scheme; charts are inline SVG with the same variables, and every
bar has its figure written beside it, so that colour carries nothing alone.
"""

from __future__ import annotations

import dataclasses
import html
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dask_gpurt.observe.output_file import replaceable, replacing

_CSS = """
:root { color-scheme: light dark; --ink: #1c2126; --dim: #5d6873; --line: #d8dde2; --paper: #ffffff; --band: #f4f6f8;
  --s0: #8795a3; --s1: #0b7a75; --s2: #b4632d; --s3: #6b4fa0; --bad: #b3261e; --good: #1d7a3a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --dim: #9aa6b2; --line: #363e46; --paper: #15191d;
  --band: #1d2329; --s0: #74828f; --s1: #35b5ae; --s2: #e0935d; --s3: #a88be0; --bad: #ff8a80; --good: #6bd08c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.25rem 4rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .6rem; }
p { margin: .4rem 0; max-width: 50rem; }
p.note { color: var(--dim); font-size: .9rem; }
p.bad { color: var(--bad); font-weight: 600; } p.good { color: var(--good); font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { border-bottom-width: 2px; color: var(--dim); font-weight: 600; vertical-align: bottom; }
tbody tr:nth-child(even) { background: var(--band); }
tfoot td { border-top: 2px solid var(--line); border-bottom: 0; font-weight: 600; white-space: nowrap; }
th.n, td.n { text-align: right; } td.n { white-space: nowrap; }
td.k { color: var(--dim); white-space: nowrap; } td.v { overflow-wrap: anywhere; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 12px; font-variant-numeric: tabular-nums; }
svg text.dim { fill: var(--dim); }
svg .s0 { fill: var(--s0); } svg .s1 { fill: var(--s1); } svg .s2 { fill: var(--s2); } svg .s3 { fill: var(--s3); }
"""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Markup by this package's own chart functions, which escape what they are given; a `Page` takes it as it is."""

    markup: str


#: series of one chart, at most: so many colours can be distinguished
MAX_SERIES = 4


class Page:
    """A page to be: add sections in order, then `write`.

    Parameters
    ----------
    title
        Heading and title of the document.
    style
        More CSS, for drawings.
    """

    def __init__(self, title: str, *, style: str = "") -> None:
        self._title = title
        self._style = style
        self._parts: list[str] = []

    def text(self, text: str, *, kind: str = "") -> None:
        """A paragraph. `kind`: "" or "note" (dim), "good", "bad"."""
        if kind not in ("", "note", "good", "bad"):
            raise ValueError(f"kind is {kind!r}, must be '', 'note', 'good' or 'bad'")
        self._parts.append(f"<p{f' class={kind}' if kind else ''}>{html.escape(text)}</p>")

    def heading(self, text: str) -> None:
        """A heading."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def drawing(self, drawing: Drawing) -> None:
        """A chart."""
        self._parts.append(drawing.markup)

    def facts(self, values: Mapping[str, Any]) -> None:
        """Keys and values, one a line. Nested mappings get dotted keys; a text of several lines keeps its lines."""
        rows = "".join(
            f"<tr><td class=k>{html.escape(key)}</td><td class=v>{_value(value)}</td></tr>"
            for key, value in flatten(values)
        )
        self._parts.append(f"<div class=scroll><table><tbody>{rows}</tbody></table></div>")

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        *,
        footer: Sequence[Sequence[Any]] = (),
    ) -> None:
        """A table. A column is aligned right if all its cells are numbers, None or texts that read as numbers.

        Raises
        ------
        ValueError
            A row has not as many cells as there are columns.
        """
        for row in (*rows, *footer):
            if len(row) != len(columns):
                raise ValueError(f"a row has {len(row)} cells for {len(columns)} columns: {list(row)!r}")
        numeric = [bool(rows) and all(_reads_as_number(row[i]) for row in rows) for i in range(len(columns))]

        def line(row: Sequence[Any], tag: str) -> str:
            cells = (
                f"<{tag}{' class=n' if right else ''}>{_value(cell)}</{tag}>"
                for cell, right in zip(row, numeric, strict=True)
            )
            return f"<tr>{''.join(cells)}</tr>"

        head = f"<thead>{line(columns, 'th')}</thead>"
        body = f"<tbody>{''.join(line(row, 'td') for row in rows)}</tbody>"
        foot = f"<tfoot>{''.join(line(row, 'td') for row in footer)}</tfoot>" if footer else ""
        self._parts.append(f"<div class=scroll><table>{head}{body}{foot}</table></div>")

    def bars(
        self,
        series: Sequence[str],
        rows: Sequence[tuple[str, Sequence[float | None]]],
        *,
        unit: str = "",
        about: str = "bar chart",
    ) -> None:
        """Horizontal bars, one group a row, one bar a series, all on one scale from zero.

        Parameters
        ----------
        series
            Names, at most `MAX_SERIES`; the legend.
        rows
            (label, one value a series); None where there is nothing to show.
        unit
            Written after each figure.
        about
            What the chart shows, for a reader who cannot see it.

        Raises
        ------
        ValueError
            Too many series, a row of another length, or a value that is negative or not finite.
        """
        self.drawing(bars(series, rows, unit=unit, about=about))

    def render(self) -> str:
        """The whole document."""
        title = html.escape(self._title)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{_CSS}{self._style}</style></head>\n<body><h1>{title}</h1>\n"
            + "\n".join(self._parts)
            + "\n</body></html>\n"
        )

    def write(self, path: str) -> str:
        """Write the document to `path` in one step and return `path`. Errors: see `replaceable`."""
        full = replaceable(path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with replacing(full) as beside, open(beside, "w", encoding="utf-8") as f:
            f.write(self.render())
        return path


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings to (dotted key, value), in order. An empty mapping is kept as a value, to be seen."""
    out: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            out += flatten(value, f"{prefix}{key}.")
        else:
            out.append((f"{prefix}{key}", value))
    return out


def _value(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return html.escape(f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}")
    if isinstance(value, Mapping):
        return "none" if not value else html.escape(str(dict(value)))
    if isinstance(value, (list, tuple)):
        return html.escape(", ".join(map(str, value))) or "none"
    text = str(value)
    return f"<pre>{html.escape(text)}</pre>" if "\n" in text else html.escape(text)


def _reads_as_number(value: object) -> bool:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return True
    if isinstance(value, str):
        if value in ("", "–"):
            return True
        try:
            float(value.replace(",", "").removesuffix("x").removesuffix("%"))
        except ValueError:
            return False
        return True
    return False


#: of a part of a page that is not ours: readable on light and dark, nothing outside of it changes
_FRAGMENT_CSS = """
.gpurt td { white-space: pre-wrap; } .gpurt svg { display: block; max-width: 100%; height: auto; margin: .4em 0; }
.gpurt svg text { fill: currentColor; font: 12px system-ui, sans-serif; } .gpurt svg text.dim { opacity: .7; }
.gpurt svg .s0 { fill: #8795a3; } .gpurt svg .s1 { fill: #1a9a94; }
.gpurt svg .s2 { fill: #c87941; } .gpurt svg .s3 { fill: #8a6fc0; }
"""

#: geometry of a chart, in SVG user units (pixels at full width)
_WIDTH, _BAR, _GAP, _GROUP_GAP, _CHARACTER = 860, 13, 2, 9, 7


def bars(
    series: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float | None]]],
    *,
    unit: str = "",
    about: str = "bar chart",
    width: int = _WIDTH,
) -> Drawing:
    """`Page.bars` by itself, so many pixels wide where there is room."""
    if not 1 <= len(series) <= MAX_SERIES:
        raise ValueError(f"{len(series)} series, must be 1 to {MAX_SERIES}")
    for label, values in rows:
        if len(values) != len(series):
            raise ValueError(f"row {label!r} has {len(values)} values for {len(series)} series")
        for value in values:
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"row {label!r} has the value {value!r}, must be finite and not negative")
    return Drawing(_chart(series, rows, unit, about, width))


def fragment(body: str) -> str:
    """A part of a notebook's page: `body`, markup of ours, with the colours that drawings need."""
    return f"<div class=gpurt><style>{_FRAGMENT_CSS}</style>{body}</div>"


def _chart(
    series: Sequence[str], rows: Sequence[tuple[str, Sequence[float | None]]], unit: str, about: str, full: int
) -> str:
    highest = max((v for _, values in rows for v in values if v is not None), default=0.0) or 1.0
    left = 12 + _CHARACTER * max((len(label) for label, _ in rows), default=0)
    # Room behind the longest bar for its figure.
    figures = [_figure(v, unit) for _, values in rows for v in values]
    room = full - left - 12 - _CHARACTER * max(map(len, figures), default=0)
    out: list[str] = []
    x = float(left)
    for i, name in enumerate(series):
        out.append(f'<rect class="s{i}" x="{x:g}" y="4" width="11" height="11" rx="2"/>')
        out.append(f'<text x="{x + 16:g}" y="14">{html.escape(name)}</text>')
        x += 34 + _CHARACTER * len(name)
    y = 28.0
    for label, values in rows:
        height = len(series) * (_BAR + _GAP) - _GAP
        out.append(
            f'<text class="dim" x="{left - 8:g}" y="{y + height / 2 + 4:g}" text-anchor="end">'
            f"{html.escape(label)}</text>"
        )
        for i, value in enumerate(values):
            top = y + i * (_BAR + _GAP)
            width = 0.0 if value is None else room * value / highest
            if width:
                out.append(
                    f'<rect class="s{i}" x="{left:g}" y="{top:g}" width="{max(width, 0.5):.1f}" '
                    f'height="{_BAR}" rx="1.5"/>'
                )
            out.append(f'<text x="{left + width + 6:.1f}" y="{top + 11:g}">{html.escape(_figure(value, unit))}</text>')
        y += height + _GROUP_GAP
    return (
        f'<div class=scroll><svg role="img" aria-label="{html.escape(about, quote=True)}" width="{full}" '
        f'height="{y:g}" viewBox="0 0 {full} {y:g}">{"".join(out)}</svg></div>'
    )


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    text = f"{value:,.{digits}f}" if value >= 0.1 or value == 0 else f"{value:.2g}"
    return f"{text} {unit}" if unit else text
