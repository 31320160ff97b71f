"""Rules and mappings: what the user asks for, checked at the door.

A `PatchRule` is one key with its replacement class, a `PatchMapping` the ordered rules of a scope
or of the registry. Both are immutable, and neither can hold a rule that could never work: what
transformers accepts and then ignores in silence (a glob, a dotted path, quotes, an empty key, a
replacement that is no module) is refused here, with the key that was probably meant.

A key that is a Python identifier is an *exact name* and matches only that name. Anything else is a
*pattern*: it must compile, and is `re.search`ed. transformers 5.24.0 searches exact names as well
(`monkey_patching._find_replacement_class`); that is the one place where patchlab's matching
differs.
"""

from __future__ import annotations

import functools
import inspect
import re
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from patchlab.errors import MappingError, MappingTypeError

_IDENTIFIER = re.compile(r"[^\W\d]\w*\Z")
# Only the characters of a dotted Python path, at least one dot, and no regex operator: nobody
# writes a pattern like that, and as a pattern it can match no class name (names hold no dot).
_DOTTED_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+\Z")
_GLOB = re.compile(r"[\w*?]+\Z")
# The place of a module in a model, as `named_modules` and peft's target_modules have it.
_MODULE_PATH = re.compile(r"(?=.*\.[\d*]+(\.|\Z))([a-z_]\w*|\d+|\*)(\.([a-z_]\w*|\d+|\*))+\Z")
# A class as Python prints it, or as it is written where it is defined.
_WRITTEN_CLASS = re.compile(r"<class '(?:[\w.<>]*\.)?(\w+)'>\Z|class\s+(\w+)")
_SEVERAL = re.compile(r"\w+(?:\s*[,;]\s*\w+)+[,;]?\Z")
_EMPTY_CHOICE = re.compile(r"\||.*(?<!\\)\|(\||\Z)", re.DOTALL)
_GLOBAL_FLAGS = re.compile(r"\(\?([aiLmsux]+)\)")
_UNDECIDED = object()


@functools.lru_cache(maxsize=4096)
def compile_pattern(key: str) -> re.Pattern[str]:
    """Compile a pattern once; `re.error` as `re.compile` raises it."""
    return re.compile(key)


def is_exact_name(key: str) -> bool:
    """Tell whether a key is an exact name; anything else is a pattern."""
    return _IDENTIFIER.match(key) is not None


def as_part(key: str) -> str:
    """Return a pattern so that it can stand inside of a larger one.

    Flags at its beginning, `(?i)Mlp`, hold for a whole pattern only; they become `(?i:Mlp)`.
    """
    found = _GLOBAL_FLAGS.match(key)
    if found is None:
        return key
    # A comment at the end of a verbose pattern would take the bracket along.
    end = "\n)" if "x" in found[1] else ")"
    return f"(?{found[1]}:{key[found.end() :]}{end}"


def check_key(key: Any) -> str:
    """Return the key if it can match a class name.

    Raises:
        MappingTypeError: The key is no string.
        MappingError: The key is empty, quoted, a glob, a path, no valid regular expression, or
            holds characters that no class name has.
    """
    if not isinstance(key, str):
        raise MappingTypeError(
            f"key {_key_text(key)} is of type {type(key).__name__}; a key is a string: a class "
            f"name such as 'LlamaMLP', or a pattern such as '^Llama(MLP|Attention)$'."
            f"{_name_hint(key)}"
        )
    if not key.strip():
        raise MappingError(
            f"key {key!r} is empty, and as a pattern it would match every class. To match one "
            f"class use its name, such as 'LlamaMLP'."
        )
    if is_exact_name(key):
        return key
    stripped = key.strip().strip("'\"`").strip()
    if key[0] in "'\"`" and key[-1] in "'\"`" and len(key) > 1:
        raise MappingError(
            f"key {key!r} has quotes inside the string, so it matches no class name. Use "
            f"{stripped!r}."
        )
    _check_other_notations(key)
    if key != key.strip():
        raise MappingError(
            f"key {key!r} begins or ends with white space, so it matches no class name. "
            f"Use {key.strip()!r}."
        )
    if _DOTTED_PATH.match(key):
        raise MappingError(
            f"key {key!r} is a dotted path; keys are matched against class names, without their "
            f"Python module. Use {key.rpartition('.')[2]!r}."
        )
    if "/" in key or ("\\" in key and re.match(r"[A-Za-z]:\\|\\\\", key)):
        raise MappingError(
            f"key {key!r} looks like a file path; keys are matched against class names, which hold "
            f"no slash. Use the name of the class, such as 'LlamaMLP'."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            compile_pattern(key)
    except FutureWarning as error:
        raise MappingError(
            f"key {key!r} will mean something else in a later Python: {error}. Put a backslash "
            f"before a bracket or an operator that is meant as a letter."
        ) from error
    except re.error as error:
        raise MappingError(
            f"key {key!r} is not a valid regular expression: {error}. transformers would accept "
            f"it, warn once for each name it looks at, and match nothing. {_instead(key)}"
        ) from error
    except (RecursionError, OverflowError) as error:
        raise MappingError(
            f"key {key!r} is too much for a regular expression: {error}. Write several shorter "
            f"keys."
        ) from error
    if _GLOB.match(key) and "*" in key and ".*" not in key:
        raise MappingError(
            f"key {key!r} reads like a shell glob; as a regular expression its '*' repeats the "
            f"letter before it. {_instead(key)}"
        )
    if _EMPTY_CHOICE.match(key) and compile_pattern(key).search("") is not None:
        raise MappingError(
            f"key {key!r} has nothing on one side of a '|', and as a pattern that matches every "
            f"class. Use {'|'.join(part for part in key.split('|') if part)!r}."
        )
    if re.fullmatch(r"\[\w+\]", key):
        raise MappingError(
            f"key {key!r} is a set of single letters to a regular expression, and matches every "
            f"name that holds one of them. To match the name itself, use {key[1:-1]!r}."
        )
    if " " in key and "(?x" not in key:
        raise MappingError(
            f"key {key!r} holds a space, which no class name does, so this part of it can never "
            f"match. Use {key.replace(' ', '')!r}, or one rule for each name."
        )
    return key


def _check_other_notations(key: str) -> None:
    """Refuse what names classes or modules in another way than a key does.

    Raises:
        MappingError: It is a list of names, a class written out, or the path of a module.
    """
    if _SEVERAL.match(key):
        names = re.findall(r"\w+", key)
        raise MappingError(
            f"key {key!r} lists {len(names)} names; a key is one name or one pattern. Write a rule "
            f"for each, or use {'^(?:' + '|'.join(names) + ')$'!r}."
        )
    written = _WRITTEN_CLASS.match(key)
    if written is not None:
        raise MappingError(
            f"key {key!r} is a class written out; keys are matched against the bare names of "
            f"classes. Use {written[1] or written[2]!r}."
        )
    if _MODULE_PATH.match(key):
        raise MappingError(
            f"key {key!r} looks like the place of a module in a model; keys are matched against "
            f"the names of classes, such as 'LlamaMLP', and reach every module of the class. "
            f"patchlab.module_tree(model) shows which class is there."
        )


def check_replacement(key: str, replacement: Any) -> type[nn.Module]:
    """Return the replacement class of a key if it is one.

    Raises:
        MappingTypeError: It is not a class, or not a subclass of `torch.nn.Module`.
    """
    if isinstance(replacement, type):
        if issubclass(replacement, nn.Module):
            return replacement
        bases = ", ".join(base.__name__ for base in replacement.__mro__[1:])
        raise MappingTypeError(
            f"Replacement class for {key!r} must be a subclass of nn.Module; "
            f"{replacement.__name__} inherits from {bases}. Write `class "
            f"{replacement.__name__}(nn.Module):`."
        )
    found = type(replacement).__name__
    if isinstance(replacement, nn.Module):
        hint = f"This is an instance; give its class, {found}."
    elif isinstance(replacement, str):
        hint = "This is a string; import the class and give the class itself."
    elif isinstance(replacement, functools.partial):
        hint = "This is a functools.partial; write a subclass whose __init__ sets these arguments."
    elif inspect.isroutine(replacement):
        hint = "This is a function; a patch takes the place of a class, so give a class."
    elif replacement is None:
        hint = "To leave a class alone, leave it out of the mapping or make the pattern narrower."
    else:
        hint = "Give a class, such as one that subclasses the original."
    raise MappingTypeError(f"Replacement for {key!r} must be a class, got {found}. {hint}")


@dataclass(frozen=True, slots=True)
class PatchRule:
    """One key with the class that takes the place of what the key matches.

    Raises:
        MappingError: The key can never match (see `check_key`), or the replacement is no module
            class (`MappingTypeError`).
    """

    key: str
    replacement: type[nn.Module]

    def __post_init__(self) -> None:
        check_key(self.key)
        check_replacement(self.key, self.replacement)

    @property
    def is_exact(self) -> bool:
        """Whether the key is an exact name."""
        return is_exact_name(self.key)

    def matches(self, class_name: str) -> bool:
        """Tell whether the key fits a class name, whichever rule decides in the end."""
        if is_exact_name(self.key):
            return self.key == class_name
        return compile_pattern(self.key).search(class_name) is not None


@dataclass(frozen=True, eq=False)
class PatchMapping:
    """The rules of a scope or of the registry, in order of registration; keys are unique.

    Compared by identity: two scopes with the same rules are two scopes.
    """

    rules: tuple[PatchRule, ...] = ()
    exact: dict[str, PatchRule] = field(init=False, repr=False)
    patterns: tuple[tuple[re.Pattern[str], PatchRule], ...] = field(init=False, repr=False)
    _decided: dict[str, PatchRule | None] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        exact = {rule.key: rule for rule in self.rules if rule.is_exact}
        patterns = tuple((compile_pattern(r.key), r) for r in self.rules if not r.is_exact)
        object.__setattr__(self, "exact", exact)
        object.__setattr__(self, "patterns", patterns)

    @classmethod
    def of(cls, mapping: Any) -> PatchMapping:
        """Build a mapping from a dict, refusing it whole if one rule can never work.

        Raises:
            MappingTypeError: `mapping` is no mapping, a key no string, or a replacement no module
                class.
            MappingError: A key that can never match.
        """
        if isinstance(mapping, PatchMapping):
            return mapping
        if not isinstance(mapping, Mapping):
            raise MappingTypeError(
                f"mapping must be a dict from key to replacement class, got "
                f"{brief(mapping)}. Write {{'LlamaMLP': MyMLP}}."
            )
        return cls(tuple(PatchRule(key, replacement) for key, replacement in mapping.items()))

    def find(self, class_name: str) -> PatchRule | None:
        """Find the rule that decides a class name: its exact name, else the first pattern."""
        # Asked once for each module that is built, with few different names: remembered. A plain
        # dict, since its reads and writes are atomic and computing twice does no harm.
        decided = self._decided.get(class_name, _UNDECIDED)
        if decided is not _UNDECIDED:
            return decided  # type: ignore[return-value]
        rule = self.exact.get(class_name)
        if rule is None:
            rule = next((r for p, r in self.patterns if p.search(class_name)), None)
        self._decided[class_name] = rule
        return rule

    def to_dict(self) -> dict[str, type[nn.Module]]:
        """Return the rules as the plain dict that transformers takes."""
        return {rule.key: rule.replacement for rule in self.rules}

    def __iter__(self) -> Iterator[PatchRule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)


def brief(value: Any) -> str:
    """Return the type of a value that was given by mistake, and the value where it is short."""
    found = type(value).__name__
    # A model's own text has as many lines as the model has modules.
    return found if isinstance(value, nn.Module) else f"{found} {reprlib.repr(value)}"


def _instead(key: str) -> str:
    """Say which key was probably meant by one that is no regular expression."""
    if "*" in key and _GLOB.match(key):
        body = key.replace("?", ".").replace("*", ".*")
        meant = body if body.startswith(".*") else "^" + body
        meant = meant[:-2] if meant.endswith(".*") and meant != ".*" else meant + "$"
        if meant in ("$", ".*$", ".*", "^", ""):
            return "Name the classes to replace, such as '.*Attention$'."
        return f"For {key!r} as a glob, use {meant!r}."
    return f"To match the text itself, use {re.escape(key)!r}."


def _key_text(key: Any) -> str:
    return type(key).__name__ if isinstance(key, nn.Module) else repr(key)


def _name_hint(key: Any) -> str:
    if isinstance(key, type):
        return f" To replace the class {key.__name__}, use {key.__name__!r}."
    if isinstance(key, re.Pattern):
        return f" Use the pattern's text, {key.pattern!r}."
    return ""
