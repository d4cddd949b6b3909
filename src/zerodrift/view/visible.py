"""How is text that a model, an engine or a file wrote shown without letting it act?

A token may hold an escape sequence that repaints a terminal, a mark that turns the line right to left, or ten
megabytes. What comes out of here is one line of printable characters of bounded length: nothing is dropped in
silence, every invisible character becomes a sign that can be read, and a cut says how much was there.
"""

import unicodedata

LONGEST = 600
"""Characters of prose: the longest evidence that a probe writes is 200."""
LONGEST_TYPED = 4000
"""Characters of a fix, a command or a path, which must be whole to be of use: the longest fix of ours has 96."""
LONGEST_TOKEN = 40
"""Characters of a token: the longest in a vocabulary of 150,000 are runs of 128 spaces; a screen has 80 columns."""

# The pictures of these controls are three letters in the space of one: too small for what tokens hold most.
_WHITE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
_DELETE = 0x7F
_FIRST_PICTURE = 0x2400
# Printable to Python and yet nothing on the screen: joiners and fillers that no font draws.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")


def visible(text: str, limit: int = LONGEST) -> str:
    """`text` in one line: controls as pictures (␊, ␛), other invisible characters as ⟨U+202E⟩."""
    shown = "".join(_sign(character) for character in text[:limit])
    return shown if len(text) <= limit else f"{shown}… ({len(text):,} characters)"


def visible_token(text: str, limit: int = LONGEST_TOKEN) -> str:
    """As `visible`, with white space that can be counted, and a mark without a letter put on a dotted circle."""
    shown = visible(text[:limit].translate(_WHITE), limit)
    if text and unicodedata.category(text[0]).startswith("M"):
        shown = "◌" + shown
    return shown if len(text) <= limit else f"{shown}… ({len(text):,} characters)"


def _sign(character: str) -> str:
    if character.isprintable() and character not in _BLANK:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(_FIRST_PICTURE + code)
    return "␡" if code == _DELETE else f"⟨U+{code:04X}⟩"
