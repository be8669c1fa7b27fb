"""Figures and tables for people: in plain text, and as HTML for notebooks. Everything given is escaped in HTML."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def seconds_said(seconds: float | None) -> str:
    """``0.31 s``, ``5.2 ms``; three digits. A dash for what is not known."""
    if seconds is None:
        return "-"
    if abs(seconds) >= 0.1:
        return f"{seconds:,.3g} s" if abs(seconds) < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 5e-7 else "0 ms"


def bytes_said(nbytes: float | None) -> str:
    """``120 MB`` (powers of 1000); three digits. A dash for what is not known."""
    if nbytes is None:
        return "-"
    for prefix in ("", "k", "M", "G"):
        if abs(nbytes) < 999.5:
            return f"{nbytes:.3g} {prefix}B" if prefix else f"{nbytes:.0f} B"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB" if nbytes < 1000 else f"{nbytes:,.0f} TB"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, indent: str = "  ") -> list[str]:
    """Lines of a table. The first `left` columns are aligned left, the others right."""
    lines = [[_on_one_line(cell) for cell in line] for line in (columns, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    out = []
    for line in lines:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        out.append((indent + "  ".join(cells)).rstrip())
    return out


def _on_one_line(text: str) -> str:
    """Keys of users may have line breaks in them, or what a terminal would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, bold: int | None = None) -> str:
    """The same as HTML; the row number `bold` is set off."""

    def line(cells: Sequence[str], tag: str, strong: bool) -> str:
        out = []
        for i, cell in enumerate(cells):
            style = f"text-align:{'left' if i < left else 'right'}" + (";font-weight:bold" if strong else "")
            out.append(f"<{tag} style='{style}'>{html.escape(cell)}</{tag}>")
        return f"<tr>{''.join(out)}</tr>"

    body = "".join(line(row, "td", i == bold) for i, row in enumerate(rows))
    return f"<table><thead>{line(columns, 'th', False)}</thead><tbody>{body}</tbody></table>"
