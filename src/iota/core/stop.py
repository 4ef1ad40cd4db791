"""The stop rule of a run: "epochs >= 6 or (tokens >= 1e6 and loss <= 1.9) or minutes >= 30", checked at SYNC.

    rule  := both ("or" both)*        both := one ("and" one)*        one := "(" rule ")" | name (">=" | "<=") number

`epochs`: merged so far; `tokens`: trained so far; `loss`: held-out nats per token of the last measured checkpoint (one
that is not known yet satisfies nothing); `minutes` of run time, pauses left out.
"""

from __future__ import annotations

import math
import re

import msgspec

from iota.errors import ConfigError

NAMES = ("epochs", "tokens", "loss", "minutes")
EXAMPLE = "epochs >= 6 or (tokens >= 1e6 and loss <= 1.9) or minutes >= 30"
MAX_LENGTH = 1000
MAX_DEPTH = 30

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<word>[A-Za-z_]\w*)|(?P<sign>[<>=!]+|[()]))"
)


class Progress(msgspec.Struct, frozen=True):
    """How far a run is; `loss` None while no checkpoint was measured."""

    epochs: int
    tokens: int
    loss: float | None
    minutes: float


class Term(msgspec.Struct, frozen=True, tag=True):
    """`name` `sign` `value`, for example epochs >= 6."""

    name: str
    sign: str
    value: float


class Both(msgspec.Struct, frozen=True, tag=True):
    """All parts must hold."""

    parts: tuple[Rule, ...]


class Either(msgspec.Struct, frozen=True, tag=True):
    """One part must hold."""

    parts: tuple[Rule, ...]


Rule = Term | Both | Either


class _Parser:
    """Recursive descent over (text, position) tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, int]] = []
        self.next = 0
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                raise self.error(f"unexpected {text[at]!r}", at)
            kind = match.lastgroup or ""
            self.tokens.append((match.group(kind), match.start(kind)))
            at = match.end()

    def error(self, what: str, at: int) -> ConfigError:
        return ConfigError(
            f"stop rule, position {at + 1}: {what} in {self.text!r}",
            f"Write {', '.join(NAMES)} with >= or <= and a number, joined by and, or, parentheses; such as: {EXAMPLE}",
        )

    def peek(self) -> str:
        return self.tokens[self.next][0].lower() if self.next < len(self.tokens) else ""

    def take(self, wanted: str) -> tuple[str, int]:
        if self.next >= len(self.tokens):
            raise self.error(f"the rule ends where {wanted} should follow", len(self.text))
        token = self.tokens[self.next]
        self.next += 1
        return token

    def rule(self, depth: int) -> Rule:
        parts = [self.both(depth)]
        while self.peek() == "or":
            self.next += 1
            parts.append(self.both(depth))
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def both(self, depth: int) -> Rule:
        parts = [self.one(depth)]
        while self.peek() == "and":
            self.next += 1
            parts.append(self.one(depth))
        return parts[0] if len(parts) == 1 else Both(tuple(parts))

    def one(self, depth: int) -> Rule:
        word, at = self.take("a name or '('")
        if word == "(":
            if depth >= MAX_DEPTH:
                raise self.error(f"more than {MAX_DEPTH} nested parentheses", at)
            inner = self.rule(depth + 1)
            close, at = self.take("')'")
            if close != ")":
                raise self.error(f"expected ')', found {close!r}", at)
            return inner
        if word.lower() not in NAMES:
            raise self.error(f"unknown name {word!r}, valid are {', '.join(NAMES)},", at)
        return self.comparison(word.lower())

    def comparison(self, name: str) -> Term:
        sign, at = self.take(">= or <=")
        if sign not in (">=", "<="):
            raise self.error(f"expected >= or <= after {name}, found {sign!r}", at)
        number, at = self.take("a number")
        try:
            value = float(number)
        except ValueError:
            raise self.error(f"expected a number after {name} {sign}, found {number!r}", at) from None
        if not math.isfinite(value) or value < 0:
            raise self.error(f"{number} is not a finite number of zero or more", at)
        return Term(name, sign, value)


def parse(text: str) -> Rule:
    """The rule in `text`. Raises ConfigError with the position and the valid names, also for a rule that holds before
    the run begins (such as "epochs <= 6")."""
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"the stop rule has {len(text)} characters, at most {MAX_LENGTH} are allowed", "Shorten it.")
    parser = _Parser(text)
    rule = parser.rule(0)
    if parser.next < len(parser.tokens):
        word, at = parser.tokens[parser.next]
        raise parser.error(f"expected and, or, or the end, found {word!r}", at)
    done, why = evaluate(rule, Progress(0, 0, None, 0.0))
    if done:
        raise ConfigError(
            f"stop rule {text!r} holds before the run begins ({why})", f"Use >= for what grows; for example: {EXAMPLE}"
        )
    return rule


def evaluate(rule: Rule, progress: Progress) -> tuple[bool, str]:
    """Whether the run ends, and why or why not, in words: "epochs 6 >= 6", or "epochs 3, needs >= 6"."""
    if isinstance(rule, Term):
        return _term(rule, progress)
    results = [evaluate(part, progress) for part in rule.parts]
    held = [text for done, text in results if done]
    open_ = [text for done, text in results if not done]
    if isinstance(rule, Both):
        return (False, " and ".join(open_)) if open_ else (True, " and ".join(held))
    if held:
        return True, held[0]
    return False, " or ".join(f"({text})" if " and " in text else text for text in open_)


def _term(term: Term, progress: Progress) -> tuple[bool, str]:
    value = getattr(progress, term.name)
    if value is None or not math.isfinite(value):
        return False, f"{term.name} not known yet, needs {term.sign} {term.value:,.10g}"
    done = value >= term.value if term.sign == ">=" else value <= term.value
    return done, f"{term.name} {value:,.10g}{'' if done else ', needs'} {term.sign} {term.value:,.10g}"


def tokens_bound(rule: Rule) -> int | None:
    """The largest number of tokens that a "tokens >=" in the rule names, or None: the horizon of the learning rate."""
    if isinstance(rule, Term):
        return math.ceil(rule.value) if rule.name == "tokens" and rule.sign == ">=" else None
    bounds = [bound for part in rule.parts if (bound := tokens_bound(part)) is not None]
    return max(bounds, default=None)
