"""What begins with a slash in a conversation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lite_runner.chat.conversation import Conversation
from lite_runner.config.fields import Fault, hints_of, read
from lite_runner.config.grammar import value_of
from lite_runner.config.prompt import OWN, Request
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ConfigError

# Of a prompt's own options, those that a conversation takes.
SETTABLE = tuple(name for name in OWN if name not in ("logprobs", "prompt_logprobs"))
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # of effect with do_sample alone
HELP = """\
/reset             forget all turns; the system message stays
/undo              forget the last turn
/system TEXT       another system message ("/system" alone: none), and forget all turns
/adapter NAME      answer with an adapter; base: without
/set KEY=VALUE     temperature, top_k, max_new_tokens, ...; null: as the run; alone: show all
/save FILE         write the messages to a new file
/load FILE         go on from the messages of a file
/stats             tokens and seconds
/help              this
/exit              end; so does Ctrl-D
A line that ends in \\ goes on in the next; on a terminal Alt-Enter begins a new line too.
Ctrl-C stops an answer, and keeps what there is of it."""


class Exit(Exception):
    """The conversation is over."""


def command(line: str, conversation: Conversation) -> str:
    """Do what a line asks for; what to tell. Raises ConfigError, Exit."""
    name, _, rest = line.strip().partition(" ")
    if name not in _COMMANDS:
        near = did_you_mean(nearest(name, _COMMANDS))
        raise ConfigError(f"no command {name}{near}; /help lists them")
    return _COMMANDS[name](conversation, rest.strip())


def _reset(conversation: Conversation, _: str) -> str:
    conversation.turns.clear()
    return "all turns are forgotten"


def _undo(conversation: Conversation, _: str) -> str:
    if not conversation.turns:
        return "there is no turn"
    conversation.turns.pop()
    return f"the last turn is forgotten; {len(conversation.turns)} are left"


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
        if name == "temperature" and given in ("0", "0.0"):
            name, given = "do_sample", "false"
        if name not in SETTABLE:
            near = did_you_mean(nearest(name, SETTABLE))
            raise ConfigError(f"/set {name}: no such option{near}; {', '.join(SETTABLE)}")
        try:
            value = value_of(given, hints_of(Request)[name])
        except ValueError as error:
            raise ConfigError(f"/set {name}: {error}") from None
        faults: list[Fault] = []
        value = read(value, hints_of(Request)[name], name, faults)
        if faults:
            raise ConfigError.of([fault.text for fault in faults])
        if value is None:
            conversation.options.pop(name, None)
        else:
            conversation.options[name] = value
            if name in _SAMPLING:
                conversation.options["do_sample"] = True
    chosen = ", ".join(f"{name}={value}" for name, value in conversation.options.items())
    return chosen or "all options are as the run has them"


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        raise ConfigError("/save: expected the name of a new file")
    conversation.save(Path(name))
    return f"{len(conversation.turns)} turns are in {name}"


def _load(conversation: Conversation, name: str) -> str:
    if not name:
        raise ConfigError("/load: expected the name of a file")
    conversation.load(Path(name))
    return f"{len(conversation.turns)} turns of {name}"


def _stats(conversation: Conversation, _: str) -> str:
    answers = conversation.answers
    if not answers:
        return "no answer yet"
    last, tokens = answers[-1], sum(answer.tokens for answer in answers)
    after = max(last.seconds - last.first_s, 1e-9)
    return (
        f"last answer: {last.prompt_tokens} tokens of the prompt ({last.cached_tokens} cached),"
        f" first token after {last.first_s:.2f} s, {last.tokens} tokens,"
        f" {max(0, last.tokens - 1) / after:.1f} a second\n"
        f"all: {len(answers)} answers, {tokens} tokens, "
        f"{sum(answer.seconds for answer in answers):.1f} s"
    )


def _help(_: Conversation, __: str) -> str:
    return HELP


def _exit(_: Conversation, __: str) -> str:
    raise Exit


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
