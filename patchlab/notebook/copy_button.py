"""A button that copies a line of Python.

It is the one part of the form that needs the browser: only there can the clipboard be written. It
also tells JupyterLab to leave the keys alone that are pressed in the form, where Enter on a button
would otherwise begin to edit the cell; it makes the verdict one that screen readers read out, which
needs an attribute that no widget has; and it says whether the form is on the screen, so that one
whose cell has been run again does not go on working.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

_ESM = """
// JupyterLab asks the element that has the focus, and none around it. Text fields keep their keys
// anyway.
function keepKeys({ target }) {
  if (!target.matches("input[type=text]")) target.dataset.lmSuppressShortcuts = "true";
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // No permission, or no secure context: the line is shown to be selected.
  }
}

export default {
  render({ model, el }) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "patchlab-button";
    const draw = () => {
      button.textContent = "Copy as code";
      button.title = model.get("code") || "The form is not complete yet";
    };
    const click = async () => {
      model.send({ type: "copy" });
      const code = model.get("code");
      if (code && (await copy(code))) button.textContent = "Copied";
    };
    button.addEventListener("click", click);
    model.on("change:code", draw);
    draw();
    el.append(button);
    model.send({ type: "shown" });
    let form = null;
    const frame = requestAnimationFrame(() => {
      form = el.closest(".patchlab-lab") ?? el.closest(".patchlab-form");
      form?.addEventListener("focusin", keepKeys);
      // What is read out when it changes must be there before it does.
      for (const live of form?.querySelectorAll(".patchlab-live") ?? []) {
        live.setAttribute("role", "status");
      }
    });
    return () => {
      cancelAnimationFrame(frame);
      form?.removeEventListener("focusin", keepKeys);
      model.send({ type: "hidden" });
      model.off("change:code", draw);
    };
  },
};
"""


class CopyButton(anywidget.AnyWidget):
    """The button; `code` is what it copies, "" for nothing yet."""

    _esm = _ESM

    code = traitlets.Unicode("").tag(sync=True)

    def __init__(self, on_copy: Callable[[], None], on_shown: Callable[[], None]) -> None:
        """Make the button.

        Args:
            on_copy: Called when it is clicked, also with nothing to copy.
            on_shown: Called when it comes on the screen.
        """
        super().__init__()
        self._on_copy, self._on_shown = on_copy, on_shown
        self._views: int | None = None
        self.on_msg(self._receive)

    @property
    def was_closed(self) -> bool:
        """Whether it was on a screen and is on none any more."""
        return self._views == 0

    def click(self) -> None:
        """Do what a click does, but for the clipboard."""
        self._on_copy()

    def _receive(self, _widget: Any, content: Any, _buffers: Any) -> None:
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "copy":
            self.click()
        elif kind == "shown":
            self._views = (self._views or 0) + 1
            self._on_shown()
        elif kind == "hidden":
            self._views = max(0, (self._views or 0) - 1)
