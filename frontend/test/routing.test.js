import { expect, test } from "vitest";
import widget from "../src/routing.js";
import { Model } from "./setup.js";

const facts = {
  caption: "toy: 3 tokens",
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
};
const packed = (/** @type {number[]} */ numbers) => new DataView(Int16Array.from(numbers).buffer);

function shown(values = {}) {
  const model = new Model({
    facts,
    view: "load",
    cell: [0, 0],
    experts: packed([0, 1, 0, 1, 0, 1, 2, 3, 3, 0, -1, -1]),
    other_experts: packed([0, 1, 0, 2, 2, 3, 2, 3, 3, 0, 1, 2]),
    ...values,
  });
  const el = document.createElement("div");
  document.body.append(el);
  const leave = widget.render({ model: /** @type {any} */ (model), el });
  const status = () => el.querySelector(".status")?.textContent;
  const press = (/** @type {string} */ key) =>
    el.querySelector("canvas")?.dispatchEvent(new KeyboardEvent("keydown", { key }));
  return { model, el, leave, status, press };
}

test("says the load of the selected cell, and follows the keys to the edges", () => {
  const { model, status, press } = shown();
  expect(status()).toBe("layer 1, expert 0: 4 token slots, 2.67 × an even load");
  press("ArrowLeft");
  press("ArrowUp");
  expect(model.get("cell")).toEqual([0, 0]);
  press("PageDown");
  press("End");
  expect(model.get("cell")).toEqual([1, 3]);
  expect(status()).toBe("layer 3, expert 3: 2 token slots, 1.33 × an even load");
  press("a");
  expect(model.get("cell")).toEqual([1, 3]);
});

test("names tokens as text, and says what is not shown", () => {
  const { el, status } = shown({ view: "tokens" });
  expect(status()).toBe("layer 1, token 0 “<b>”: experts 0, 1 · the first 3 of 5 tokens");
  expect(el.querySelector("b")).toBeNull();
});

test("says where two traces part", () => {
  const { model, status } = shown({ view: "divergence", cell: [0, 1] });
  expect(status()).toContain("experts 0, 1, in the other trace 0, 2; 1 of 2 shared");
  model.set("cell", [1, 2]);
  expect(status()).toContain("no experts known, in the other trace 1, 2");
  expect(status()).not.toContain("shared");
});

test("offers the divergence only where there are two traces", () => {
  const tabs = (/** @type {HTMLElement} */ el) =>
    [...el.querySelectorAll("button")].map((button) => button.textContent);
  expect(tabs(shown().el)).toEqual(["Load", "Tokens", "Divergence"]);
  expect(tabs(shown({ facts: { ...facts, compared: false } }).el)).toEqual(["Load", "Tokens"]);
});

test("changes the view with a tab, and listens to nothing after it is gone", () => {
  const { model, el, leave } = shown();
  el.querySelectorAll("button")[1].click();
  expect(model.get("view")).toBe("tokens");
  expect(model.saved).toBe(1);
  leave();
  expect(model.listening).toBe(0);
});

test("sends an error to Python and does not throw", () => {
  const { model } = shown({ facts: null });
  expect(model.sent[0].type).toBe("error");
});
