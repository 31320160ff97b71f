// The outline: which rows of a tree are to be seen, and in what order. No DOM in here.
//
// A row is kept if it is on the tab shown and fits the search and the "changes only" switch. Kept
// siblings of one shape fold into one row, unless their marks or hits differ somewhere inside: what
// is matched, changed or found is never folded away.

import { MARKS, STATUSES } from "./payload.js";

/** @typedef {import("./payload.js").Columns} Columns */
/** @typedef {"before" | "after" | "diff"} Tab */
/** @typedef {{ hits: Uint8Array, count: number }} Found */

// Siblings of one shape that differ in marks are compared with as many groups as this at most; the
// rest stand alone. Keeps folding linear when every sibling is marked otherwise.
const MOST_VARIANTS = 12;
const FIRST_LOOK = 24; // Rows at most that are open at first.
const MOST_CHANGES = 300; // With more rows than this, what is replaced is not opened at first.
const SWALLOWED = MARKS.indexOf("swallowed");

export class Outline {
  /** @param {Columns} columns */
  constructor(columns) {
    const count = columns.rows;
    this.columns = columns;
    /** @type {Tab} */
    this.tab = columns.isDiff ? "diff" : "before";
    this.changesOnly = false;
    this.folding = true;
    /** @type {Uint8Array | null} */
    this.marks = null;
    /** @type {Found | null} */
    this.found = null;

    this.end = new Int32Array(count); // The row after the last one inside.
    this.parent = new Int32Array(count).fill(-1);
    this.open = new Uint8Array(count);
    /** What is open while a search or "changes only" is on; begins anew with each. */
    this.openFiltered = new Uint8Array(count);
    /** @type {Set<number>} First rows of groups that the user took apart. */
    this.unfolded = new Set();

    this.keep = new Uint8Array(count);
    /** First row of the fold group each row is in; itself where it stands alone. */
    this.group = new Int32Array(count);
    this.groupSize = new Int32Array(count);
    this.visible = new Int32Array(count);
    this.visibleCount = 0;
    this.position = new Int32Array(count).fill(-1); // In `visible`; -1 if not to be seen.
    this.placeInSet = new Int32Array(count);
    this.setSize = new Int32Array(count + 1); // By parent + 1.
    this.keptCount = count;

    const { depth } = columns;
    /** @type {number[]} */
    const path = [];
    for (let row = 0; row < count; row++) {
      while (path.length > depth[row]) this.end[/** @type {number} */ (path.pop())] = row;
      this.parent[row] = path.length ? path[path.length - 1] : -1;
      path.push(row);
    }
    for (const row of path) this.end[row] = count;
    /** @type {Uint8Array | undefined} What was open before there were marks. */
    this.openUnmarked = undefined;
    /** @type {string[] | undefined} */
    this.allFqns = undefined;
    this.openByDefault();
  }

  get filtered() {
    return this.found !== null || this.changesOnly;
  }

  get opened() {
    return this.filtered ? this.openFiltered : this.open;
  }

  /** Opens what makes a good first look: whatever holds a change, or the first few levels. */
  openByDefault() {
    const { columns, parent, open } = this;
    if (!columns.rows) return;
    open[0] = 1;
    if (columns.status.some((status) => status !== 0)) {
      for (let row = columns.rows - 1; row > 0; row--) {
        // What is in something added or removed follows from it, so that stays closed.
        const above = STATUSES[columns.status[parent[row]]];
        if ((columns.status[row] || open[row]) && above !== "added" && above !== "removed") {
          open[parent[row]] = 1;
        }
      }
      this.refilter();
      if (this.visibleCount > MOST_CHANGES) {
        for (let row = 1; row < columns.rows; row++) if (columns.status[row]) open[row] = 0;
        this.relist();
      }
      return;
    }
    this.refilter();
    for (let level = 1; ; level++) {
      const before = this.visibleCount;
      for (let row = 0; row < columns.rows; row++) if (columns.depth[row] === level) open[row] = 1;
      this.relist();
      if (this.visibleCount === before) return;
      if (this.visibleCount > FIRST_LOOK) {
        for (let row = 0; row < columns.rows; row++)
          if (columns.depth[row] === level) open[row] = 0;
        this.relist();
        return;
      }
    }
  }

  /**
   * Takes new marks and opens what holds them. The marks before are forgotten, with what they opened.
   * @param {Uint8Array | null} marks
   */
  setMarks(marks) {
    const { parent } = this;
    if (!this.marks) this.openUnmarked = this.open.slice();
    if (this.openUnmarked) this.open.set(this.openUnmarked);
    this.marks = marks;
    if (marks) {
      const holds = new Uint8Array(marks.length);
      for (let row = marks.length - 1; row > 0; row--) {
        const above = parent[row];
        // What a container swallows is shown one level deep: enough to see what it is.
        const deeper = marks[row] === SWALLOWED && marks[above] === SWALLOWED;
        if ((marks[row] && !deeper) || holds[row]) {
          holds[above] = 1;
          this.open[above] = 1;
        }
      }
    }
    this.refold();
  }

  /** @param {number} row */
  fqn(row) {
    const { names, name } = this.columns;
    let text = "";
    for (let at = row; at > 0; at = this.parent[at]) {
      text = text ? `${names[name[at]]}.${text}` : names[name[at]];
    }
    return text;
  }

  /** @returns {string[]} The FQN of each row. */
  fqns() {
    if (!this.allFqns) {
      const { names, name, rows } = this.columns;
      /** @type {string[]} */
      const all = new Array(rows);
      for (let row = 0; row < rows; row++) {
        const above = this.parent[row] > 0 ? all[this.parent[row]] : "";
        all[row] = row === 0 ? "" : above ? `${above}.${names[name[row]]}` : names[name[row]];
      }
      this.allFqns = all;
    }
    return this.allFqns;
  }

  /** @param {string} fqn @returns {number} The row, or -1. */
  find(fqn) {
    return this.columns.rows ? this.fqns().indexOf(fqn) : -1;
  }

  /** @param {number} row */
  hasChildren(row) {
    for (let at = row + 1; at < this.end[row]; at = this.end[at]) if (this.keep[at]) return true;
    return false;
  }

  /** Works out what is kept, after a change of tab, search or switch. */
  refilter() {
    const { columns, keep, parent, found, changesOnly, tab } = this;
    const { rows, before, after, status } = columns;
    /** @param {number} row */
    const there = (row) => tab === "diff" || (tab === "before" ? before : after)[row] !== 0;
    this.openFiltered.fill(0);
    keep.fill(0);
    this.keptCount = 0;
    for (let row = rows - 1; row >= 0; row--) {
      if (!there(row)) continue;
      this.keptCount++;
      const wanted = (!found || found.hits[row]) && (!changesOnly || status[row]);
      if (wanted) keep[row] = 1;
      if (keep[row] && row > 0) {
        keep[parent[row]] = 1;
        this.openFiltered[parent[row]] = 1;
      }
    }
    if (found && !changesOnly) {
      // What is inside a hit can still be looked at, by opening it.
      const inside = new Uint8Array(rows);
      for (let row = 1; row < rows; row++) {
        inside[row] = found.hits[parent[row]] || inside[parent[row]];
        if (inside[row] && there(row)) keep[row] = 1;
      }
    }
    this.refold();
  }

  /** Works out the fold groups, after a change of what is kept, or of the marks. */
  refold() {
    const { columns, keep, group, groupSize, end } = this;
    const { rows, shape } = columns;
    for (let row = 0; row < rows; row++) group[row] = row;
    groupSize.fill(1);
    if (this.folding) {
      for (let row = 0; row < rows; row++) {
        if (end[row] <= row + 2) continue; // One child or none.
        /** @type {Map<number, number[]>} */
        const firsts = new Map();
        for (let child = row + 1; child < end[row]; child = end[child]) {
          if (!keep[child]) continue;
          const variants = firsts.get(shape[child]);
          if (!variants) {
            firsts.set(shape[child], [child]);
            continue;
          }
          const like = variants.find((first) => this.looksLike(first, child));
          if (like !== undefined) {
            group[child] = like;
            groupSize[like]++;
          } else if (variants.length < MOST_VARIANTS) variants.push(child);
        }
      }
    }
    this.relist();
  }

  /** @param {number} first @param {number} second Two rows of one shape. */
  looksLike(first, second) {
    const { marks, found, keep, end } = this;
    const size = end[first] - first;
    if (size !== end[second] - second) return false;
    const hits = found && found.hits;
    for (let at = 0; at < size; at++) {
      if (marks && marks[first + at] !== marks[second + at]) return false;
      if (hits && hits[first + at] !== hits[second + at]) return false;
      if (keep[first + at] !== keep[second + at]) return false;
    }
    return true;
  }

  /** Lists the rows to be seen, after anything was opened, closed, folded or unfolded. */
  relist() {
    const { columns, keep, group, unfolded, visible, position, end, parent, setSize } = this;
    const open = this.opened;
    let count = 0;
    position.fill(-1);
    setSize.fill(0);
    for (let row = 0; row < columns.rows;) {
      if (!keep[row] || (group[row] !== row && !unfolded.has(group[row]))) {
        row = end[row];
        continue;
      }
      position[row] = count;
      visible[count++] = row;
      this.placeInSet[row] = ++setSize[parent[row] + 1];
      row = open[row] ? row + 1 : end[row];
    }
    this.visibleCount = count;
  }

  /** @param {number} row */
  isFolded(row) {
    return this.group[row] === row && this.groupSize[row] > 1 && !this.unfolded.has(row);
  }

  /** @param {number} row @returns {number[]} The rows of the group that a row stands for. */
  members(row) {
    /** @type {number[]} */
    const rows = [];
    const above = this.parent[row];
    if (above < 0) return [row];
    for (let at = above + 1; at < this.end[above]; at = this.end[at]) {
      if (this.group[at] === this.group[row]) rows.push(at);
    }
    return rows;
  }

  /** @param {number} row @param {boolean} [to] */
  toggle(row, to) {
    this.opened[row] = (to ?? !this.opened[row]) ? 1 : 0;
    this.relist();
  }

  /** @param {number} row A row of a group. */
  toggleFold(row) {
    const first = this.group[row];
    if (!this.unfolded.delete(first)) {
      this.unfolded.add(first);
      // Twelve open layers would hide the list that was asked for.
      for (const member of this.members(first)) if (member !== first) this.opened[member] = 0;
    }
    this.relist();
  }

  /** @param {boolean} to */
  openAll(to) {
    this.opened.fill(to ? 1 : 0);
    if (!to && this.columns.rows) this.opened[0] = 1;
    this.relist();
  }

  /** @param {number} row Opens its siblings as well. */
  openSiblings(row) {
    const above = this.parent[row];
    if (above < 0) this.opened[row] = 1;
    else for (let at = above + 1; at < this.end[above]; at = this.end[at]) this.opened[at] = 1;
    this.relist();
  }

  /**
   * Opens and unfolds whatever hides a row.
   * @param {number} row
   * @returns {boolean} Whether it can be seen now; not if the search or the tab leaves it out.
   */
  reveal(row) {
    if (!this.keep[row]) return false;
    for (let at = row; at >= 0; at = this.parent[at]) {
      if (this.group[at] !== at) this.unfolded.add(this.group[at]);
      if (at !== row) this.opened[at] = 1;
    }
    this.relist();
    return true;
  }
}
