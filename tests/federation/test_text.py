"""Text from outside, as it is shown."""

import pytest

from federation.text import comment, counted, escaped, without_links


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b[31mred", r"\x1b[2J\x1b[31mred"),
        ("one\ntwo\r\x00\x7f", r"one\ntwo\r\x00\x7f"),
        ("\x9b31m", r"\x9b31m"),
        ("abc\u202efed\u2066x\u200f", r"abc\u202efed\u2066x\u200f"),
        ("a\u2028b\u2029c\u0085d", r"a\u2028b\u2029c\x85d"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("lone \ud800", r"lone \ud800"),
        ("tag \U000e0041", r"tag \U000e0041"),
    ],
)
def test_controls_line_breaks_and_bidirectional_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert escaped(shown) == shown, "escaping twice changes nothing"


def test_letters_of_all_scripts_stay_as_they_are() -> None:
    text = "Universitätsklinikum, 東京大学, المستشفى, больница, 🏥 C:\\data"
    assert escaped(text) == text


def test_a_long_text_is_cut_and_says_how_long_it_was() -> None:
    cut = escaped("x" * 2000, limit=40)
    assert cut == "x" * 19 + "... (2000 characters)"
    assert escaped(cut, limit=40) == cut
    assert escaped("x" * 40, limit=40) == "x" * 40


def test_a_text_that_grows_when_it_is_escaped_is_cut_after_that() -> None:
    assert escaped("\x1b" * 30, limit=40) == "\\x1b" * 5 + "\\... (30 characters)"


def test_a_count_of_one_takes_the_singular() -> None:
    assert [counted(number, "round") for number in range(3)] == ["0 rounds", "1 round", "2 rounds"]
    assert [counted(number, "reply", "replies") for number in (1, 2)] == ["1 reply", "2 replies"]


def test_a_text_in_markdown_becomes_comments_without_its_links() -> None:
    text = "As in [the rules](reference/rules.md#one) of [`[stop]`](stop.md), in [0, 1] (both)."
    assert without_links(text) == "As in the rules of `[stop]`, in [0, 1] (both)."
    lines = comment(f"{text} {'word ' * 30}")
    assert len(lines) == 2
    assert all(line.startswith("# ") and len(line) <= 120 for line in lines)
