"""Headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--remote-debugging-pipe"),
    # Nothing of its own: it asks for updates, lists and the like otherwise.
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_KEYS = {"Enter": ("\r", 13), "Tab": ("", 9), "Escape": ("", 27), "ArrowDown": ("", 40)}

# Event of the console -> its field.
_SAYS = {
    "Log.entryAdded": "entry",
    "Runtime.consoleAPICalled": "args",
    "Runtime.exceptionThrown": "exceptionDetails",
}


class Browser:
    """One tab of a browser of its own. What its console says, and every exception, is kept in
    `console`; every URL that it asks for in `asked`."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        # The browser reads from descriptor 3 and writes to 4; so theirs must not be these.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (their_in, their_out)]
        command = 'exec "${@:3}" 3<&$1 4>&$2'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", command, "bash", *map(str, theirs)),
                *(CHROMIUM, *_SWITCHES, f"--user-data-dir={folder}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=theirs,
        )
        for end in (their_in, their_out, *theirs):
            os.close(end)
        self._pending = b""
        self._sent = self._loaded = 0
        self._session: str | None = None
        self.console: list[str] = []
        self.asked: list[str] = []
        target = self._do("Target.createTarget", url="about:blank")["targetId"]
        attached = self._do("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self._do(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, url: str) -> None:
        loaded = self._loaded
        self._do("Page.navigate", url=url)
        while self._loaded == loaded:
            self._note(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page. Raises AssertionError where it throws."""
        found = self._do(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true."""
        poll = f"""new Promise(resolve => {{
            const look = () => {{
                const found = ({expression});
                if (found) resolve(found); else setTimeout(look, 10);
            }};
            look();
        }})"""
        return self.evaluate(poll)

    def text(self, selector: str) -> str:
        """The text of an element as it is shown."""
        found = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        assert isinstance(found, str)
        return found

    def type(self, text: str) -> None:
        """Into the focused element."""
        self._do("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        text, code = _KEYS[key]
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self._do("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self._do("Input.dispatchKeyEvent", type="keyUp", **given)

    def focused(self) -> str:
        """The id, else the name, else the tag of the focused element."""
        found = self.evaluate(
            "(e => e.id || e.name || e.tagName.toLowerCase())(document.activeElement)"
        )
        assert isinstance(found, str)
        return found

    def size(self, width: int, height: int) -> None:
        self._do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as the system would."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._do("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._do("Page.captureScreenshot")["data"]))

    def accessible(self) -> list[tuple[str, str]]:
        """(role, name) of everything exposed to a screen reader."""
        nodes = self._do("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    def _do(self, method: str, **params: Any) -> Any:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._sent:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._pending += part
        message, _, self._pending = self._pending.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Page.loadEventFired":
            self._loaded += 1
        elif event["method"] == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif event["method"] in _SAYS:
            self.console.append(str(params[_SAYS[event["method"]]]))
