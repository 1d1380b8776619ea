"""A headless Chromium that is driven by the DevTools protocol over two pipes; no package is needed.

    with Browser(chromium()) as browser:
        browser.open("file:///tmp/report.html", width=1600)
        browser.evaluate("document.title")

Errors of scripts and what the page tried to load are collected.
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
FLAGS = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-dev-shm-usage"


def chromium() -> str | None:
    """Return the path of a browser, or None: Debian's package is chromium."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with one page. ``errors``: of scripts; ``requests``: addresses that the page asked for."""

    def __init__(self, path: str, patience: float = 60.0):
        self.patience = patience
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.numbers = itertools.count(1)
        self.answers: dict[int, Queue] = {}
        self.loaded: Queue = Queue()
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.writer = os.pipe()
        self.reader, from_browser = os.pipe()
        command = [
            path,
            *FLAGS.split(),
            f"--user-data-dir={self.profile.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # The browser reads from descriptor 3 and writes to 4.
        shell = f'exec 103<&{to_browser} 104>&{from_browser}; exec 3<&103 4>&104; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "browser", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        threading.Thread(target=self._read, daemon=True).start()
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.writer)
        self.process.terminate()
        self.process.wait(10)
        self.profile.cleanup()

    def _read(self) -> None:
        rest = b""
        while data := os.read(self.reader, 1 << 20):
            *messages, rest = (rest + data).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    self.answers[message["id"]].put(message)
                    continue
                method, values = message["method"], message["params"]
                if method == "Page.loadEventFired":
                    self.loaded.put(True)
                elif method == "Runtime.exceptionThrown":
                    details = values["exceptionDetails"]
                    self.errors.append(details.get("exception", {}).get("description") or details["text"])
                elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
                    self.errors.append(values["entry"]["text"])
                elif method == "Network.requestWillBeSent":
                    self.requests.append(values["request"]["url"][:200])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self.numbers)
        self.answers[number] = Queue()
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.writer, data) :]
        try:
            answer = self.answers[number].get(timeout=self.patience)
        except Empty:
            raise TimeoutError(f"the browser does not answer {method}") from None
        del self.answers[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url: str, width: int = 1600, height: int = 1000, dark: bool = False, mobile: bool = False) -> None:
        """Load a page in a window of this size and wait for its scripts."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.errors.clear()
        self.requests.clear()
        while not self.loaded.empty():
            self.loaded.get()
        self.call("Page.navigate", url="about:blank")
        self.loaded.get(timeout=self.patience)
        self.call("Page.navigate", url=url)
        self.loaded.get(timeout=self.patience)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited. An exception is a RuntimeError."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true; return its value."""
        end = time.monotonic() + self.patience
        while time.monotonic() < end:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.02)
        raise TimeoutError(f"never true in the page: {expression}")

    def mouse(self, kind: str, x: float, y: float, button: str = "none") -> None:
        """Move (``mouseMoved``), press or release (``mousePressed``, ``mouseReleased``) the mouse."""
        self.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=int(button == "left"), clickCount=1
        )

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))
