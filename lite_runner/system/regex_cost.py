"""Upper bounds on the cost of an untrusted regular expression, computed from the pattern.

Backtracking needs a part that matches in several ways and, behind it, something that can fail:
`(a|aa)+$`, and not `(a|aa)+`, where the first way stands. So from each place of a text a pattern
may cost a constant, or as much as the text is long, or a power of that.
"""

from __future__ import annotations

import re
from typing import Literal

from lite_runner.records import dataclass

MAX_PATTERN = 1 << 16  # characters
MAX_NESTING = 32
MAX_DEGREE = 1  # of the cost at one place, as a power of the text's length
MAX_FACTOR = 1024
_MANY = 1 << 32  # larger factors are not distinguished
_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\?(?::|=|!|<=|<!|>|P?<\w+>|'\w+'|[im-]*:)")
_COMMENT_END = re.compile(r"[^)]*\)")
_FLAGS = re.compile(r"\?[im-]*\)")
_ESCAPE = re.compile(r"\\(?:[pPx]\{[^}]*\}|x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)


def check_cost(
    pattern: str, *, most_degree: int = MAX_DEGREE, most_factor: int = MAX_FACTOR
) -> None:
    """Raises ValueError, which says why, for a pattern that may cost more at one place of a text
    than a factor times a power (degree) of its length, or that has what is not understood here."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"{len(pattern):,} characters, at most {MAX_PATTERN:,} are expected")
    degree, factor = _cost(_Parser(pattern).whole(), tail=False)
    if degree > most_degree or factor > most_factor:
        raise ValueError("it has too many ways to match a text")


@dataclass(frozen=True)
class _Node:
    kind: Literal["atom", "sequence", "choice", "repeat", "atomic", "look"]
    parts: tuple[_Node, ...] = ()
    least: int = 0  # of a repeat
    most: int | None = None  # None: without end
    empty: bool = False  # an atom that takes no character

    def is_nullable(self) -> bool:
        """True if it may match no characters."""
        if self.kind == "atom":
            return self.empty
        if self.kind == "choice":
            return any(part.is_nullable() for part in self.parts)
        if self.kind == "repeat" and self.least == 0:
            return True
        return self.kind == "look" or all(part.is_nullable() for part in self.parts)

    def can_fail(self) -> bool:
        """True if there is a place where it does not match."""
        if self.kind == "repeat" and self.least == 0:
            return False
        if self.kind == "choice":
            return all(part.can_fail() for part in self.parts)
        return self.kind in ("atom", "look") or any(part.can_fail() for part in self.parts)

    def is_variable(self) -> bool:
        """True if it may match in several ways at one place."""
        if self.kind in ("atom", "atomic", "look"):
            return False
        several = self.kind == "choice" or (self.kind == "repeat" and self.least != self.most)
        return several or any(part.is_variable() for part in self.parts)


def _cost(node: _Node, *, tail: bool) -> tuple[int, int]:
    """Degree and factor; `tail`: the rest of the pattern can fail."""
    degree, factor = 0, 1
    if node.kind == "sequence":
        for part in reversed(node.parts):
            more, times = _cost(part, tail=tail)
            degree, factor = degree + more, min(factor * times, _MANY)
            tail = tail or part.can_fail()
        return degree, factor
    if node.kind == "choice":
        costs = [_cost(part, tail=tail) for part in node.parts]
        return max(cost[0] for cost in costs), sum(cost[1] for cost in costs)
    if node.kind in ("atomic", "look"):
        return _cost(node.parts[0], tail=False)
    if node.kind == "atom":
        return 0, 1
    body = node.parts[0]
    again = node.most is None or node.most > 1
    inside = tail or (node.least > 1 and body.can_fail())
    degree, factor = _cost(body, tail=inside)
    if inside and again and body.is_variable():
        raise ValueError("a repeated part matches in several ways, and the rest may fail")
    if node.most is None:
        # Each time round may look as far as the text goes; or each number of times is tried.
        return degree + (1 if tail or degree else 0), factor
    ways = node.most - node.least + 1 if tail else 1
    rounds = node.most if body.is_nullable() or degree else 1
    return degree, min(factor * max(ways, 1) * max(rounds, 1), _MANY)


class _Parser:
    """The syntax of Oniguruma and of Python as far as it matters for the cost. Raises
    ValueError."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> _Node:
        node = self._choice()
        if self._at < len(self._text):
            raise ValueError("a ) without its (")
        return node

    def _choice(self) -> _Node:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ValueError(f"groups nested more than {MAX_NESTING} deep")
        options = [self._sequence()]
        while self._next() == "|":
            self._at += 1
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else _Node("choice", tuple(options))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._next() not in ("", "|", ")"):
            if self._taken("(", _FLAGS):  # for the rest of the group, other choices too
                parts.append(self._choice())
            else:
                parts.append(self._repeated(self._atom()))
        return _Node("sequence", tuple(parts))

    def _repeated(self, node: _Node) -> _Node:
        while True:
            sign = self._next()
            found = _REPEAT.match(self._text, self._at)
            if sign in ("*", "+", "?"):
                self._at += 1
                least, most = (1 if sign == "+" else 0), (1 if sign == "?" else None)
            elif found and (found[1] or found[3]):
                self._at = found.end()
                least = int(found[1] or 0)
                most = least if not found[2] else int(found[3]) if found[3] else None
            else:
                return node
            node = _Node("repeat", (node,), least, most)
            if self._next() == "?":
                self._at += 1
            elif self._next() == "+" and sign != "{":
                self._at += 1
                node = _Node("atomic", (node,))

    def _atom(self) -> _Node:
        sign = self._next()
        if sign == "(":
            return self._group()
        if sign == "[":
            self._class()
            return _Node("atom")
        if sign == "\\":
            found = _ESCAPE.match(self._text, self._at)
            if found is None:
                raise ValueError("a \\ at its end")
            if found[0][1] in "123456789kg":
                raise ValueError(f"{found[0]}, a reference to a group")
            self._at = found.end()
            return _Node("atom", empty=found[0][1] in "bBAzZG")
        self._at += 1
        return _Node("atom", empty=sign in "^$")

    def _group(self) -> _Node:
        if self._taken("(?#", _COMMENT_END):
            return _Node("sequence")
        kind = self._taken("(", _GROUP)
        if not kind:
            if self._text.startswith(("(?", "(*"), self._at):
                raise ValueError(f"{self._text[self._at : self._at + 4]!r} is not known")
            self._at += 1
        node = self._choice()
        if self._next() != ")":
            raise ValueError("a ( without its )")
        self._at += 1
        if kind in ("?=", "?!", "?<=", "?<!"):
            return _Node("look", (node,))
        return _Node("atomic", (node,)) if kind == "?>" else node

    def _class(self) -> None:
        """Skip [...], which may have others inside."""
        depth = 0
        while True:
            sign = self._next()
            if not sign:
                raise ValueError("a [ without its ]")
            self._at += 2 if sign == "\\" else 1
            if sign == "[":
                depth += 1
                self._at += self._next() == "^"
                self._at += self._next() == "]"  # the first one stands for itself
            elif sign == "]":
                depth -= 1
                if depth == 0:
                    return

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _taken(self, start: str, rest: re.Pattern[str]) -> str:
        """Consume `start` and what `rest` matches, which is returned; "" if they are not next."""
        if not self._text.startswith(start, self._at):
            return ""
        found = rest.match(self._text, self._at + len(start))
        if found is None:
            return ""
        self._at = found.end()
        return found[0]
