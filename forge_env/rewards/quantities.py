"""Parsing of numbers: thousands, fractions, mixed numbers, powers of ten, percent, currency, units.

Only a text that is a number as a whole is parsed: "4,9", "4n" and "18 or 19" are not numbers.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

# --- Normalization of LaTeX

_SYMBOLS = str.maketrans(
    {
        "\u2212": "-",
        "\ufe63": "-",
        "\uff0d": "-",
        "\u2205": r"\emptyset ",
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u22c5": r"\cdot ",
        "\u00f7": "/",
        "\u03c0": r"\pi ",
        "\u03b8": r"\theta ",
        "\u221e": r"\infty ",
        "\u221a": r"\sqrt ",
        "\u221b": r"\sqrt[3]",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2260": r"\ne ",
        "\u00b1": r"\pm ",
        "\u2208": r"\in ",
        "\u222a": r"\cup ",
        "\u2229": r"\cap ",
        "\u00b0": r"^\circ ",
    }
)
_RAISED = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")


def _quotient_of_units(match: re.Match[str]) -> str:
    """`\\text{~m} / \\text{s}` becomes `\\text{m/s}`."""
    above, below = (part.strip(" ~") for part in match.groups())
    return rf"\text{{{above}/{below}}}"


_OPEN = r"(?:\\(?:text|mathrm)\s*\{\s*)?"
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:,\s*\\!|\{,\}|\\[,!]|[\u2009\u202f\u00a0])\s*(?=\d{3}(?!\d))", ","),  # thousands
        (r"(?<!\\)\\(?:[,;:! ]|q?quad(?![a-z])|displaystyle(?![a-z]))|~|[\u2009\u202f\u00a0]", " "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (r"\{,\}", ","),
        (r"\\(?:[dtcs]|nice)frac(?![a-z])", r"\\frac"),
        (r"\\colon(?![a-z])", ":"),
        (r"\\frac\s*(\w)\s*(?=[\w{])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\}\s*)(\w)", r"\1{\2}"),
        (r"\\sqrt\s*(\[\s*\w+\s*\])?\s*(\w)", r"\\sqrt\1{\2}"),
        (r"\\(leq|geq|neq)(?![a-z])(?:slant)?", lambda match: rf"\{match.group(1)[:2]}"),
        (r"\\(le|ge)qslant(?![a-z])", r"\\\1"),
        (r"\^\s*\{?\s*\\(?:circ|degree)(?![a-z])\s*\}?", r"^\\circ "),
        (rf"\^\\circ\s*{_OPEN}C(?![A-Za-z])\s*\}}?", r"\\text{celsius}"),
        (rf"\^\\circ\s*{_OPEN}F(?![A-Za-z])\s*\}}?", r"\\text{fahrenheit}"),
        (r"\\(?:textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|operatorname)\s*\{", r"\\text{"),
        (r"\\text\s*\{([^{}]*)\}\s*/\s*\\text\s*\{([^{}]*)\}", _quotient_of_units),
        (r"\\%", "%"),
        (r"\\pmod\s*(\d+|[A-Za-z])", r"\\pmod{\1}"),
        (r"(^|[=(\[{,])\s*[\u2010-\u2013]\s*(?=[\d.\\A-Za-z])", r"\1-"),  # a dash between two numbers is a range
        (r"\\varnothing(?![a-z])|\\\{\s*\\\}", r"\\emptyset "),
    )
]
_FRACTIONS = {
    code: re.sub("(.+)\u2044(.+)", r"\\frac{\1}{\2}", unicodedata.normalize("NFKD", chr(code)))
    for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F))
}
"""Single-character fractions -> LaTeX."""
_INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff]")
_RAISED_RUN = re.compile(r"[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_SAYS = re.compile(r"(?!(?:and|or)\b)\b[A-Za-z]{2,}")
"""A word; "2 and 3" contains none."""
_SCRIPT = re.compile(r"([\^_])\s*\{\s*(\w)\s*\}")
_DASH = re.compile("[\u2010-\u2013]")
_SPACE = re.compile(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])")


def plain(text: str) -> str:
    """Unify equivalent spellings in LaTeX and Unicode: `\\dfrac12` becomes `\\frac{1}{2}`."""
    text = re.sub(r"\s+", " ", _INVISIBLE.sub("", text))
    text = _RAISED_RUN.sub(lambda run: "^{" + run.group().translate(_RAISED) + "}", text).translate(_SYMBOLS)
    text = text.translate(_FRACTIONS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip()


def spelled(text: str) -> str:
    """`plain(text)` without details that text comparisons ignore: spaces, `$`, `\\text`, a full stop."""
    text = _TEXT.sub(r" \1 ", plain(text)).replace(r"\$", "").replace("$", "").strip()
    text = _DASH.sub("-", without_full_stop(text))
    text = _SPACE.sub("", _SCRIPT.sub(r"\1\2", text))
    return re.sub(r"\s+", " ", text).strip()


def without_full_stop(text: str) -> str:
    """Remove one full stop at the end of a text; an ellipsis is not changed."""
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


# --- Numbers with units

_UNITS = {
    name: unit
    for unit, names in {
        "%": "% percent",
        "celsius": "celsius",
        "fahrenheit": "fahrenheit",
        "degree": r"^\circ degree degrees deg",
        "radian": "radian radians rad",
        "dollar": r"dollar dollars usd",
        "euro": "euro euros eur",
        "pound": "pounds",
        "cent": "cent cents",
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres",
        "inch": "in inch inches",
        "foot": "ft foot feet",
        "yard": "yd yard yards",
        "mile": "mile miles",
        "mg": "milligram milligrams",
        "g": "gram grams",
        "kg": "kg kilogram kilograms",
        "lb": "lb lbs",
        "oz": "oz ounce ounces",
        "ml": "ml mL milliliter milliliters millilitre millilitres",
        "l": "liter liters litre litres",
        "second": "sec second seconds",
        "minute": "min minute minutes",
        "hour": "hr hrs hour hours",
        "day": "day days",
        "week": "week weeks",
        "year": "yr yrs year years",
        "mph": "mph",
        "km/h": "km/h kph km/hr",
        "m/s": "m/s",
        "unit": "unit units",
    }.items()
    for name in names.split()
}
_TEXT_UNITS = {"m": "m", "g": "g", "s": "second", "h": "hour", "L": "l", "l": "l", "mg": "mg", "mi": "mile"}
"""Units recognized only inside `\\text`; elsewhere these letters are variables."""
_ATTACHED = ("%", r"^\circ", "mm", "cm", "km", "kg", "mph")
"""Units that may follow a number without a space."""
_SCALES = {
    "hundred": 100,
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SCALE = re.compile(rf"(?:\s*\\text\s*\{{\s*|\s+)({'|'.join(_SCALES)})s?(?![A-Za-z])(?:\s*\}})?", re.IGNORECASE)
_COUNTS = re.compile(
    rf"(?:(?:{'|'.join(_SCALES)})s?|hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|tenths?|squared|cubed"
    r"|gross|score|mil|mln|bn|factorial|times|plus|minus|or|and|mod|to|if|for|infinity|pi)"
)
"""Words after a number that change its value, and therefore are not units."""
_MONEY = {"$": "dollar", "\u20ac": "euro", "\u00a3": "pound", "\u00a5": "yen", "\u20b9": "rupee"}

_THOUSANDS = r"[1-9](?:\d{0,2}(?:,\d{3})+|\d?(?:,\d\d)+,\d{3})"
"""Digits in groups of three, or as in India: 12,34,567."""
_UNSIGNED = rf"(?:{_THOUSANDS}(?![\d,])(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = rf"[-+]?\s?{_UNSIGNED}"
_TEN = r"\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*"
_EXPONENT = rf"(?:[eE](?P<e>[-+]?\d{{1,3}})|{_TEN}(?P<ten>\{{\s*[-+]?\s*\d{{1,3}}\s*\}}|[-+]?\d{{1,3}}))"
_NUMBERS = [
    re.compile(pattern)
    for pattern in (
        rf"(?P<sign>[-+]?)\s*(?P<whole>\d*)\s*\\frac\s*\{{\s*(?P<value>{_DECIMAL})\s*\}}\s*\{{\s*(?P<below>{_DECIMAL})\s*\}}",
        r"(?P<sign>[-+]?)\s*(?P<whole>\d+)\s+(?P<value>\d+)\s*/\s*(?P<below>\d+)",
        rf"(?P<value>{_DECIMAL})\s*/\s*(?P<below>{_DECIMAL})",
        r"(?P<value>[-+]?\s?\d*\.\d*)\\(?:overline|bar)\s*\{?(?P<repeated>\d{1,30})\}?",
        rf"(?P<value>{_DECIMAL}){_EXPONENT}?",
    )
]
_LOCAL = re.compile(
    r"(?P<whole>[-+]?[1-9]\d{0,2}(?:(?P<group>[ .'\u2019])\d{3})(?:(?P=group)\d{3})*)(?:(?P<point>[.,])(?P<part>\d+))?"
    r"(?!\s*[\d.,/])"
)
"""A number of another locale, with spaces, apostrophes or points between thousands: "1.234,5", "1'000"."""
_LABEL = re.compile(r"(?:\\text\s*\{\s*\([A-J]\)\s*\}|\([A-J]\))\s*(?=\S)")
_CURRENCY = re.compile(r"([-+]?)\s*\\?(?P<sign>[$\u20ac\u00a3\u00a5\u20b9])\s*(?=[-\d.\\])")
_MONEY_AFTER = re.compile(r"\s*\\?(?P<sign>[$\u20ac\u00a3\u00a5\u20b9])$")
_LATEX_UNIT = re.compile(r" ?\\text ?\{([^{}]*)\} ?(?:\^\s*\{?\s*([23])\s*\}?)?")
_PLAIN_UNIT = re.compile(r"(\s*)\(?\s*([A-Za-z][A-Za-z/ .-]*?|%|\^\\circ)\s*\)?\s*(?:\^\s*\{?\s*([23])\s*\}?)?")
_LAST_UNIT = re.compile(rf"(?<=[\w}})]){_LATEX_UNIT.pattern}$")
_LAST_WORD = re.compile(r"(?<=[\w})]) [A-Za-z]{2,}(?:\^\{?[23]\}?)?$")
_MAX_DIGITS = 1_000


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and the canonical name of its unit, or "" if the unit is missing or unknown."""

    value: Fraction
    unit: str = ""


def quantity(text: str) -> Quantity | None:
    """Parse a text as one number; None if it is anything else."""
    text = without_full_stop(plain(text))
    if whole := _TEXT.fullmatch(text):
        text = whole.group(1).strip()
    if text.count("$") == 2 and r"\$" not in text:
        text = text.replace("$", " ").strip()
    text = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
    money = _CURRENCY.match(text)
    if money:
        text = money.group(1) + text[money.end() :]
    elif money := _MONEY_AFTER.search(text):
        text = text[: money.start()]
    text = _unlocalized(text)
    for pattern in _NUMBERS:
        match = pattern.match(text)
        value = None if match is None else _value(match)
        if match is None or value is None:
            continue
        rest = text[match.end() :]
        while scale := _SCALE.match(rest):
            value, rest = value * _SCALES[scale.group(1).lower()], rest[scale.end() :]
        unit = _unit(rest)
        if unit is not None:
            name = _MONEY[money.group("sign")] if money and not unit else unit
            return Quantity(value / 100 if unit == "%" else value, name)
    return None


def _unlocalized(text: str) -> str:
    """Convert a number of another locale at the start of `text`; one that may be English, such as "1.234", is kept."""
    match = _LOCAL.match(text)
    if match is None or match["group"] == match["point"]:
        return text
    if match["group"] == "." and match["point"] is None and match["whole"].count(".") == 1:
        return text
    return re.sub(r"[^-+\d]", "", match["whole"]) + f".{match['part'] or 0}" + text[match.end() :]


def split_unit(text: str) -> tuple[str, str]:
    """Split a known unit in `\\text` off the end; returns the expression and the unit's name or ""."""
    if (whole := _TEXT.fullmatch(text)) and not _SAYS.search(whole.group(1)):
        text = whole.group(1).strip()
    match = _LAST_UNIT.search(text) or _LAST_WORD.search(text)
    unit = match and _unit(match.group())
    return (text[: match.start()], unit) if match and unit else (text, "")


def decimal(text: str) -> Fraction | None:
    """Parse a decimal number with an optional sign, thousands separators and exponent."""
    digits = text.replace(",", "").replace(" ", "")
    try:
        return Fraction(digits) if len(digits) <= _MAX_DIGITS else None
    except (ValueError, ZeroDivisionError):
        return None


def _value(match: re.Match[str]) -> Fraction | None:
    groups = match.groupdict()
    value = decimal(groups["value"])
    below = decimal(groups.get("below") or "1")
    if value is None or not below:
        return None
    value /= below
    if repeated := groups.get("repeated"):
        places = len(groups["value"].partition(".")[2])
        part = Fraction(int(repeated), 10**places * (10 ** len(repeated) - 1))
        value += -part if groups["value"].lstrip().startswith("-") else part
    if exponent := groups.get("e") or groups.get("ten"):
        value *= Fraction(10) ** int(exponent.strip("{} ").replace(" ", ""))
    if groups.get("whole"):
        if not 0 <= value < 1:
            return None  # 2\frac{7}{3} is not a mixed number
        value += int(groups["whole"])
    return -value if groups.get("sign") == "-" else value


def _unit(text: str) -> str | None:
    """Canonical name of the unit `text`, "" if it is empty or unknown; None if `text` is not a unit."""
    if not text.strip():
        return ""
    if match := _LATEX_UNIT.fullmatch(text):
        words, power = match.group(1).strip().rstrip("."), match.group(2)
        unit = _TEXT_UNITS.get(words) or _named(words)
        unit = "" if unit is None and _is_noun(words, shortest=1) else unit
    elif match := _PLAIN_UNIT.fullmatch(text):
        blank, words, power = match.groups()
        words = words.strip().rstrip(".")
        unit = _named(words) if blank or words in _ATTACHED else None
        unit = "" if unit is None and blank and _is_noun(words, shortest=3) else unit
    else:
        return None
    return f"{unit}^{power}" if unit and power else unit


def _named(words: str) -> str | None:
    words = re.sub(r"^(sq|cu)\b\.?\s*", lambda match: {"sq": "square ", "cu": "cubic "}[match.group(1)], words)
    shape = next((name for name in ("square", "cubic") if words.startswith(f"{name} ")), "")
    unit = _UNITS.get(words.removeprefix(shape).strip()) or _UNITS.get(words.removeprefix(shape).strip().lower())
    return f"{unit}^{'2' if shape == 'square' else '3'}" if unit and shape else unit


def _is_noun(words: str, shortest: int) -> bool:
    words = re.sub(r"(?<=[a-z])\^?[23](?!\w)", "", words.lower())  # exponent of an area or a volume
    parts = re.split(r"[ /.-]+", words)
    return len(parts[0]) >= shortest and not re.search(r"\d", words) and not any(map(_COUNTS.fullmatch, parts))
