"""A button that copies a line of Python.

It is the one part of the form that needs the browser: only there can the clipboard be written. It
also tells JupyterLab to leave the keys alone that are pressed in the form, where Enter on a button
would otherwise begin to edit the cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

_ESM = """
const FRAME = ".patchlab-lab, .patchlab-form";

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
    const frame = requestAnimationFrame(() => {
      for (let at = el.closest(FRAME); at; at = at.parentElement?.closest(FRAME)) {
        at.dataset.lmSuppressShortcuts = "true";
      }
    });
    return () => {
      cancelAnimationFrame(frame);
      model.off("change:code", draw);
    };
  },
};
"""


class CopyButton(anywidget.AnyWidget):
    """The button; `code` is what it copies, "" for nothing yet."""

    _esm = _ESM

    code = traitlets.Unicode("").tag(sync=True)

    def __init__(self, on_copy: Callable[[], None], **traits: Any) -> None:
        """Make the button.

        Args:
            on_copy: Called when it is clicked, also with nothing to copy.
            **traits: Initial traits.
        """
        super().__init__(**traits)
        self._on_copy = on_copy
        self.on_msg(self._receive)

    def click(self) -> None:
        """Do what a click does, but for the clipboard."""
        self._on_copy()

    def _receive(self, _widget: Any, content: Any, _buffers: Any) -> None:
        if isinstance(content, dict) and content.get("type") == "copy":
            self.click()
