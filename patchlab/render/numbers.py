"""Numbers for people: three digits and a unit; the exact form is for titles and frames."""

from __future__ import annotations

_UNITS = ((10**3, "k"), (10**6, "M"), (10**9, "B"), (10**12, "T"))


def human(number: int) -> str:
    """Write a count with three significant digits.

    Example:
        >>> [human(n) for n in (0, 999, 1_000, 592_128, 999_950, 22_713_216, 671_026_404_352)]
        ['0', '999', '1 k', '592 k', '1 M', '22.7 M', '671 B']
    """
    if number < 0:
        return f"−{human(-number)}"
    if number < 1000:
        return str(number)
    for size, unit in _UNITS:
        digits = float(f"{number / size:.3g}")
        # 999.95 k rounds to 1000 k, and so belongs to the next unit.
        if digits < 1000:
            return f"{digits:g} {unit}"
    return f"{number // 10**12:,} T"


def exact(number: int) -> str:
    """Write a count in full, in groups of three digits."""
    return f"{number:,}"


def count(number: int, noun: str, plural: str = "") -> str:
    """Write a count with its noun.

    Example:
        >>> count(1, "module"), count(1215, "module"), count(2, "class", "classes")
        ('1 module', '1,215 modules', '2 classes')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
