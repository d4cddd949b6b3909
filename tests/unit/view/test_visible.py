import pytest

from zerodrift.view.visible import LONGEST, visible, visible_token


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text", "plain text"),
        ("a\nb\tc\r", "a␊b␉c␍"),
        ("\x1b[2J\x07\x00", "␛[2J␇␀"),
        ("\x7f\x9b31m", "␡⟨U+009B⟩31m"),
        ("\u202eevil\u2066", "⟨U+202E⟩evil⟨U+2066⟩"),
        ("a\u200bb\u00a0c\ufeff", "a⟨U+200B⟩b⟨U+00A0⟩c⟨U+FEFF⟩"),
        ("\u2028\u2029\u3164\U000e0041", "⟨U+2028⟩⟨U+2029⟩⟨U+3164⟩⟨U+E0041⟩"),
        ("\ud800", "⟨U+D800⟩"),
        ("où 東京 שלום 🙂", "où 東京 שלום 🙂"),
        ("", ""),
    ],
)
def test_what_cannot_be_seen_becomes_a_sign(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_every_result_is_printable_whatever_goes_in() -> None:
    everything = "".join(map(chr, range(0x11000)))
    assert visible(everything, len(everything)).isprintable()
    assert visible_token(everything, len(everything)).isprintable()


def test_long_text_is_cut_and_says_so() -> None:
    assert visible("x" * LONGEST) == "x" * LONGEST
    assert visible("x" * (LONGEST + 1)) == "x" * LONGEST + "… (601 characters)"
    assert visible_token("A" * 10_000_000) == "A" * 40 + "… (10,000,000 characters)"


def test_spaces_of_a_token_can_be_counted() -> None:
    assert visible_token("  a \n\t\r") == "␣␣a␣↵⇥␍"


def test_a_mark_without_a_letter_stands_on_a_circle() -> None:
    assert visible_token("\u0301x") == "◌\u0301x"
    assert visible_token("e\u0301") == "e\u0301"
    assert visible_token("") == ""
