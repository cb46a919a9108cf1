"""Requests as front ends and agents send them: their fields, headers and habits."""

from __future__ import annotations

import json
from typing import Any

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
SAID = {
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
TOLD = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "b"}]}
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
            {**SAID, "reasoning_details": [{"type": "reasoning.text", "text": "t"}]},
            TOLD,
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
        "messages": [HI, SAID, TOLD],
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
    "LobeChat, Dify": {"messages": [{**SAID, "tool_calls": []}, HI], "user": "u", "stop": None},
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
    ],
    "tools": [{"name": LONG, "description": "d", "input_schema": PARAMETERS, **CACHED}],
    "metadata": {"user_id": "user_1"},
    "temperature": 1,
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
REFUSED = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, ""),
    ("/v1/chat/completions", {"messages": [HI], "tool_choice": "any", "tools": [TOOL]}, ""),
    ("/v1/chat/completions", {"messages": [HI], "tools": [{"type": "web_search"}]}, ""),
    ("/v1/chat/completions", {"messages": [HI], "max_tokens": -1}, ""),
    ("/v1/chat/completions", {"messages": [HI], "think": True}, ""),
    ("/v1/chat/completions", {"messages": [{"role": "function", "name": "f", "content": "x"}]}, ""),
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, ""),
    ("/v1/messages", {"max_tokens": 9, "messages": [HI], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ""),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}]}, ""),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "custom", "name": "apply_patch"}]}, ""),
    ("/v1/responses", {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, ""),
    ("/chat/completions", {"messages": [HI]}, ""),
    ("/api/chat", {"messages": [HI]}, ""),
    ("/v1/images/generations", {"messages": [HI]}, ""),
)


def test_refusals(start: Start) -> None:
    served = start(MockBackend(letters, 4, 1024, 4), tokenizer=TOKENIZER)
    for path, body, why in REFUSED:
        status, _, content = call(served, path, body)
        print(path, status, content.decode()[:300])
    print(call(served, "/v1/models/"), call(served, "/models"))
    assert 0
