from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.text import byte_tokenizer, load_tokenizer
from lite_runner.text.chat import render_template

USER = [{"role": "user", "content": "Hi"}]
SIMPLE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'user' %}\n"
    "[U] {{ message['content'] }}{{ eos_token }}\n"
    "    {% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[A] {% endif %}"
)


def render(template: str, **values: Any) -> str:
    return render_template(template, {"messages": USER, **values}, source="test")


def test_template_of_the_config(folder: Callable[..., Path]) -> None:
    path = folder(bos_token="<|bos|>", eos_token="<|endoftext|>", chat_template=SIMPLE)
    tokenizer = load_tokenizer(path, model_vocab=None)
    assert tokenizer.has_chat_template
    # trim_blocks and lstrip_blocks: tags leave neither line ends nor indentation
    text = "<|bos|>[U] Hi<|endoftext|>\n"
    assert tokenizer.render_chat(USER, add_generation_prompt=False) == text
    assert tokenizer.render_chat(USER) == text + "[A] "


def test_bos_comes_once(folder: Callable[..., Path]) -> None:
    path = folder(bos_token="<|bos|>", add_bos_token=True, chat_template=SIMPLE)
    tokenizer = load_tokenizer(path, model_vocab=None)
    assert tokenizer.encode("x")[0] == 1
    assert tokenizer.encode_chat(USER).count(1) == 1


def test_named_templates(folder: Callable[..., Path]) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path = folder(chat_template=templates)
    assert load_tokenizer(path, model_vocab=None).render_chat(USER) == "D"
    path = folder(chat_template=templates[:1])
    assert not load_tokenizer(path, model_vocab=None).has_chat_template


def test_template_file_wins(folder: Callable[..., Path]) -> None:
    path = folder(chat_template="from the config")
    (path / "chat_template.jinja").write_text("aus der Datei: ü", encoding="utf-8")
    assert load_tokenizer(path, model_vocab=None).render_chat(USER) == "aus der Datei: ü"
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ArtifactError, match="not UTF-8"):
        load_tokenizer(path, model_vocab=None)


def test_no_template() -> None:
    with pytest.raises(ConfigError, match="no chat template") as error:
        byte_tokenizer().render_chat(USER)
    assert "chat=true" in error.value.hint


def test_the_dialect_of_transformers() -> None:
    assert render("{{ messages | tojson }}") == json.dumps(USER)
    assert render("{{ {'a': '<ü>'} | tojson(indent=1) }}") == '{\n "a": "<ü>"\n}'
    assert render("{% generation %}x{{ 1 }}{% endgeneration %}!") == "x1!"
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{{ tools is defined }}{{ missing }}") == "False"
    assert render("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}") == "2"


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for %}", "chat template failed at line 1"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 'a' + 1 }}", "chat template failed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template failed"),
    ],
)
def test_failing_templates(template: str, message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as error:
        render(template)
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ 'x' * 10**12 }}",
        "{{ [0] * 10**9 }}",
        "{{ 9 ** 99999 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(90000) %}{{ 'x' * 9000 }}{% endfor %}",
    ],
)
def test_hostile_templates_are_stopped(template: str) -> None:
    with pytest.raises(ArtifactError, match="chat template failed"):
        render(template)


def test_a_template_without_end_is_refused() -> None:
    with pytest.raises(ArtifactError, match="2000000 characters"):
        render("x" * 2_000_000)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    render_template("{% set m = messages[0] %}{{ m.content }}", {"messages": messages}, source="t")
    assert messages == USER
