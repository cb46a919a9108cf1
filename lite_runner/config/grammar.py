"""Values in Hydra's override grammar, and interpolation in a user's yaml in OmegaConf's.

A text (a prompt, a path) is taken as typed. Numbers, booleans, null, lists and sweeps are
Hydra's: `max_new_tokens=24`, `eos_token_id=[1,2]`, `seed=1,2` with -m.

In a yaml `${oc.env:NAME}`, `${oc.env:NAME,default}` and `${oc.decode:...}` are resolved when the
file is read, `${other.key}` when the rest of the config is known. There are no other resolvers, and
no prompt file, word of the command line or yaml beside a model is interpolated.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args, get_origin

from lite_runner.config import Invalid, accepts, show
from lite_runner.config.prompt import Request, is_prompt
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.files import parse_json
from lite_runner.system.secret import SECRETS

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override


@functools.cache
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _parse(text: str) -> Override:
    """Raises ValueError with one line that names the part that cannot be read."""
    try:
        return _parser().parse_override(f"key={text}")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # ANTLR's and Python's own errors, besides HydraException
        raise ValueError(str(error).strip().splitlines()[0][:100]) from None


def single_value(text: str) -> Any:
    """The value that a text means. Raises ValueError where the grammar cannot read it, or where it
    is a sweep."""
    override = _parse(text)
    if override.is_sweep_override():
        raise ValueError("several values; add -m to run them one after another")
    return override.value()


def list_of(text: str, annotation: Any) -> list[Any] | None:
    """The list that a text means for such a key; None where it is a text that looks like one.

    It is a list where each item is a text, null if the key takes that, or, where it takes prompts,
    one of those with more than a text: `{role: user, content: hi}`, in JSON as well.
    """
    value = _value(text)
    items = [get_args(member)[0] for member in get_args(annotation) if get_origin(member) is tuple]
    kinds = (str, types.NoneType) if any(accepts(i, types.NoneType) for i in items) else str
    prompts = any(accepts(item, Request) for item in items)

    def fits(entry: Any) -> bool:
        return isinstance(entry, kinds) or (prompts and is_prompt(entry))

    return value if isinstance(value, list) and all(map(fits, value)) else None


def _value(text: str) -> Any:
    try:
        return _parse(text).value()
    except ValueError:
        pass
    try:  # JSON quotes keys, which the grammar does not accept
        value = parse_json(text)
    except ValueError:
        return None
    return value if "{" in text else None


def is_sweep(text: str) -> bool:
    """True for a text that lists values, or describes an interval of them."""
    try:
        return bool(_parse(text).is_sweep_override())
    except ValueError:
        return False


def swept_values(text: str, options: list[str], most: int) -> list[str]:
    """The first `most` values of a sweep as texts, `[text]` where it is not one; a glob selects
    from `options`.

    Raises ValueError for what cannot be listed, such as `interval(0, 1)`.
    """
    from hydra.core.override_parser.types import Glob, IntervalSweep

    try:
        override = _parse(text)
    except ValueError:
        return [text]  # reported with the other errors
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(options)
    if not override.is_sweep_override():
        return [text]
    if isinstance(value, IntervalSweep):
        raise ValueError("an interval has no list of values; use range(start,stop)")
    return list(itertools.islice(override.sweep_string_iterator(), most))


MAX_SIZE = 1_000_000  # characters and entries after resolving references
_WHOLE = re.compile(r"\$\{oc\.env:(\w+)(,.*)?\}")
# Variables whose value must not be written to a run's config.yaml.
_SECRET = re.compile(r"(.*_)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD)", re.IGNORECASE)
_HINT = r"; \${ is a plain ${"

Find = Callable[[str], Any]  # the value of a dotted key; raises KeyError


@dataclass(frozen=True)
class Reference:
    """A text with `${other.key}` in it."""

    text: str

    def __str__(self) -> str:
        return self.text


class _Deferred(Exception):
    pass


def with_environment(raw: Mapping[str, Any], where: str, errors: list[Invalid]) -> dict[str, Any]:
    """The data of a file with its variables of the environment; what names other keys is left as
    a `Reference`."""

    def defer(key: str, _: Any) -> Any:
        raise _Deferred

    def one(key: str, text: str) -> Any:
        if key in SECRETS and (whole := _WHOLE.fullmatch(text)):
            if whole[1] in os.environ or whole[2] is None:
                return f"env:{whole[1]}"
        elif key in SECRETS and "oc.env" in text:
            raise ConfigError("expected ${oc.env:NAME} alone, or env:NAME")
        try:
            return _visited(text, defer)
        except _Deferred:
            return Reference(text)

    return _each(raw, str, one, where, errors)


def with_references(
    raw: Mapping[str, Any], find: Find, where: str, errors: list[Invalid]
) -> dict[str, Any]:
    """The data of files with the values of the keys that a `Reference` names."""
    known: dict[str, tuple[Any, int]] = {}  # by key: its value, and how large that is
    left = MAX_SIZE

    def one(key: str, reference: Reference, above: tuple[str, ...] = ()) -> Any:
        def other(named: str, _: Any) -> Any:
            nonlocal left
            absolute = _absolute(named, key)
            if absolute in (key, *above):
                raise ConfigError(f"{absolute} refers to itself")
            if absolute not in known:
                before = left
                try:
                    found = find(absolute)
                except KeyError:
                    raise ConfigError(f"no such key: {absolute}") from None
                found = follow(absolute, found, (*above, key))
                size = before - left + (len(found) if isinstance(found, str) else 0)
                known[absolute] = found, size
            value, size = known[absolute]
            left -= 1 + size
            if left < 0:
                raise ConfigError(f"references expand to more than {MAX_SIZE} characters")
            return value

        return _visited(reference.text, other)

    def follow(key: str, value: Any, above: tuple[str, ...]) -> Any:
        nonlocal left
        left -= 1
        if isinstance(value, Reference):
            return one(key, value, above)
        if isinstance(value, Mapping) and left > 0:
            return {name: follow(f"{key}.{name}", entry, above) for name, entry in value.items()}
        if isinstance(value, list) and left > 0:
            return [follow(f"{key}.{i}", entry, above) for i, entry in enumerate(value)]
        return value

    return _each(raw, Reference, one, where, errors)


def _each(
    raw: Mapping[str, Any],
    kind: type,
    one: Callable[[str, Any], Any],
    where: str,
    errors: list[Invalid],
) -> dict[str, Any]:
    """Nested data with `one` in place of each entry of a kind; what goes wrong are errors."""
    seen: dict[int, Any] = {}  # with yaml's aliases a section may occur twice, and inside itself

    def walk(key: str, value: Any) -> Any:
        if isinstance(value, (Mapping, list)):
            if id(value) not in seen:
                seen[id(value)] = value
                prefix = f"{key}." if key else ""
                if isinstance(value, Mapping):
                    changed: Any = {n: walk(f"{prefix}{n}", entry) for n, entry in value.items()}
                else:
                    changed = [walk(f"{prefix}{i}", entry) for i, entry in enumerate(value)]
                seen[id(value)] = changed
            return seen[id(value)]
        return resolved(key, value) if isinstance(value, kind) else value

    def resolved(key: str, value: Any) -> Any:
        if "${" not in str(value):
            return value
        from omegaconf.errors import OmegaConfBaseException

        try:
            return one(key, value)
        except ConfigError as error:
            reason = error.message
        except (OmegaConfBaseException, ValueError) as error:
            reason = f"{str(error).strip().splitlines()[0][:100]}{_HINT}"
        except RecursionError:
            reason = "nested too deeply"
        errors.append(Invalid((key,), f"{key}: {show(str(value))}: {reason}{where}"))
        return None

    return {name: walk(str(name), value) for name, value in raw.items()}


def _absolute(named: str, key: str) -> str:
    """A key as `${...}` names it from the place of another: brackets are dots, and a first dot is
    the section that both are in, each further one the section above."""
    bare = named.lstrip(".")
    path = re.sub(r"\[([^]]*)\]", r".\1", bare).lstrip(".")
    up = len(named) - len(bare)
    if not up:
        return path
    parts = key.split(".")
    if up > len(parts):
        raise ConfigError(f"no section so far above {key}")
    return ".".join([*parts[:-up], path])


def _visited(text: str, other: Callable[[str, Any], Any], rule: str = "configValue") -> Any:
    """The value of a text; `other` resolves `${key}`."""
    from omegaconf.grammar_parser import parse
    from omegaconf.grammar_visitor import GrammarVisitor

    def resolver(name: str, args: tuple[Any, ...], args_str: tuple[str, ...]) -> Any:
        if name == "oc.env" and len(args) in (1, 2):
            return _variable(*args)
        if name == "oc.decode" and len(args) == 1:
            return args[0] if args[0] is None else _decoded(args[0])
        raise ConfigError(
            f"{name}: expected oc.env:NAME, oc.env:NAME,DEFAULT, oc.decode:TEXT, or a key{_HINT}"
        )

    mode = "DEFAULT_MODE" if rule == "configValue" else "VALUE_MODE"
    tree = parse(text, parser_rule=rule, lexer_mode=mode)
    return GrammarVisitor(other, resolver, memo=None).visit(tree)


def _decoded(text: Any) -> Any:
    """A text as a value of OmegaConf's grammar; nothing in it is interpolated."""
    if not isinstance(text, str) or "${" in text:
        raise ConfigError(f"oc.decode: got {show(text)}, expected a text without ${{")
    return _visited(text, lambda key, memo: None, rule="singleElement")


def _variable(name: Any, *default: Any) -> str | None:
    """A variable of the environment. Raises ConfigError: missing, or a secret."""
    if _SECRET.fullmatch(str(name)):
        raise ConfigError(
            f"{name} may be a secret, which the config.yaml of the run would show; those that take"
            f" one: {', '.join(SECRETS)}"
        )
    value = os.environ.get(str(name))
    if value is not None:
        return value
    if not default:
        raise ConfigError(f"no environment variable {name}; ${{oc.env:{name},DEFAULT}} has one")
    return None if default[0] is None else str(default[0])
