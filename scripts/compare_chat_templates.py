"""Compares what chat templates write here with what transformers writes: one turn and several, a
system prompt, thinking on and off, tools, a call and its result.

    python scripts/compare_chat_templates.py FILE...

A FILE is a template (.jinja), or a JSON list of objects with model_name and chat_template. Prints
each difference; the exit code is 1 where there is one. Needs: transformers, jinja2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template

from lite_runner.errors import RunnerError
from lite_runner.system.files import parse_json
from lite_runner.text.chat_templates import render_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
CITY = {"city": {"type": "string", "description": "Its name"}, "days": {"type": "integer"}}
WEATHER = {
    "name": "get_weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": CITY, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]
MADE = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
CALLS = [{"id": "call_1a2b3", "type": "function", "function": MADE}]
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hi <b>\u00e9"}
ANSWER = {"role": "assistant", "content": "Hello."}
CALLED = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "tool_call_id": "call_1a2b3", "name": "get_weather", "content": "sun"}
THOUGHT = {**ANSWER, "reasoning_content": "Hm."}
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a turn": ([HELLO], {}),
    "a system prompt": ([SYSTEM, HELLO], {}),
    "turns": ([SYSTEM, HELLO, ANSWER, HELLO], {}),
    "thinking": ([HELLO, THOUGHT, HELLO], {"enable_thinking": True}),
    "no thinking": ([HELLO], {"enable_thinking": False}),
    "tools": ([HELLO], {"tools": TOOLS}),
    "a call": ([HELLO, CALLED, RESULT], {"tools": TOOLS}),
}


def templates(path: Path) -> Iterator[tuple[str, str]]:
    """The names and texts of a file's templates."""
    if path.suffix != ".json":
        yield path.stem, path.read_text(encoding="utf-8")
        return
    for one in parse_json(path.read_bytes()):
        if "{%" in (template := one.get("chat_template") or ""):
            yield one["model_name"], template


def theirs(template: str, values: dict[str, Any]) -> str | None:
    """None: it refuses."""
    try:
        found: str = _compile_jinja_template(template).render(
            **{"tools": None, "documents": None, **values}
        )
    except Exception:
        return None
    return found


def ours(template: str, values: dict[str, Any]) -> str | None:
    """None: it refuses."""
    try:
        return render_template(template, values, source="a template")
    except RunnerError:
        return None


def main() -> int:
    seen: set[str] = set()
    count = different = 0
    for path in map(Path, sys.argv[1:]):
        for name, template in templates(path):
            if template in seen:
                continue
            seen.add(template)
            for case, (messages, more) in CASES.items():
                for generates in (True, False):
                    turn = {"messages": messages, "add_generation_prompt": generates}
                    values = {**turn, **SPECIAL, **more}
                    count += 1
                    if ours(template, values) != theirs(template, values):
                        different += 1
                        print(f"{name}: {case}")
    print(f"{len(seen)} templates, {count:,} texts, {different} differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
