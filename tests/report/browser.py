"""A headless Chromium, told what to do by its DevTools protocol over a web socket; it notes errors and requests."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S, ANSWER_S = 60.0, 60.0
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"),
    *("--no-first-run", "--disable-background-networking", "--disable-extensions", "--disable-component-update"),
)


def find_chromium() -> str | None:
    """The program, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser(program: str, home: Path) -> Iterator[Page]:
    """A page of a fresh Chromium, whose profile lies in ``home``."""
    command = [program, *FLAGS, f"--user-data-dir={home}", "about:blank"]
    with (home.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with connect(_address(home, process), max_size=None, open_timeout=START_S) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(ANSWER_S)


def _address(home: Path, process: subprocess.Popen[bytes]) -> str:
    """Where Chromium listens, which it writes into its profile."""
    port, deadline = home / "DevToolsActivePort", time.monotonic() + START_S
    while not port.exists() or port.read_text().count("\n") < 1:
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"Chromium did not start; see {home.parent / 'chromium.log'}")
        time.sleep(0.05)
    number, path = port.read_text().split("\n")[:2]
    return f"ws://127.0.0.1:{number}{path}"


class Page:
    """One tab. ``errors``: what its console and its exceptions said; ``requests``: every URL that it asked for."""

    def __init__(self, socket: ClientConnection) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket, self._number, self._seen = socket, 0, set[str]()
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._tell(f"{domain}.enable")

    def open(self, url: str, width: int, dark: bool = False) -> None:
        """Load a page into a window of ``width`` and wait until it has loaded."""
        self._tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._tell("Emulation.setEmulatedMedia", features=scheme)
        self._seen.discard("Page.loadEventFired")
        self._tell("Page.navigate", url=url)
        deadline = time.monotonic() + ANSWER_S
        while "Page.loadEventFired" not in self._seen:
            self._take(deadline)

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives."""
        answer = self._tell("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + ANSWER_S
        while not self.value(script):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {ANSWER_S:g} s: {script}")
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """A key, for what has the focus."""
        for kind in ("keyDown", "keyUp"):
            self._tell("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def point_at(self, selector: str) -> None:
        """Move the pointer to the middle of an element, scrolled into view."""
        self.value(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.value(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self._tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """A PNG of what the window shows."""
        path.write_bytes(base64.b64decode(self._tell("Page.captureScreenshot", format="png")["data"]))

    def _tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._ask(method, self._session, **parameters)

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        deadline = time.monotonic() + ANSWER_S
        while (answer := self._take(deadline)).get("id") != self._number:
            pass
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _take(self, deadline: float) -> dict[str, Any]:
        """The next message; events are noted."""
        message: dict[str, Any] = json.loads(self._socket.recv(max(0.1, deadline - time.monotonic())))
        name, told = message.get("method", ""), message.get("params", {})
        self._seen.add(name)
        if name == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        if name == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        if name == "Log.entryAdded":
            self.errors.append(told["entry"]["text"])
        if name == "Runtime.consoleAPICalled":
            self.errors.append(json.dumps(told["args"]))
        return message
