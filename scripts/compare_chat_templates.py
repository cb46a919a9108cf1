"""Compares what chat templates write here with what transformers writes: one turn and several, a
system prompt, thinking on and off, tools, a call and its result.

    python scripts/compare_chat_templates.py FILE...

A FILE is a template (.jinja), or a JSON list of objects with model_name and chat_template. Prints
what is told of each: the parser of calls, and whether it reads the call that the template writes;
the thinking's marks; what switches it off. Then each difference; the exit code is 1 where there is
one, or where a call is not read. Needs: transformers, jinja2, llguidance.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template

from lite_runner.errors import RunnerError
from lite_runner.serving.tool_formats import CallFormat, detect_format
from lite_runner.serving.tool_parsers import Call, More
from lite_runner.system.files import parse_json
from lite_runner.text.chat_templates import render_template
from lite_runner.text.thinking import HARMONY, HarmonyReader, thinking_marks, thinking_switch
from lite_runner.text.tokenizer import byte_tokenizer

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


def told(template: str) -> tuple[str, bool]:
    """The line about a template, and True if its call is read."""
    tokenizer = byte_tokenizer().with_special(chat_template=template)
    form, marks = detect_format(tokenizer), thinking_marks(template)
    off, call = "-", "no tools"
    if marks is not None:
        try:
            off = f"off: {thinking_switch(template, False)}"
        except RunnerError:
            off = "always"
    is_read = None if form is None else reads_its_call(template, form)
    if form is not None:
        call = f"{form.name}, {({None: 'writes none', True: 'read', False: 'NOT READ'})[is_read]}"
    return f"{call} | {marks.begin if marks else 'no thinking'} | {off}", is_read is not False


def reads_its_call(template: str, form: CallFormat) -> bool | None:
    """True if the parser reads the call that the template writes; None: it writes none."""
    name = MADE["name"]
    calls = [{**CALLS[0], "id": form.new_id(name, 0)}]
    values = {"tools": TOOLS, "add_generation_prompt": False, **SPECIAL}
    asked = ours(template, {"messages": [HELLO], **values}) or ""
    written = ours(template, {"messages": [HELLO, {**CALLED, "tool_calls": calls}], **values}) or ""
    said = written.removeprefix(asked)
    if name not in said:
        return None
    if not form.marks:  # the call is all that there is behind the role
        said = said[max(said.find(form.whole[0] + form.opening.partition("{name}")[0] + name), 0) :]
    if thinking_marks(template) is HARMONY:
        said = "".join(HarmonyReader().put(said.removeprefix("<|start|>assistant"), last=True))
    parser = form.parser({name: WEATHER["parameters"]})
    parts = [*parser.put(said), *parser.finish()]
    found = [one for one in parts if isinstance(one, Call)]
    arguments = "".join(one.arguments for one in found)
    arguments += "".join(one.text for one in parts if isinstance(one, More))
    try:
        return [one.name for one in found] == [name] and parse_json(arguments) == MADE["arguments"]
    except ValueError:
        return False


def main() -> int:
    seen: set[str] = set()
    count = different = unread = 0
    for path in map(Path, sys.argv[1:]):
        for name, template in templates(path):
            if template in seen:
                continue
            seen.add(template)
            line, is_read = told(template)
            print(f"{name}: {line}")
            unread += not is_read
            for case, (messages, more) in CASES.items():
                for generates in (True, False):
                    turn = {"messages": messages, "add_generation_prompt": generates}
                    values = {**turn, **SPECIAL, **more}
                    count += 1
                    if ours(template, values) != theirs(template, values):
                        different += 1
                        print(f"{name}: {case}")
    print(f"{len(seen)} templates, {count:,} texts, {different} differ, {unread} calls not read")
    return int(different + unread > 0)


if __name__ == "__main__":
    sys.exit(main())
