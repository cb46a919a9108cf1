"""Pictures of the terminal and of the server's page, made by running them.

  python -m scripts.pictures [FOLDER]   terminal.svg and page.png in docs/, or in FOLDER

The terminal is a pseudo-terminal, whose text becomes an SVG; the page is opened, asked and
photographed in headless Chromium, and left out, with a note, where there is none. The model is
smollm2_135m, fetched on first use.
"""

from __future__ import annotations

import html
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.serving.browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the capital of France?"
PROMPT = "The capital of France is"
MODEL = "model=smollm2_135m"
COMMANDS = (
    (f"predict_data='{PROMPT}' max_new_tokens=24", [f"predict_data={PROMPT}", "max_new_tokens=24"]),
    ("run_mode=chat model=smollm2_135m", ["run_mode=chat", MODEL]),
)
WIDTH, LINE, CHARACTER = 100, 18, 7.83  # columns; pixels of a line and of a character
_CONTROL = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")


def typed(words: list[str], folder: Path, answers: bytes = b"") -> list[str]:
    """The lines that a command leaves on a terminal."""
    own, their = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, ROOT / "run_lite.py", *words],
        cwd=folder,
        env={**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": str(WIDTH)},
        stdin=subprocess.PIPE,
        stdout=their,
        stderr=their,
    )
    os.close(their)
    assert process.stdin is not None
    process.stdin.write(answers)
    process.stdin.close()
    said = b""
    while True:
        try:
            part = os.read(own, 1 << 12)
        except OSError:  # of Linux, where the other end is closed
            break
        said += part
    os.close(own)
    assert process.wait() == 0, said.decode()
    # What a line was overwritten with is what stays of it.
    text = _CONTROL.sub("", said.decode()).replace("\r\n", "\n")
    return [
        line.rpartition("\r")[2].replace(str(folder), "~") for line in text.rstrip().split("\n")
    ]


def terminal(folder: Path) -> str:
    """An SVG of a completion and of a conversation."""
    lines: list[tuple[str, str]] = []
    for shown, words in COMMANDS:
        asked = QUESTION if "run_mode=chat" in words else ""
        said = typed(words, folder, asked.encode())
        pipe = f"echo '{asked}' | " if asked else ""
        lines.append(("typed", f"$ {pipe}python run_lite.py {shown}"))
        lines += [*(("", line) for line in said), ("", "")]
    return as_svg(lines[:-1])


def as_svg(lines: list[tuple[str, str]]) -> str:
    """A dark window with (class, text) lines; long ones go on in the next."""
    rows = [
        (kind, text[start : start + WIDTH])
        for kind, text in lines
        for start in range(0, max(len(text), 1), WIDTH)
    ]
    width, height = round(WIDTH * CHARACTER) + 32, len(rows) * LINE + 52
    body = "\n".join(
        f'<text class="{kind or "said"}" x="16" y="{46 + place * LINE}">{html.escape(text)}</text>'
        for place, (kind, text) in enumerate(rows)
    )
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<style>
text {{ font: 13px ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre }}
.said {{ fill: #d4d4d4 }} .typed {{ fill: #8be9a8 }}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#1e1e1e"/>
<circle cx="20" cy="16" r="5" fill="#ff5f56"/><circle cx="38" cy="16" r="5" fill="#ffbd2e"/>
<circle cx="56" cy="16" r="5" fill="#27c93f"/>
{body}
</svg>
"""


def page(path: Path, folder: Path) -> None:
    """A photograph of the server's page after a question."""
    words = ["run_mode=serve", MODEL, "serve.port=0", "seed=1"]
    server = subprocess.Popen(
        [sys.executable, ROOT / "run_lite.py", *words],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        found = next(filter(None, (re.search(r"on (http://\S+)", line) for line in server.stderr)))
        browser = Browser(folder / "browser")
        try:
            browser.size(1000, 620)
            browser.open(f"{found[1]}/")
            browser.until("!document.querySelector('#send').disabled")
            browser.evaluate("document.querySelector('[name=temperature]').value = '0'")
            browser.type(QUESTION)
            browser.press("Enter")
            browser.until("document.querySelector('#stop').hidden")
            browser.screenshot(path)
        finally:
            browser.close()
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    target = Path(sys.argv[1] if sys.argv[1:] else ROOT / "docs").resolve()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        (target / "terminal.svg").write_text(terminal(Path(folder)), encoding="utf-8")
        if CHROMIUM is None:
            print("page.png is left out: neither chromium nor google-chrome is on PATH")
        else:
            page(target / "page.png", Path(folder))


if __name__ == "__main__":
    main()
