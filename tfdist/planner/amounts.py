"""Bytes and seconds as people write and read them: three digits and a unit, of powers of 1000. Pure."""

from __future__ import annotations

import math
import re

BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_FACTORS = {unit.lower(): 1000**power for power, unit in enumerate(BYTES)}
_FACTORS |= {unit.lower().replace("b", "ib"): 1024**power for power, unit in enumerate(BYTES) if power}


def told_bytes(count: float) -> str:
    """Bytes with the unit in which they have one to three digits before the point.

    >>> told_bytes(999), told_bytes(1_234_567)
    ('999 B', '1.23 MB')
    """
    return _told(count, BYTES, 0)


def told_seconds(seconds: float) -> str:
    """Seconds likewise, down to microseconds.

    >>> told_seconds(0.0123), told_seconds(75)
    ('12.3 ms', '75.0 s')
    """
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 0.9995:
        return _told(seconds * 1e6, ("us", "ms"), 2)
    return _digits(seconds) + " s"


def told_rate(per_second: float) -> str:
    """A number a second, such as of samples, with three digits that count.

    >>> told_rate(12_345.6), told_rate(0.0123)
    ('12,300', '0.0123')
    """
    if not per_second or not math.isfinite(per_second):
        return f"{per_second:.3g}"
    rounded = round(per_second, 2 - math.floor(math.log10(abs(per_second))))
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def read_bytes(text: str) -> float:
    """Bytes from a number with or without a unit: kB, MB, GB of powers of 1000, KiB, MiB, GiB of 1024.

    >>> read_bytes("8GB"), read_bytes("1.5 MiB"), read_bytes("2e9")
    (8000000000.0, 1572864.0, 2000000000.0)

    Raises:
        ValueError: it is none, or not above 0.
    """
    match = re.fullmatch(r"\s*([0-9][0-9_,.]*(?:e[+]?[0-9]+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = match[2].lower() or "b" if match else ""
    try:
        number = float(match[1].replace(",", "")) if match else 0.0
    except ValueError:
        number = 0.0
    if unit not in _FACTORS or number <= 0:
        units = ", ".join(BYTES)
        raise ValueError(f"{text!r} is no number of bytes; expected one above 0, with or without one of {units}, GiB.")
    return number * float(_FACTORS[unit])


def _told(count: float, units: tuple[str, ...], decimals: int) -> str:
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    text = f"{count:.0f}" if not power and not decimals else _digits(count)
    return f"{text} {units[power]}"


def _digits(count: float) -> str:
    """Three digits, without a power of ten."""
    size = abs(count)
    return f"{count:.0f}" if size >= 99.95 else f"{count:.1f}" if size >= 9.995 else f"{count:.2f}"
