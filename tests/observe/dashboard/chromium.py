"""A headless Chromium for tests, spoken to over its DevTools protocol with tornado's websocket client.

Chromium's own ``--screenshot --virtual-time-budget`` stops the clock that Bokeh's websocket lives by and shows empty
plots. So a page is opened, the test waits in real time until an expression is true, and looks then.
"""

# ruff: noqa: ASYNC210, ASYNC220, ASYNC230, ASYNC240  (one test, one page: nothing else waits for this loop)

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from tornado.websocket import WebSocketClientConnection, websocket_connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-default-browser-check"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*"),
)


def executable() -> str:
    """The browser; skips the test without one, or fails it if GPURT_REQUIRE_CHROMIUM=1."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    if os.environ.get("GPURT_REQUIRE_CHROMIUM") == "1":
        pytest.fail("GPURT_REQUIRE_CHROMIUM=1, and there is no chromium on PATH")
    pytest.skip("no chromium on PATH")


class Tab:
    """One page."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket = socket
        self._calls = 0
        #: what the console showed as an error, and uncaught exceptions
        self.errors: list[str] = []
        #: addresses of everything that was asked for
        self.requests: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; what comes in meanwhile is noted."""
        self._calls += 1
        me = self._calls
        await self._socket.write_message(json.dumps({"id": me, "method": method, "params": parameters}))
        while True:
            text = await asyncio.wait_for(self._socket.read_message(), 60)
            assert text is not None, "the browser ended"
            message = json.loads(text)
            if message.get("id") == me:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "assert"):
                self.errors.append(json.dumps(parameters["args"])[:2000])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(json.dumps(parameters["entry"])[:2000])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    async def open(self, url: str, width: int = 1100, height: int = 600) -> None:
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression is."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 90) -> None:
        """Wait until an expression is true."""
        value = None
        for _ in range(int(seconds / 0.25)):
            with contextlib.suppress(KeyError):
                value = await self.value(f"(() => {{ try {{ return !!({expression}) }} catch {{ return null }} }})()")
                if value:
                    return
            await asyncio.sleep(0.25)
        raise AssertionError(f"{expression} is {value!r} after {seconds} s; console: {self.errors}")

    async def screenshot(self, path: Path) -> None:
        got = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(got["data"]))


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = subprocess.Popen(
            [executable(), *FLAGS, f"--user-data-dir={home}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port_file = os.path.join(home, "DevToolsActivePort")
            for _ in range(240):
                assert process.poll() is None, f"chromium ended with {process.returncode}"
                if os.path.exists(port_file) and os.path.getsize(port_file):
                    break
                await asyncio.sleep(0.25)
            with open(port_file, encoding="ascii") as f:
                port = int(f.readline())
            yield Browser(port)
        finally:
            process.terminate()
            process.wait(20)


class Browser:
    """A running Chromium."""

    def __init__(self, port: int) -> None:
        self._port = port

    @contextlib.asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """A new page, closed at the end."""
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request) as reply:
            target = json.load(reply)
        socket = await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=2**28)
        tab = Tab(socket)
        try:
            yield tab
        finally:
            with contextlib.suppress(Exception):
                await tab.call("Page.close")
            socket.close()
