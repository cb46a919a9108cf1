"""The loop of a conversation in a terminal or over a pipe, and its slash commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lite_runner import progress
from lite_runner.chat.conversation import Conversation
from lite_runner.config import Invalid, did_you_mean, hints_of, nearest, read
from lite_runner.config.argv import value_of
from lite_runner.config.generation import SAMPLING
from lite_runner.config.prompt import OWN, Request
from lite_runner.errors import ConfigError, RunnerError

Read = Callable[[], str]  # the next line without its end; EOFError behind the last
# Of a prompt's own options, those that a conversation takes.
SETTABLE = tuple(name for name in OWN if name not in ("logprobs", "prompt_logprobs"))
HELP = """\
/reset             forget all turns; the system message stays
/undo              forget the last turn
/system TEXT       another system message ("/system" alone: none), and forget all turns
/adapter NAME      answer with an adapter; base: without
/set KEY=VALUE     temperature, top_k, max_new_tokens, ...; null: as the run; alone: show all
/save FILE         write the messages to a new file
/load FILE         go on from the messages of a file
/stats             tokens and seconds
/help              this; Tab completes commands, options, adapters and paths
/exit              end; so does Ctrl-D
A line that ends in \\ goes on in the next; on a terminal Alt-Enter begins a new line too.
Ctrl-C stops an answer, and keeps what there is of it."""


def converse(conversation: Conversation) -> None:
    """Until Ctrl-D, /exit, or the end of standard input."""
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    read = _terminal(conversation) if at_terminal else _pipe
    note(f"chat with {conversation.model.name}: /help lists commands, Ctrl-D ends")
    while True:
        try:
            text = _message(read)
            if text.startswith("/"):
                note(command(text, conversation))
            elif text.strip():
                _answer(conversation, text)
        except (EOFError, Exit):
            return
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            note("Ctrl-D or /exit ends")
        except RunnerError as error:
            progress.note(f"error: {error}", "red")


def note(text: str) -> None:
    """The program's own output, apart from the model's."""
    progress.note(text, "dim")


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
        note(f"note: the oldest {dropped} turns no longer fit the context and are dropped")
    if answer.finish_reason == "interrupted":
        note("interrupted")
    elif answer.finish_reason == "length":
        note("note: the answer was cut by max_new_tokens or the context; /set changes it")


def _pipe() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _terminal(conversation: Conversation) -> Read:
    """With history, editing, colours, and Tab for commands; Alt-Enter begins a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.styles import Style

    class Commands(Completer):
        def get_completions(self, document: Document, _: CompleteEvent) -> Iterator[Completion]:
            line = document.text_before_cursor
            for whole in completions(line, conversation):
                yield Completion(whole, -len(line))

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    style = Style.from_dict({"": "ansigreen", "prompt": "bold"})  # none with NO_COLOR
    session: PromptSession[str] = PromptSession(
        key_bindings=keys, completer=Commands(), complete_while_typing=False, style=style
    )
    return lambda: session.prompt("> ")


class Exit(Exception):
    """The conversation is over."""


def command(line: str, conversation: Conversation) -> str:
    """Execute a command line; returns its output. Raises ConfigError, Exit."""
    name, _, rest = line.strip().partition(" ")
    if name not in _COMMANDS:
        near = did_you_mean(nearest(name, _COMMANDS))
        raise ConfigError(f"no command {name}{near}; /help lists them")
    return _COMMANDS[name](conversation, rest.strip())


def completions(line: str, conversation: Conversation) -> Iterator[str]:
    """Completions of a command line."""
    name, space, rest = line.partition(" ")
    if not line.startswith("/"):
        return
    found: Iterable[str] = (f"{one} " if one in _WITH_TEXT else one for one in _COMMANDS)
    if space:
        ends: dict[str, Callable[[], Iterable[str]]] = {
            "/adapter": lambda: ("base", *conversation.model.adapters),
            "/set": lambda: (f"{one}=" for one in SETTABLE),
            "/save": lambda: _paths(rest),
            "/load": lambda: _paths(rest),
        }
        found = (f"{name} {end}" for end in ends.get(name, tuple)())
    yield from (one for one in found if one.startswith(line))


def _paths(beginning: str) -> Iterator[str]:
    """Files and folders with this prefix of their path."""
    folder = beginning.rpartition("/")[0] + "/" if "/" in beginning else ""
    try:
        entries = sorted(Path(folder or ".").expanduser().iterdir())
    except OSError:
        return
    for entry in entries:
        if not entry.name.startswith("."):
            yield f"{folder}{entry.name}{'/' if entry.is_dir() else ''}"


def _reset(conversation: Conversation, _: str) -> str:
    conversation.turns.clear()
    return "all turns are forgotten"


def _undo(conversation: Conversation, _: str) -> str:
    if not conversation.turns:
        return "there is no turn"
    conversation.turns.pop()
    return f"the last turn is forgotten; {_counted(len(conversation.turns), 'turn')} left"


def _system(conversation: Conversation, text: str) -> str:
    conversation.system = text
    conversation.turns.clear()
    return "a new conversation " + ("with that system message" if text else "without one")


def _adapter(conversation: Conversation, name: str) -> str:
    conversation.choose(name)
    return f"answers are of {conversation.adapter or conversation.model.name} from now on"


def _set(conversation: Conversation, text: str) -> str:
    if text:
        name, _, given = (part.strip() for part in text.partition("="))
        if name not in SETTABLE:
            near = did_you_mean(nearest(name, SETTABLE))
            raise ConfigError(f"/set {name}: no such option{near}; {', '.join(SETTABLE)}")
        try:
            value = value_of(given, hints_of(Request)[name])
        except ValueError as error:
            raise ConfigError(f"/set {name}: {error}") from None
        errors: list[Invalid] = []
        value = read(value, hints_of(Request)[name], name, errors)
        if errors:
            raise ConfigError.of([error.text for error in errors])
        if value is None:
            conversation.options.pop(name, None)
        else:
            conversation.options[name] = value
            if name in SAMPLING:  # said last, it decides
                conversation.options.pop("do_sample", None)
    chosen = ", ".join(f"{name}={value}" for name, value in conversation.options.items())
    return chosen or "all options are as the run has them"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        raise ConfigError("/save: expected the name of a new file")
    conversation.save(Path(name))
    return f"{_counted(len(conversation.turns), 'turn')} in {name}"


def _load(conversation: Conversation, name: str) -> str:
    if not name:
        raise ConfigError("/load: expected the name of a file")
    conversation.load(Path(name))
    return f"{_counted(len(conversation.turns), 'turn')} of {name}"


def _stats(conversation: Conversation, _: str) -> str:
    answers = conversation.answers
    if not answers:
        return "no answer yet"
    last, tokens = answers[-1], sum(answer.tokens for answer in answers)
    after = max(last.seconds - last.first_s, 1e-9)
    return (
        f"last answer: {_counted(last.prompt_tokens, 'token')} of the prompt"
        f" ({last.cached_tokens} cached),"
        f" first token after {last.first_s:.2f} s, {_counted(last.tokens, 'token')},"
        f" {max(0, last.tokens - 1) / after:.1f} a second\n"
        f"all: {_counted(len(answers), 'answer')}, {_counted(tokens, 'token')}, "
        f"{sum(answer.seconds for answer in answers):.1f} s"
    )


def _help(_: Conversation, __: str) -> str:
    return HELP


def _exit(_: Conversation, __: str) -> str:
    raise Exit


_WITH_TEXT = ("/system", "/adapter", "/set", "/save", "/load")
_COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/reset": _reset,
    "/undo": _undo,
    "/system": _system,
    "/adapter": _adapter,
    "/set": _set,
    "/save": _save,
    "/load": _load,
    "/stats": _stats,
    "/help": _help,
    "/exit": _exit,
    "/quit": _exit,
}
