"""Tools of a chat: their definitions for the template, and calls, which are read or forced."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from lite_runner.records import dataclass
from lite_runner.serving.errors import ApiError
from lite_runner.serving.sampling import check_free_end
from lite_runner.serving.schemas import ChatRequest, Function, Message, NamedTool
from lite_runner.serving.tool_parsers import (
    BEGIN,
    END,
    FUNCTION_END,
    KEY,
    KEY_END,
    KEYS,
    MARKS,
    NAMES,
    PARAMETER_END,
    PARAMETER_NAMES,
    TEXT,
    TURN_BEGIN,
    TURN_END,
    TURN_TAG,
    VALUE,
    VALUE_END,
    Call,
    ChatGLM3,
    Parser,
    Part,
    Spell,
    Tools,
    glm4,
    glm45,
    hermes,
    llama_json,
    mistral,
    qwen3_coder,
    resolved,
    types,
    write_turn,
)
from lite_runner.structured.grammars import Grammar, json_rule, keywords, regex_terminal
from lite_runner.system.json_file import parse_json
from lite_runner.text.chatglm_chat import ChatForm
from lite_runner.text.tokenizer import Tokenizer, reads

Name = Literal["hermes", "llama_json", "mistral", "glm4", "glm45", "qwen3_coder", "chatglm3"]
_ARGUMENTS = '{"name": "{name}", "arguments": '
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")
# What a schema may ask of the arguments together.
_TOGETHER = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)
_TEXTS = "/(?s:.*)/"
_NOT_HERE = ("$ref", "allOf", "oneOf", "not", "if")  # keywords that the grammar of a text lacks


class ToolUse:
    """The tools of one request."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, grammar: Grammar | None) -> None:
        """`grammar`: of structured output. Raises ApiError for what cannot be done."""
        self._format = _format(tokenizer, "tools")
        self._functions = [tool.function for tool in body.tools or ()]
        self._several = body.parallel_tool_calls is not False
        self.definitions = [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
            for tool in body.tools or ()
        ]
        known = {id: text for text in self._format.marks if (id := tokenizer.id_of(text))}
        self._special = {text: id for id, text in known.items() if id in tokenizer.special_ids}
        self.keeps_special = bool(self._special)  # else the marks of calls are not in the text
        if grammar is not None:
            raise ApiError(400, f"{grammar.field}: not with tools", grammar.field)
        self.grammar = self._forced(body)

    def reader(self) -> CallReader:
        """Reads one answer."""
        tools = {function.name: _schema(function) for function in self._functions}
        return CallReader(self._format, tools, several=self._several)

    def _forced(self, body: ChatRequest) -> Grammar | None:
        """Of calls that must be made."""
        chosen, functions = body.tool_choice, self._functions
        if chosen in (None, "auto"):
            return None
        check_free_end(body, "tool_choice")
        if isinstance(chosen, NamedTool):
            functions = [one for one in functions if one.name == chosen.function.name]
        schemas = [(one.name, _schema(one)) for one in functions]
        several = self._several and chosen == "required"
        lark = self._format.grammar(schemas, self._spell, several)
        return Grammar(lark, "tools", tuple(schema for _, schema in schemas))

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


class CallReader:
    """Separates the text of an answer from the calls in it."""

    def __init__(self, form: CallFormat, tools: Tools, *, several: bool) -> None:
        self._parser, self._several = form.parser(tools), several
        self._short_ids = form.short_ids
        self.calls: list[dict[str, Any]] = []  # so far, as message.tool_calls has them

    def put(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text that is certain now, and calls as deltas have them; `last`: no more follows."""
        parts: list[Part] = self._parser.put(text)
        if last:
            parts += self._parser.finish()
        content = "".join(part for part in parts if isinstance(part, str))
        deltas = []
        for part in parts:
            if isinstance(part, Call) and (self._several or not self.calls):
                made = self._made(part)
                deltas.append({"index": len(self.calls), **made})
                self.calls.append(made)
        return content, deltas

    def _made(self, call: Call) -> dict[str, Any]:
        id = secrets.token_hex(5)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": id, "type": "function", "function": function}


def plain_messages(messages: Sequence[Message], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """As chat templates take them. Raises ApiError for calls where the template knows none."""
    plain: list[dict[str, Any]] = []
    names = ("reasoning_content", "reasoning", "thinking")
    read = [name for name in names if tokenizer.template_reads(name, of_messages=True)]
    for place, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        made: dict[str, Any] = {"role": role, "content": message.text}
        thought = message.reasoning_content or message.reasoning
        if thought:  # the template keeps it or not
            made |= dict.fromkeys(read, thought)
        if not message.tool_calls and role != "tool":
            plain.append(made)
            continue
        form = _format(tokenizer, f"messages.{place}.{'role' if role == 'tool' else 'tool_calls'}")
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
            plain += _as_turns(made, calls, form.turn)
        elif role == "tool":
            named = {"name": message.name} if message.name else {}
            plain.append({**made, "tool_call_id": message.tool_call_id, **named})
        else:
            plain.append({**made, "tool_calls": calls})
    return plain


def _as_turns(
    made: dict[str, Any],
    calls: Sequence[dict[str, Any]],
    write: Callable[[dict[str, Any]], str],
) -> list[dict[str, Any]]:
    """Calls are the assistant's messages with the tool's name as metadata."""
    if made["role"] == "tool":
        return [{**made, "role": "observation"}]
    said = [made] if made["content"] else []
    return said + [
        {
            "role": "assistant",
            "metadata": call["function"]["name"],
            "content": write(call["function"]["arguments"]),
        }
        for call in calls
    ]


def _format(tokenizer: Tokenizer, field: str) -> CallFormat:
    found = format_of(tokenizer.chat_template, tokenizer.chat_form)
    if found is None:
        why = "the model's chat template has no tools, or none in a form that is known"
        raise ApiError(400, f"{field}: not supported: {why}", field, "unsupported_parameter")
    return found


def _schema(function: Function) -> dict[str, Any]:
    """Of the arguments."""
    return _NOTHING if function.parameters is None else {"type": "object", **function.parameters}


def _arguments(text: str, place: int, number: int) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        field = f"messages.{place}.tool_calls.{number}.function.arguments"
        raise ApiError(400, f"{field}: expected a JSON object", field, "invalid_value")
    return found


def format_of(template: str | None, chat_form: ChatForm | None = None) -> CallFormat | None:
    """Of a chat template, or of a form of chats that needs none; None: it does not know tools, or
    how the model calls them is not known here."""
    if template is None and chat_form == "chatglm3":
        return FORMATS["chatglm3"]
    if template is None or not reads(template, "tools"):
        return None
    if "<tool_call>" in template:
        if "<function=" in template:
            return FORMATS["qwen3_coder"]
        return FORMATS["glm45" if "<arg_key>" in template else "hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "[gMASK]" in template and "<|observation|>" in template:
        return FORMATS["glm4"]
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return FORMATS["llama_json"]
    return None


def _json_rules(rule: str, schema: Mapping[str, Any], _: Spell) -> list[str]:
    """An object. Each schema is a rule of its own, so that "#" in it means itself."""
    return [f"{rule}: {json_rule(schema)}"]


def _json_text(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls. `arguments`: rules in Lark, of which the first is named, for the
    arguments of a tool with a schema."""

    name: Name
    marks: tuple[str, ...]  # which may be tokens of their own
    parser: Callable[[Tools], Parser]
    opening: str  # before the arguments; {name} is the tool's
    closing: str
    between: str | None = None  # two calls; None: one at a time
    whole: tuple[str, str] = ("", "")  # around all calls
    arguments: Callable[[str, Mapping[str, Any], Spell], list[str]] = _json_rules
    # A call in a turn of its own, with the tool's name for its head; None: the template writes it.
    turn: Callable[[dict[str, Any]], str] | None = None
    short_ids: bool = False  # the template takes ids of nine characters only

    def grammar(
        self,
        tools: Iterable[tuple[str, dict[str, Any]]],
        spell: Spell,
        several: bool,
    ) -> str:
        """At least one call, in Lark. `tools`: names and schemas of the arguments."""
        rules, calls = [], []
        for number, (name, schema) in enumerate(tools):
            rules += self.arguments(f"arguments_{number}", schema, spell)
            opening = self.opening.replace("{name}", name)
            calls.append(f"{spell(opening)} arguments_{number} {spell(self.closing)}")
        again = ""
        if several and self.between is not None:
            again = f"({spell(self.between)} call)*"
        begin, end = map(spell, self.whole)
        return "\n".join(
            [f"start: {begin} call {again} {end}", f"call: {' | '.join(calls)}", *rules]
        )


@dataclass(frozen=True)
class ToolParameter:
    """One that a forced call may have."""

    name: str
    schema: dict[str, Any]  # with the definitions that it refers to
    resolved: dict[str, Any]  # with what a reference names in its place
    required: bool


def parameters(tool: Mapping[str, Any], names: re.Pattern[str]) -> list[ToolParameter]:
    """Of a tool's schema, for a grammar. Raises ApiError for what a model that writes them one by
    one cannot be held to, and for a name that is none of `names`."""
    listed, required = tool.get("properties", {}), tool.get("required", [])
    for key in _TOGETHER:
        if key in tool:
            raise refused(f"{key} of all arguments")
    if not isinstance(listed, dict) or not isinstance(required, list):
        raise refused("properties or required of another type")
    if unknown := [name for name in required if name not in list(listed)]:
        raise refused(f"{str(unknown[0])[:80]!r}, which is required and no property")
    definitions = {key: tool[key] for key in _DEFINITIONS if key in tool}
    for key, value in keywords([listed, definitions]):
        if key == "$ref" and isinstance(value, str) and not _is_definition(value):
            raise refused(f"the reference {value[:80]!r}, which is of no definition")
    made = []
    for name, given in listed.items():
        schema = {} if given is True else given
        if not isinstance(schema, dict) or not names.fullmatch(name):
            raise refused(f"the property {name[:80]!r}")
        if any(key == "$ref" for key, _ in keywords(schema)):
            schema = {**schema, **definitions}
        made.append(ToolParameter(name, schema, resolved(given, tool), name in required))
    return made


def refused(what: str) -> ApiError:
    """Of a forced call."""
    why = f"tools: not supported in a forced call of this model: {what}"
    return ApiError(400, why, "tools", "invalid_value")


def _is_definition(reference: str) -> bool:
    return reference.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS))


def glm45_rules(rule: str, tool: Mapping[str, Any], spell: Spell) -> list[str]:
    """The arguments of a tool. See CallFormat."""
    pairs, values, new_line = [], [], f"{spell(chr(10))}?"
    for number, one in enumerate(parameters(tool, KEYS)):
        value = f"{rule}_{number}"
        key = f"{spell(f'{KEY}{one.name}{KEY_END}')} {new_line} {spell(VALUE)}"
        pairs.append(f"({key} {value} {new_line}){'' if one.required else '?'}")
        values += _value_rules(value, one, VALUE_END, spell(VALUE_END))
    return [f"{rule}: {' '.join([new_line, *pairs])}", *values]


def qwen3_coder_rules(rule: str, tool: Mapping[str, Any], spell: Spell) -> list[str]:
    """The arguments of a tool. See CallFormat."""
    pairs, values, end = [], [], spell(f"\n{PARAMETER_END}\n")
    for number, one in enumerate(parameters(tool, PARAMETER_NAMES)):
        value = f"{rule}_{number}"
        key = spell(f"<parameter={one.name}>\n")
        pairs.append(f"({key} {value}){'' if one.required else '?'}")
        values += _value_rules(value, one, PARAMETER_END, end)
    listed = " ".join(pairs) or '""'
    return [f"{rule}: {listed}", *values]


def _value_rules(rule: str, parameter: ToolParameter, mark: str, end: str) -> list[str]:
    """A value, and `end`, in which is the mark behind it."""
    if types(parameter.resolved) != TEXT:
        return [f"{rule}: {rule}_json {end}", f"{rule}_json: {json_rule(parameter.schema)}"]
    text, terminal = _text(parameter.resolved, mark), rule.upper()
    if end.startswith("<"):  # a token of its own, which no terminal can have in it
        return [f"{rule}: {terminal} {end}", f"{terminal}: {text}"]
    # A terminal takes as much as it can: on its own it would take the first half of the mark.
    return [f"{rule}: {terminal}", f"{terminal}: ({text}) {end}"]


def _text(schema: Any, mark: str) -> str:
    """The texts of a schema, but for those with the mark in them; `format` is a remark."""
    if not isinstance(schema, dict):
        raise refused(f"the schema {schema!r} of a text")
    for key in _NOT_HERE:
        if key in schema:
            raise refused(f"{key} of a text")
    parts = [_TEXTS, f"~/(?s:.*)<\\{mark[1:]}(?s:.*)/"]
    choices = [schema["const"]] if "const" in schema else _get(schema, "enum", list, [])
    if choices:
        texts = [one for one in choices if isinstance(one, str) and mark not in one]
        if not texts:
            raise refused(f"a text that is one of {str(choices)[:80]}")
        parts.append(_one_of(map(json.dumps, texts)))
    if "minLength" in schema or "maxLength" in schema:
        least, most = _get(schema, "minLength", int, 0), _get(schema, "maxLength", int, "")
        parts.append(f"/(?s:.{{{least},{most}}})/")
    if "pattern" in schema:
        parts.append(regex_terminal(_whole(_get(schema, "pattern", str, ""))))
    if members := _get(schema, "anyOf", list, []):
        parts.append(_one_of(_text(member, mark) for member in members))
    return " & ".join(parts)


def _get(schema: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    found = schema.get(key, default)
    if found is not default and not isinstance(found, kind):
        raise refused(f"{key} {str(found)[:80]}")
    return found


def _one_of(parts: Iterable[str]) -> str:
    return f"({' | '.join(parts)})"


def _whole(pattern: str) -> str:
    """A regex of whole texts, for one that a schema searches in them."""
    first, last = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    before, after = "" if first else "(?s:.*)", "" if last else "(?s:.*)"
    return f"{before}(?:{pattern[first : len(pattern) - last]}){after}"


def chatglm3_rules(rule: str, tool: Mapping[str, Any], spell: Spell) -> list[str]:
    """The arguments of a tool. See CallFormat."""
    listed = parameters(tool, NAMES)
    first, rules = [], [f'{rule}_from_{len(listed)}: ""']
    for number, one in enumerate(listed):
        pair, rest = f"{rule}_{number}", f"{rule}_from_{number + 1}"
        again = "" if one.required else "?"
        rules += [
            f"{pair}: {spell(f'{one.name}=')} {pair}_value",
            f"{pair}_value: {json_rule(one.schema)}",
            f"{rule}_from_{number}: ({spell(', ')} {pair}){again} {rest}",
        ]
        if not any(before.required for before in listed[:number]):
            first.append(f"{pair} {rest}")
    if not any(one.required for one in listed):
        first.append('""')
    return [f"{rule}: {' | '.join(first)}", *rules]


FORMATS: dict[Name, CallFormat] = {
    "hermes": CallFormat(
        "hermes", (BEGIN, END), hermes, f"{BEGIN}\n{_ARGUMENTS}", f"}}\n{END}", between="\n"
    ),
    "llama_json": CallFormat(
        "llama_json", (), llama_json, '{"name": "{name}", "parameters": ', "}"
    ),
    "mistral": CallFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        mistral,
        _ARGUMENTS,
        "}",
        ", ",
        ("[TOOL_CALLS][", "]"),
        short_ids=True,
    ),
    "glm4": CallFormat("glm4", (), glm4, "{name}\n", "", turn=_json_text),
    "glm45": CallFormat(
        "glm45", MARKS, glm45, f"{BEGIN}{{name}}", END, between="\n", arguments=glm45_rules
    ),
    "qwen3_coder": CallFormat(
        "qwen3_coder",
        (BEGIN, END),
        qwen3_coder,
        f"{BEGIN}\n<function={{name}}>\n",
        f"{FUNCTION_END}\n{END}",
        between="\n",
        arguments=qwen3_coder_rules,
    ),
    # A sentencepiece vocabulary begins each text with a space.
    "chatglm3": CallFormat(
        "chatglm3",
        (TURN_TAG,),
        ChatGLM3,
        f" {{name}}\n {TURN_BEGIN}",
        TURN_END,
        arguments=chatglm3_rules,
        turn=write_turn,
    ),
}
