// What the tests share: widgets as Python made them, and the browser's end of a widget's model.

import { Outline } from "../src/outline.js";
import { readTree } from "../src/payload.js";
import diff from "./fixtures/diff.json";
import odd from "./fixtures/odd.json";
import tree from "./fixtures/tree.json";

const FIXTURES = { diff, odd, tree };

/** @param {string} base64 */
export const decode = (base64) => {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return new DataView(bytes.buffer);
};

/** @param {"tree" | "diff" | "odd"} name @returns {any} */
export function traits(name) {
  const values = structuredClone(FIXTURES[name]);
  return { ...values, payload: decode(values.payload), highlight: decode(values.highlight) };
}

/** @param {"tree" | "diff" | "odd"} name */
export const outline = (name) => new Outline(readTree(traits(name).payload));

/** @param {Outline} shown @returns {string[]} The FQNs to be seen. */
export const seen = (shown) =>
  [...shown.visible.subarray(0, shown.visibleCount)].map((row) => shown.fqn(row));

/** The part of anywidget's model that a view may use, and a count of its listeners. */
export class Model {
  /** @param {any} values */
  constructor(values) {
    this.values = values;
    /** @type {Map<string, Set<() => void>>} */
    this.listeners = new Map();
    /** @type {any[]} */
    this.sent = [];
    this.saved = 0;
  }
  /** @param {string} name */
  get(name) {
    return this.values[name];
  }
  /** @param {string} name @param {any} value */
  set(name, value) {
    if (Object.is(this.values[name], value)) return;
    this.values[name] = value;
    for (const work of [...(this.listeners.get(`change:${name}`) ?? [])]) work();
  }
  save_changes() {
    this.saved++;
  }
  /** @param {any} message */
  send(message) {
    this.sent.push(message);
  }
  /** @param {string} event @param {() => void} work */
  on(event, work) {
    this.listeners.set(event, (this.listeners.get(event) ?? new Set()).add(work));
  }
  /** @param {string} event @param {() => void} work */
  off(event, work) {
    this.listeners.get(event)?.delete(work);
  }
  get listening() {
    return [...this.listeners.values()].reduce((sum, works) => sum + works.size, 0);
  }
}
