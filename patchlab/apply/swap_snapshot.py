"""What a factory finds in the module it is given, so that whatever it does there can be put back.

`from_original` is the user's code and has the live module in its hands. It may take parts out of
it, rename them, fail half-way. A swap that fails, and an undo, put the parts back.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from patchlab.apply.tensor_names import parts_of


class Snapshot:
    """The attributes of a module and its parts, with what is in their dicts."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(part, _state(part)) for part in parts_of(module).values()]
        self._changed: list[tuple[nn.Module, str]] = []

    def note_changes(self) -> None:
        """Note what has changed since; only that is put back."""
        self._changed = [
            (part, name)
            for part, before in self._before
            for name in {**before, **vars(part)}
            if not _same(before.get(name), vars(part).get(name))
        ]

    def put_back(self) -> None:
        """Give each attribute that was noted its old value; may be called again."""
        states = {id(part): before for part, before in self._before}
        for part, name in self._changed:
            before = states[id(part)].get(name)
            if before is None:
                vars(part).pop(name, None)
                continue
            value, content = before
            if content is not None and dict(value) != content:
                value.clear()
                value.update(content)
            vars(part)[name] = value

    @property
    def changed(self) -> bool:
        """Whether a change was noted."""
        return bool(self._changed)


_State = tuple[Any, dict[Any, Any] | None]


def _state(part: nn.Module) -> dict[str, _State]:
    return {
        name: (value, dict(value) if isinstance(value, dict) else None)
        for name, value in vars(part).items()
    }


def _same(before: _State | None, value: Any) -> bool:
    if before is None:
        return False
    old, content = before
    if old is not value:
        return False
    return content is None or (
        content.keys() == value.keys() and all(content[key] is value[key] for key in content)
    )
