// The entry that anywidget loads. All code is in one file: it comes from a Blob URL, from which a
// relative import cannot resolve.

import "./tree.css";
import { TreeView } from "./view.js";

/** @param {{ model: import("./traits.js").Model, el: HTMLElement }} context */
function render({ model, el }) {
  const view = new TreeView(model, el);
  return () => view.destroy();
}

export default { render };
