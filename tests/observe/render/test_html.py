"""Pages are self-contained, escape everything and refuse what they cannot draw."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.bench import facts
from dask_gpurt.observe.render.html import Page, flatten

if TYPE_CHECKING:
    from pathlib import Path

EVIL = "<script>alert('x')</script> & \"quoted\" 'single'"


class Reader(HTMLParser):
    """Tags that were opened and the text between them, as a browser would see them."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def everything(text: str) -> str:
    page = Page(text)
    page.text(text)
    page.heading(text)
    page.facts({text: text, "nested": {text: f"{text}\n{text}"}, "list": [text]})
    page.table([text, "n"], [[text, 1]], footer=[[text, 2]])
    page.bars([text], [(text, [1.0])], unit=text, about=text)
    return page.render()


def test_everything_is_escaped() -> None:
    reader = Reader(everything(EVIL))
    assert "script" not in reader.tags
    assert sum(EVIL in t for t in reader.texts) >= 10
    labels = [value for name, value in reader.attributes if name == "aria-label"]
    assert labels == [EVIL]
    # Markup differs from that of a harmless text in nothing: no tag or attribute came from the text.
    harmless = Reader(everything("plain"))
    assert reader.tags == harmless.tags
    assert [name for name, _ in reader.attributes] == [name for name, _ in harmless.attributes]


def test_nothing_is_loaded_from_elsewhere() -> None:
    document = everything("plain")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bsrc=|<link|<script", document)
    assert "prefers-color-scheme: dark" in document


def test_numbers_stand_right_and_words_left() -> None:
    page = Page("t")
    page.table(["word", "number", "text number", "mixed"], [["a", 1234567, "1,2.5x", 1], ["b", None, "–", "one"]])
    document = page.render()
    assert "<th>word</th><th class=n>number</th><th class=n>text number</th><th>mixed</th>" in document
    assert "<td class=n>1,234,567</td>" in document


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells for 2 columns"):
        Page("t").table(["a", "b"], [["x"]])
    with pytest.raises(ValueError, match="a row has 3 cells"):
        Page("t").table(["a", "b"], [["x", 1]], footer=[[1, 2, 3]])


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_values_without_a_length_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        Page("t").bars(["a"], [("r", [value])])


def test_series_are_limited_and_rows_complete() -> None:
    with pytest.raises(ValueError, match="5 series, must be 1 to 4"):
        Page("t").bars(list("abcde"), [])
    with pytest.raises(ValueError, match="1 values for 2 series"):
        Page("t").bars(["a", "b"], [("r", [1.0])])
    with pytest.raises(ValueError, match="kind is 'red'"):
        Page("t").text("x", kind="red")


def test_bars_are_in_proportion_and_inside() -> None:
    page = Page("t")
    page.bars(["a", "b"], [("first", [10.0, 5.0]), ("second", [None, 0.0])], unit="s")
    document = page.render()
    bars = [
        (float(x), float(w)) for x, w in re.findall(r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="13"', document)
    ]
    assert len(bars) == 2
    assert bars[1][1] == pytest.approx(bars[0][1] / 2, rel=0.01)
    assert bars[0][0] == bars[1][0]
    assert bars[0][0] + bars[0][1] < 860
    assert "10.0 s" in document
    assert "–</text>" in document


def test_a_chart_of_zeros_and_an_empty_one_are_drawn() -> None:
    page = Page("t")
    page.bars(["a"], [("r", [0.0])])
    page.bars(["a"], [])
    assert page.render().count("<svg") == 2


def test_flatten_keeps_order_and_shows_what_is_empty() -> None:
    assert flatten({"b": {"y": 1, "x": {"z": 2}}, "a": {}}) == [("b.y", 1), ("b.x.z", 2), ("a", {})]


def test_write_replaces_the_file(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "r.html"
    Page("one").write(str(target))
    Page("two ÷ ü").write(str(target))
    assert "<title>two ÷ ü</title>" in target.read_text(encoding="utf-8")
    assert [p.name for p in target.parent.iterdir()] == ["r.html"]


def test_files_beside_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a link of a likely name points to, and also after an error."""
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "r.html.new").symlink_to(tmp_path / "theirs")
    (tmp_path / "r.json.new").write_text("theirs")
    for _ in range(2):
        Page("one").write(str(tmp_path / "r.html"))
        facts.write_json(str(tmp_path / "r.json"), {"exercised_on": "a test"})
    monkeypatch.setattr(Page, "render", lambda page: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Page("two").write(str(tmp_path / "r.html"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html", "r.html.new", "r.json", "r.json.new", "theirs"]
    assert (tmp_path / "theirs").read_text() == (tmp_path / "r.json.new").read_text() == "theirs"
    assert "<title>one</title>" in (tmp_path / "r.html").read_text()


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    Page("one").write(str(tmp_path / "r.html"))
    assert (tmp_path / "r.html").stat().st_mode == (tmp_path / "plain").stat().st_mode
