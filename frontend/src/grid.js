// The rows on the screen: a tree of which only what can be seen is in the document.
//
// The role is "tree", since rows and not cells take the focus; each row is read out as one sentence.
// Exactly one row can be tabbed to. It stays in the document when it is scrolled away, so that the
// keyboard never loses its place.

import { make, set } from "./dom.js";
import { exact } from "./format.js";
import { Keys } from "./keys.js";
import {
  classesOf,
  countOf,
  explain,
  foldName,
  nameOf,
  relation,
  shareOf,
  stateOf,
} from "./wording.js";

/** @typedef {import("./outline.js").Outline} Outline */
/** @typedef {{ element: HTMLElement, chevron: HTMLElement, label: HTMLElement, fold: HTMLElement,
 *   cls: HTMLElement, number: HTMLElement, change: HTMLElement, row: number, at: number }} Line */

const ROW_HEIGHT = 24;
const OVERSCAN = 4;

export class Grid {
  /**
   * @param {object} options
   * @param {Outline} options.outline
   * @param {(row: number) => void} options.onActive The user moved to a row.
   * @param {() => void} options.onSearch The user pressed "/".
   * @param {() => void} options.onCopy The user pressed Ctrl+C or ⌘C.
   * @param {(work: () => void) => void} options.guard Runs a handler and reports its error.
   */
  constructor({ outline, onActive, onSearch, onCopy, guard }) {
    this.outline = outline;
    this.onActive = onActive;
    this.onSearch = onSearch;
    this.onCopy = onCopy;
    this.guard = guard;
    this.active = 0;
    this.selected = -1;
    /** @type {import("./search.js").Matcher | null} */
    this.matcher = null;
    /** @type {Map<number, Line>} Lines in use, by row. */
    this.lines = new Map();
    /** @type {Line[]} */
    this.spare = [];
    /** @type {Map<number, string>} */
    this.foldNames = new Map();
    this.keys = new Keys(this);
    this.frame = 0;
    this.leastHeight = 0;

    this.tree = make("div", { class: "rows", role: "tree", "aria-label": "Modules" });
    this.element = make(
      "div",
      { class: "scroller" },
      make(
        "div",
        { class: "row head", "aria-hidden": "true" },
        make("span", {}, "Module"),
        make("span", {}, "Class"),
        make("span", { class: "num" }, "Parameters"),
        make("span", {}, outline.columns.isDiff ? "Change" : "Note"),
      ),
      this.tree,
      make("div", { class: "nothing", hidden: true }),
    );
    this.nothing = /** @type {HTMLElement} */ (this.element.lastElementChild);
    this.element.addEventListener("scroll", () => this.schedule(), { passive: true });
    this.tree.addEventListener("keydown", (event) => guard(() => this.keys.pressed(event)));
    this.tree.addEventListener("click", (event) => guard(() => this.clicked(event)));
    this.tree.addEventListener("dblclick", (event) => guard(() => this.clickedTwice(event)));
    this.observer = new ResizeObserver(() => this.schedule());
    this.observer.observe(this.element);
  }

  destroy() {
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
  }

  /** Draws anew after the outline has changed. */
  refresh() {
    const { outline } = this;
    if (outline.position[this.active] < 0 || this.active >= outline.columns.rows) {
      this.active = this.nearestVisible(this.active);
    }
    const height = outline.visibleCount * ROW_HEIGHT;
    this.tree.style.height = `${height}px`;
    // The view grows with what is opened but does not shrink under the pointer.
    this.leastHeight = Math.max(this.leastHeight, Math.min(height + ROW_HEIGHT + 4, 480));
    this.element.style.minHeight = `${this.leastHeight}px`;
    this.foldNames.clear();
    const focused = this.hasFocus();
    for (const line of this.lines.values()) line.at = -1;
    this.paint();
    if (focused) this.lines.get(this.active)?.element.focus({ preventScroll: true });
  }

  /** @param {number} row @returns {number} The row itself, or the nearest one around it to be seen. */
  nearestVisible(row) {
    const { outline } = this;
    for (let at = row; at >= 0; at = outline.parent[at]) {
      if (outline.position[at] >= 0) return at;
      const first = outline.group[at];
      if (outline.position[first] >= 0) return first;
    }
    return outline.visibleCount ? outline.visible[0] : -1;
  }

  rowsOnScreen() {
    return Math.max(1, Math.floor(this.element.clientHeight / ROW_HEIGHT) - 2);
  }

  hasFocus() {
    const root = /** @type {Document | ShadowRoot} */ (this.tree.getRootNode());
    return Boolean(root.activeElement && this.tree.contains(root.activeElement));
  }

  schedule() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.guard(() => this.paint());
    });
  }

  paint() {
    const { outline, element } = this;
    const height = element.clientHeight || 480;
    const top = element.scrollTop;
    const first = Math.max(0, Math.floor(top / ROW_HEIGHT) - OVERSCAN);
    const last = Math.min(outline.visibleCount, Math.ceil((top + height) / ROW_HEIGHT) + OVERSCAN);
    /** @type {Set<number>} */
    const wanted = new Set();
    for (let at = first; at < last; at++) wanted.add(outline.visible[at]);
    if (this.active >= 0) wanted.add(this.active);
    for (const [row, line] of this.lines) {
      if (wanted.has(row)) continue;
      this.lines.delete(row);
      line.element.hidden = true;
      this.spare.push(line);
    }
    for (const row of wanted) {
      let line = this.lines.get(row);
      if (!line) {
        line = this.spare.pop() ?? this.makeLine();
        line.row = row;
        line.at = -1;
        this.lines.set(row, line);
      }
      if (line.at < 0) this.fill(line);
      line.element.tabIndex = row === this.active ? 0 : -1;
      set(line.element, "aria-selected", String(row === this.selected));
    }
  }

  /** @returns {Line} */
  makeLine() {
    const chevron = make("span", { class: "chevron" });
    const label = make("span", { class: "label" });
    const fold = make("span", { class: "fold" });
    const cls = make("span", { class: "cls" });
    const number = make("span", { class: "num" });
    const change = make("span", { class: "change" });
    const name = make("span", { class: "name" }, chevron, label, fold);
    const element = make("div", { class: "row", role: "treeitem" }, name, cls, number, change);
    this.tree.append(element);
    return { element, chevron, label, fold, cls, number, change, row: -1, at: -1 };
  }

  /** @param {Line} line */
  fill(line) {
    const { outline } = this;
    const { columns } = outline;
    const { row, element } = line;
    line.at = outline.position[row];
    element.hidden = false;
    element.style.transform = `translateY(${line.at * ROW_HEIGHT}px)`;
    element.style.setProperty("--depth", String(columns.depth[row]));
    element.dataset.row = String(row);

    const { mark, status, note, word } = stateOf(outline, row);
    set(element, "data-mark", mark === "none" ? null : mark);
    set(element, "data-status", status === "same" ? null : status);
    element.classList.toggle("hit", Boolean(outline.found?.hits[row]));

    const branch = outline.hasChildren(row);
    const opened = branch && Boolean(outline.opened[row]);
    set(element, "aria-expanded", branch ? String(opened) : null);
    set(element, "aria-level", columns.depth[row] + 1);
    set(element, "aria-posinset", outline.placeInSet[row]);
    set(element, "aria-setsize", outline.setSize[outline.parent[row] + 1]);

    const size = outline.group[row] === row ? outline.groupSize[row] : 1;
    const folded = outline.isFolded(row);
    const name = folded ? this.foldNameOf(row) : nameOf(outline, row);
    this.write(line.label, name);
    line.label.title = folded ? `${name}, all equal` : outline.fqn(row);
    line.fold.hidden = size === 1;
    line.fold.textContent = size === 1 ? "" : folded ? `× ${exact(size)}` : `fold ${exact(size)}`;
    line.fold.title = folded ? "Show each (Shift+Enter)" : "Fold again (Shift+Enter)";

    const className = this.fillClass(line.cls, row);
    const [shown, title] = countOf(outline, row);
    line.number.textContent = shown;
    line.number.title = title;
    element.style.setProperty("--share", String(shareOf(outline, row)));

    line.change.textContent = word;
    line.change.title = `${explain(outline, row)}\n${relation(outline, row)}`.trim();
    set(line.change, "data-note", note || null);

    const parts = [name];
    if (folded) parts.push(`${exact(size)} equal modules`);
    parts.push(className, `${shown} parameters`);
    if (word) parts.push(word);
    if (status !== "same" && word !== status) parts.push(status);
    set(element, "aria-label", parts.join(", "));
  }

  /** @param {number} row */
  foldNameOf(row) {
    const name = this.foldNames.get(row) ?? foldName(this.outline, row);
    this.foldNames.set(row, name);
    return name;
  }

  /** @param {HTMLElement} cell @param {number} row @returns {string} What it says. */
  fillClass(cell, row) {
    const { classes } = this.outline.columns;
    const indices = classesOf(this.outline, row);
    const names = indices.map((index) => classes[index - 1][0]);
    cell.title = indices.map((index) => classes[index - 1].toReversed().join(".")).join("\n→ ");
    if (names.length < 2) this.write(cell, names[0] ?? "");
    else cell.replaceChildren(make("s", {}, names[0]), make("b", {}, names[1]));
    return names.join(" becomes ");
  }

  /** Writes text and marks what the search found in it. @param {HTMLElement} cell @param {string} text */
  write(cell, text) {
    const span = this.matcher?.(text);
    if (!span || span[0] === span[1]) cell.textContent = text;
    else {
      cell.replaceChildren(
        text.slice(0, span[0]),
        make("mark", {}, text.slice(...span)),
        text.slice(span[1]),
      );
    }
  }

  /** @param {number} row @param {{ focus?: boolean, tell?: boolean }} [options] */
  activate(row, { focus = true, tell = true } = {}) {
    const at = this.outline.position[row];
    if (!(at >= 0)) return;
    this.active = row;
    const top = at * ROW_HEIGHT;
    const room = (this.element.clientHeight || 480) - 2 * ROW_HEIGHT;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top > this.element.scrollTop + room) this.element.scrollTop = top - room;
    if (tell) this.selected = row;
    this.paint();
    if (focus) this.lines.get(row)?.element.focus({ preventScroll: true });
    if (tell) this.onActive(row);
  }

  /** @param {Event} event */
  lineOf(event) {
    const element = /** @type {Element} */ (event.target).closest?.("[data-row]");
    return element ? Number(/** @type {HTMLElement} */ (element).dataset.row) : -1;
  }

  /** @param {MouseEvent} event */
  clicked(event) {
    const row = this.lineOf(event);
    if (row < 0) return;
    const { classList } = /** @type {Element} */ (event.target);
    if (classList.contains("chevron")) this.outline.toggle(row);
    else if (classList.contains("fold")) this.outline.toggleFold(row);
    this.refresh();
    this.activate(row);
  }

  /** @param {MouseEvent} event */
  clickedTwice(event) {
    const row = this.lineOf(event);
    const { classList } = /** @type {Element} */ (event.target);
    if (row < 0 || classList.contains("chevron") || classList.contains("fold")) return;
    this.outline.toggle(row);
    this.refresh();
  }
}
