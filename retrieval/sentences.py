"""Where sentences end."""

import re

# Latin terminators need white space behind them ("3.14", "example.org"); CJK ones do not.
_TERMINATOR = re.compile(r"""(?<![.!?…؟۔।])[.!?…؟۔।]+["'”’»)\]]*(?=\s)|[。！？]+["'”’）」』]*|\n[^\S\n]*\n""")
_LINE_ENDS = re.compile(r"\s*\n")
_ABBREVIATED = re.compile(
    r"\b(\w|mrs?|ms|dr|prof|st|jr|sr|vs|etc|inc|ltd|co|corp|no|vol|fig|eq|al|approx|dept|est|gen|gov|hon|rev)$",
    re.IGNORECASE,
)
_LONGEST_ABBREVIATION = 8


def sentence_ends(text: str) -> list[int]:
    """Return the positions behind each sentence of ``text``, ascending; the last is ``len(text)``.

    Line breaks stay with the sentence before them, other white space goes with the sentence behind it, as
    byte-level tokenizers do. A blank line ends a sentence; white space alone is none. Abbreviations and single
    letters with a full stop do not end one.
    """
    ends: list[int] = []
    start = reach = 0
    for match in _TERMINATOR.finditer(text):
        if match.start() < reach or (match.group() == "." and _is_abbreviated(text, match.start())):
            continue
        breaks = _LINE_ENDS.match(text, match.end())
        reach = breaks.end() if breaks else match.end()
        if not text[start:reach].isspace():
            ends.append(reach)
            start = reach
    if ends and not text[start:].strip():
        ends.pop()
    return [*ends, len(text)] if text else []


def _is_abbreviated(text: str, stop: int) -> bool:
    return _ABBREVIATED.search(text[max(0, stop - _LONGEST_ABBREVIATION) : stop]) is not None
