"""Formats of tool calls: recognized in a chat template, forced by grammars."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.records import dataclass
from lite_runner.serving.errors import ApiError
from lite_runner.serving.tool_code import (
    GEMMA,
    GEMMA4,
    NAMES,
    TURN_BEGIN,
    TURN_END,
    TURN_TAG,
    ChatGLM3,
    GemmaMarks,
    Pythonic,
    write_turn,
)
from lite_runner.serving.tool_parsers import (
    BEGIN,
    COHERE,
    DEEPSEEK,
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEP,
    END,
    FUNCTION_END,
    GLM4,
    GRANITE,
    HARMONY,
    HERMES,
    HUNYUAN,
    KEY,
    KEY_END,
    KEYS,
    KIMI,
    KIMI_ARGUMENTS,
    KIMI_BEGIN,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_END,
    LLAMA3,
    MARKS,
    MISTRAL,
    NEMOTRON,
    PARAMETER_END,
    PARAMETER_NAMES,
    PHI4,
    SEED_BEGIN,
    SEED_END,
    TEXT,
    VALUE,
    VALUE_END,
    JsonCalls,
    Parser,
    Spell,
    Tools,
    glm45,
    qwen3_coder,
    resolved,
    seed_oss,
    types,
)
from lite_runner.structured.grammars import json_rule, keywords, regex_terminal
from lite_runner.text.tokenizer import Tokenizer, reads

_ARGUMENTS = '{"name": "{name}", "arguments": '
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_PROBE = "look_up"  # the tool of a call that a template is asked to write
_DEFINITIONS = ("$defs", "definitions")
# Keywords of a schema about all arguments together.
_TOGETHER = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)
_TEXTS = "/(?s:.*)/"
_NOT_HERE = ("$ref", "allOf", "oneOf", "not", "if")  # keywords that the grammar of a text lacks
_DEEPSEEK = (DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END)


def _json_rules(rule: str, schema: Mapping[str, Any], _: Spell) -> list[str]:
    """An object. Each schema is a rule of its own, so that "#" in it means itself."""
    return [f"{rule}: {json_rule(schema)}"]


def _json_text(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True)
class CallFormat:
    """The format in which a model writes calls. `arguments`: rules in Lark, of which the first
    is named, for the arguments of a tool with a schema."""

    name: str
    marks: tuple[str, ...]  # they may be special tokens
    parser: Callable[[Tools], Parser]
    opening: str  # before the arguments; {name} is the tool's
    closing: str
    between: str | None = None  # two calls; None: one at a time
    whole: tuple[str, str] = ("", "")  # around all calls
    said: str = ""  # before an answer that is no call
    arguments: Callable[[str, Mapping[str, Any], Spell], list[str]] = _json_rules
    # A call in a turn of its own, with the tool's name for its head; None: the template writes it.
    turn: Callable[[dict[str, Any]], str] | None = None
    new_id: Callable[[str, int], str] = lambda name, place: f"call_{secrets.token_hex(12)}"

    def grammar(
        self,
        tools: Iterable[tuple[str, dict[str, Any]]],
        spell: Spell,
        several: bool,
        said: str | None = None,
    ) -> str:
        """At least one call, in Lark, or an answer in the grammar `said`. `tools`: names and
        schemas of the arguments."""
        rules, calls = [], []
        for number, (name, schema) in enumerate(tools):
            rules += self.arguments(f"arguments_{number}", schema, spell)
            opening = self.opening.replace("{name}", name)
            if opening.startswith("{"):  # a terminal of its own, as an answer in JSON has it
                opening = f"{spell('{')} {spell(opening[1:])}"
            else:
                opening = spell(opening)
            calls.append(f"{opening} arguments_{number} {spell(self.closing)}")
        again = ""
        if several and self.between is not None:
            again = f"({spell(self.between)} call)*"
        begin, end = map(spell, self.whole)
        start = f"start: {begin} call {again} {end}"
        if said is not None:
            start += f" | said\nsaid: {spell(self.said)} {said.removeprefix('start: ')}"
        return "\n".join([start, f"call: {' | '.join(calls)}", *rules])


@dataclass(frozen=True)
class ToolParameter:
    """One that a forced call may have."""

    name: str
    schema: dict[str, Any]  # with the definitions that it refers to
    resolved: dict[str, Any]  # with what a reference names in its place
    required: bool


def parameters(tool: Mapping[str, Any], names: re.Pattern[str]) -> list[ToolParameter]:
    """The parameters in a tool's schema, for a grammar. Raises ApiError for what a model that
    writes them one by one cannot be held to, and for a name that is none of `names`."""
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
            raise refused(f"the reference {value[:80]!r}, which has no definition")
    parameters = []
    for name, given in listed.items():
        schema = {} if given is True else given
        if not isinstance(schema, dict) or not names.fullmatch(name):
            raise refused(f"the property {name[:80]!r}")
        if any(key == "$ref" for key, _ in keywords(schema)):
            schema = {**schema, **definitions}
        parameters.append(ToolParameter(name, schema, resolved(given, tool), name in required))
    return parameters


def refused(what: str) -> ApiError:
    """The error for a forced call that cannot be forced."""
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


def qwen3_coder_rules(
    rule: str, tool: Mapping[str, Any], spell: Spell, line: str = "\n"
) -> list[str]:
    """The arguments of a tool, `line` before and behind each value. See CallFormat."""
    pairs, values, end = [], [], spell(f"{line}{PARAMETER_END}\n")
    for number, one in enumerate(parameters(tool, PARAMETER_NAMES)):
        value = f"{rule}_{number}"
        key = spell(f"<parameter={one.name}>{line}")
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
    parts = [_TEXTS, f"~/(?s:.*){re.escape(mark).replace('/', chr(92) + '/')}(?s:.*)/"]
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


def gemma_rules(escape: str, rule: str, tool: Mapping[str, Any], spell: Spell) -> list[str]:
    """The arguments of a tool, texts in `escape`. See CallFormat."""
    return _listed_rules(rule, tool, spell, ":", ",", partial(_gemma_value, escape))


def _gemma_value(escape: str, rule: str, parameter: ToolParameter, spell: Spell) -> list[str]:
    if types(parameter.resolved) != TEXT:
        return [f"{rule}: {json_rule(parameter.schema)}"]
    rest = _value_rules(f"{rule}_text", parameter, escape, spell(escape))
    return [f"{rule}: {spell(escape)} {rule}_text", *rest]


def _gemma(name: str, marks: GemmaMarks) -> CallFormat:
    return CallFormat(
        name,
        (marks.begin, marks.end, marks.escape),
        marks.parser,
        f"{marks.begin}call:{{name}}{{",
        f"}}{marks.end}",
        "",
        arguments=partial(gemma_rules, marks.escape),
    )


def _json_value(rule: str, parameter: ToolParameter, _: Spell) -> list[str]:
    return [f"{rule}: {json_rule(parameter.schema)}"]


def code_rules(rule: str, tool: Mapping[str, Any], spell: Spell) -> list[str]:
    """The arguments of a tool. See CallFormat."""
    return _listed_rules(rule, tool, spell, "=", ", ", _json_value)


def _listed_rules(
    rule: str,
    tool: Mapping[str, Any],
    spell: Spell,
    equals: str,
    between: str,
    value: Callable[[str, ToolParameter, Spell], list[str]],
) -> list[str]:
    """Names and values, with something between."""
    listed = parameters(tool, NAMES)
    first, rules = [], [f'{rule}_from_{len(listed)}: ""']
    for number, one in enumerate(listed):
        pair, rest = f"{rule}_{number}", f"{rule}_from_{number + 1}"
        again = "" if one.required else "?"
        rules += [
            f"{pair}: {spell(f'{one.name}{equals}')} {pair}_value",
            *value(f"{pair}_value", one, spell),
            f"{rule}_from_{number}: ({spell(between)} {pair}){again} {rest}",
        ]
        if not any(before.required for before in listed[:number]):
            first.append(f"{pair} {rest}")
    if not any(one.required for one in listed):
        first.append('""')
    return [f"{rule}: {' | '.join(first)}", *rules]


FORMATS: dict[str, CallFormat] = {
    one.name: one
    for one in (
        CallFormat(
            "hermes",
            (BEGIN, END),
            partial(JsonCalls, HERMES),
            f"{BEGIN}\n{_ARGUMENTS}",
            f"}}\n{END}",
            "\n",
        ),
        CallFormat(
            "llama3_json", (), partial(JsonCalls, LLAMA3), '{"name": "{name}", "parameters": ', "}"
        ),
        CallFormat(
            "mistral",
            ("[TOOL_CALLS]",),
            partial(JsonCalls, MISTRAL),
            _ARGUMENTS,
            "}",
            ", ",
            ("[TOOL_CALLS][", "]"),
            new_id=lambda name, place: secrets.token_hex(5)[:9],  # all that its template takes
        ),
        CallFormat(
            "granite",
            ("<|tool_call|>",),
            partial(JsonCalls, GRANITE),
            _ARGUMENTS,
            "}",
            ", ",
            ("<|tool_call|>[", "]"),
        ),
        CallFormat(
            "phi4",
            ("<|tool_call|>", "<|/tool_call|>"),
            partial(JsonCalls, PHI4),
            _ARGUMENTS,
            "}",
            ", ",
            ("functools[", "]"),
        ),
        CallFormat(
            "nemotron_json",
            ("<TOOLCALL>", "</TOOLCALL>"),
            partial(JsonCalls, NEMOTRON),
            _ARGUMENTS,
            "}",
            ", ",
            ("<TOOLCALL>[", "]</TOOLCALL>"),
        ),
        CallFormat(
            "hunyuan_a13b",
            ("<tool_calls>", "</tool_calls>"),
            partial(JsonCalls, HUNYUAN),
            _ARGUMENTS,
            "}",
            ", ",
            ("<tool_calls>[", "]</tool_calls>"),
        ),
        CallFormat(
            "cohere",
            ("<|START_ACTION|>", "<|END_ACTION|>"),
            partial(JsonCalls, COHERE),
            '{"tool_call_id": "0", "tool_name": "{name}", "parameters": ',
            "}",
            ", ",
            ("<|START_ACTION|>[", "]<|END_ACTION|>"),
        ),
        CallFormat("glm4", (), partial(JsonCalls, GLM4), "{name}\n", "", turn=_json_text),
        CallFormat(
            "kimi_k2",
            (KIMI_BEGIN, KIMI_END, KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END),
            partial(JsonCalls, KIMI),
            f"{KIMI_CALL}functions.{{name}}:0{KIMI_ARGUMENTS}",
            KIMI_CALL_END,
            "",
            (KIMI_BEGIN, KIMI_END),
            new_id=lambda name, place: f"functions.{name}:{place}",
        ),
        CallFormat(
            "deepseek_v3",
            _DEEPSEEK,
            partial(JsonCalls, DEEPSEEK),
            f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}{{name}}\n```json\n",
            f"\n```{DEEPSEEK_CALL_END}",
            "\n",
            (DEEPSEEK_BEGIN, DEEPSEEK_END),
        ),
        CallFormat(
            "deepseek_v31",
            _DEEPSEEK,
            partial(JsonCalls, DEEPSEEK),
            f"{DEEPSEEK_CALL}{{name}}{DEEPSEEK_SEP}",
            DEEPSEEK_CALL_END,
            "",
            (DEEPSEEK_BEGIN, DEEPSEEK_END),
        ),
        CallFormat(
            "harmony",
            ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
            partial(JsonCalls, HARMONY),
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            "<|call|>",
            said="<|channel|>final<|message|>",
        ),
        CallFormat("glm45", MARKS, glm45, f"{BEGIN}{{name}}", END, "\n", arguments=glm45_rules),
        CallFormat(
            "qwen3_coder",
            (BEGIN, END),
            qwen3_coder,
            f"{BEGIN}\n<function={{name}}>\n",
            f"{FUNCTION_END}\n{END}",
            "\n",
            arguments=qwen3_coder_rules,
        ),
        CallFormat(
            "seed_oss",
            (SEED_BEGIN, SEED_END),
            seed_oss,
            f"{SEED_BEGIN}\n<function={{name}}>\n",
            f"{FUNCTION_END}\n{SEED_END}",
            "\n",
            arguments=partial(qwen3_coder_rules, line=""),
        ),
        _gemma("gemma", GEMMA),
        _gemma("gemma4", GEMMA4),
        CallFormat(
            "pythonic", (), Pythonic, "{name}(", ")", ", ", ("[", "]"), arguments=code_rules
        ),
        CallFormat(
            "llama4_pythonic",
            ("<|python_start|>", "<|python_end|>"),
            Pythonic,
            "{name}(",
            ")",
            ", ",
            ("[", "]"),
            arguments=code_rules,
        ),
        # A sentencepiece vocabulary begins each text with a space.
        CallFormat(
            "chatglm3",
            (TURN_TAG,),
            ChatGLM3,
            f" {{name}}\n {TURN_BEGIN}",
            TURN_END,
            arguments=code_rules,
            turn=write_turn,
        ),
    )
}


def detect_format(tokenizer: Tokenizer) -> CallFormat | None:
    """The format of calls that a chat template writes, or describes in its text; None: it knows no
    tools, or its format is not known here."""
    template = tokenizer.chat_template
    if template is None:
        return FORMATS["chatglm3"] if tokenizer.chat_form == "chatglm3" else None
    if not reads(template, "tools"):
        return None
    written = _written(tokenizer)
    for text in (written, template):
        for name, *signs in _SIGNS:
            if all(sign in text for sign in signs):
                return FORMATS[name]
    return None


# The first whose signs are all in a text.
_SIGNS = (
    ("qwen3_coder", "<tool_call>", "<function="),
    ("glm45", "<tool_call>", "<arg_key>"),
    ("granite", "<|tool_call|>", "<|start_of_role|>"),
    ("granite", "<tool_call>[{"),
    ("hermes", "<tool_call>"),
    ("kimi_k2", KIMI_CALL),
    ("deepseek_v3", DEEPSEEK_CALL, "```json"),
    ("deepseek_v31", DEEPSEEK_CALL),
    ("gemma", GEMMA.begin),
    ("gemma4", f"{GEMMA4.begin}call:"),
    ("seed_oss", SEED_BEGIN),
    ("nemotron_json", "<TOOLCALL>"),
    ("hunyuan_a13b", "<tool_calls>[{"),
    ("cohere", "<|START_ACTION|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("harmony", "<|channel|>", "to=functions."),
    ("phi4", "functools["),
    ("phi4", "<|tool_call|>"),
    ("glm4", "[gMASK]", "<|observation|>"),
    ("llama4_pythonic", "<|python_start|>"),
    ("llama4_pythonic", "<|header_start|>"),
    ("pythonic", f"[{_PROBE}("),
    ("llama3_json", "<|python_tag|>"),
    ("llama3_json", "<|start_header_id|>"),
)


def _written(tokenizer: Tokenizer) -> str:
    """A call as the chat template writes it; "": it writes none."""
    function = {"name": _PROBE, "arguments": {"key": "value"}}
    definition = {"name": _PROBE, "description": "", "parameters": NO_ARGUMENTS}
    call = {"id": "callid123", "type": "function", "function": function}
    asked = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"type": "function", "function": definition}]
    try:
        written = tokenizer.render_chat([asked, answer], False, tools=tools)
        before = tokenizer.render_chat([asked], False, tools=tools)
    except (ArtifactError, ConfigError):
        return ""
    return written.removeprefix(before) if written.startswith(before) else ""
