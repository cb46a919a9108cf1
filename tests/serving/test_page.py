"""The page at `/`, in headless Chromium against a server over a mock backend."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner import __version__
from lite_runner.text.tokenizer import byte_tokenizer
from tests.conftest import NO_BROWSER
from tests.generation.mock import MockBackend
from tests.serving.browser import CHROMIUM, Browser
from tests.serving.conftest import END, VOCAB, Served, Start

SAYING = "Bonjour !\n<img src=x onerror=\"console.log('unsafe')\"> <b>&amp;</b> Buongiorno ☕"
COUNTING = " ".join(map(str, range(1, 200)))


def saying(history: list[int], adapter: int, answer: str = SAYING) -> NDArray[np.float32]:
    """Logits of a model that has one answer to all that ends in a question mark; of an adapter, its
    number. To "count?" it is a long one."""
    sequence = bytes(token for token in history if token < 256)
    at = max(sequence.rfind(b"[assistant]") + len("[assistant]"), sequence.rfind(b"?") + 1)
    if adapter:
        answer = f"adapter {adapter}"
    if b"count?" in sequence[:at]:
        answer = COUNTING
    text = answer.encode()[len(sequence) - at :]
    scores = np.full(VOCAB, -50, np.float32)
    scores[text[0] if text else END] = 50
    return scores


class Talker(MockBackend):
    """Says a text, or counts with pauses until it is told to fail."""

    def __init__(self, pause: float = 0, text: str = SAYING) -> None:
        super().__init__(partial(saying, answer=text), 4, 4096, 4)
        self.pause, self.fails = pause, False

    def forward(self, rows: Any) -> Any:
        time.sleep(self.pause)
        if self.fails:
            raise RuntimeError("the memory is gone")
        return super().forward(rows)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A tab that has nothing to say at the end but what a test has taken out."""
    if CHROMIUM is None:
        pytest.skip(f"{NO_BROWSER}: neither chromium nor google-chrome is on PATH")
    opened = Browser(tmp_path / "profile")
    try:
        yield opened
        assert opened.console == []
    finally:
        opened.close()


Visit = Callable[..., Served]


@pytest.fixture
def visit(start: Start, browser: Browser) -> Visit:
    """`visit(backend)`: the page of a server, ready."""

    def run(backend: Any = None, **options: Any) -> Served:
        served = start(backend or Talker(), **options)
        browser.open(f"{served.url}/")
        browser.until("!document.querySelector('#send').disabled")
        return served

    return run


def ask(browser: Browser, text: str) -> None:
    assert browser.focused() == "message"
    browser.type(text)
    browser.press("Enter")


def until_answered(browser: Browser) -> str:
    """The newest answer, as it is shown."""
    browser.until("document.querySelector('#stop').hidden")
    return browser.text("#conversation li:last-child")


def set_field(browser: Browser, name: str, value: str) -> None:
    browser.evaluate(f"document.querySelector('[name={name}]').value = {value!r}")


def test_a_conversation(browser: Browser, visit: Visit) -> None:
    served = visit()
    ask(browser, "How are you?")
    name, copy, *lines, figures = until_answered(browser).splitlines()
    assert (name, copy) == ("base", "Copy")
    assert "\n".join(line for line in lines if line) == SAYING  # and no element of it
    assert browser.evaluate("document.querySelectorAll('#conversation :is(img, b)').length") == 0
    tokens = len(SAYING.encode()) + 1
    assert re.match(rf"{tokens} tokens · [\d.]+ tokens/s · first token after ", figures)
    assert figures.endswith("· prompt 30 tokens")
    ask(browser, "And now?")
    assert re.search(r"prompt \d+ tokens, \d+ cached$", until_answered(browser))
    assert browser.evaluate("document.querySelectorAll('#conversation li').length") == 4
    assert all(url.startswith(served.url) for url in browser.asked)
    browser.evaluate("document.querySelector('#clear').click()")
    assert browser.evaluate("document.querySelectorAll('#conversation li').length") == 0
    ask(browser, "How are you?")
    assert "prompt 30 tokens" in until_answered(browser)


MARKDOWN = """# Heading

Some **bold _and_ emphasis**, `a < b`, snake_case_name, 2 * 3 * 4 and \\*stars\\*.
A [page](https://example.com/a_b), https://example.com/c. [no](javascript:alert(1)) ![i](http://x.example/i.png)

1. one
   - inner
2. two

   ```python
   if a < b:
       print("<script>")
   ```

> quoted
> > twice

| name | value |
|---|--:|
| `x` | <b>1</b> |

---
```
not closed **here**
"""


def test_markdown_is_shown(browser: Browser, visit: Visit) -> None:
    served = visit(Talker(text=MARKDOWN))
    ask(browser, "How are you?")
    until_answered(browser)

    def texts(selector: str) -> list[str]:
        shown = f"[...document.querySelectorAll('.markdown {selector}')].map(e => e.textContent)"
        found: list[str] = browser.evaluate(shown)
        return found

    assert texts("h4") == ["Heading"]
    assert texts("strong") == ["bold and emphasis"] and texts("em") == ["and"]
    assert texts("p code") == ["a < b"]
    assert texts("ol > li > ul > li") == ["inner"] and len(texts("ol > li")) == 2
    assert texts("pre") == ['if a < b:\n    print("<script>")', "not closed **here**\n"]
    assert [text.strip() for text in texts("blockquote blockquote")] == ["twice"]
    assert texts("th") == ["name", "value"] and texts("td") == ["x", "<b>1</b>"]
    assert len(texts("hr")) == 1
    hrefs = "[...document.querySelectorAll('.markdown a')].map(e => [e.textContent, e.href])"
    assert browser.evaluate(hrefs) == [
        ["page", "https://example.com/a_b"],
        ["https://example.com/c", "https://example.com/c"],
        ["i", "http://x.example/i.png"],
    ]
    shown = texts("p")[0]
    assert "snake_case_name, 2 * 3 * 4 and *stars*." in shown
    assert "[no](javascript:alert(1))" in shown
    inside = ":is(script, img, b, iframe, style)"
    assert texts(inside) == [] and browser.evaluate(CONTRASTS) == []
    assert all(url.startswith(served.url) for url in browser.asked)
    # What is asked next holds the text, not what is shown of it.
    assert browser.evaluate("document.querySelector('#status').textContent").endswith(MARKDOWN)


def test_answers_and_code_are_copied(browser: Browser, visit: Visit) -> None:
    visit(Talker(text=MARKDOWN))
    ask(browser, "How are you?")
    until_answered(browser)
    browser.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    for label, text in (
        ("Copy answer", MARKDOWN),
        ("Copy code", 'if a < b:\n    print("<script>")'),
    ):
        button = f"document.querySelector('[aria-label=\"{label}\"]')"
        browser.evaluate(f"{button}.click()")
        browser.until(f"{button}.textContent === 'Copied'")
        assert browser.evaluate("window.copied") == text


def test_an_answer_is_drawn_block_by_block(browser: Browser, visit: Visit) -> None:
    """A selection in a block above is kept while the rest arrives."""
    visit(Talker(pause=0.003, text="first block\n\n" + "word " * 60))
    ask(browser, "How are you?")
    browser.until("document.querySelectorAll('.markdown > p').length === 2")
    browser.evaluate("window.first = document.querySelector('.markdown > p')")
    until_answered(browser)
    assert browser.evaluate("window.first === document.querySelector('.markdown > p')")


def test_text_that_is_hard_to_read_is_shown(browser: Browser, visit: Visit) -> None:
    """Expressions that go back and forth would take hours."""
    visit()
    for part, count in (("*", 15_000), ("**a", 6_000), ("`", 15_000), ("[", 15_000), ("_a", 9_000)):
        shown = browser.evaluate(
            "import('/static/markdown.js').then(({ Markdown }) => { const view = new Markdown();"
            f" view.show('x ' + {part!r}.repeat({count})); return view.element.innerText; }})"
        )
        assert shown


def test_settings_reach_the_model_and_faults_the_reader(browser: Browser, visit: Visit) -> None:
    visit()
    set_field(browser, "system", "Be brief.")
    set_field(browser, "stop", "jour\n")
    ask(browser, "How are you?")
    answer = until_answered(browser)
    assert "\nBon\n" in answer
    assert "prompt 48 tokens" in answer
    set_field(browser, "top_p", "0")
    ask(browser, "And now?")
    answer = until_answered(browser)
    assert "top_p: Input should be greater than 0" in answer
    assert re.search(r"status 400 · type invalid_request_error · param top_p", answer)
    assert re.search(r"code invalid_value · request \w{16}", answer)
    assert browser.evaluate("document.querySelector('#message').value") == "And now?"
    browser.console.pop()  # the browser's own line on the status 400
    set_field(browser, "top_p", "7")  # not even sent
    browser.press("Enter")
    assert browser.focused() == "top_p"
    assert browser.evaluate("document.querySelectorAll('#conversation li').length") == 4


def test_an_adapter_and_the_keyboard_alone(browser: Browser, visit: Visit) -> None:
    browser.size(600, 900)
    visit()
    assert browser.focused() == "message"
    order = []
    while not order or order[-1] != "message":
        browser.press("Tab")
        order.append(browser.focused())
        if order[-1] == "summary":
            browser.press("Enter")  # the settings open, and what is in them is next
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert order[-1] == "body" or browser.evaluate(outline) != "none"
    expected = "clear send model theme summary system temperature max_tokens top_p top_k min_p seed"
    assert set(expected.split()) <= set(order)
    while browser.focused() != "model":
        browser.press("Tab")
    browser.press("ArrowDown")
    assert browser.evaluate("document.querySelector('#model').value") == "a"
    while browser.focused() != "message":
        browser.press("Tab")
    browser.type("Who")
    browser.press("Enter", shift=True)
    ask(browser, "are you?")
    name, _, text, *_ = (line for line in until_answered(browser).splitlines() if line)
    assert (name, text) == ("a", "adapter 1")
    assert browser.text("#conversation li .text") == "Who\nare you?"
    assert browser.focused() == "message"


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stop(browser: Browser, visit: Visit, how: str) -> None:
    served = visit(Talker(pause=0.01))
    ask(browser, "count?")
    browser.until("document.querySelector('#conversation').innerText.includes('1 2 3')")
    if how == "Escape":
        browser.press("Escape")
    else:
        browser.evaluate("document.querySelector('#stop').focus()")
        browser.press("Enter")
    answer = until_answered(browser)
    assert "1 2 3" in answer and "199" not in answer and answer.endswith("stopped")
    served.until_idle()
    assert browser.focused() == "message"
    assert browser.text("#status") == "Stopped."
    ask(browser, "and?")
    assert "199" in until_answered(browser)  # what was stopped is part of the conversation


def test_a_failure_on_the_way(browser: Browser, visit: Visit) -> None:
    backend = Talker(pause=0.01)
    visit(backend)
    ask(browser, "count?")
    browser.until("document.querySelector('#conversation').innerText.includes('1 2 3')")
    backend.fails = True
    answer = until_answered(browser)
    assert "1 2 3" in answer and "type service_unavailable_error" in answer
    ask(browser, "and?")
    assert "status 503" in until_answered(browser)
    browser.console.pop()


def test_a_key_is_asked_for_and_kept_nowhere(browser: Browser, start: Start) -> None:
    served = start(Talker(), key=b"0123")
    browser.open(f"{served.url}/")
    browser.until("!document.querySelector('#access').hidden")
    assert "expected Bearer and the server's key" in browser.text("#faults")
    assert browser.focused() == "key"
    browser.type("wrong")
    browser.press("Enter")
    browser.until("document.querySelector('#key').value === ''")
    browser.until("document.querySelector('#faults').innerText.includes('status 401')")
    browser.type("0123")
    browser.press("Enter")
    browser.until("!document.querySelector('#send').disabled")
    assert browser.text("#faults") == ""
    ask(browser, "How are you?")
    assert "Bonjour !" in until_answered(browser)
    kept = "document.cookie + localStorage.length + sessionStorage.length + location.href"
    assert browser.evaluate(kept) == f"00{served.url}/"
    assert not browser.evaluate("document.documentElement.outerHTML.includes('0123')")
    assert len(browser.console) == 2 and all("401" in line for line in browser.console)
    browser.console.clear()


def test_without_a_chat_template_text_is_continued(browser: Browser, visit: Visit) -> None:
    visit(tokenizer=byte_tokenizer())
    assert "has no chat template" in browser.text("#mode")
    ask(browser, "How are you?")
    assert "Bonjour !" in until_answered(browser)
    assert "prompt 12 tokens" in browser.text("#conversation")
    ask(browser, "And now?")
    tokens = len(f"How are you?{SAYING}\nAnd now?".encode())
    assert f"prompt {tokens} tokens, {tokens - len('And now?') - 1} cached" in until_answered(
        browser
    )
    browser.console.pop()  # of asking whether there is a template


def test_light_and_dark(browser: Browser, visit: Visit) -> None:
    visit()
    ask(browser, "How are you?")
    until_answered(browser)
    set_field(browser, "top_p", "0")
    ask(browser, "And now?")
    until_answered(browser)
    browser.console.pop()
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.prefer("light")
    light = browser.evaluate(ground)
    assert browser.evaluate(CONTRASTS) == []
    browser.prefer("dark")
    assert browser.evaluate(ground) != light
    assert browser.evaluate(CONTRASTS) == []
    browser.evaluate("document.querySelector('#theme').focus()")
    browser.press("ArrowDown")  # light, whatever the system has
    assert browser.evaluate(ground) == light


# Texts with a contrast below 4.5 : 1, after WCAG 2.
CONTRASTS = """(() => {
    const channels = (color) => color.match(/[\\d.]+/g).map(Number);
    const luminance = (color) => {
        const [r, g, b] = channels(color).map((c) => c / 255)
            .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (e) => {
        const color = getComputedStyle(e).backgroundColor;
        return channels(color)[3] === 0 ? ground(e.parentElement) : color;
    };
    const low = [];
    for (const e of document.body.querySelectorAll(":not(:disabled, option, noscript *)")) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!own || !e.checkVisibility()) continue;
        const found = [getComputedStyle(e).color, ground(e)];
        const [dark, light] = found.map(luminance).sort((a, b) => a - b);
        const ratio = (light + 0.05) / (dark + 0.05);
        if (ratio < 4.5) low.push([e.outerHTML.slice(0, 60), ...found, ratio]);
    }
    return low;
})()"""


def test_texts_for_screen_readers(browser: Browser, visit: Visit) -> None:
    browser.size(1200, 800)
    visit(Talker(pause=0.005))
    ask(browser, "How are you?")
    browser.until("document.querySelector('#conversation li:last-child').ariaBusy === 'true'")
    until_answered(browser)
    assert browser.evaluate("document.querySelector('#conversation li:last-child').ariaBusy") == (
        "false"
    )
    assert browser.evaluate("document.querySelector('#status').textContent") == f"base: {SAYING}"
    labels = browser.accessible()
    used = [name for role, name in labels if role in USED]
    assert all(used) and {"Model", "Theme", "Message", "Send", "System prompt"} <= set(used)
    headings = [name.strip() for role, name in labels if role == "heading"]
    assert headings == [f"lite-runner {__version__}", "You", "base", "Settings"]
    roles = {role for role, _ in labels}
    assert {"banner", "main", "complementary", "status", "list"} <= roles


USED = ("button", "textbox", "combobox", "spinbutton", "DisclosureTriangle")


@pytest.mark.parametrize("width", [320, 390, 800, 1200])
def test_it_fits(browser: Browser, visit: Visit, width: int) -> None:
    """Nothing is cut off, and there is no scrolling to the side."""
    browser.size(width, 800)
    visit()
    ask(browser, f"{'long' * 100}?")
    until_answered(browser)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(
        "document.querySelector('#send').getBoundingClientRect().bottom <= innerHeight"
    )
