"""The text of a patch file: header, imports, pieces, mapping, conversions, `register()`."""

from __future__ import annotations

import platform
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import transformers

from patchlab.mapping.rules import as_part
from patchlab.plan.findings import Finding
from patchlab.ship.code import WIDTH, Code, Group, layout, listed, quoted
from patchlab.ship.homes import Import, is_of_the_user
from patchlab.ship.pieces import Piece
from patchlab.ship.writing import MARK


@dataclass(frozen=True, slots=True)
class FileContent:
    """What a patch file says.

    Attributes:
        mapping: Key → the expression that names its replacement class.
        conversions: Model type or class name → code of its conversions.
        not_modules: Names of transformers' classes that a pattern fits and that are no modules.
    """

    mapping: Mapping[str, str]
    conversions: Mapping[str, Sequence[Code]]
    pieces: Sequence[Piece]
    imports: Iterable[Import]
    late_annotations: bool
    findings: Sequence[Finding]
    notes: Sequence[str]
    not_modules: Sequence[str]


def file_text(content: FileContent) -> str:
    """Return the whole file; the same content gives the same bytes."""
    imports = _without_parents(content.imports)
    blocks = [_header(content, imports)]
    if content.late_annotations:
        blocks.append("from __future__ import annotations\n")
    blocks += _import_blocks(imports)
    text = "\n".join(blocks)
    after_definition = False
    for piece in content.pieces:
        is_definition = piece.kind != "constant"
        first = piece is content.pieces[0]
        gap = 2 if is_definition or after_definition else 1 if first else 0
        text += "\n" * gap + piece.text
        after_definition = is_definition
    text += "\n" * (2 if after_definition else 1) + _tables(content)
    return text + "\n\n" + _register(content)


def _header(content: FileContent, imports: Sequence[Import]) -> str:
    versions = ", ".join(
        [
            # Not imported: a room that imports the root imports every room.
            f"patchlab {sys.modules['patchlab'].__version__}",
            f"transformers {transformers.__version__}",
            f"torch {torch.__version__}",
            f"Python {platform.python_version()}",
        ]
    )
    lines = [MARK, *_comment(f"Made with {versions}.")]
    roots = {imported.root for imported in imports}
    own = sorted({i.module for i in imports if is_of_the_user(i.module)} - {"patchlab"})
    needs = sorted(roots - set(sys.stdlib_module_names) - {i.partition(".")[0] for i in own})
    lines.append("#")
    how = (
        "Import it and call register() before the models are built; from_pretrained and "
        "from_config then build them with these classes. "
    )
    if "patchlab" in roots:
        how += "The classes themselves use patchlab, so it must be installed."
    else:
        how += "It works with patchlab, and without it as far as transformers' own patching goes."
    lines += _comment(how)
    if needs:
        lines += _comment(f"It imports {', '.join(needs)}.")
    if own:
        lines += _comment(
            f"It also imports {', '.join(own)}, which no package installs: it must be on the path "
            f"wherever this file is used."
        )
    lines.append("#")
    if not content.findings:
        lines += _comment("Findings when it was written: none.")
    else:
        lines += _comment("Findings when it was written:")
        for finding in content.findings:
            lines += _comment(f"{finding.severity} {finding}", hanging=True)
    for note in content.notes:
        lines += _comment(f"Note: {note}")
    return "\n".join(lines) + "\n"


def _comment(text: str, *, hanging: bool = False) -> list[str]:
    # Whatever a name or a pattern holds, a comment stays a comment.
    printable = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.wrap(
        printable,
        WIDTH,
        initial_indent="# - " if hanging else "# ",
        subsequent_indent="#   " if hanging else "# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _without_parents(imports: Iterable[Import]) -> list[Import]:
    """Imports in order, without `import xml` where `import xml.etree` binds the same name."""
    unique = sorted(set(imports), key=lambda i: (i.module, i.attribute, i.name))
    dotted = [i.module for i in unique if i.plain and i.name == i.module]
    return [
        i
        for i in unique
        if not (i.plain and i.name == i.module)
        or not any(module.startswith(i.module + ".") for module in dotted)
    ]


def _import_blocks(imports: Sequence[Import]) -> list[str]:
    """Imports in groups: Python's own, installed packages, the user's."""
    groups: list[list[Import]] = [[], [], []]
    for imported in imports:
        if imported.root in sys.stdlib_module_names:
            groups[0].append(imported)
        else:
            groups[2 if is_of_the_user(imported.module) else 1].append(imported)
    return ["\n".join(_import_lines(group)) + "\n" for group in groups if group]


def _import_lines(group: Sequence[Import]) -> list[str]:
    lines = []
    taken: dict[str, list[str]] = {}
    for imported in group:
        if imported.plain:
            renamed = "" if imported.name == imported.module else f" as {imported.name}"
            lines.append(f"import {imported.module}{renamed}")
        else:
            renamed = "" if imported.name == imported.attribute else f" as {imported.name}"
            taken.setdefault(imported.module, []).append(imported.attribute + renamed)
    for module, names in taken.items():
        start = f"from {module} import "
        flat = start + ", ".join(names)
        wrapped = Group("(", tuple(("", name) for name in names), ")")
        lines.append(flat if len(flat) <= WIDTH else start + layout(wrapped, used=WIDTH))
    return lines


def _tables(content: FileContent) -> str:
    items: list[tuple[str, Code]] = [
        (f"{quoted(as_part(key), raw=True)}: ", name) for key, name in content.mapping.items()
    ]
    tables = _assignment("MAPPING: dict[str, type]", Group("{", tuple(items), "}"))
    conversions: list[tuple[str, Code]] = [
        (f"{quoted(name)}: ", listed(list(codes))) for name, codes in content.conversions.items()
    ]
    tables += _assignment("CONVERSIONS: dict[str, list]", Group("{", tuple(conversions), "}"))
    if content.not_modules:
        names: list[Code] = [quoted(name) for name in content.not_modules]
        tables += "# Classes of transformers that a pattern fits and that are no modules.\n"
        tables += _assignment("NOT_MODULES: list[str]", listed(names))
    return tables


def _assignment(target: str, code: Code) -> str:
    start = f"{target} = "
    return start + layout(code, used=len(start)) + "\n"


def _register(content: FileContent) -> str:
    pattern = "key: cls for key, cls in MAPPING.items() if not key.isidentifier()"
    before = ""
    if content.not_modules:
        before = '        others = "|".join(NOT_MODULES)\n'
        pattern = (
            'f"^(?!(?:{others})$).*?(?:{key})": cls\n'
            "            for key, cls in MAPPING.items()\n"
            "            if not key.isidentifier()"
        )
        patterns = f"        patterns = {{\n            {pattern}\n        }}\n"
    else:
        patterns = f"        patterns = {{{pattern}}}\n"
    text = (
        "def register() -> dict[str, type]:\n"
        '    """Register what is above in this process, and return MAPPING; twice is once."""\n'
        "    try:\n"
        "        from patchlab import register_patch_mapping\n"
        "\n"
        "        mapping = MAPPING\n"
        "    except ModuleNotFoundError as error:\n"
        '        if error.name != "patchlab":\n'
        "            raise\n"
        "        from transformers.monkey_patching import register_patch_mapping\n"
        "\n"
        "        # transformers searches for names, too, takes the first key that fits, and\n"
        "        # replaces classes that are no modules. These keys mean the same to it.\n"
        f"{before}"
        '        names = {f"^{key}$": cls for key, cls in MAPPING.items() if key.isidentifier()}\n'
        f"{patterns}"
        "        mapping = names | patterns\n"
        "    register_patch_mapping(mapping, overwrite=True)\n"
    )
    if content.conversions:
        text += (
            "    from transformers.conversion_mapping import (\n"
            "        register_checkpoint_conversion_mapping,\n"
            "    )\n"
            "\n"
            "    for name, conversions in CONVERSIONS.items():\n"
            "        register_checkpoint_conversion_mapping("
            "name, list(conversions), overwrite=True)\n"
        )
    return text + "    return MAPPING\n"
