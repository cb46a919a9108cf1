"""Arguments in Python's spelling."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from lite_runner.serving import tool_parsers
from lite_runner.serving.options import ToolParser as Name
from lite_runner.serving.tool_code import (
    GEMMA4,
    TURN_TAG,
    CallEnds,
    read_arguments,
    write_arguments,
    write_turn,
)
from lite_runner.serving.tool_formats import FORMATS
from lite_runner.serving.tool_parsers import END, Call, JsonForm, More
from tests.each import each
from tests.serving.tool_reading import Allowed, read, read_however_cut, refusal

READ: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("a=1", {"a": 1}),
    (" a = -1.5e3 ,\n b=True, c=None,)", {"a": -1500.0, "b": True, "c": None}),
    (
        "a='it\\'s', b=\"it's\", c='''x\n'y\"''', d=''",
        {"a": "it's", "b": "it's", "c": "x\n'y\"", "d": ""},
    ),
    ("a='\\u00fc\\n\\x41\\101 \\\\ \\d+', ü='東京 😀'", {"a": "ü\nAA \\ \\d+", "ü": "東京 😀"}),
    # JSON's spelling: what Python reads otherwise.
    ('a="\\/\\ud83d\\ude00", b=[true, false, null]', {"a": "/😀", "b": [True, False, None]}),
    ("a={'x': [1, {'y': ()}]}".replace("()", "[]"), {"a": {"x": [1, {"y": []}]}}),
    ("a=[1, 2,], b={'x': 1,}", {"a": [1, 2], "b": {"x": 1}}),
    ("a=')', b='tool_call(', c='a=1'", {"a": ")", "b": "tool_call(", "c": "a=1"}),
    ("from=1, True_=2", {"from": 1, "True_": 2}),
]


@each(("code", "expected"), READ)
def test_it_is_read(code: str, expected: dict[str, Any]) -> None:
    code = code.removesuffix(")")
    assert read_arguments(f"f({code}) rest", 2) == (expected, len(code) + 3)


@each(("_", "arguments"), READ)
def test_a_manifest_is_read_back(_: str, arguments: dict[str, Any]) -> None:
    written = write_arguments(arguments)
    assert read_arguments(f"{written})", 0) == (arguments, len(written) + 1)


NO_PLAIN_CALLS = [
    *("1", "'a'", "*a", "**{'a': 1}", "a", "a=", "a=b", "a=1 b=2", "a==1", "a:=1", "'a': 1"),
    *("a=1, a=2", "a={'x': 1, 'x': 2}", "a={'x'=1}", "a={x=1}", "a={1: 2}", "a={1, 2}"),
    *("a=(1, 2)", "a=f()", "a=f'{x}'", "a=b'x'", "a=r'x'", "a='x' 'y'", "a=1+1", "a=1j"),
    *("a=[1", "a=1]", "a=1}, {", "}, {'a': 1", "a=[1)]", "a=[,]", ",", "a=1,,", "a=[1,,]"),
    *("a='x\ny'", "a='x", "a='\\x4'", "a='\\N{no such}'", "a='\\ud800'", "a='\0'"),
    *("a=nan", "a=inf", "a=1e999", "a=007", "a=" + "9" * 100, "a=1_000", "a=0x1", "# a"),
    *("a=[x for x in y]", "a=lambda: 0", "a=__import__('os')", "a=1 if 1 else 2", "a=-'x'"),
    "a=" + "[" * 100 + "]" * 100,
]


def test_other_code_is_no_call(subtests: pytest.Subtests) -> None:
    for code in NO_PLAIN_CALLS:
        with subtests.test(code=code):
            assert read_arguments(f"{code})", 0) is None


@pytest.mark.parametrize(
    "code",
    [
        "a=" + "[" * 300_000,
        "a=" + "[" * 300_000 + "]" * 300_000 + ")",
        "a='" + "\\" * 300_001,
        "a=" + "'''" * 100_001,
        "a=" + "-1" * 300_000 + ")",
        "a=" + "9" * 300_000 + ")",
        " " * 300_000,
        ", ".join(f"a{number}='x'" for number in range(50_000)) + ", a1=1)",
    ],
    ids=lambda code: code[:10],
)
def test_hostile_code_takes_no_time(code: str) -> None:
    began = time.process_time()
    assert read_arguments(code, 0) is None
    assert time.process_time() - began < 2


def test_long_texts_are_read() -> None:
    text = "line 'one'\n\"two\" \\ü" * 20_000
    written = write_arguments({"text": text, "same": json.loads(json.dumps([text]))})
    found = read_arguments(f"{written})", 0)
    assert found is not None and found[0] == {"text": text, "same": [text]}


TOOLS: dict[str, Any] = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "colour": {"$ref": "#/$defs/colour"},
            "one_of": {"enum": ["1", "2"]},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "number": {"type": "number"},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "any": {},
        },
        "$defs": {"colour": {"type": "string"}},
    },
    "broken": {"properties": ["x"]},
}


def pair(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"


def call(*pairs: str, name: str = "f") -> str:
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def qwen3_pair(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def qwen3_call(*pairs: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


VALUES: list[tuple[str, str, Any]] = [
    ("text", "Oslo", "Oslo"),
    ("text", "3", "3"),
    ("text", ' {"a": 1}\n', ' {"a": 1}\n'),
    ("text", "", ""),
    ("text", '"quoted', '"quoted'),
    ("text", "a < b </tool_call> <tool_call> c", "a < b </tool_call> <tool_call> c"),
    ("colour", "null", "null"),
    ("one_of", "2", "2"),
    ("maybe", "null", None),
    ("maybe", "007", "007"),
    ("maybe", "7", "7"),
    ("maybe", '"null"', "null"),
    ("number", "7", 7),
    ("number", " -1.5e3 ", -1500.0),
    ("number", "seven", "seven"),
    ("list", '["</arg_value></tool_call>", "\\""]', ["</arg_value></tool_call>", '"']),
    ("list", "[1, {}", "[1, {}"),
    ("any", '{"ü": [true, null]}', {"ü": [True, None]}),
    ("any", "2020-01-01", "2020-01-01"),
    ("any", "NaN", "NaN"),
    ("unknown", "[1]", [1]),
    ("unknown", "東京", "東京"),
    ("unknown", "1" * 100, "1" * 100),
]


@pytest.mark.parametrize("form", ["glm45", "qwen3_coder"])
def test_the_schema_tells_texts_from_json(subtests: pytest.Subtests, form: Name) -> None:
    for key, value, expected in VALUES:
        output = call(pair(key, value)) if form == "glm45" else qwen3_call(qwen3_pair(key, value))
        with subtests.test(key=key, value=value):
            assert read_however_cut(form, output, TOOLS) == ("", [("f", {key: expected})])


QWEN3_CALLS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    (f"a\n{qwen3_call()}", "a", [("f", {})]),
    (f"{qwen3_call()}\n{qwen3_call(name='g')}\n", "", [("f", {}), ("g", {})]),
    (qwen3_call(qwen3_pair("text", "\na\n")), "", [("f", {"text": "\na\n"})]),
    (qwen3_call("<parameter=number>7</parameter>"), "", [("f", {"number": 7})]),
    (qwen3_call(qwen3_pair("flag", "True")), "", [("f", {"flag": True})]),
    (qwen3_call(qwen3_pair("text", "</function></tool_call>")), "",
     [("f", {"text": "</function></tool_call>"})]),
    (qwen3_call(qwen3_pair("text", "x")).replace("</function>\n", ""), "", [("f", {"text": "x"})]),
    (qwen3_call(qwen3_pair("text", "x")).removesuffix(END), "", [("f", {"text": "x"})]),
]  # fmt: skip


@each(("output", "text", "calls"), QWEN3_CALLS)
def test_calls_of_qwen3_coder(
    output: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    assert read_however_cut("qwen3_coder", output, TOOLS) == (text, calls)


@pytest.mark.parametrize(
    "output",
    [
        "<tool_call>\n</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        qwen3_call("what"),
        qwen3_call("<parameter=text>\nnever closed"),
        "<function=f>\n</function>",
    ],
)
def test_other_texts_of_qwen3_coder_stay_text(output: str) -> None:
    assert read_however_cut("qwen3_coder", output, TOOLS) == (output, [])


CALLS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    (f"a\n{call()}", "a", [("f", {})]),
    (f"<think>b</think>{call()}\n{call(name='g')}\n", "<think>b</think>", [("f", {}), ("g", {})]),
    (f"{call()} and {call()} c", " and c", [("f", {}), ("f", {})]),
    (
        call(pair("text", "x"), pair("any", "y"), name="broken"),
        "",
        [("broken", {"text": "x", "any": "y"})],
    ),
    # As GLM-4.7 breaks no lines, and one that the answer's limit has cut.
    (call(pair("text", "x")).replace("\n", ""), "", [("f", {"text": "x"})]),
    (call(pair("text", "x")).removesuffix(END), "", [("f", {"text": "x"})]),
]


@pytest.mark.parametrize(("output", "text", "calls"), CALLS)
def test_calls_and_texts(output: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert read_however_cut("glm45", output, TOOLS) == (text, calls)


@each(
    "output",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        call("what"),
        call(pair("", "a")),
        call(pair("a<b", "a")),
        "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>never closed</tool_call> x",
        'x <tool_call>{"name": "f", "arguments": {}}</tool_call>'.replace('"', "<"),
        "</tool_call></arg_value><arg_key>",
    ],
)
def test_other_texts_stay_text(output: str) -> None:
    assert read_however_cut("glm45", output, TOOLS) == (output, [])


@pytest.mark.parametrize(
    "output",
    [
        call(pair("text", "a"), pair("text", "b")),
        call(pair("text", "a"), "<arg_key>x</arg_key>"),
        call(pair("text", "a"), "what"),
    ],
)
def test_a_call_that_has_begun_is_one(output: str) -> None:
    assert read_however_cut("glm45", output, TOOLS) == ("", [("f", {"text": "a"})])


def test_a_call_that_is_cut_has_what_has_come() -> None:
    output = call(pair("text", "a"), "<arg_key>x</arg_key>").removesuffix(END)
    assert read_however_cut("glm45", output, TOOLS) == ("", [("f", '{"text": "a"')])


def test_texts_stream_and_arguments_come_complete() -> None:
    parser = FORMATS["glm45"].parser(TOOLS)
    assert parser.put("Hello ") == ["Hello"]
    assert parser.put("you") == [" you"]
    assert parser.put("<tool_call>f\n<arg_key>text</arg_key>\n<arg_value></tool_call>") == []
    assert parser.put("</arg_value>") == [Call("f", ""), More('{"text": "</tool_call>"')]
    assert parser.put(pair("flag", "true")) == [More(', "flag": true')]
    assert parser.put(END) == [More("}")]


@pytest.mark.parametrize(
    "output",
    [
        call(pair("list", '["' + "<" * 200_000)),
        call(pair("list", "[" * 200_000)),
        call(pair("any", "[" * 500 + "]" * 500)),
        call(*(pair(f"a{number}", "1") for number in range(10_000))),
        "<tool_call>" * 20_000,
        call(" " * 200_000 + "x"),
    ],
    ids=lambda output: output[20:60],
)
@pytest.mark.parametrize("form", ["glm45", "qwen3_coder"])
def test_hostile_calls_take_no_time(form: Name, output: str) -> None:
    if form == "qwen3_coder":
        output = output.replace("<tool_call>f", "<tool_call><function=f>")
        output = output.replace("<arg_key>", "<parameter=").replace("</arg_key>\n<arg_value>", ">")
        output = output.replace("</arg_value>", "</parameter>")
    began = time.process_time()
    read(form, [output], TOOLS)
    assert time.process_time() - began < 2


def test_space_in_front_of_calls_takes_no_time(subtests: pytest.Subtests) -> None:
    began = time.process_time()
    for form in (one for one in vars(tool_parsers).values() if isinstance(one, JsonForm)):
        with subtests.test(form=form.marks):
            for before in ("", "[", " to=functions.f", "f", "[TOOL_CALLS]", "{", ";"):
                assert form.header.match(before + "\n" * 20_000) is None
    assert time.process_time() - began < 2


CHATGLM3_TOOLS: dict[str, Any] = {"get_weather": {}, "get": {}}


def turn(code: str, name: str = "get_weather") -> str:
    return f" {name}\n ```python\ntool_call({code})\n```"


CHATGLM3_CALLS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    (turn("city='Oslo', n=3"), "", [("get_weather", {"city": "Oslo", "n": 3})]),
    (turn("", "get").strip(), "", [("get", {})]),
    (f"\n Let me see.{TURN_TAG}{turn('a=[1]')}", "\n Let me see.", [("get_weather", {"a": [1]})]),
    (
        turn("a=1") + TURN_TAG + turn("b=2", "get"),
        "",
        [("get_weather", {"a": 1}), ("get", {"b": 2})],
    ),
    (f"{turn('')}{TURN_TAG}\n So.", "\n So.", [("get_weather", {})]),
    (f"{turn('')}\n So.", "So.", [("get_weather", {})]),
    (turn(f"a='{TURN_TAG} ```\\n'"), "", [("get_weather", {"a": f"{TURN_TAG} ```\n"})]),
    # With less around it, and cut by the answer's limit.
    ("get_weather\ntool_call(a='x')", "", [("get_weather", {"a": "x"})]),
    ("get \n```\n tool_call(\n  a='ü',\n)\n", "", [("get", {"a": "ü"})]),
]


@each(("output", "text", "calls"), CHATGLM3_CALLS)
def test_calls_and_texts_of_chatglm3(
    output: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    assert read_however_cut("chatglm3", output, CHATGLM3_TOOLS) == (text, calls)


@each(
    "output",
    [
        "",
        " get_weather",
        " get_weather\n is a tool.",
        "\n get_weather\n ```python\ntool_call()\n```",
        turn("", "unknown"),
        turn("1"),
        turn("a=__import__('os').system('x')"),
        turn("a=1, a=2"),
        turn("a='x"),
        turn("a=1).b("),
        turn("a=1)[0"),
        turn("a=1); tool_call("),
        " get\n ```python\nprint(1)\n```",
        " get\n {}",
    ],
)
def test_other_texts_of_chatglm3_stay_text(output: str) -> None:
    assert read_however_cut("chatglm3", output, CHATGLM3_TOOLS) == (output, [])
    # The tag is not in the text: a turn that follows is no call either.
    assert read_however_cut("chatglm3", f"x{TURN_TAG}{output}{TURN_TAG}\n y", CHATGLM3_TOOLS) == (
        f"x{output}\n y",
        [],
    )


def test_texts_stream_and_calls_come_at_the_end() -> None:
    parser = FORMATS["chatglm3"].parser(CHATGLM3_TOOLS)
    assert parser.put("\n Hello <|ass") == ["\n Hello "]
    assert parser.put("ume|>") == ["<|assume|>"]
    assert parser.put(f" you{TURN_TAG} get_") == [" you"]
    assert parser.put("no ") == [" get_no "]
    assert parser.put(TURN_TAG + turn("a=1", "get")) == []
    (call,) = parser.finish()
    assert call.arguments == '{"a": 1}'  # type: ignore[union-attr]
    assert parser.finish() == []


SCHEMA: dict[str, Any] = {
    "properties": {
        "a": {"type": "string", "maxLength": 2},
        "b": {"$ref": "#/$defs/b"},
        "ü": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["b"],
    "$defs": {"b": {"enum": ["x", None]}},
}


def test_allowed_arguments() -> None:
    tools = {"get_weather": SCHEMA, "get": {}, "put": {"properties": {"a": {}, "b": {}}}}
    allowed = Allowed("chatglm3", tools, several=True)
    for code in ('b="x"', "b=null", 'a="é)", b="x"', 'a="", b=null, ü=[true]', "b=null, ü=[]"):
        assert turn(code) in allowed
        text, calls = read_however_cut("chatglm3", turn(code), tools)
        assert not text and len(calls) == 1
    for code in ("", 'a=""', 'ü=[], b="x"', "b=null, b=null", "b=null, ", ', b="x"', 'a="abc"'):
        assert turn(code) not in allowed
    for code in ("", "a=1", "b=1", "a=1, b=2"):
        assert turn(code, "put") in allowed
    assert turn("", "get") in allowed and turn("b=1, a=2", "put") not in allowed
    assert turn("", "get") + TURN_TAG + turn("", "get") not in allowed


def test_schemas_that_cannot_be_forced_are_refused_by_name() -> None:
    assert "the property 'a b'" in refusal("chatglm3", {"properties": {"a b": {}}})
    assert "allOf of all arguments" in refusal("chatglm3", {"allOf": []})


def test_a_turn_before_is_as_the_model_writes_it() -> None:
    code = write_turn({"city": "Oslo", "n": 3, "all": [True, None]})
    assert code == "```python\ntool_call(city='Oslo', n=3, all=[True, None])\n```"
    arguments = {"city": "Oslo", "n": 3, "all": [True, None]}
    assert read_however_cut("chatglm3", f"get\n{code}", CHATGLM3_TOOLS) == (
        "",
        [("get", arguments)],
    )


@each(
    ("form", "output", "text", "calls"),
    [
        (
            "gemma4",
            """<|tool_call>call:clock{a:<|"|>it's {x:"1"}<|"|>,b:[1,{c:<|"|><|"|>}]}<tool_call|>""",
            "",
            [("clock", {"a": 'it\'s {x:"1"}', "b": [1, {"c": ""}]})],
        ),
        (
            "seed_oss",
            "Well.\n<seed:tool_call>\n<function=clock>\n<parameter=a>x\ny</parameter>\n</function>\n"
            "</seed:tool_call>",
            "Well.",
            [("clock", {"a": "x\ny"})],
        ),
        (
            "nemotron_json",
            '<TOOLCALL>[{"name": "clock", "arguments": {}}, '
            '{"name": "clock", "arguments": {"a": "]"}}]'
            "</TOOLCALL>",
            "",
            [("clock", {}), ("clock", {"a": "]"})],
        ),
        (
            "hunyuan_a13b",
            'So.<tool_calls>[{"name": "clock", "arguments": {"a": 1}}]</tool_calls>',
            "So.",
            [("clock", {"a": 1})],
        ),
        (
            "cohere",
            "<|START_ACTION|>[\n"
            '    {"tool_call_id": "0", "tool_name": "clock", "parameters": {}},\n'
            '    {"tool_call_id": "1", "tool_name": "clock", "parameters": {"a": {"b": 1}}}\n'
            "]<|END_ACTION|>",
            "",
            [("clock", {}), ("clock", {"a": {"b": 1}})],
        ),
        # Keys in another order than the family's own, in any of the calls, and keys of no use.
        (
            "cohere",
            '<|START_ACTION|>[{"tool_call_id":"0","tool_name":"clock","parameters":{}}, '
            '{"name":"clock","tool_call_id":"1","parameters":{"a":"z"}}]<|END_ACTION|>',
            "",
            [("clock", {}), ("clock", {"a": "z"})],
        ),
        (
            "cohere",
            '<|START_ACTION|>[{"tool_name":"clock","tool_call_id":"0","parameters":{}}]'
            "<|END_ACTION|>",
            "",
            [("clock", {})],
        ),
        (
            "cohere",
            '<|START_ACTION|>[{"tool_call_id":0,"tool_name":"clock","parameters":{"a":1}}]'
            "<|END_ACTION|>",
            "",
            [("clock", {"a": 1})],
        ),
        (
            "hunyuan_a13b",
            '<tool_calls>[{"name":"clock","arguments":{}},\n{"arguments":{"a":"q"},"name":"clock"}]'
            "</tool_calls>So.",
            "So.",
            [("clock", {}), ("clock", {"a": "q"})],
        ),
        (
            "hunyuan_a13b",
            '<tool_calls>[{"name":"clock","arguments":{},"id":"}"}, '
            '{"name":"clock","arguments":{"a":"]"},"id":1}]</tool_calls>',
            "",
            [("clock", {}), ("clock", {"a": "]"})],
        ),
        (
            "hermes",
            '<tool_call>{"name":"clock","arguments":{}}\n{"arguments":{"a":1},"name":"clock"}'
            "</tool_call>",
            "",
            [("clock", {}), ("clock", {"a": 1})],
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name":"clock","arguments":{},"id":"x"},'
            '{"id":"y","name":"clock","arguments":{"a":1}}]',
            "",
            [("clock", {}), ("clock", {"a": 1})],
        ),
        ("llama3_json", ';{"name":"clock","parameters":{}}', "", [("clock", {})]),
        # What is no call behind one is text.
        (
            "hunyuan_a13b",
            '<tool_calls>[{"name":"clock","arguments":{}}, {"arguments":{"a":"q"}}]</tool_calls>',
            ', {"arguments":{"a":"q"}}]',
            [("clock", {})],
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|>}, so<|tool_calls_section_end|>",
            "}, so",
            [("clock", {})],
        ),
    ],
)
def test_calls_of_marked_families(
    form: Name, output: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    assert read_however_cut(form, output, {"clock": {}}) == (text, calls)


@each(
    "code",
    [
        """a:<|"|>x<|"| "<tool_call|><|"|>""",
        r"""a:"\\",b:"\"<tool_call|><|\"|>",c:"<|",d:<|"|>\<|"|>""",
        """a:<|"|><|<|"|>,b:[<|"|>"<|"|>,<|"|>"<|"|>]""",
    ],
)
def test_a_mark_within_a_text_of_gemma4_ends_no_call(code: str) -> None:
    tool_call = f"<|tool_call>call:clock{{{code}}}<tool_call|>"
    text, calls = read_however_cut("gemma4", f"{tool_call}Well.{tool_call}", {"clock": {}})
    assert text == "Well." and len(calls) == 2 and isinstance(calls[0][1], dict)


@each(
    ("begins", "ends"),
    [('<|"|>', '<|"|>'), ('"', '"'), ("[1,", ""), ('["\\\\",', ""), ('"\\"', '"')],
)
def test_scanned_text_of_gemma4_is_not_scanned_again(begins: str, ends: str) -> None:
    end_of = CallEnds(GEMMA4.escape, GEMMA4.end)
    before = "call:clock{a:" + begins + "abcd" * 10
    assert end_of(before) == -1
    other = "?" * len(before) + ends + "}"
    assert end_of(other) == -1
    assert end_of(other + GEMMA4.end) == len(other)
    assert end_of(GEMMA4.end) == 0  # of the next call
