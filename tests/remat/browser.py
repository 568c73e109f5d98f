"""A headless Chromium, driven over the pipe of its debugging protocol.

``--remote-debugging-pipe`` reads commands from file descriptor 3 and answers on 4, each a JSON
object and a zero byte: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT: Final = 60.0  # seconds for one answer: the machine may be busy


def find_browser() -> str | None:
    """The path of a Chromium, if this machine has one."""
    found = (shutil.which(name) for name in NAMES)
    return next((path for path in found if path), None)


class Browser:
    """A running Chromium."""

    def __init__(self, path: str, folder: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._rest = b""
        self._next = 0
        self.events: list[dict[str, Any]] = []
        arguments = [
            path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--no-first-run", f"--user-data-dir={folder}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", *arguments],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Give one command and wait for its answer."""
        self._next += 1
        command = {"id": self._next, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            message = self._message(deadline)
            if message.get("id") == command["id"]:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._read], [], [], left)
            assert ready, "the browser did not answer"
            got = os.read(self._read, 1 << 20)
            assert got, "the browser has gone"
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def close(self) -> None:
        """End it, and wait for the end."""
        self.send("Browser.close")
        self._process.wait(TIMEOUT)
        os.close(self._write)
        os.close(self._read)


class Tab:
    """One page, of one size and one colour scheme."""

    def __init__(
        self, browser: Browser, path: Path, *, width: int, height: int = 900, dark: bool = False
    ) -> None:
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session: str = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        narrow = width < 500
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if narrow else 1,
            mobile=narrow,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command to this page."""
        return self.browser.send(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; fails on an exception."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until it is true."""
        deadline = time.monotonic() + TIMEOUT
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.02)

    def press(self, key: str, *, shift: bool = False) -> None:
        """One key, as if typed."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36}
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        common: dict[str, Any] = {"key": key, "modifiers": 8 * shift}
        if key in codes:
            common["windowsVirtualKeyCode"] = codes[key]
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def mouse(self, x: float, y: float, *, click: bool = False) -> None:
        """Move the mouse there, in pixels of the window; click if asked to."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.send(
                    "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
                )

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Store a picture of the window, or of the whole page."""
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def complaints(self) -> list[str]:
        """What the page complained of: exceptions, refused by policy, requests but its own."""
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            what = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(what["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and what["entry"]["level"] == "error":
                found.append(what["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                url = what["request"]["url"]
                if not url.startswith("file:"):
                    found.append(f"request of {url}")
        return found


@contextmanager
def running(path: str, folder: Path) -> Iterator[Browser]:
    """A browser that is ended whatever happens."""
    browser = Browser(path, folder)
    try:
        yield browser
    finally:
        browser.close()
