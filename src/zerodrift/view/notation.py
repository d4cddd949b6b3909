"""How are numbers written for people? One notation for the page and for the terminal.

Three digits are what the noise of an audit leaves of a number; a share that is not all and not nothing is never
rounded to 100% or to 0%.
"""

import math

Fact = float | int | str | bool
"""One value of a probe's evidence."""


def number(value: float, digits: int = 3) -> str:
    """Three significant digits, or as many as asked for: 0.0213, 1.4e-6, 12.3; 2,794 and −∞ in full."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if 1e3 <= abs(value) < 1e7:
        return count(value).replace("-", "−")
    mantissa, exponential, exponent = f"{value:.{digits}g}".partition("e")
    if exponential:
        mantissa = f"{mantissa}e{int(exponent)}"
    return mantissa.replace("-", "−", 1) if value < 0 else mantissa


def signed(value: float) -> str:
    """As `number`, with a plus where it is positive."""
    return f"+{number(value)}" if value > 0 else number(value)


def count(value: float) -> str:
    """A whole number with its thousands apart: 12,345."""
    return f"{value:,.0f}"


def share(value: float) -> str:
    """A part of a whole: 97.3%."""
    if not 0 < value < 1:
        return f"{100 * value:.0f}%"
    if value < 5e-4:
        return "<0.1%"
    return ">99.9%" if value >= 0.9995 else f"{100 * value:.1f}%"


def fact(value: Fact) -> str:
    """Counts in full, measurements in four digits (a slope of 0.9998 is not 1), words as they are."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return count(value) if isinstance(value, int) else number(value, 4)
