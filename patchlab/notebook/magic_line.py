r"""The line of a magic: `key=Class` rules and options, read literally.

Nothing in the line is expanded or evaluated: braces, `$` and backslashes of a regular expression
mean themselves. Words are separated by spaces; a quote, single or double, keeps the spaces up to
the next one of its kind and is dropped itself. A rule is split at its last `=`, since a pattern may
hold one (`(?=...)`) and the name of a class cannot.

The class of a rule is looked up by name in the user's namespace, `MyMLP` or `mymodule.MyMLP`, and
must be there as a class.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError
from torch import nn

from patchlab.errors import PatchlabError
from patchlab.mapping.rules import PatchRule

VALUED = ("--map", "--model", "--convert")


@dataclass(frozen=True, slots=True)
class MagicLine:
    """What the line of a magic says.

    Attributes:
        rules: Pairs of key and name of the replacement class, in order.
        words: Words that are neither rules nor options.
        model: Variable that holds a model, "" if none is named.
        convert: Variable that holds the weight conversions, "" if none is named.
        flags: Options without a value, such as "--quiet".
    """

    rules: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()
    model: str = ""
    convert: str = ""
    flags: frozenset[str] = frozenset()


def split_words(line: str) -> list[str]:
    """Split a line at its spaces; quotes keep theirs and are dropped; a backslash is a backslash.

    Raises:
        UsageError: A quote is not closed.
    """
    words: list[str] = []
    word: list[str] | None = None
    quote = ""
    for character in line:
        if quote:
            if character == quote:
                quote = ""
            elif word is not None:
                word.append(character)
        elif character in "'\"":
            quote = character
            word = [] if word is None else word
        elif character.isspace():
            if word is not None:
                words.append("".join(word))
            word = None
        elif word is None:
            word = [character]
        else:
            word.append(character)
    if quote:
        raise UsageError(f"the quote {quote} in {line.strip()!r} is not closed.")
    if word is not None:
        words.append("".join(word))
    return words


def asks_for_help(line: str) -> bool:
    """Tell whether one of the words is `--help` or `-h`; a quote left open asks for nothing."""
    try:
        return not {"--help", "-h"}.isdisjoint(split_words(line))
    except UsageError:
        return False


def parse_line(
    line: str, *, valued: Sequence[str] = VALUED, flags: Sequence[str] = (), words: bool = False
) -> MagicLine:
    """Read the line of a magic.

    Args:
        line: As typed, without the name of the magic.
        valued: Options that take a value, as `--model NAME` or `--model=NAME`.
        flags: Options that take none.
        words: Whether words that are no rules are allowed.

    Raises:
        UsageError: A word that is neither a rule nor an option, an option without its value, a rule
            without a key or a class, or a key given twice.
    """
    rules: dict[str, str] = {}
    loose: list[str] = []
    values: dict[str, str] = {}
    found: set[str] = set()
    remaining = split_words(line)
    while remaining:
        word = remaining.pop(0)
        option, equals, value = word.partition("=")
        if option in valued:
            if not equals:
                if not remaining:
                    raise UsageError(f"{option} needs a value: {option} NAME.")
                value = remaining.pop(0)
            if option != "--map":
                if not value:
                    raise UsageError(f"{option} needs a value: {option} NAME.")
                values[option] = value
                continue
            word = value
        elif word in flags:
            found.add(word)
            continue
        elif word.startswith("--"):
            if option in flags:
                raise UsageError(f"{option} takes no value: write {option} alone.")
            known = [*valued, *flags]
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}."
            raise UsageError(f"there is no option {option}. {hint}")
        if "=" not in word and words:
            loose.append(word)
            continue
        key, name = split_rule(word)
        if key in rules:
            raise UsageError(f"the key {key!r} is given twice; a key has one class.")
        rules[key] = name
    return MagicLine(
        rules=tuple(rules.items()),
        words=tuple(loose),
        model=values.get("--model", ""),
        convert=values.get("--convert", ""),
        flags=frozenset(found),
    )


def split_rule(word: str) -> tuple[str, str]:
    """Split a rule at its last `=` into key and name of the class.

    Raises:
        UsageError: There is no `=`, or nothing on one side of it.
    """
    key, equals, name = word.rpartition("=")
    key, name = key.strip(), name.strip()
    if not (equals and key and name):
        raise UsageError(
            f"{word!r} is not a rule. A rule is a key, '=' and a class, such as LlamaMLP=MyMLP or "
            f"'^Llama(MLP|Attention)$=MyModule'; rules are separated by spaces."
        )
    return key, name


def resolve_mapping(
    rules: Sequence[tuple[str, str]], namespace: Mapping[str, Any]
) -> dict[str, type[nn.Module]]:
    """Look up the classes of rules, and check the rules.

    Raises:
        UsageError: A class that is not there, or a rule that can never work.
    """
    mapping = {}
    for key, name in rules:
        replacement = resolve_name(name, namespace)
        try:
            rule = PatchRule(key, replacement)
        except PatchlabError as error:
            raise UsageError(str(error)) from error
        mapping[rule.key] = rule.replacement
    return mapping


def resolve_name(name: str, namespace: Mapping[str, Any]) -> Any:
    """Look up a class by its name or dotted path; nothing is evaluated.

    Only Python modules and classes have their attributes read, no other object.

    Raises:
        UsageError: Nothing of that name is there; with the names of module classes that are close.
    """
    first, *rest = name.split(".")
    if first not in namespace:
        raise UsageError(f"there is no {first!r} in this notebook.{_nearest(name, namespace)}")
    found, path = namespace[first], first
    for part in rest:
        if not isinstance(found, (types.ModuleType, type)):
            raise UsageError(
                f"{path!r} in {name!r} is neither a Python module nor a class; give the class a "
                f"name of its own first: MyClass = {name}"
            )
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise UsageError(
                f"{path!r} has no {part!r}.{_nearest(part, vars(found), path + '.')}"
            ) from error
        path = f"{path}.{part}"
    return found


def module_classes(namespace: Mapping[str, Any]) -> list[str]:
    """Return the names under which a namespace holds `torch.nn.Module` classes, sorted."""
    return sorted(
        name
        for name, value in list(namespace.items())
        if isinstance(value, type) and issubclass(value, nn.Module) and not name.startswith("_")
    )


def _nearest(name: str, namespace: Mapping[str, Any], prefix: str = "") -> str:
    known = module_classes(namespace)
    if not known:
        return " No torch.nn.Module class is defined there yet: run the cell that defines it first."
    folded = {other.casefold(): other for other in known}
    near = difflib.get_close_matches(name.casefold(), list(folded), n=3, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(prefix + folded[other] for other in near)}?"
    shown = ", ".join(prefix + other for other in known[:8])
    return f" The module classes there: {shown}{', …' if len(known) > 8 else ''}."
