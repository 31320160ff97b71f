import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { printable } from "../src/format.js";
import widget from "../src/tree.js";
import { Model, traits } from "./setup.js";

/** @type {(() => void)[]} */
let cleanups = [];

beforeEach(() => {
  vi.useFakeTimers();
});
afterEach(() => {
  for (const cleanup of cleanups) cleanup();
  cleanups = [];
  document.body.replaceChildren();
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

/** @param {"tree" | "diff" | "odd"} name @param {object} [changes] */
function show(name, changes = {}) {
  const model = new Model({ ...traits(name), ...changes });
  return { model, ...view(model) };
}

/** @param {Model} model */
function view(model) {
  const el = document.createElement("div");
  document.body.append(el);
  const cleanup = widget.render({ model: /** @type {any} */ (model), el });
  cleanups.push(cleanup);
  /** @param {string} selector @returns {HTMLElement[]} */
  const all = (selector) =>
    [.../** @type {NodeListOf<HTMLElement>} */ (el.querySelectorAll(selector))].filter(visible);
  /** @param {string} text */
  const row = (text) => /** @type {HTMLElement} */ (rows(el).find((item) => label(item) === text));
  /** @param {string} key @param {KeyboardEventInit} [options] */
  const press = (key, options = {}) => {
    const target = document.activeElement ?? document.body;
    const event = new KeyboardEvent("keydown", {
      key,
      bubbles: true,
      cancelable: true,
      ...options,
    });
    target.dispatchEvent(event);
    return event;
  };
  return { el, cleanup, all, row, press };
}

/** @param {Element} element */
const visible = (element) => !(/** @type {HTMLElement} */ (element).closest("[hidden]"));

/** @param {HTMLElement} el @returns {HTMLElement[]} In the order they are seen in. */
const rows = (el) =>
  /** @type {HTMLElement[]} */ ([...el.querySelectorAll("[role=treeitem]")])
    .filter(visible)
    .sort((a, b) => Number(a.dataset.row) - Number(b.dataset.row));

/** @param {Element} item */
const label = (item) => item.querySelector(".label")?.textContent ?? "";

/** @param {HTMLElement} el */
const labels = (el) => rows(el).map(label);

/** @param {HTMLElement} el */
const tabbable = (el) =>
  rows(el)
    .filter((item) => item.tabIndex === 0)
    .map(label);

const focused = () => label(/** @type {Element} */ (document.activeElement));

describe("a view", () => {
  test("shows the verdict, the findings and a row for each module that is open", () => {
    const { el, all } = show("tree");
    expect(all(".verdict")[0].textContent).toBe("✕ 1 error8 modules replaced by 1 rule in Model");
    expect(all(".verdict b").map((bold) => bold.textContent)).toEqual(["8 modules", "Model"]);
    expect(all(".findings .finding")).toHaveLength(2);
    expect(labels(el).slice(0, 4)).toEqual(["Model", "embed", "layers", "0–3"]);
  });

  test("opens what a finding's code means under the code", () => {
    const { all } = show("tree");
    const opened = all(".findings details").map((element) => element.textContent);
    expect(opened[0]).toMatch(/^✕ error: PL101 containerThe key matches a class whose modules/);
    expect(all(".findings .finding > details[open]")).toHaveLength(0);
  });

  test("tells each state in a word, and reads a row out as one sentence", () => {
    const { row } = show("tree");
    expect(row("attention").querySelector(".change")?.textContent).toBe("container");
    expect(row("self").querySelector(".change")?.textContent).toBe("swallowed");
    expect(row("attention").getAttribute("aria-label")).toBe(
      "attention, Attention, 60 parameters, container",
    );
  });

  test("shows both classes of a replaced module, and the number it had on hover", () => {
    const { row } = show("diff");
    expect(row("self").querySelector(".cls")?.textContent).toBe("SelfAttentionFastAttention");
    expect(row("embed").querySelector(".change")?.textContent).toBe("removed");
    expect(row("head").querySelector(".change")?.textContent).toBe("added");
    expect(row("layers").querySelector(".num")?.getAttribute("title")).toBe(
      "272 → 268 parameters (−4)",
    );
  });

  test("writes names as text, whatever they look like", () => {
    const { el, row } = show("odd");
    expect(el.querySelector("img")).toBeNull();
    expect(row("<img src=x onerror=alert(1)>")).toBeDefined();
    expect(row("层").querySelector(".num")?.textContent).toBe("uninitialized");
    expect(row("me").querySelector(".change")?.textContent).toBe("shared");
  });

  test("notes a module with a parameter of another, and names that one on hover", () => {
    const change = show("odd").row("head").querySelector(".change");
    expect(change?.textContent).toBe("tied");
    expect(change?.getAttribute("title")).toBe(
      "Has a parameter in common with <img src=x onerror=alert(1)>.",
    );
  });

  test("writes what cannot be seen in a name as an escape", () => {
    expect(printable("a\nb\u202ec")).toBe("a\\u000ab\\u202ec");
    expect(printable("مرحبا 层 self_attn")).toBe("مرحبا 层 self_attn");
  });

  test("keeps JupyterLab's shortcuts away from its keys", () => {
    const { el } = show("tree");
    expect(el.firstElementChild?.getAttribute("data-lm-suppress-shortcuts")).toBe("true");
  });
});

describe("the keyboard", () => {
  /** @param {ReturnType<typeof show>} shown */
  const enter = ({ el }) =>
    rows(el)
      .find((item) => item.tabIndex === 0)
      ?.focus();

  test("finds one row to tab to, wherever it has been", () => {
    const shown = show("tree", { selected: null });
    expect(tabbable(shown.el)).toEqual(["Model"]);
    enter(shown);
    shown.press("ArrowDown");
    shown.press("ArrowDown");
    expect(tabbable(shown.el)).toEqual(["layers"]);
    expect(focused()).toBe("layers");
  });

  test("moves with arrows, Home and End, and opens and closes", () => {
    const shown = show("tree", { selected: null });
    enter(shown);
    shown.press("End");
    expect(focused()).toBe(labels(shown.el).at(-1));
    shown.press("Home");
    expect(focused()).toBe("Model");
    shown.press("ArrowUp");
    expect(focused()).toBe("Model");
    shown.press("ArrowLeft");
    expect(labels(shown.el)).toEqual(["Model"]);
    shown.press("ArrowRight");
    expect(labels(shown.el).length).toBeGreaterThan(2);
    shown.press("ArrowRight");
    expect(focused()).toBe("embed");
    shown.press("ArrowLeft");
    expect(focused()).toBe("Model");
  });

  test("Enter opens a row, * its siblings, Shift+Enter unfolds", () => {
    const shown = show("tree", { selected: null, highlight: new DataView(new ArrayBuffer(0)) });
    enter(shown);
    shown.press("End");
    shown.press("Home");
    shown.press("ArrowLeft");
    shown.press("Enter");
    shown.press("l");
    expect(focused()).toBe("layers");
    if (shown.row("layers").getAttribute("aria-expanded") !== "true") shown.press("Enter");
    shown.press("ArrowRight");
    expect(focused()).toBe("0–3");
    shown.press("Enter", { shiftKey: true });
    expect(labels(shown.el)).toEqual(expect.arrayContaining(["0", "1", "2", "3"]));
    shown.press("ArrowLeft");
    expect(labels(shown.el)).toEqual(["Model", "embed", "layers", "0", "1", "2", "3"]);
    shown.press("*");
    expect(labels(shown.el).filter((text) => text === "attention")).not.toHaveLength(0);
    shown.press("Enter", { shiftKey: true });
    expect(focused()).toBe("0–3");
  });

  test("goes to names by their first letters", () => {
    const shown = show("tree", { selected: null });
    enter(shown);
    shown.press("o");
    shown.press("u");
    expect(focused()).toBe("output");
    vi.advanceTimersByTime(2000);
    shown.press("e");
    expect(focused()).toBe("embed");
  });

  test("goes to the search box with / and back with Enter, at the first hit", () => {
    const shown = show("tree", { selected: null });
    enter(shown);
    shown.press("/");
    const input = /** @type {HTMLInputElement} */ (shown.el.querySelector("input"));
    expect(document.activeElement).toBe(input);
    input.value = "norm";
    shown.press("Enter");
    expect(focused()).toBe("norm");
    expect(shown.model.get("query")).toBe("norm");
  });

  test("leaves keys with Ctrl and Tab to the browser", () => {
    const shown = show("tree", { selected: null });
    enter(shown);
    expect(shown.press("a", { ctrlKey: true }).defaultPrevented).toBe(false);
    expect(shown.press("Tab").defaultPrevented).toBe(false);
    expect(shown.press("ArrowDown").defaultPrevented).toBe(true);
  });
});

describe("what is synced", () => {
  test("a row that is chosen is selected in Python once the user has settled", () => {
    const { model, row } = show("tree", { selected: null });
    row("embed").click();
    row("layers").click();
    expect(model.saved).toBe(0);
    vi.advanceTimersByTime(1000);
    expect(model.get("selected")).toBe("layers");
    expect(model.saved).toBe(1);
  });

  test("a selection from Python opens what hides it, in every view", () => {
    const { model, el } = show("tree", { selected: null });
    const other = view(model);
    model.set("selected", "layers.2.attention.self.key");
    for (const root of [el, other.el]) {
      const selected = rows(root).filter((item) => item.getAttribute("aria-selected") === "true");
      expect(selected.map(label)).toEqual(["key"]);
    }
  });

  test("a query from Python is searched, and a wrong one is told in place", () => {
    const { model, el, all } = show("tree");
    model.set("query", "embed");
    expect(labels(el)).toEqual(["Model", "embed"]);
    expect(all(".count")[0].textContent).toBe("1 of 35 modules");
    model.set("regex", true);
    model.set("query", "embed(");
    expect(all(".problem")[0].textContent).toMatch(/regular expression/);
    expect(labels(el)).toEqual(["Model", "embed"]);
    model.set("query", "nothing like it");
    expect(all(".problem")).toHaveLength(0);
    expect(all(".nothing")[0].textContent).toBe("No module or class fits the search.");
  });

  test("tabs and switches write their traits and follow them", () => {
    const { model, el, all } = show("diff");
    all("[data-tab=after]")[0].click();
    expect(model.get("tab")).toBe("after");
    expect(labels(el)).not.toContain("embed");
    model.set("tab", "diff");
    expect(labels(el)).toContain("embed");
    all("[role=switch]")[0].click();
    expect(model.get("changes_only")).toBe(true);
    expect(all("[role=switch]")[0].getAttribute("aria-checked")).toBe("true");
  });

  test("details come at once from the payload and then from Python", () => {
    const { model, all, row } = show("tree");
    expect(all(".details h3")[0].textContent).toBe("layers.0.attention");
    expect(all(".details")[0].textContent).toContain("'.*Attention' decides it.");
    row("embed").click();
    expect(all(".details")[0].textContent).toContain("Embedding");
    model.set("details", {
      fqn: "embed",
      sides: [
        { ...model.get("details").sides[0], parameters: [["weight", "1000 × 4", "float32"]] },
      ],
      rule: "",
      notes: [],
      findings: [],
    });
    vi.advanceTimersByTime(1000);
    expect(all(".details td").map((cell) => cell.textContent)).toEqual([
      "weight",
      "1000 × 4",
      "float32",
    ]);
  });

  test("copying is said for a moment", async () => {
    const { all, press, row } = show("tree");
    vi.stubGlobal("navigator", { clipboard: { writeText: async () => {} } });
    row("embed").click();
    press("c", { ctrlKey: true });
    await vi.advanceTimersByTimeAsync(10);
    expect(all("[role=status]").map((item) => item.textContent)).toContain("Copied embed");
    await vi.advanceTimersByTimeAsync(5000);
    expect(all("[role=status]").map((item) => item.textContent)).not.toContain("Copied embed");
  });

  test("a suggestion that is clicked goes to Python", () => {
    const { model, all } = show("tree");
    all(".findings .link")[0].click();
    expect(model.sent).toEqual([{ type: "suggestion", key: "^Self" }]);
  });
});

describe("errors", () => {
  test("of the payload are shown and sent, and a good payload mends the view", () => {
    const { model, el, all } = show("tree", { payload: new DataView(new ArrayBuffer(4)) });
    expect(all(".failure")[0].textContent).toMatch(/cannot be read/);
    expect(model.sent).toEqual([{ type: "error", message: all(".failure")[0].textContent }]);
    model.set("payload", traits("tree").payload);
    expect(all(".failure")).toHaveLength(0);
    expect(labels(el)).toContain("embed");
  });

  test("of the marks are shown, and the tree stays", () => {
    const { model, el, all } = show("tree");
    model.set("highlight", new DataView(new Uint8Array(8).fill(255).buffer));
    expect(all(".failure")[0].textContent).toMatch(/marks do not fit/);
    expect(labels(el)).toContain("embed");
  });

  test("from Python are shown until they are taken back", () => {
    const { model, all } = show("tree");
    model.set("error", "ValueError: no");
    expect(all(".failure")[0].textContent).toBe("ValueError: no");
    model.set("error", "");
    expect(all(".failure")).toHaveLength(0);
  });
});

describe("closing", () => {
  test("five views leaves no listener, no element and no timer", () => {
    const model = new Model(traits("tree"));
    const views = Array.from({ length: 5 }, () => view(model));
    expect(model.listening).toBeGreaterThanOrEqual(5);
    views[0].row("embed").click();
    for (const { cleanup } of views) cleanup();
    expect(model.listening).toBe(0);
    expect(document.querySelectorAll(".patchlab-tree")).toHaveLength(0);
    vi.advanceTimersByTime(5000);
    expect(model.saved).toBe(0);
  });

  test("one view leaves the others at work", () => {
    const model = new Model(traits("tree"));
    const [first, second] = [view(model), view(model)];
    first.cleanup();
    model.set("query", "embed");
    expect(labels(second.el)).toEqual(["Model", "embed"]);
  });
});
