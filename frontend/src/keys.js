// The keyboard of the rows, as the ARIA Authoring Practices want it of a tree.

import { nameOf } from "./wording.js";

const TYPE_AHEAD = 700; // Milliseconds in which letters belong to one word.

export class Keys {
  /** @param {import("./grid.js").Grid} grid */
  constructor(grid) {
    this.grid = grid;
    this.typed = "";
    this.typedAt = 0;
  }

  /** @param {KeyboardEvent} event */
  pressed(event) {
    if (this.grid.active < 0) return;
    if ((event.ctrlKey || event.metaKey) && event.key === "c") {
      if (getSelection()?.isCollapsed ?? true) this.grid.onCopy();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (!this.act(event.key, event.shiftKey)) return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** @param {string} key @param {boolean} shift @returns {boolean} Whether the key means anything. */
  act(key, shift) {
    const { grid } = this;
    const { outline, active } = grid;
    const at = outline.position[active];
    const page = grid.rowsOnScreen();
    const branch = outline.hasChildren(active);
    const opened = branch && Boolean(outline.opened[active]);
    /** @param {number} to */
    const go = (to) =>
      grid.activate(outline.visible[Math.max(0, Math.min(outline.visibleCount - 1, to))]);
    if (key === "ArrowDown") go(at + 1);
    else if (key === "ArrowUp") go(at - 1);
    else if (key === "PageDown") go(at + page);
    else if (key === "PageUp") go(at - page);
    else if (key === "Home") go(0);
    else if (key === "End") go(outline.visibleCount - 1);
    else if (key === "ArrowRight") {
      if (opened) go(at + 1);
      else if (branch) this.change(() => outline.toggle(active, true));
    } else if (key === "ArrowLeft") {
      if (opened) this.change(() => outline.toggle(active, false));
      else if (outline.parent[active] >= 0) grid.activate(outline.parent[active]);
    } else if (key === "Enter" && shift) this.change(() => this.toggleFold(active));
    else if (key === "Enter" || key === " ") {
      if (branch) this.change(() => outline.toggle(active));
      grid.activate(active);
    } else if (key === "*") this.change(() => outline.openSiblings(active));
    else if (key === "/") grid.onSearch();
    else if ([...key].length === 1) this.typeAhead(key);
    else return false;
    return true;
  }

  /** @param {() => void} work Changes the outline. */
  change(work) {
    work();
    this.grid.refresh();
    this.grid.activate(this.grid.active, { tell: false });
  }

  /** @param {number} row */
  toggleFold(row) {
    const { outline } = this.grid;
    const first = outline.group[row];
    if (outline.groupSize[first] < 2) return;
    outline.toggleFold(row);
    if (outline.position[row] < 0) this.grid.active = first;
  }

  /** @param {string} letter */
  typeAhead(letter) {
    const { outline, active } = this.grid;
    const now = performance.now();
    if (now - this.typedAt > TYPE_AHEAD) this.typed = "";
    this.typedAt = now;
    // The same letter again goes on to the next name; another one makes the word longer.
    if (this.typed !== letter) this.typed += letter;
    const from = outline.position[active] + (this.typed.length > 1 ? 0 : 1);
    const wanted = this.typed.toLowerCase();
    for (let step = 0; step < outline.visibleCount; step++) {
      const row = outline.visible[(from + step) % outline.visibleCount];
      if (nameOf(outline, row).toLowerCase().startsWith(wanted)) {
        this.grid.activate(row);
        return;
      }
    }
  }
}
