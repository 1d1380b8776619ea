"""Units of measurement in answers: their dimension and size."""

import re
from fractions import Fraction

# Size of each unit in the first one of its dimension, by its names.
_TABLE: dict[str, dict[str, Fraction | int]] = {
    "length": {
        "m|meter|metre": 1, "km|kilometer|kilometre": 1000, "cm|centimeter|centimetre": Fraction(1, 100),
        "mm|millimeter|millimetre": Fraction(1, 1000), "dm|decimeter": Fraction(1, 10), "nm": Fraction(1, 10**9),
        "in|inch|inche": Fraction(254, 10000), "ft|foot|feet": Fraction(3048, 10000), "yd|yard": Fraction(9144, 10000),
        "mi|mile": Fraction(1609344, 1000),
    },
    "mass": {
        "g|gram": 1, "kg|kilogram": 1000, "mg|milligram": Fraction(1, 1000), "t|ton|tonne": 10**6,
        "oz|ounce": Fraction("28.349523125"), "lb|pound": Fraction("453.59237"),
    },
    "time": {
        "s|sec|second": 1, "min|minute": 60, "h|hr|hour": 3600, "day": 86400, "week": 7 * 86400,
        "ms|millisecond": Fraction(1, 1000),
    },
    "months": {"month": 1, "yr|year": 12},
    "litres": {"l|L|liter|litre": 1, "ml|mL|milliliter|millilitre": Fraction(1, 1000)},
    "money": {"dollar|usd|USD": 1, "cent|¢": Fraction(1, 100)},
    "euros": {"euro|eur|EUR|€": 1},
    "pounds": {"£|gbp|GBP": 1},
    "angle": {"degree|deg": 1},
    "radians": {"radian|rad": 1},
    "force": {"N|newton": 1, "kN": 1000},
    "energy": {"J|joule": 1, "kJ": 1000, "eV": Fraction("1.602176634e-19")},
    "power": {"W|watt": 1, "kW": 1000},
    "charge": {"C|coulomb": 1},
    "voltage": {"V|volt": 1},
    "current": {"A|ampere|amp": 1},
    "frequency": {"Hz|hertz": 1, "kHz": 1000, "MHz": 10**6},
    "temperature": {"K|kelvin": 1},
    "pressure": {"Pa|pascal": 1, "kPa": 1000, "atm": 101325},
    "amount": {"mol|mole": 1},
}  # fmt: skip
_UNITS = {
    name: (dimension, Fraction(size))
    for dimension, table in _TABLE.items()
    for names, size in table.items()
    for name in names.split("|")
}
_COMPOUND = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h"}
_LETTERS = frozenset("msghLNJWVK")  # that name a unit also without \text
_POWER = re.compile(r"(.*?)\s*\^?\s*\{?(-?\d+)?\}?")
Unit = tuple[Fraction, tuple[tuple[str, int], ...]]  # size, and the powers of its dimensions; a word is its own


def read_unit(text: str) -> Unit | None:
    r"""Return the unit that a text such as "km/h", "square feet" or "\text{cm}^2" names; None for an empty text.

    Words that name no unit of the table, such as "apples", are a dimension of their own.
    """
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).replace("\\cdot", " ").replace("*", " ")
    text = re.sub(r"(?<=[A-Za-z])\s+per\s+(?=[A-Za-z])", "/", text)
    text = " ".join(text.replace("{", "").replace("}", "").split()).strip(" .")
    text = re.sub(r"\s*\^\s*", "^", text)
    size, powers = Fraction(1), dict[str, int]()
    for place, part in enumerate(_COMPOUND.get(text, text).split("/")):
        for word, power in _words(part):
            known = ("unit", Fraction(1)) if power > 1 and word in ("unit", "units") else _known(word)
            power = -power if place else power
            size *= known[1] ** power
            powers[known[0]] = powers.get(known[0], 0) + power
    powers = {name: power for name, power in powers.items() if power and name}
    return (size, tuple(sorted(powers.items()))) if powers else None


def is_word(dimension: str) -> bool:
    """Return whether a dimension is a word that names no unit of the table, such as "egg"."""
    return dimension not in _TABLE


def names_unit(text: str) -> bool:
    """Return whether a text without \\text is made of units only, such as "m/s^2" or "hrs", and not of variables."""
    words = [word for part in text.split("/") for word, _ in _words(part)]
    return (
        text in _COMPOUND
        or all(
            word in _LETTERS if len(word) == 1 else word in _UNITS or (len(word) > 2 and not is_word(_known(word)[0]))
            for word in words
        )
        or text in ("am", "pm")
    )


def _words(part: str) -> list[tuple[str, int]]:
    found, power = [], 1
    for word in part.split():
        if word.lower() in ("square", "sq", "cubic"):
            power = 3 if word.lower() == "cubic" else 2
            continue
        match = _POWER.fullmatch(word)
        assert match is not None
        found.append((match[1], int(match[2] or 1) * power))
        power = 1
    return found


def _known(word: str) -> tuple[str, Fraction]:
    lower = word.lower()
    if lower in ("unit", "units", "of", "the", "a", "total"):
        return "", Fraction(1)
    for name in (word, word.rstrip("."), lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if name in _UNITS:
            return _UNITS[name]
    return lower.removesuffix("s"), Fraction(1)
