"""Every plot draws what it is given, from nothing to a hundred workers, and fails into a text."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("bokeh")

from bokeh.document import Document
from bokeh.models import Axis, HoverTool, LayoutDOM, Plot, Text
from bokeh.server.callbacks import PeriodicCallback

from dask_gpurt.observe.dashboard import component, hook, late, pages, style
from dask_gpurt.observe.dashboard.axes import NAMED
from dask_gpurt.observe.figures import history as feeds
from dask_gpurt.observe.figures.shuffle_progress import Progress
from dask_gpurt.observe.runs import recorder
from tests.observe.fakes import Clock, FakeScheduler, MiB, figures, give_feed, heartbeat

from .documents import called_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.observe.figures.history import Feed

PLOTS = list(pages.PLOTS.values())
#: plots with a row per worker
PER_WORKER = [plot for address, plot in pages.PLOTS.items() if address.endswith(("occupancy", "traffic"))]


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


def _run(made: Feed, clock: Clock, seconds: int = 5) -> None:
    for _ in range(seconds):
        made.tick()
        clock.now += 1


def _lengths(plot: Any) -> list[int]:
    """Rows of each source; its columns have one length."""
    out = []
    for source in plot.sources:
        (length,) = {len(column) for column in source.data.values()}
        out.append(length)
    return out


@pytest.mark.parametrize("plot", PLOTS)
def test_without_the_extension(plot: Any, scheduler: FakeScheduler) -> None:
    made = plot(scheduler)
    made.update()
    assert made.said == component.NOT_INSTALLED
    assert set(_lengths(made)) == {0}
    assert made.errors == 0


@pytest.mark.parametrize("plot", PLOTS)
def test_after_a_detach_the_plot_is_empty_and_says_so(
    plot: Any, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as m:
        scheduler.add("a", heartbeat(host_bytes=1))
        feed, clock = give_feed(scheduler, lambda: figures(local=9), m)
        _run(feed, clock)
        feed.shuffles._runs["a", 1] = Progress("a", 1, inputs=2, outputs=2)
        made = plot(scheduler)
        made.update()
        assert max(_lengths(made)) > 0
    made.update()
    assert set(_lengths(made)) == {0}
    assert made.said == component.NOT_INSTALLED


@pytest.mark.parametrize("plot", PLOTS)
@pytest.mark.parametrize("engines", [True, False])
def test_without_workers(plot: Any, engines: bool, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, clock = give_feed(scheduler, figures if engines else dict, monkeypatch)
    _run(feed, clock)
    made = plot(scheduler)
    made.update()
    assert made.errors == 0, made.said
    assert made.said
    if plot in PER_WORKER:
        assert made.said == component.NO_WORKERS


@pytest.mark.parametrize("plot", PER_WORKER)
def test_workers_without_the_extension(plot: Any, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler.add("a", None)
    give_feed(scheduler, figures, monkeypatch)[0].tick()
    made = plot(scheduler)
    made.update()
    assert made.said == component.NO_FIGURES
    assert set(_lengths(made)) == {0}


def test_occupancy_stacks_disk_on_host_and_marks_the_limit(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.add("tcp://10.20.30.40:40000", heartbeat(host_bytes=60 * MiB, disk_bytes=200 * MiB))
    scheduler.add(1, heartbeat(host_bytes=10 * MiB, host_limit_bytes=None))
    scheduler.add("stock", None)
    give_feed(scheduler, figures, monkeypatch)[0].tick()
    made = pages.TierOccupancy(scheduler)
    made.update()
    assert made.bars.data["host"] == [60 * MiB, 10 * MiB]
    assert made.bars.data["end"] == [260 * MiB, 10 * MiB]
    assert made.bars.data["disk_limit_text"] == ["no limit"] * 2
    assert made.limits.data["x"] == [100 * MiB]
    assert made.figure.x_range.end == pytest.approx(1.08 * 260 * MiB)
    assert made.figure.yaxis[0].major_label_overrides == {0: "10.20.30.40:40000", 1: "1"}
    assert made.said == (
        "None at the limit of memory, 1 of 2 workers with data on disk.\n"
        "host 70.00 MiB · disk 200.00 MiB · 2 workers · 1 without dask-gpurt"
    )


def test_rates_and_decisions(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    a = scheduler.add("a", heartbeat())
    told = figures()
    feed, clock = give_feed(scheduler, lambda: told, monkeypatch)
    for i in range(100):
        scheduler.workers[a].metrics["gpurt"] = heartbeat(written_bytes=i * MiB, read_bytes=i * 2 * MiB)
        told = figures(local=i * 4, moved=i * 2, declined=i, fallbacks=i)
        feed.tick()
        clock.now += 1
    disk, decisions = pages.DiskRates(scheduler), pages.PlacementDecisions(scheduler)
    disk.update()
    decisions.update()
    assert set(disk.lines.data["written"]) == {MiB}
    assert set(disk.lines.data["read"]) == {2 * MiB}
    assert disk.figure.x_range.start == 120
    assert disk.figure.xaxis[0].ticker.ticks == [0, 30, 60, 90, 120]
    assert disk.said == (
        "Reading back: now 1.00 MiB/s to disk, 2.00 MiB/s from it.\nso far written 99.00 MiB · read 198.00 MiB"
    )
    assert set(decisions.lines.data["total"]) == {7.0}
    assert decisions.said == (
        "57% of the tasks run where all their inputs are.\nlocal 396 · moved 198 · left 99 · fallbacks 99 · 25 µs/task"
    )


def test_links_say_what_is_measured(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    give_feed(scheduler, figures, monkeypatch)[0].tick()
    made = pages.LinkEstimates(scheduler)
    made.update()
    assert made.dots.data["alpha"] == [0.0, 0.9, 0.0]
    assert made.dots.data["latency_text"] == ["5 ms"] * 3
    assert made.dots.data["bandwidth_text"] == ["381.47 MiB/s"] * 3
    assert made.said.startswith("Measured: host 381.47 MiB/s.\ntransfers measured: host 7 ·")


def test_shuffle_counts_and_leaves_out_rechunks(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    a = scheduler.add("a", heartbeat(shuffle_sent_bytes=100))
    feed, _ = give_feed(scheduler, figures, monkeypatch)
    feed.tick()
    scheduler.workers[a].metrics["gpurt"] = heartbeat(
        shuffle_sent_bytes=103, shuffle_received_bytes=2, shuffle_kept_bytes=1
    )
    made = pages.ShuffleTraffic(scheduler)
    made.update()
    assert [made.bars.data[key] for key in ("sent", "received", "kept")] == [[3], [2], [1]]
    assert made.said == "One worker: all rows stay on it.\nactive 1 · runs so far 3 · left to Dask 2"
    scheduler.workers[a].metrics["gpurt"] = heartbeat(shuffle_received_bytes=7)  # it was restarted
    made.update()
    assert made.bars.data["received"] == [7]
    scheduler.add("b", heartbeat(shuffle_received_bytes=1))
    made.update()
    assert made.said.startswith("Uneven: a takes 1.8x as many bytes as the average worker.")


def test_a_shuffle_that_has_ended_leaves_the_traffic_after_a_minute(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = scheduler.add("a", heartbeat())
    feed, clock = give_feed(scheduler, figures, monkeypatch)
    made = pages.ShuffleTraffic(scheduler)
    seen = []
    for second in range(100):
        scheduler.workers[a].metrics["gpurt"] = heartbeat(shuffle_received_bytes=MiB if second > 3 else 0)
        feed.tick()
        made.update()
        seen.append(made.bars.data["received"][0])
        clock.now += 1
    assert seen[4:55] == [MiB] * 51
    assert seen[75:] == [0.0] * 25
    assert made.said.startswith("No shuffle moved rows in the last minute.")


@pytest.mark.parametrize("plot", PER_WORKER)
def test_a_hundred_workers_and_fewer_again(
    plot: Any, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(100):
        scheduler.add(i, heartbeat(host_bytes=i, shuffle_sent_bytes=i))
    feed, _ = give_feed(scheduler, figures, monkeypatch)
    feed.tick()
    made = plot(scheduler)
    made.update()
    assert _lengths(made)[0] == 100
    assert made.figure.y_range.start == 99.5
    assert made.figure.yaxis[0].ticker.ticks == []
    assert made.figure.yaxis[0].axis_label == "100 workers"
    for address in list(scheduler.workers)[NAMED:]:
        del scheduler.workers[address]
    made.update()
    assert made.figure.yaxis[0].ticker.ticks == list(range(NAMED))
    assert made.errors == 0


@pytest.mark.parametrize("plot", PLOTS)
def test_an_exception_is_counted_and_shown_and_gone_with_its_cause(
    plot: Any, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.add("a", heartbeat())
    feed, clock = give_feed(scheduler, figures, monkeypatch)
    _run(feed, clock)
    made = plot(scheduler)
    with monkeypatch.context() as m:
        m.setattr(type(made), "_draw", lambda *_: 1 / 0)
        made.update()
        made.update()
    assert made.errors == 2
    assert made.said == "not shown (2 errors): ZeroDivisionError: division by zero"
    made.update()
    assert "not shown" not in made.said


def test_what_did_not_change_is_not_sent(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler.add("a", heartbeat(host_bytes=5))
    give_feed(scheduler, figures, monkeypatch)[0].tick()
    made = pages.TierOccupancy(scheduler)
    made.update()
    before = made.bars.data
    made.update()
    assert made.bars.data is before


def in_thread(make: Callable[[], None]) -> None:
    """As Bokeh from 3.10 on makes documents."""
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()


@pytest.mark.parametrize("address", list(pages.documents()))
def test_nothing_is_read_before_the_event_loop_has_its_turn(
    address: str, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bokeh from 3.10 on calls all but coroutines in threads, where what the scheduler has may change meanwhile."""
    asked: list[int] = []
    monkeypatch.setattr(feeds, "of", lambda scheduler: asked.append(threading.get_ident()))
    monkeypatch.setattr(recorder, "of", lambda scheduler: asked.append(threading.get_ident()))
    doc = Document()
    in_thread(lambda: pages.documents()[address](scheduler, {"prefix": "/", "pages": [], "plots": []}, doc))
    assert asked == []
    called_back(doc)
    assert set(asked) == {threading.get_ident()}


@pytest.mark.parametrize("address", list(pages.documents()))
def test_documents_build_and_are_valid(
    address: str, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    scheduler.add("a", heartbeat(host_bytes=5))
    feed, clock = give_feed(scheduler, figures, monkeypatch)
    _run(feed, clock)
    doc = Document()
    in_thread(lambda: pages.documents()[address](scheduler, {"prefix": "/", "pages": [], "plots": []}, doc))
    called_back(doc)
    doc.validate()
    assert len(doc.roots) == (len(PLOTS) if address == pages.OVERVIEW else 1)
    periodic = [c for c in doc.session_callbacks if isinstance(c, PeriodicCallback)]
    assert len(periodic) == len(doc.roots)
    # The collector may find what other tests left open at any line, also at one of bokeh's.
    said = [w for w in recwarn if "bokeh" in str(w.filename) and not issubclass(w.category, ResourceWarning)]
    assert [str(w.message) for w in said] == []
    # A fixed width would not fit a narrow panel.
    modes = {model.sizing_mode for model in doc.models if isinstance(model, LayoutDOM)}
    assert modes <= {"stretch_both", "stretch_width"}
    assert {root.sizing_mode for root in doc.roots} == {"stretch_both"}


@pytest.mark.parametrize("address", list(pages.documents()))
def test_no_name_is_drawn_as_a_formula(address: str, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """TeX can be a link that runs a script, and names are a user's."""
    for name in ("$$x$$", r"\[x\]", r"\(x\)"):
        scheduler.add(name, heartbeat(host_bytes=5))
    feed, clock = give_feed(scheduler, figures, monkeypatch)
    _run(feed, clock)
    doc = Document()
    in_thread(lambda: pages.documents()[address](scheduler, {"prefix": "/", "pages": [], "plots": []}, doc))
    called_back(doc)
    texts = [model for model in doc.models if hasattr(model, "disable_math")]
    assert texts
    assert all(model.disable_math for model in texts)
    labels = [label for axis in doc.models if isinstance(axis, Axis) for label in axis.major_label_overrides.values()]
    assert len(labels) >= (3 if address == pages.OVERVIEW or pages.PLOTS.get(address) in PER_WORKER else 0)
    assert [label for label in labels if "$$" in label or r"\[" in label or r"\(" in label] == []


def test_the_menu_is_sorted_and_has_each_page_once() -> None:
    menu = [{"url": "hardware", "name": "Hardware"}, {"url": "individual-tier-occupancy", "name": "Tier Occupancy"}]
    for _ in range(2):
        late._list(menu, list(pages.PLOTS))
    urls = [item["url"] for item in menu]
    assert sorted(urls) == sorted(
        {"hardware", "gpurt", "gpurt-history", *(address.strip("/") for address in pages.PLOTS)}
    )
    assert [item["name"] for item in menu] == sorted(item["name"] for item in menu)


def test_importing_the_preload_brings_no_bokeh_and_announces_the_plots() -> None:
    """It is imported in every nanny and worker."""
    code = (
        "import sys, dask, dask_gpurt.preload as p;"
        "heavy = {'bokeh', 'distributed.dashboard', 'prometheus_client'} & set(sys.modules);"
        "assert not heavy, heavy;"
        f"assert dask.config.get({hook.ROUTES!r}).count({hook.__name__!r}) == 1;"
        "p.hook.announce();"
        f"assert dask.config.get({hook.ROUTES!r}).count({hook.__name__!r}) == 1;"
        # A scheduler without a dashboard reads the routes, too.
        "assert p.hook.routes == [];"
        "assert 'bokeh' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_error_while_plots_are_added_does_not_end_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "register", lambda: 1 / 0)
    assert hook.routes == []
    assert "no plots" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("plot", PLOTS)
def test_an_update_makes_no_new_models(plot: Any, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one, Bokeh looks through all models of the page: 0.1 s of the scheduler's loop, each second."""
    from bokeh.document.models import DocumentModelManager

    told = figures(local=1)
    feed, clock = give_feed(scheduler, lambda: told, monkeypatch)
    first = [scheduler.add(name, heartbeat(host_bytes=MiB)) for name in ("a", "b", "c")]
    told["placement"]["speeds"] = dict.fromkeys(first, 1.0)
    _run(feed, clock)
    made = plot(scheduler)
    made.update()
    document = Document()
    document.add_root(made.root)
    looked = []
    monkeypatch.setattr(DocumentModelManager, "recompute", lambda self: looked.append(self))
    # Others come, the old ones become slow, minutes pass: other rows, another order, other ticks.
    more = [scheduler.add(name, heartbeat(disk_bytes=MiB)) for name in ("d", "e")]
    told["placement"]["speeds"] = {**dict.fromkeys(first, 0.3), **dict.fromkeys(more, 1.1)}
    _run(feed, clock, 130)
    made.update()
    assert made.errors == 0
    assert looked == []


def test_long_columns_of_numbers_are_arrays_and_what_is_the_same_is_not_sent() -> None:
    import numpy as np
    from bokeh.models import ColumnDataSource

    source = ColumnDataSource({"x": [], "name": []})
    component.fill(source, {"x": [0.5] * component.LONG, "name": ["a"] * component.LONG})
    assert isinstance(source.data["x"], np.ndarray)
    assert isinstance(source.data["name"], list)
    sent = []
    source.on_change("data", lambda attr, old, new: sent.append(new))
    component.fill(source, {"x": [0.5] * component.LONG, "name": ["a"] * component.LONG})
    assert sent == []
    component.fill(source, {"x": [1.0], "name": ["b"]})
    assert source.data["x"] == [1.0]
    assert len(sent) == 1


@pytest.mark.parametrize("plot", PLOTS)
def test_every_axis_says_what_it_measures_and_the_pointer_what_it_means(plot: Any, scheduler: FakeScheduler) -> None:
    scheduler.add("a", heartbeat())
    made = plot(scheduler)
    made.update()
    drawn = [model for model in made.root.references() if isinstance(model, Plot)]
    assert drawn
    for fig in drawn:
        for axis in (*fig.xaxis, *fig.yaxis):
            workers = plot in (*PER_WORKER, pages.WorkerSpeeds, pages.LinkMatrix, pages.ShuffleProgress)
            assert axis.axis_label or workers  # those are named with the first worker
        (tool,) = [tool for tool in fig.tools if isinstance(tool, HoverTool)]
        assert "margin-top" in tool.tooltips  # the sentence below the figures
        assert fig.title is None or not fig.title.text


@pytest.mark.parametrize("plot", PLOTS)
def test_no_plot_has_more_than_six_colours(plot: Any, scheduler: FakeScheduler) -> None:
    made = plot(scheduler)
    plain = {style.INK, style.GRID, style.MARK, style.HALO}
    for fig in [model for model in made.root.references() if isinstance(model, Plot)]:
        colours = {
            getattr(renderer.glyph, name, None)
            for renderer in fig.renderers
            for name in ("fill_color", "line_color")
            if not isinstance(renderer.glyph, Text)
        }
        assert 1 <= len(colours - plain - {None}) <= 6


def test_a_heading_escapes_what_it_is_given() -> None:
    text = style.heading_text("T", "name <b>\n1 < 2")
    assert "name &lt;b&gt;" in text
    assert "1 &lt; 2" in text
    assert style.heading_text("T", "").count("<div") == 1
