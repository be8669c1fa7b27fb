"""The newest runs on the dashboard: a table of them, and the report of each as a page of its own.

The report is a plain page, not a Bokeh document: it does not change while it is read.
"""

from __future__ import annotations

import contextlib
import html
import logging
from typing import TYPE_CHECKING, Any

from bokeh.models import Div
from distributed.dashboard.components import DashboardComponent
from tornado.web import RequestHandler

from dask_gpurt.observe.answers.runs import COLUMNS, row
from dask_gpurt.observe.dashboard.component import NOT_INSTALLED
from dask_gpurt.observe.render.html import Page
from dask_gpurt.observe.report.page import page
from dask_gpurt.observe.runs import record, recorder

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("distributed.scheduler.gpurt")

#: address of the report of a run
REPORT = "/gpurt-run"
#: rows of the table
SHOWN = 50

_STYLE = """<style>
.gpurt-runs { font: 14px/1.45 system-ui, sans-serif; color: #6e7681; overflow-x: auto; }
.gpurt-runs table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.gpurt-runs td, .gpurt-runs th { padding: .2rem .7rem; text-align: left; white-space: nowrap;
  border-bottom: 1px solid rgba(139, 148, 158, .3); }
.gpurt-runs td.why { white-space: normal; min-width: 20rem; }
.gpurt-runs p { margin: .4rem 0 .8rem; max-width: 60rem; } .gpurt-runs a { color: #2f7fd0; }
</style>"""


class RunTable(DashboardComponent):
    """The newest runs, with the verdict on the newest of them in words above. Cannot fail its page."""

    TITLE = "Runs: what they waited for"
    NAME = "gpurt_runs"

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.errors = 0
        # Without math, as in `style.heading`: names of tasks are in it.
        self.root = Div(text="", name=self.NAME, sizing_mode="stretch_both", disable_math=True)

    async def prepare(self) -> None:
        """Before `update`. Never raises: what fails here fails there."""
        runs = recorder.of(self.scheduler)
        if runs is not None:
            with contextlib.suppress(Exception):
                await runs.refresh()

    def update(self) -> None:
        """Called by Bokeh while a page is open. Never raises."""
        try:
            text = self._draw()
        except Exception as e:
            self.errors += 1
            if self.errors == 1:
                logger.warning("dask-gpurt: the table of runs could not be updated", exc_info=True)
            text = html.escape(f"not shown ({self.errors} errors): {type(e).__name__}: {e}")
        text = f"{_STYLE}<div class=gpurt-runs>{text}</div>"
        if self.root.text != text:
            self.root.text = text

    def _draw(self) -> str:
        runs = recorder.of(self.scheduler)
        if runs is None:
            return html.escape(NOT_INSTALLED)
        headlines = runs.headlines()
        if not headlines:
            return "nothing has run yet"
        newest = headlines[0]
        body = "".join(_line(headline) for headline in headlines[:SHOWN])
        head = "".join(f"<th>{name}</th>" for name in (*COLUMNS, "why"))
        return (
            f"<p><b>Run {newest['number']}</b>, {html.escape(newest['name'])}: {html.escape(newest['verdict'])}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


def _line(headline: dict[str, Any]) -> str:
    number, *rest = (html.escape(cell) for cell in row(headline))
    link = f'<a href="{REPORT.strip("/")}?run={number}">{number}</a>'
    cells = "".join(f"<td>{cell}</td>" for cell in (link, *rest))
    return f"<tr>{cells}<td class=why>{html.escape(headline['verdict'])}</td></tr>"


class ReportPage(RequestHandler):
    """``/gpurt-run?run=7``: the report of a run; without a number of the newest."""

    def initialize(self, scheduler: Scheduler) -> None:
        """Tornado calls this for each request."""
        self.scheduler = scheduler

    def get(self) -> None:
        """Answer with a page, also when there is no such run."""
        status, made = self._answer(self.get_query_argument("run", "-1"))
        self.set_status(status)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(made.render())

    def _answer(self, text: str) -> tuple[int, Page]:
        """The status and the page for the number that was asked for."""
        runs = recorder.of(self.scheduler)
        if runs is None:
            return 503, _refusal(NOT_INSTALLED)
        try:
            number = int(text)
        except ValueError:
            return 400, _refusal(f"The run is {text!r}, must be a whole number, such as 7, or -1 for the newest.")
        known = runs.numbers()
        found = runs.find(known[number] if -len(known) <= number < 0 else number)
        if found is None:
            kept = f"{known[0]} to {known[-1]}" if known else "none"
            return 404, _refusal(f"There is no run {number}, or it is not kept any more. Kept are: {kept}.")
        return 200, page(record.run_of(found))


def _refusal(why: str) -> Page:
    out = Page("dask-gpurt: no report")
    out.text(why, kind="bad")
    return out
