// Whatever a kernel of another version, or a hand, puts into a widget's traits: nothing is thrown,
// and what cannot be shown is said in the widget and told to Python.

import { describe, expect, test, vi } from "vitest";
import routing from "../src/routing.js";
import tree from "../src/tree.js";
import { Model, traits } from "./setup.js";

vi.setConfig({ testTimeout: 60_000 }); // Hundreds of widgets; a busy machine takes its time.

/** Numbers that are the same each time (mulberry32). @param {number} seed */
function numbersFrom(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const TEXTS = ["", "<img src=x onerror=alert(1)>", "__proto__", "\u0000", "a".repeat(3000), "ẞ"];
const NUMBERS = [0, -1, 1, 0.5, 7, 2 ** 31, 2 ** 53, Infinity, NaN];

/** Some value of any kind. @param {() => number} random @param {number} depth @returns {any} */
function anything(random, depth = 0) {
  const pick = (/** @type {any[]} */ from) => from[Math.floor(random() * from.length)];
  const several = () => Array.from({ length: Math.floor(random() * 4) });
  const kinds = [
    () => null,
    () => undefined,
    () => random() < 0.5,
    () => pick(NUMBERS),
    () => pick(TEXTS),
    () => new DataView(Uint8Array.from(several(), () => random() * 256).buffer),
    () => several().map(() => anything(random, depth + 1)),
    () => Object.fromEntries(several().map(() => [pick(TEXTS), anything(random, depth + 1)])),
  ];
  return pick(depth > 2 ? kinds.slice(0, 6) : kinds)();
}

/** Puts something else into one place of a value. @param {any} value @param {() => number} random @returns {any} */
function damaged(value, random) {
  if (value instanceof DataView) {
    const bytes = new Uint8Array(value.buffer.slice(0));
    if (!bytes.length || random() < 0.3) return anything(random);
    if (random() < 0.5) return new DataView(bytes.buffer, 0, Math.floor(random() * bytes.length));
    bytes[Math.floor(random() * bytes.length)] = Math.floor(random() * 256);
    return new DataView(bytes.buffer);
  }
  if (value === null || typeof value !== "object" || random() < 0.2) return anything(random);
  const copy = Array.isArray(value) ? [...value] : { ...value };
  const keys = Object.keys(copy);
  if (!keys.length) return anything(random);
  const key = keys[Math.floor(random() * keys.length)];
  if (random() < 0.2) delete copy[key];
  else copy[key] = damaged(copy[key], random);
  return copy;
}

const trace = () => ({
  facts: {
    caption: "toy",
    layers: [1, 3],
    routers: ["layers.1.gate", "layers.3.gate"],
    load: [
      [4, 2, 0, 0],
      [1, 1, 2, 2],
    ],
    top_k: 2,
    tokens: 3,
    all_tokens: 5,
    names: ["<b>", "two", "three"],
    compared: true,
  },
  view: "tokens",
  cell: [0, 1],
  experts: new DataView(Int16Array.from([0, 1, 0, 1, 0, 1, 2, 3, 3, 0, -1, -1]).buffer),
  other_experts: new DataView(Int16Array.from([0, 1, 0, 2, 2, 3, 2, 3, 3, 0, 1, 2]).buffer),
});

const WIDGETS = /** @type {[string, any, () => any, number][]} */ ([
  ["routing", routing, trace, 300],
  ["tree", tree, () => traits("diff"), 80],
]);

describe.each(WIDGETS)("the %s widget", (name, widget, whole, runs) => {
  test("shows or refuses whatever it is made from", () => {
    let refused = 0;
    for (let seed = 0; seed < runs; seed++) {
      const random = numbersFrom(seed);
      /** @type {any} */
      const values = whole();
      const keys = Object.keys(values);
      const key = keys[Math.floor(random() * keys.length)];
      values[key] = damaged(values[key], random);
      const model = new Model(values);
      const el = document.createElement("div");
      document.body.append(el);
      const leave = widget.render({ model, el });
      const alert = el.querySelector('[role="alert"]');
      expect(el.querySelector("img, b[onerror]"), `seed ${seed}`).toBeNull();
      const failed = model.sent.some((message) => message.type === "error");
      if (failed) {
        refused++;
        expect(alert?.textContent, `seed ${seed}`).not.toBe("");
        expect(/** @type {HTMLElement} */ (alert).hidden, `seed ${seed}`).toBe(false);
      }
      leave();
      expect(model.listening, `seed ${seed}`).toBe(0);
      el.remove();
    }
    expect(refused).toBeGreaterThan(runs / 10);
  });

  test("shows or refuses whatever comes later, and recovers", () => {
    for (let seed = 0; seed < runs / 8; seed++) {
      const random = numbersFrom(seed);
      const good = whole();
      const model = new Model(whole());
      const el = document.createElement("div");
      document.body.append(el);
      const leave = widget.render({ model, el });
      const keys = Object.keys(good);
      const press = () =>
        el
          .querySelector("canvas, [role=tree]")
          ?.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
      for (let step = 0; step < 4; step++) {
        const key = keys[Math.floor(random() * keys.length)];
        model.set(key, damaged(/** @type {any} */ (good)[key], random));
        press();
      }
      for (const key of keys) model.set(key, /** @type {any} */ (whole())[key]);
      // All of it is good again, and what all is drawn from comes last.
      for (const key of ["payload", "facts"]) model.set(key, /** @type {any} */ (whole())[key]);
      const alert = /** @type {HTMLElement} */ (el.querySelector('[role="alert"]'));
      expect(alert.hidden || !alert.textContent, `seed ${seed}: ${alert.textContent}`).toBe(true);
      leave();
      el.remove();
    }
  });
});
