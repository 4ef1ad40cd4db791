"""The stop rule: what it accepts, when it holds, and errors that say where and what to write."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.core import stop
from iota.core.stop import Progress
from iota.errors import ConfigError

LIMITED = settings(derandomize=True, deadline=None, max_examples=80)
RULE = "epochs >= 6 or (tokens >= 1e6 and loss <= 1.9) or minutes >= 30"


@pytest.mark.parametrize(
    "progress, done, words",
    [
        (Progress(6, 0, None, 0), True, "epochs 6 >= 6"),
        (Progress(7, 0, None, 0), True, "epochs 7 >= 6"),
        (Progress(5, 10**6, 1.9, 0), True, "tokens 1,000,000 >= 1,000,000 and loss 1.9 <= 1.9"),
        (Progress(5, 10**6, 1.91, 0), False, "loss 1.91, needs <= 1.9"),
        (Progress(5, 10**6, None, 0), False, "loss not known yet, needs <= 1.9"),
        (Progress(5, 10**6, float("nan"), 0), False, "loss not known yet"),
        (Progress(5, 0, 1.0, 29.9), False, "epochs 5, needs >= 6 or tokens 0, needs >= 1,000,000 or minutes 29.9"),
        (Progress(0, 0, None, 30.0), True, "minutes 30 >= 30"),
    ],
)
def test_the_example(progress: Progress, done: bool, words: str) -> None:
    found, why = stop.evaluate(stop.parse(RULE), progress)
    assert found is done and words in why


def test_and_binds_tighter_than_or() -> None:
    rule = stop.parse("epochs >= 1 or epochs >= 2 and minutes >= 9")
    assert stop.evaluate(rule, Progress(1, 0, None, 0))[0]
    rule = stop.parse("(epochs >= 1 or epochs >= 2) and minutes >= 9")
    assert not stop.evaluate(rule, Progress(1, 0, None, 0))[0]
    assert stop.evaluate(rule, Progress(1, 0, None, 9))[0]


@pytest.mark.parametrize("text", ["EPOCHS>=6", " epochs  >=  6 ", "((epochs>=6))", "epochs >= 6 OR loss <= .5"])
def test_spelling(text: str) -> None:
    assert stop.evaluate(stop.parse(text), Progress(6, 0, None, 0))[0]


@pytest.mark.parametrize(
    "text, position, words",
    [
        ("", 1, "ends where a name"),
        ("epochs", 7, "ends where >= or <="),
        ("epochs >=", 10, "ends where a number"),
        ("epoch >= 6", 1, "unknown name 'epoch', valid are epochs, tokens, loss, minutes"),
        ("epochs > 6", 8, "expected >= or <= after epochs, found '>'"),
        ("epochs == 6", 8, "found '=='"),
        ("epochs >= six", 11, "expected a number"),
        ("epochs >= -1", 11, "zero or more"),
        ("epochs >= 1e999", 11, "not a finite number"),
        ("epochs >= 1__0", 11, "expected a number"),
        ("epochs >= 6 tokens >= 5", 13, "expected and, or, or the end, found 'tokens'"),
        ("epochs >= 6 and", 16, "ends where a name"),
        ("(epochs >= 6", 13, "ends where ')'"),
        ("(epochs >= 6 ]", 14, "unexpected ']'"),
        ("epochs >= 6)", 12, "found ')'"),
        ("epochs >= 6; import os", 12, "unexpected ';'"),
        ("6 >= epochs", 1, "unknown name '6'"),
        ("(" * 40 + "epochs >= 6" + ")" * 40, 31, "nested"),
    ],
)
def test_errors_say_where_and_what(text: str, position: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stop.parse(text)
    assert words in caught.value.cause and f"position {position}:" in caught.value.cause
    assert "epochs, tokens, loss, minutes" in caught.value.remedy


@pytest.mark.parametrize("text", ["epochs <= 6", "minutes >= 0", "epochs >= 5 or tokens <= 1e6"])
def test_a_rule_that_holds_at_once_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="before the run begins"):
        stop.parse(text)


def test_length_limit() -> None:
    with pytest.raises(ConfigError, match="at most"):
        stop.parse("epochs >= 6" + " " * 2000)


def test_tokens_bound() -> None:
    for text, bound in ((RULE, 10**6), ("epochs >= 5", None), ("tokens >= 5 or (tokens >= 2e3 and epochs >= 1)", 2000)):
        assert stop.tokens_bound(stop.parse(text)) == bound


terms = st.builds(
    lambda name, value: f"{name} >= {value}", st.sampled_from(["epochs", "tokens", "minutes"]), st.integers(1, 9)
)
rules = st.recursive(
    terms,
    lambda inner: st.builds(lambda a, w, b: f"({a} {w} {b})", inner, st.sampled_from(["and", "or"]), inner),
    max_leaves=8,
)


@LIMITED
@given(rules, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_agrees_with_python(text: str, epochs: int, tokens: int, minutes: int) -> None:
    names = {"epochs": epochs, "tokens": tokens, "minutes": minutes}
    done, why = stop.evaluate(stop.parse(text), Progress(epochs, tokens, None, minutes))
    assert done == eval(text, {}, names) and why


@LIMITED
@given(st.text(max_size=40))
def test_any_text_is_a_rule_or_a_config_error(text: str) -> None:
    try:
        stop.parse(text)
    except ConfigError as error:
        assert error.cause and error.remedy
