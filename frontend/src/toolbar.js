// The bar above the rows: tabs, switches, search box, counts and the buttons for the whole tree.

import { make, set } from "./dom.js";
import { icon } from "./icons.js";

/** @typedef {import("./outline.js").Tab} Tab */
/** @typedef {object} Actions
 * @property {(tab: Tab) => void} tab
 * @property {(on: boolean) => void} changesOnly
 * @property {(query: string, isRegex: boolean) => void} search
 * @property {() => void} toTree Leaves the search box for the rows.
 * @property {(open: boolean) => void} openAll
 * @property {(on: boolean) => void} fold
 */

/** @type {[Tab, string][]} */
const TABS = [
  ["before", "Before"],
  ["after", "After"],
  ["diff", "Diff"],
];
const TYPING = 90; // Milliseconds without a further letter before a search begins.

export class Toolbar {
  /**
   * @param {Actions} actions
   * @param {string} panel Id of the element that the tabs change.
   * @param {(work: () => void) => void} guard
   */
  constructor(actions, panel, guard) {
    this.actions = actions;
    this.guard = guard;
    this.timer = 0;
    this.tabs = TABS.map(([tab, title]) =>
      make(
        "button",
        { type: "button", role: "tab", "data-tab": tab, id: `${panel}-${tab}` },
        title,
      ),
    );
    for (const tab of this.tabs) set(tab, "aria-controls", panel);
    this.tablist = make(
      "div",
      { class: "tabs", role: "tablist", "aria-label": "View" },
      ...this.tabs,
    );
    this.changes = this.makeSwitch("changes only", "Show only what the patch changes");
    this.folds = this.makeSwitch("fold equal", "Show equal siblings as one row");
    this.input = make("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": "Search modules and classes",
      spellcheck: "false",
      autocomplete: "off",
    });
    this.regex = make(
      "button",
      {
        type: "button",
        class: "regex",
        title: "Regular expression",
        "aria-label": "Regular expression",
      },
      ".*",
    );
    this.count = make("span", { class: "count", role: "status" });
    this.problem = make("div", { class: "problem", role: "alert", hidden: true });
    this.problem.id = `${panel}-problem`;
    set(this.input, "aria-describedby", this.problem.id);
    const expand = this.makeButton("expand", "Expand all");
    const collapse = this.makeButton("collapse", "Collapse all");
    this.element = make(
      "div",
      { class: "bar" },
      this.tablist,
      this.changes,
      this.folds,
      this.count,
      make(
        "span",
        { class: "tools" },
        make(
          "span",
          { class: "field" },
          icon("search"),
          this.input,
          make("kbd", { "aria-hidden": "true", title: "Press / in the tree" }, "/"),
          this.regex,
        ),
        make("span", {}, expand, collapse),
      ),
    );
    /** @param {HTMLElement} element @param {string} type @param {(event: any) => void} work */
    const on = (element, type, work) =>
      element.addEventListener(type, (event) => guard(() => work(event)));
    on(this.tablist, "click", (event) => this.clickedTab(event));
    on(this.tablist, "keydown", (event) => this.pressedTab(event));
    on(this.changes, "click", () => actions.changesOnly(!isOn(this.changes)));
    on(this.folds, "click", () => actions.fold(!isOn(this.folds)));
    on(this.regex, "click", () => actions.search(this.input.value, !isPressed(this.regex)));
    on(this.input, "input", () => {
      clearTimeout(this.timer);
      this.timer = window.setTimeout(() => guard(() => this.search()), TYPING);
    });
    on(this.input, "keydown", (event) => this.pressedSearch(event));
    on(expand, "click", () => actions.openAll(true));
    on(collapse, "click", () => actions.openAll(false));
  }

  destroy() {
    clearTimeout(this.timer);
  }

  search() {
    clearTimeout(this.timer);
    this.actions.search(this.input.value, isPressed(this.regex));
  }

  /** @param {string} text @param {string} title */
  makeSwitch(text, title) {
    return make(
      "button",
      { type: "button", class: "switch", role: "switch", "aria-checked": "false", title },
      make("i", { "aria-hidden": "true" }),
      text,
    );
  }

  /** @param {"expand" | "collapse"} name @param {string} title */
  makeButton(name, title) {
    return make(
      "button",
      { type: "button", class: "tool", title, "aria-label": title },
      icon(name),
    );
  }

  /** @param {MouseEvent} event */
  clickedTab(event) {
    const tab = /** @type {HTMLElement} */ (event.target).dataset.tab;
    if (tab) this.actions.tab(/** @type {Tab} */ (tab));
  }

  /** @param {KeyboardEvent} event */
  pressedTab(event) {
    const at = this.tabs.findIndex((tab) => tab.getAttribute("aria-selected") === "true");
    const last = this.tabs.length - 1;
    /** @type {Record<string, number>} */
    const to = {
      ArrowRight: at === last ? 0 : at + 1,
      ArrowLeft: at === 0 ? last : at - 1,
      Home: 0,
      End: last,
    };
    if (!(event.key in to)) return;
    event.preventDefault();
    this.actions.tab(TABS[to[event.key]][0]);
    this.tabs[to[event.key]].focus();
  }

  /** @param {KeyboardEvent} event */
  pressedSearch(event) {
    if (event.key === "Escape") {
      if (this.input.value) {
        this.input.value = "";
        this.search();
      } else this.actions.toTree();
    } else if (event.key === "Enter" || event.key === "ArrowDown") {
      this.search();
      this.actions.toTree();
    } else return;
    event.preventDefault();
  }

  /**
   * @param {object} state
   * @param {boolean} state.isDiff
   * @param {Tab} state.tab
   * @param {boolean} state.changesOnly
   * @param {boolean} state.folding
   * @param {string} state.query
   * @param {boolean} state.isRegex
   * @param {string} state.problem What is wrong with the query, "" if nothing.
   * @param {string} state.count
   */
  show({ isDiff, tab, changesOnly, folding, query, isRegex, problem, count }) {
    this.tablist.hidden = this.changes.hidden = !isDiff;
    for (const element of this.tabs) {
      const on = element.dataset.tab === tab;
      set(element, "aria-selected", String(on));
      element.tabIndex = on ? 0 : -1;
    }
    set(this.changes, "aria-checked", String(changesOnly));
    set(this.folds, "aria-checked", String(folding));
    set(this.regex, "aria-pressed", String(isRegex));
    // What is being typed is newer than what Python has.
    const root = /** @type {Document | ShadowRoot} */ (this.input.getRootNode());
    if (root.activeElement !== this.input) this.input.value = query;
    set(this.input, "aria-invalid", problem ? "true" : null);
    this.problem.hidden = !problem;
    if (this.problem.textContent !== problem) this.problem.textContent = problem;
    if (this.count.textContent !== count) this.count.textContent = count;
  }
}

/** @param {HTMLElement} element */
const isOn = (element) => element.getAttribute("aria-checked") === "true";

/** @param {HTMLElement} element */
const isPressed = (element) => element.getAttribute("aria-pressed") === "true";
