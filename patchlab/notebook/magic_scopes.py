"""The scopes that `%%patched` opens: what is odd is told under the cell and not warned about."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from patchlab.errors import PatchlabWarning
from patchlab.plan.explain import raise_errors

if TYPE_CHECKING:
    from patchlab.apply.swap import Swap


class WithoutWarnings(AbstractContextManager[Any]):
    """A scope that does not warn when it is left."""

    def __init__(self, scope: AbstractContextManager[Any]) -> None:
        self._scope = scope

    def __enter__(self) -> Any:
        return self._scope.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PatchlabWarning)
            self._scope.__exit__(*exc_info)


class SwapForCell(AbstractContextManager[Any]):
    """A swap that is done when the cell begins and undone when it ends; yields the `Swap`.

    Args:
        mapping: None for what is registered.
        strict: Whether a finding that is an error undoes the swap and stops the cell.
    """

    def __init__(
        self,
        model: nn.Module,
        mapping: dict[str, type[nn.Module]] | None,
        conversions: Any,
        *,
        strict: bool,
    ) -> None:
        self._arguments = (model, mapping)
        self._conversions = conversions
        self._strict = strict
        self._swap: Swap | None = None

    def __enter__(self) -> Swap:
        from patchlab.apply.swap import swap

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PatchlabWarning)
            self._swap = swap(*self._arguments, conversions=self._conversions)
        if self._strict and not self._swap.ok:
            self._swap.undo()
            raise_errors("the cell was not run:", self._swap.findings)
        return self._swap

    def __exit__(self, *exc_info: Any) -> None:
        if self._swap is not None:
            self._swap.__exit__(*exc_info)
