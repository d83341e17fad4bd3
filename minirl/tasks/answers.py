"""What of an answer counts as its result, and which number stands there. Pure functions of text.

    final    what stands after the last </think>, if there is one
    marked   of that, what the last mark points at: the text after "####", or what is in \\boxed{…},
             whichever comes last; of a box in a box, the inner one
    number   exact, as a fraction

Leaves out: what is right (each task says that), symbols (math.py).
"""

import re
from fractions import Fraction

HASHES = "####"
MAX_DIGITS = 400  # a longer number is none: no answer means it, and to compare it costs

# A dash after a digit or a word is no sign ("5-10"), and commas join only groups of three digits.
_SIGN = r"(?P<sign>(?<![\w)])[-−–](?:\\?[$€£])?)?"
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d+)?|(?<![\w.])\.\d+)"
_LATEX_FRACTION = r"\\[dt]?frac\s*\{\s*(?P<top>-?\d+)\s*\}\s*\{\s*(?P<bottom>\d+)\s*\}"
_SLASH = r"\s?/\s?(?P<under>\d+)(?![\d/]|\.\d)"
_MIXED = r"(?: |\s+and\s+)(?P<over>\d+)/(?P<part>\d+)(?![\d/])"
_TIMES_TEN = r"\s*(?:\\times|\\cdot|[×x*])\s*10\s*\^\s*\{?(?P<ten>-?\d{1,3})\}?"
_POWER = rf"(?:[eE](?P<e>[-+]?\d{{1,3}})(?!\w)|{_TIMES_TEN})"
NUMBER = re.compile(
    rf"{_SIGN}(?<!\d:)(?:(?:(?P<whole>\d+)\s*)?{_LATEX_FRACTION}"
    rf"|(?P<decimal>{_DECIMAL})(?!:\d)(?:{_MIXED}|{_SLASH}|{_POWER})?)"
)
_THIN_SPACES = re.compile(r"(?<=\d)(?:\{,\}|\\,|[\u2009\u202f\u00a0])(?=\d{3}(?!\d))")


def final(text: str) -> str:
    """Without the thinking, where the model marks it."""
    return text.rpartition("</think>")[2]


def last_box(text: str) -> tuple[int, str] | None:
    """Of the closed \\boxed{…} or \\fbox{…} that begins last: where it ends, and what is in it."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for brace in re.finditer(r"\\.|[{}]", text[match.end() :], re.DOTALL):  # \{ is no group's
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                end = match.end() + brace.start()
                return end, text[match.end() : end]
    return None


def marked(text: str) -> str | None:
    """What the last mark points at; None where there is no mark."""
    box, place = last_box(text), text.rfind(HASHES)
    if box and box[0] > place:
        return box[1]
    return text[place + len(HASHES) :] if place >= 0 else None


def numbers(text: str) -> list[Fraction]:
    """Every number in the text, in order. Units, currencies and per cent signs are not read."""
    text = _THIN_SPACES.sub(",", text).replace("\\%", "%").replace("\\!", "")
    return [value for match in NUMBER.finditer(text) if (value := _value(match)) is not None]


def final_number(text: str) -> Fraction | None:
    """The number that an answer gives: at the last mark the first one (after the last "=", if the
    line has one), without a mark the last one of the text. None: it gives none."""
    text = final(text)
    at_mark = marked(text)
    if at_mark is None:
        found = numbers(text)
        return found[-1] if found else None
    line = next((line for line in at_mark.splitlines() if line.strip()), "")
    found = numbers(line.rpartition("=")[2])
    return found[0] if found else None


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    if len(match.group()) > MAX_DIGITS:
        return None
    sign = -1 if part["sign"] else 1
    try:
        if part["bottom"]:
            return sign * (int(part["whole"] or 0) + Fraction(f"{part['top']}/{part['bottom']}"))
        value = Fraction(part["decimal"].replace(",", ""))
        if part["under"]:
            value /= int(part["under"])
        elif part["part"]:
            value += Fraction(int(part["over"]), int(part["part"]))
        elif power := part["e"] or part["ten"]:
            value *= Fraction(10) ** int(power)
        return sign * value
    except ZeroDivisionError:
        return None
