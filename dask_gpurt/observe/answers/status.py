"""`Status`: what `dask_gpurt.status` returns. Prints as text, shows as HTML in a notebook, gives plain JSON values."""

from __future__ import annotations

import dataclasses
import html

from dask_gpurt.observe.answers import every_figure, summary, verdict
from dask_gpurt.observe.answers.snapshot import Snapshot
from dask_gpurt.observe.collect.causes import CAUSES
from dask_gpurt.observe.render.html import Drawing, bars, fragment
from dask_gpurt.observe.render.text import html_table

#: workers with bars of their own
_BARS = 8
_GB = 1e9
#: pixels of a chart
_WIDTH = 560


@dataclasses.dataclass(frozen=True)
class Status(Snapshot):
    """A snapshot that shows itself; see `to_dict` for its layout."""

    #: whether it prints all figures after the summary
    verbose: bool = False

    def text(self, *, verbose: bool | None = None) -> str:
        """At most twenty lines of at most a hundred characters; all figures after them where `verbose`."""
        out = summary.lines(self)
        if self.verbose if verbose is None else verbose:
            out += every_figure.lines(self)
        return "\n".join(out)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        rows = [[s.label, "\n".join(filter(None, s.texts))] for s in summary.sections(self)]
        body = f"<h4>{html.escape(summary.headline(self))}</h4>{html_table(['', ''], rows, 2)}"
        body += "".join(drawing.markup for drawing in self._drawings())
        for title, figures in every_figure.groups(self):
            table = html_table(["figure", "value"], [list(row) for row in figures], 1)
            shown = " open" if self.verbose else ""
            body += f"<details{shown}><summary>{html.escape(title)}</summary>{table}</details>"
        return fragment(body)

    def _drawings(self) -> list[Drawing]:
        run = verdict.as_run(self)
        out = []
        wanted = run.wanted_seconds
        causes = [(c, s) for c, s in run.causes.items() if c != "no_work" and s >= 0.01 * wanted > 0]
        if causes:
            shares: list[tuple[str, list[float | None]]] = [("busy", [max(0.0, 100 * run.busy_seconds / wanted)])]
            shares += [(CAUSES[c][0], [100 * s / wanted]) for c, s in sorted(causes, key=lambda item: -item[1])[:5]]
            out.append(
                bars(["share of the threads' time"], shares, unit="%", about="what the threads did", width=_WIDTH)
            )
        rows: list[tuple[str, list[float | None]]] = []
        for address in list(self.having)[:_BARS]:
            tiers = self.having[address].get("tiers", {})
            held = [max(0, tiers.get(name, 0)) / _GB for name in ("host_bytes", "disk_bytes")]
            if any(held):
                rows.append((self.title(address), held))
        if rows:
            out.append(bars(["in memory", "on disk"], rows, unit="GB", about="values by worker and tier", width=_WIDTH))
        return out
