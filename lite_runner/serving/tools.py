"""Tools of a chat: their definitions for the template, and calls, which are read or forced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from lite_runner.serving.errors import ApiError
from lite_runner.serving.sampling import check_free_end
from lite_runner.serving.schemas import ChatRequest, Function, Message, NamedTool, Tool
from lite_runner.serving.tool_formats import NO_ARGUMENTS, CallFormat
from lite_runner.serving.tool_parsers import Call, More, Part, Tools, json_of, type_of, types_of
from lite_runner.structured.grammars import Grammar
from lite_runner.system.files import MAX_DIGITS, parse_json
from lite_runner.text.tokenizer import Tokenizer

# Fields of a definition that are not for the chat template.
_NOT_TOLD: Any = {"cache_control": True, "function": {"strict"}}


class ToolUse:
    """The tools of one request."""

    def __init__(
        self,
        body: ChatRequest,
        tokenizer: Tokenizer,
        form: CallFormat | None,
        grammar: Grammar | None,
    ) -> None:
        """`form`: how the model writes calls; `grammar`: of structured output. Raises ApiError for
        what cannot be done."""
        self.definitions, self._format = definitions(body.tools or (), form), _known(form, "tools")
        self._functions = [tool.function for tool in body.tools or ()]
        self._several = body.parallel_tool_calls is not False
        self._forced = body.tool_choice not in (None, "auto")
        known = {id: text for text in self._format.marks if (id := tokenizer.id_of(text))}
        self._special = {text: id for id, text in known.items() if id in tokenizer.special_ids}
        self.keeps_special = bool(self._special)  # else the marks of calls are not in the text
        self.grammar = self._restricted(body, grammar)

    def reader(self) -> CallReader:
        """Reads one answer."""
        tools = {function.name: _schema(function) for function in self._functions}
        return CallReader(self._format, tools, several=self._several, forced=self._forced)

    def _restricted(self, body: ChatRequest, answer: Grammar | None) -> Grammar | None:
        """The grammar of calls, where they must be made; else of calls or an answer in the grammar
        `answer`."""
        chosen, functions = body.tool_choice, self._functions
        if not self._forced and answer is None:
            return None
        check_free_end(body, "tool_choice")
        if isinstance(chosen, NamedTool):
            functions = [one for one in functions if one.name == chosen.function.name]
        schemas = [(one.name, _schema(one)) for one in functions]
        several = self._several and not isinstance(chosen, NamedTool)
        other = None if self._forced else answer
        lark = self._format.grammar(schemas, self._spell, several, other.lark if other else None)
        listed = (*(schema for _, schema in schemas), *(other.schemas if other else ()))
        return Grammar(lark, "tools", listed, other.patterns if other else ())

    def _spell(self, text: str) -> str:
        """A text in Lark; marks that are special tokens by their ids."""
        marks = "|".join(map(re.escape, self._special))
        parts = re.split(f"({marks})", text) if marks else [text]
        spelled = (
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part)
            for part in parts
            if part
        )
        return " ".join(spelled)


def definitions(tools: Sequence[Tool], form: CallFormat | None) -> list[dict[str, Any]]:
    """Tools as chat templates take them. Raises ApiError where the template knows none."""
    _known(form, "tools")
    return [tool.model_dump(exclude_none=True, exclude=_NOT_TOLD) for tool in tools]


class CallReader:
    """Separates the text of an answer from the calls in it."""

    def __init__(self, form: CallFormat, tools: Tools, *, several: bool, forced: bool) -> None:
        self._parser, self._several, self._forced = form.parser(tools), several, forced
        self._tools = tools
        self._new_id = form.new_id
        self._dropped = False  # the newest call, where one alone is wanted
        self.calls: list[dict[str, Any]] = []  # so far, as message.tool_calls has them

    def put(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text that is certain now, and calls as deltas have them; `last`: no more follows."""
        parts: list[Part] = self._parser.put(text)
        if last:
            parts += self._parser.finish()
        content = "".join(part for part in parts if isinstance(part, str))
        deltas = []
        for part in parts:
            if isinstance(part, Call):
                self._dropped = bool(self.calls) and not self._several
                if not self._dropped:
                    call = self._call_item(part)
                    deltas.append({"index": len(self.calls), **call})
                    self.calls.append({**call, "function": {**call["function"]}})
            elif isinstance(part, More) and not self._dropped:
                self.calls[-1]["function"]["arguments"] += part.text
                more = {"function": {"arguments": part.text}}
                deltas.append({"index": len(self.calls) - 1, **more})
        return content, deltas

    def check(self) -> None:
        """Validate a whole answer. Raises ApiError where calls were forced, and one is not
        to be used: in JSON a number may be beyond all floats."""
        if self._forced and not (self.calls and all(map(self._is_usable, self.calls))):
            raise ApiError(
                500,
                "tool_choice: the call does not fit the schema, as by a number beyond all floats"
                f" or of more than {MAX_DIGITS} digits; ask again, or bound numbers in the schema",
                "tool_choice",
            )

    def _is_usable(self, call: dict[str, Any]) -> bool:
        """True if its arguments are JSON, and of the types that they may have."""
        function = call["function"]
        allowed = types_of(self._tools.get(function["name"], {}))
        arguments = json_of(function["arguments"])
        return isinstance(arguments, dict) and all(
            not allowed.get(name) or type_of(value) in allowed[name]
            for name, value in arguments.items()
        )

    def _call_item(self, call: Call) -> dict[str, Any]:
        id = self._new_id(call.name, len(self.calls))
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": id, "type": "function", "function": function}


def plain_messages(
    messages: Sequence[Message], tokenizer: Tokenizer, known: CallFormat | None
) -> list[dict[str, Any]]:
    """The messages as chat templates take them. Raises ApiError for calls where the template
    knows none."""
    plain: list[dict[str, Any]] = []
    names = ("reasoning_content", "reasoning", "thinking")
    read = [name for name in names if tokenizer.template_reads(name, of_messages=True)]
    for place, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": message.text}
        thought = message.reasoning_content or message.reasoning
        if thought:  # the template keeps it or not
            turn |= dict.fromkeys(read, thought)
        if not message.tool_calls and role != "tool":
            plain.append(turn)
            continue
        form = _known(known, f"messages.{place}.{'role' if role == 'tool' else 'tool_calls'}")
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, place, number),
                },
            }
            for number, call in enumerate(message.tool_calls or ())
        ]
        if form.turn is not None:
            plain += _as_turns(turn, calls, form.turn)
        elif role == "tool":
            named = {"name": message.name} if message.name else {}
            plain.append({**turn, "tool_call_id": message.tool_call_id, **named})
        else:
            plain.append({**turn, "tool_calls": calls})
    return plain


def _as_turns(
    turn: dict[str, Any], calls: Sequence[dict[str, Any]], write: Callable[[dict[str, Any]], str]
) -> list[dict[str, Any]]:
    """Calls are the assistant's messages with the tool's name as metadata."""
    if turn["role"] == "tool":
        return [{**turn, "role": "observation"}]
    before = [turn] if turn["content"] else []
    return before + [
        {
            "role": "assistant",
            "metadata": call["function"]["name"],
            "content": write(call["function"]["arguments"]),
        }
        for call in calls
    ]


def _known(form: CallFormat | None, field: str) -> CallFormat:
    if form is None:
        why = "the model's chat template has no tools, or none in a form that is known"
        raise ApiError(400, f"{field}: not supported: {why}", field, "unsupported_parameter")
    return form


def _schema(function: Function) -> dict[str, Any]:
    """The JSON schema of the arguments."""
    return (
        NO_ARGUMENTS if function.parameters is None else {"type": "object", **function.parameters}
    )


def _arguments(text: str, place: int, number: int) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        field = f"messages.{place}.tool_calls.{number}.function.arguments"
        raise ApiError(400, f"{field}: expected a JSON object", field, "invalid_value")
    return found
