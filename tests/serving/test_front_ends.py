"""Requests as front ends and agents send them: their fields, headers and habits."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.generation.mock import MockBackend
from tests.serving.conftest import Start, letters, tokenizer_with_chat
from tests.serving.test_app import call
from tests.serving.test_tools import TEMPLATES

TOKENIZER = tokenizer_with_chat(TEMPLATES["hermes"])
CACHED = {"cache_control": {"type": "ephemeral"}}
HI = {"role": "user", "content": "hi"}
# As MCP servers name theirs in Claude Code: up to 128 characters.
LONG = "mcp__a_server_of_many_words__" + "search_the_documents_" * 3
PARAMETERS = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"path": {"type": "string", "format": "uri"}, "tags": {"uniqueItems": True}},
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "index": 0,
            "id": "call_1",
            "type": "function",
            "function": {"name": "read", "arguments": '{"path": "a"}'},
        }
    ],
}
TOOL_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "b"}]}
CHATS: dict[str, dict[str, Any]] = {
    "Open WebUI": {
        "model": "base",
        "messages": [HI],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 9,
    },
    "LibreChat": {
        "model": "base",
        "user": "66f1",
        "messages": [HI],
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "top_p": 1,
        "n": 1,
    },
    "Cline, Roo": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s", **CACHED}]},
            {"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]},
            {**CALL, "reasoning_details": [{"type": "reasoning.text", "text": "t"}]},
            TOOL_RESULT,
        ],
        "tools": [{**TOOL, **CACHED}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "temperature": 0,
    },
    "Continue": {
        "messages": [HI],
        "max_tokens": 9,
        "tools": [{"type": "function", "function": {**TOOL["function"], "strict": False}}],
        "stop": ["<fim_prefix>", "/src/", *(f"\nword{n}" for n in range(22))],
    },
    "Zed": {
        "messages": [HI, CALL, TOOL_RESULT],
        "stop": [],
        "tool_choice": None,
        "tools": [],
        "prompt_cache_key": "thread",
        "max_completion_tokens": 9,
    },
    "aider by LiteLLM": {
        "messages": [
            {"role": "user", "content": "hi", **CACHED},
            {
                "role": "assistant",
                "content": "ok",
                "provider_specific_fields": {"refusal": None},
                "images": [],
                "thinking_blocks": None,
                "function_call": None,
            },
            HI,
        ],
        "extra_headers": None,
        "temperature": 0,
    },
    "Codex, older": {
        "messages": [{"role": "developer", "content": "s"}, HI],
        "reasoning_effort": None,
        "store": False,
        "metadata": {"session": "1"},
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    },
    "LobeChat, Dify": {"messages": [{**CALL, "tool_calls": []}, HI], "user": "u", "stop": None},
}
CLAUDE_CODE = {
    "model": "base",
    "max_tokens": 32000,
    "stream": True,
    "system": [{"type": "text", "text": "You are", **CACHED}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": LONG, "input": {}, **CACHED},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "b"}],
                    "is_error": False,
                    **CACHED,
                },
                {"type": "text", "text": "<system-reminder>"},
            ],
        },
        {"role": "system", "content": "Be brief."},
    ],
    "tools": [{"name": LONG, "description": "d", "input_schema": PARAMETERS, **CACHED}],
    "metadata": {"user_id": "user_1"},
    "temperature": 1,
    "thinking": {"type": "enabled", "budget_tokens": 31999},  # where the model can
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
CODEX = {
    "model": "base",
    "instructions": "You are",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "p"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "b"}],
        },
    ],
    "tools": [{"type": "function", "name": "shell", "strict": False, "parameters": PARAMETERS}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread",
    "client_metadata": {"session_id": "1"},
    "max_output_tokens": 9,
}


def test_requests_of_front_ends_are_answered(start: Start, subtests: pytest.Subtests) -> None:
    served = start(MockBackend(letters, 4, 1024, 4), tokenizer=TOKENIZER)
    for name, body in CHATS.items():
        with subtests.test(name):
            status, _, content = call(served, "/v1/chat/completions", {"max_tokens": 9, **body})
            assert status == 200, content
    for path, body in (("/v1/messages?beta=true", CLAUDE_CODE), ("/v1/responses", CODEX)):
        with subtests.test(path):
            status, _, content = call(served, path, body)
            assert status == 200, content


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
RESULT = {"role": "system", "content": [{"type": "tool_result", "tool_use_id": "1"}]}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
# What is not there, with the message to the client.
REFUSED: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "got 'image_url', expected"),
    (CHAT, {"messages": [HI], "tool_choice": "any", "tools": [TOOL]}, 400, "got 'any', expected"),
    (CHAT, {"messages": [HI], "tools": [{"type": "web_search"}]}, 400, "tools.0.type: got 'web_s"),
    (CHAT, {"messages": [HI], "max_tokens": -1}, 400, "max_tokens: Input should be greater"),
    (CHAT, {"messages": [HI], "think": True}, 400, "think: not supported"),
    (CHAT, {"messages": [{"role": 3, "content": "x"}]}, 400, "role: got a number, expected"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "'image', "),
    (MESSAGES, {"messages": [RESULT]}, 400, "tool_result is not in a message of the system"),
    (MESSAGES, {"messages": [HI], "tools": [SEARCH]}, 400, "got 'web_search_20250305', expected"),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "custom"}]}, 400, "got 'custom', expe"),
    ("/v1/responses", {"input": [ITEM]}, 400, "got 'input_image', expected 'input_text'"),
    ("/v1/responses/compact", {}, 405, "/v1/responses/compact does not take POST"),
    ("/chat/completions", {}, 404, "there is no /chat/completions here; there is /v1/chat/comp"),
    ("/v1/metrics", {}, 404, "there is /metrics"),
    ("/api/chat", {}, 404, "there is no /api/chat here"),
)


def test_unsupported_requests_are_refused(start: Start, subtests: pytest.Subtests) -> None:
    served = start(tokenizer=TOKENIZER)
    for path, body, expected, why in REFUSED:
        with subtests.test(f"{path} {why}"):
            more = {"max_tokens": 9} if path == MESSAGES else {}
            status, _, content = call(served, path, {**body, **more})
            error = json.loads(content)["error"]
            assert (status, why in error["message"]) == (expected, True), error


def test_an_answer_takes_what_the_context_has_for_anthropics_clients(start: Start) -> None:
    served = start(MockBackend(letters, 4, 64, 4), tokenizer=TOKENIZER)
    body = {"messages": [HI], "max_tokens": 32000, "temperature": 0}
    found = json.loads(call(served, MESSAGES, body)[2])
    if found["stop_reason"] != "end_turn":
        assert found["stop_reason"] == "model_context_window_exceeded"
        assert found["usage"]["input_tokens"] + found["usage"]["output_tokens"] == 64
    status, _, content = call(served, MESSAGES, {**body, "system": "x" * 99})
    assert (status, b"context of 64 tokens" in content) == (400, True)


def test_models_in_anthropics_form(start: Start) -> None:
    served = start(MockBackend(letters, 4, 64, 4))
    headers = {"anthropic-version": "2023-06-01"}
    listed = json.loads(call(served, "/v1/models?limit=1000", **headers)[2])
    assert [one["id"] for one in listed["data"]] == ["base", "a", "b"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("base", "b", False)
    (_, _, one) = call(served, "/v1/models/a", **headers)
    assert json.loads(one) == listed["data"][1]
    assert listed["data"][1]["max_input_tokens"] == 64


def test_a_page_may_ask_before_it_asks(start: Start) -> None:
    """As a browser does for a front end of another origin."""
    served = start(key=b"secret", cors_origins=("http://localhost:3000",))
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=30)
    headers = {
        "Origin": "http://localhost:3000",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    connection.request("OPTIONS", "/v1/chat/completions", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200
    assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]


def test_tokens_are_the_templates_in_each_protocol(start: Start) -> None:
    served = start(MockBackend(letters, 4, 2048, 4), tokenizer=TOKENIZER)
    for name, body in CHATS.items():
        asked = {**body, "max_tokens": 1, "stream": False, "stream_options": None}
        asked.pop("max_completion_tokens", None)
        usage = json.loads(call(served, CHAT, asked)[2])["usage"]
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        chat = {"messages": body["messages"], "tools": tools}
        assert usage["prompt_tokens"] == json.loads(call(served, "/tokenize", chat)[2])["count"], (
            name
        )
    body = {**CLAUDE_CODE, "max_tokens": 1, "stream": False}
    usage = json.loads(call(served, MESSAGES, body)[2])["usage"]
    del body["max_tokens"], body["stream"], body["metadata"], body["temperature"]
    counted = json.loads(call(served, f"{MESSAGES}/count_tokens", body)[2])["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    body = {**CODEX, "max_output_tokens": 1, "stream": False}
    usage = json.loads(call(served, "/v1/responses", body)[2])["usage"]
    counted = json.loads(call(served, "/v1/responses/input_tokens", body)[2])["input_tokens"]
    assert usage["input_tokens"] == counted
