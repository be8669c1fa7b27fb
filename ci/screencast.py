"""The screen cast: a cluster starts, joins what does not fit, and is looked at, as an animated image.

    PYTHONPATH=. python ci/screencast.py docs/images/screencast.gif

All of it is real: the commands are typed into a terminal (tmux), whose text is drawn with Pillow; dashboard and report
are pages in headless Chromium. Needs tmux, Chromium, Pillow and DejaVu Sans Mono, and some minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import dataclasses
import io
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from tests.observe.dashboard.chromium import browser

if TYPE_CHECKING:
    from tests.observe.dashboard.chromium import Tab

ROOT = pathlib.Path(__file__).resolve().parents[1]
COLUMNS, LINES = 100, 34
WIDTH, HEIGHT, BAR = 880, 680, 32
PAPER, INK, BAND, TITLE = "#15191d", "#e4e8ec", "#0b7a75", "#ffffff"
FONT = "DejaVuSansMono.ttf"
#: of a palette: the terminal needs two, plots a few
COLOURS = 64
#: the longest that the film may be, in seconds
LONGEST = 120.0
#: pages of the dashboard, as they stand in the picture
PANELS = (
    *("individual-stall-causes", "individual-tier-occupancy"),
    *("individual-tier-history", "individual-shuffle-progress"),
)

#: what the typed code imports
SHOP = """
import dask.dataframe as dd
import numpy as np
import pandas as pd

def _orders(i, rows=400_000):
    r = np.random.default_rng(i)
    return pd.DataFrame({"customer": r.integers(0, 80_000, rows), "price": r.random(rows), "tax": r.random(rows)})

def _customers(i, rows=10_000):
    r = np.random.default_rng(100 + i)
    country = r.choice(["DE", "FR", "JP", "US"], rows)
    return pd.DataFrame({"customer": np.arange(i * rows, (i + 1) * rows), "country": country})

# Without meta Dask would compute it, in a scheduler that waits for this import to end.
orders = dd.from_map(_orders, range(320), meta=_orders(0, 1))
customers = dd.from_map(_customers, range(8), meta=_customers(0, 1))
"""


@dataclasses.dataclass
class Film:
    """Frames with their durations; a frame that equals the last one makes that longer."""

    frames: list[Image.Image] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def add(self, frame: Image.Image, seconds: float) -> None:
        if self.frames and frame.tobytes() == self.frames[-1].tobytes():
            self.seconds[-1] += seconds
        else:
            self.frames.append(frame)
            self.seconds.append(seconds)

    def save(self, path: pathlib.Path) -> None:
        """Write a GIF that begins again after five seconds."""
        if sum(self.seconds) > LONGEST:
            raise RuntimeError(f"the film takes {sum(self.seconds):.0f} s, must be at most {LONGEST:.0f} s")
        small = [frame.quantize(COLOURS, dither=Image.Dither.NONE) for frame in self.frames]
        durations = [round(1000 * s) for s in [*self.seconds[:-1], self.seconds[-1] + 5]]
        small[0].save(path, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True)


def titled(title: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """An empty frame with its title."""
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, WIDTH, BAR), fill=BAND)
    draw.text((14, 6), title, fill=TITLE, font=ImageFont.truetype(FONT, 15))
    return image, draw


class Terminal:
    """A terminal of tmux, with a server of its own."""

    def __init__(self, home: pathlib.Path, port: int) -> None:
        self._home = home
        paths = f"{home}{os.pathsep}{ROOT}"
        environment = {
            **{key: value for key, value in os.environ.items() if key in ("LANG", "HOME")},
            "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": paths,
            "DASK_SCHEDULER_ADDRESS": f"tcp://127.0.0.1:{port}",
            "DASK_TEMPORARY_DIRECTORY": str(home),
            "TERM": "screen",
            "DASK_LOGGING__DISTRIBUTED": "error",
            "PYTHON_BASIC_REPL": "1",
        }
        # The shell that tmux starts this one with passes neither of them on.
        (home / "rc").write_text(f"PS1='$ '\nPATH='{environment['PATH']}'\n")
        self._shell = f"bash --noprofile --rcfile {home / 'rc'}"
        size = ("-x", str(COLUMNS), "-y", str(LINES))
        self._tmux("new-session", "-d", *size, self._shell, env=environment)
        self._tmux("set-option", "-g", "status", "off")
        self._font = ImageFont.truetype(FONT, 14)

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        command = ["tmux", "-S", str(self._home / "tmux"), *words]
        done = subprocess.run(command, env=env, cwd=self._home, capture_output=True, text=True, check=True)
        return done.stdout

    def press(self, *keys: str) -> None:
        # A semicolon at the end of a word would end tmux's command.
        self._tmux("send-keys", *(f"{key[:-1]}\\;" if key.endswith(";") else key for key in keys))

    def window(self) -> None:
        """A second terminal in front of the first."""
        self._tmux("new-window", self._shell)

    def show(self, window: int) -> None:
        self._tmux("select-window", "-t", f":{window}")

    def text(self) -> str:
        return self._tmux("capture-pane", "-p").rstrip("\n")

    def frame(self, title: str) -> Image.Image:
        image, draw = titled(title)
        for i, line in enumerate(self.text().split("\n")):
            draw.text((14, BAR + 12 + 18 * i), line, fill=INK, font=self._font)
        return image

    def until(self, prompt: str, seconds: float = 90) -> None:
        """Wait until the last line is that prompt."""
        deadline = time.monotonic() + seconds
        while self.text().split("\n")[-1].strip() != prompt:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {prompt!r} after {seconds} s:\n{self.text()}")
            time.sleep(0.1)

    def end(self) -> None:
        self._tmux("kill-server")


def type_in(film: Film, terminal: Terminal, title: str, line: str) -> None:
    """Type a line, a few letters a frame, and press return."""
    for i in range(0, len(line), 6):
        terminal.press("-l", "--", line[i : i + 6])
        time.sleep(0.06)
        film.add(terminal.frame(title), 0.15)
    film.add(terminal.frame(title), 0.5)
    terminal.press("Enter")


def watch(film: Film, terminal: Terminal, title: str, seconds: float, faster: float = 1.0) -> None:
    """Film the terminal for so long; the film runs `faster` times as fast."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        film.add(terminal.frame(title), 0.5 / faster)
        time.sleep(0.5)


async def _picture(tab: Tab) -> Image.Image:
    got = await tab.call("Page.captureScreenshot", format="png")
    return Image.open(io.BytesIO(base64.b64decode(got["data"]))).convert("RGB")


async def film_dashboard(film: Film, base: str, title: str, frames: int) -> None:
    """Four plots side by side, each a page of its own in a frame."""
    width, height = WIDTH // 2, (HEIGHT - BAR) // 2
    place = "position: fixed; border: 0; left: {}px; top: {}px; width: {}px; height: {}px"
    boxes = "".join(
        f'<iframe src="/{panel}" style="{place.format(width * (i % 2), height * (i // 2), width, height)}"></iframe>'
        for i, panel in enumerate(PANELS)
    )
    drawn = "(f => { try { return f.contentWindow.Bokeh.documents[0].roots().length > 0 } catch { return false } })"
    async with browser() as chromium, chromium.tab() as tab:
        await tab.open(f"{base}health", WIDTH, HEIGHT - BAR)
        await tab.until("document.body")
        await tab.value(f"document.body.innerHTML = {json.dumps(boxes)}")
        await tab.until(f"[...document.querySelectorAll('iframe')].filter({drawn}).length == {len(PANELS)}")
        await asyncio.sleep(4)
        for _ in range(frames):
            image, _ = titled(title)
            image.paste(await _picture(tab), (0, BAR))
            film.add(image, 1.2)
            await asyncio.sleep(1.2)


async def film_report(film: Film, file: pathlib.Path, title: str) -> None:
    """From its top down."""
    page = f"file://{file}"
    async with browser() as chromium, chromium.tab() as tab:
        await tab.open(page, WIDTH, HEIGHT - BAR)
        await tab.until("document.querySelector('h1')")
        tall = int(await tab.value("document.documentElement.scrollHeight"))
        for top in range(0, min(tall, 3 * HEIGHT), (HEIGHT - BAR) * 2 // 3):
            await tab.value(f"window.scrollTo(0, {top})")
            image, _ = titled(title)
            image.paste(await _picture(tab), (0, BAR))
            film.add(image, 4.0)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def shoot(home: pathlib.Path) -> Film:
    film, port, board = Film(), _free_port(), _free_port()
    (home / "shop.py").write_text(SHOP)
    terminal = Terminal(home, port)
    try:
        start = "1  Start: a local cluster with the extension"
        terminal.until("$")
        type_in(film, terminal, start, "python -q")
        terminal.until(">>>")
        type_in(film, terminal, start, "import dask_gpurt; from dask.distributed import Client")
        terminal.until(">>>")
        type_in(film, terminal, start, 'cluster = dask_gpurt.local_cluster(n_workers=4, memory_limit="1 GB",')
        options = f'    threads_per_worker=1, scheduler_port={port}, dashboard_address="127.0.0.1:{board}")'
        type_in(film, terminal, start, options)
        terminal.until(">>>")
        type_in(film, terminal, start, "client = Client(cluster)")
        terminal.until(">>>")
        film.add(terminal.frame(start), 1)
        join = "2  Ordinary Dask code: a join that does not fit into memory"
        type_in(film, terminal, join, "from shop import customers, orders")
        terminal.until(">>>")
        type_in(film, terminal, join, 'joined = orders.persist().merge(customers, on="customer", shuffle_method="p2p")')
        terminal.until(">>>")
        type_in(film, terminal, join, 'joined.groupby("country").price.sum().compute()')
        watch(film, terminal, join, 2)
        terminal.window()
        top = "3  In another terminal: dask gpurt top"
        terminal.until("$")
        type_in(film, terminal, top, "dask gpurt top")
        watch(film, terminal, top, 6)
        asyncio.run(film_dashboard(film, f"http://127.0.0.1:{board}/", "4  The dashboard", 10))
        terminal.show(0)
        terminal.until(">>>", 120)
        film.add(terminal.frame("5  The result"), 4)
        report = "6  What did it wait for? dask gpurt report"
        terminal.show(1)
        terminal.press("C-c", "Enter")
        terminal.until("$")
        terminal.press("-l", "--", "clear")
        terminal.press("Enter")
        time.sleep(0.3)
        type_in(film, terminal, report, "dask gpurt report --out report.html")
        time.sleep(1)
        terminal.until("$")
        film.add(terminal.frame(report), 6)
        asyncio.run(film_report(film, home / "report.html", report))
        terminal.show(0)
        terminal.press("-l", "--", "client.close(); cluster.close(); exit()")
        terminal.press("Enter")
        terminal.until("$")
    finally:
        terminal.end()
    return film


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    o = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        film = shoot(pathlib.Path(home))
    film.save(o.out)
    print(f"{o.out}: {len(film.frames)} frames, {sum(film.seconds):.0f} s, {o.out.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
