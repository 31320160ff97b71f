"""Suggestions: the key that was probably meant by one that matches too much.

A suggestion keeps every matched class that is no container, drops every container, and matches no
name that the key at hand does not match, among all classes of the installed transformers, modules
or not. It can be registered as it stands. For 828 of 828 trapped pairs of architecture and pattern
in transformers 5.24.0 there is one.

The forms are tried in the order in which they read well: the names themselves if they are few, the
same key with an anchor, a longer list of names, a few common endings, the same key with the
containers taken out in front. Where a tree is at hand, a key for the classes that are in it goes
before a long one that also keeps what another config would bring in.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from patchlab.errors import MappingError
from patchlab.mapping.rules import check_key, is_exact_name
from patchlab.model.catalog import Catalog

Form = Literal["names", "anchor", "endings", "exclusion", "list"]

_FEW_NAMES = 3
_FEW_ENDINGS = 4
# How much shorter a key must be that keeps less than it could, where neither is readable.
_FOR_LESS = 1.25
READABLE = 60  # characters; a longer key is taken only if no form gives a shorter one
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z]*|\d+|[^A-Z\d]+")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A narrower key.

    Attributes:
        key: The key, ready to be registered.
        form: How it was made.
        keeps: Class names that it matches in the scope, sorted: all that are no container, or,
            where the key for all would not be readable, those of the built tree.
        drops: The containers that it leaves alone, sorted.
        built: Those of `keeps` that a module of the built tree is of, sorted; empty without a tree.
        elsewhere: Model types, none of whose classes the key at hand matches in the scope, in which
            it matches a class too, sorted.
    """

    key: str
    form: Form
    keeps: tuple[str, ...]
    drops: tuple[str, ...]
    built: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.key


def suggest_key(
    key: str,
    matched_classes: Iterable[str],
    containers: Iterable[str],
    catalog: Catalog,
    *,
    built_classes: Collection[str] = (),
) -> Suggestion | None:
    """Find the narrower key.

    Args:
        key: The key that matches too much.
        matched_classes: Names of the classes that it matches in the scope: those of the tree, and
            those that the catalog says the architecture can hold.
        containers: Names of those that must be dropped.
        catalog: The classes of the installed transformers; nothing new may be matched among them.
        built_classes: Names of the classes in the built tree, if there is one.

    Returns:
        None if nothing is left once the containers are dropped, or no form will do.
    """
    matched = set(matched_classes)
    drops = sorted(matched & set(containers))
    leaves = sorted(matched - set(drops))
    if not leaves or not drops:
        return None
    built = [name for name in leaves if name in set(built_classes)]
    refused = [*_not_matched(key, catalog), *drops]
    # Looked at one by one, since each costs a search through 10,000 names.
    best: tuple[float, Form, str] | None = None
    for form, candidate, kept in _candidates(key, leaves, built, drops, refused):
        length = len(candidate) * (1 if len(kept) == len(leaves) else _FOR_LESS)
        if (best is None or length < best[0]) and _is_right(candidate, kept, refused):
            best = length, form, candidate
            if len(candidate) <= READABLE:
                break
    if best is None:
        return None
    _, form, narrower = best
    keeps = tuple(filter(_searcher(narrower), leaves))
    return Suggestion(
        key=narrower,
        form=form,
        keeps=keeps,
        drops=tuple(drops),
        built=tuple(name for name in keeps if name in built),
        elsewhere=_elsewhere(narrower, matched, catalog),
    )


@functools.lru_cache(maxsize=16)
def _not_matched(key: str, catalog: Catalog) -> tuple[str, ...]:
    """Return the names of transformers that a key does not match; a survey asks for each family."""
    search = _searcher(key)
    names = [*dict.fromkeys(catalog.names), *catalog.other_names]
    return tuple(name for name in names if not search(name))


def _searcher(key: str) -> Callable[[str], object]:
    if is_exact_name(key):
        return lambda name: name == key
    return re.compile(key).search


def _is_right(candidate: str, leaves: Sequence[str], refused: Sequence[str]) -> bool:
    try:
        check_key(candidate)
    except MappingError:
        return False
    search = _searcher(candidate)
    return all(map(search, leaves)) and not any(map(search, refused))


def _candidates(
    key: str,
    leaves: Sequence[str],
    built: Sequence[str],
    drops: Sequence[str],
    refused: Sequence[str],
) -> Iterator[tuple[Form, str, Sequence[str]]]:
    """Yield keys to try, each with the names that it must keep: all leaves, or those built."""
    names = f"^{alternatives(leaves)}$"
    if len(leaves) <= _FEW_NAMES:
        yield "names", names, leaves
    if not key.endswith("$"):
        yield "anchor", f"{key}$", leaves
    if not key.startswith(("^", ".*")):
        yield "anchor", f"^{key}", leaves
        if not key.endswith("$"):
            yield "anchor", f"^{key}$", leaves
    endings = _common_endings(leaves, refused)
    if len(endings) == 1:
        yield "endings", f"{alternatives(endings)}$", leaves
    if len(names) <= READABLE:
        yield "list", names, leaves
    if len(endings) > 1:
        yield "endings", f"{alternatives(endings)}$", leaves
    if built:
        form: Form = "names" if len(built) <= _FEW_NAMES else "list"
        yield form, f"^{alternatives(built)}$", built
    if key.startswith(("^", ".*")):
        body = key.removeprefix("^")
    else:
        body = f".*(?:{key})" if "|" in key else f".*{key}"
    yield "exclusion", f"^(?!{alternatives(drops)}$){body}", leaves
    yield "list", names, leaves


def _common_endings(leaves: Sequence[str], refused: Sequence[str]) -> tuple[str, ...]:
    """Cover the leaves with a few endings that no refused name has; empty if a few do not do."""
    # One string of all refused names, so that an ending is looked for once and not 10,000 times.
    refused_ends = "\n".join(refused) + "\n"
    covers: dict[str, set[str]] = {}
    for leaf in leaves:
        parts = words(leaf)
        for start, word in enumerate(parts):
            if start and (len(word) == 1 or not word[0].isalpha()):
                continue  # "TModel", "3VideoModel": short, and no name to a reader
            ending = "".join(parts[start:])
            if ending not in covers and f"{ending}\n" not in refused_ends:
                covers[ending] = {name for name in leaves if name.endswith(ending)}
    chosen: list[str] = []
    left = set(leaves)
    while left:
        best = min(covers, key=lambda e: (-len(covers[e] & left), len(e), e), default="")
        if not best or not covers[best] & left or len(chosen) == _FEW_ENDINGS:
            return ()
        chosen.append(best)
        left -= covers[best]
    return tuple(sorted(chosen))


def words(class_name: str) -> list[str]:
    """Split a class name into its words.

    Example:
        >>> words("Wav2Vec2SdpaMLPBlock")
        ['Wav', '2', 'Vec', '2', 'Sdpa', 'MLP', 'Block']
    """
    return _WORD.findall(class_name)


def alternatives(names: Sequence[str]) -> str:
    """Write names as one pattern, with what all of them begin and end with written once.

    Example:
        >>> alternatives(["BertCrossAttention", "BertSelfAttention"])
        'Bert(?:Cross|Self)Attention'
    """
    split = [words(name) for name in sorted(set(names))]
    if len(split) == 1:
        return re.escape("".join(split[0]))
    shortest = min(map(len, split))
    start = 0
    while start < shortest and len({parts[start] for parts in split}) == 1:
        start += 1
    end = 0
    while end < shortest - start and len({parts[-1 - end] for parts in split}) == 1:
        end += 1
    middles = ["".join(parts[start : len(parts) - end]) for parts in split]
    optional = "?" if "" in middles else ""
    listed = "|".join(re.escape(middle) for middle in middles if middle)
    head = re.escape("".join(split[0][:start]))
    tail = re.escape("".join(split[0][len(split[0]) - end :]))
    return f"{head}(?:{listed}){optional}{tail}"


def _elsewhere(key: str, matched: Collection[str], catalog: Catalog) -> tuple[str, ...]:
    search = _searcher(key)
    home = {catalog.model_type(entry.number) for name in matched for entry in catalog.named(name)}
    found = {
        catalog.model_type(number) for number, name in enumerate(catalog.names) if search(name)
    }
    return tuple(sorted(found - home - {""}))
