"""The loop of a conversation: lines from a terminal or a pipe, answers as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable

from lite_runner import progress
from lite_runner.chat.commands import Exit, command
from lite_runner.chat.conversation import Conversation
from lite_runner.errors import RunnerError

Read = Callable[[], str]  # the next line without its end; EOFError behind the last


def converse(conversation: Conversation) -> None:
    """Until Ctrl-D, /exit, or the end of standard input."""
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    read = _terminal() if at_terminal else _pipe
    progress.note(f"chat with {conversation.model.name}: /help lists commands, Ctrl-D ends")
    while True:
        try:
            text = _message(read)
            if text.startswith("/"):
                progress.note(command(text, conversation))
            elif text.strip():
                _answer(conversation, text)
        except (EOFError, Exit):
            return
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            progress.note("Ctrl-D or /exit ends")
        except RunnerError as error:
            progress.note(f"error: {error}")


def _message(read: Read) -> str:
    """One message: a line that ends in a backslash goes on in the next."""
    lines = [read()]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read())
    return "\n".join(lines)


def _answer(conversation: Conversation, text: str) -> None:
    answer, dropped = conversation.ask(text, progress.text)
    progress.text("\n")
    if dropped:
        progress.note(f"note: the oldest {dropped} turns no longer fit the context and are dropped")
    if answer.finish_reason == "interrupted":
        progress.note("interrupted")
    elif answer.finish_reason == "length":
        progress.note("note: the answer was cut by max_new_tokens or the context; /set changes it")


def _pipe() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _terminal() -> Read:
    """With history and editing; Alt-Enter begins a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(key_bindings=keys)
    return lambda: session.prompt("> ")
