// One view of a tree widget: draws what the traits say and writes back what the user chose.
//
// What is open, folded and scrolled belongs to the view; what is selected, searched and switched
// belongs to the widget, so that two views of one widget and Python agree on it.

import { makeDetails } from "./details.js";
import { copy, make, set } from "./dom.js";
import { makeFinding, makeFindings, makeVerdict } from "./findings.js";
import { counted, exact } from "./format.js";
import { Grid } from "./grid.js";
import { Outline } from "./outline.js";
import { readMarks, readTree } from "./payload.js";
import { makeMatcher, search } from "./search.js";
import { Toolbar } from "./toolbar.js";
import { explain, sidesOf } from "./wording.js";

/** @typedef {import("./traits.js").Model} Model */
/** @typedef {import("./traits.js").Traits} Traits */
/** @typedef {import("./details.js").Finding} Finding */

const SETTLE = 80; // Milliseconds that a row must stay selected before Python hears of it.
const MOMENT = 2500; // Milliseconds that "Copied" stays.
const MADE_FROM = /payload|verdict|findings|error/; // Traits that are drawn from the start.
let views = 0;

export class TreeView {
  /** @param {Model} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    this.timer = 0;
    this.quiet = 0;
    this.problem = "";
    /** @type {string | null} What the user has moved to and Python has not heard of yet. */
    this.pending = null;
    this.allFindings = false;
    /** @type {Outline | null} */
    this.outline = null;
    /** @type {Grid | null} */
    this.grid = null;
    this.guard = this.guard.bind(this);

    const id = `patchlab-tree-${++views}`;
    this.toolbar = new Toolbar(
      {
        tab: (tab) => this.save({ tab }),
        changesOnly: (on) => this.save({ changes_only: on }),
        search: (query, regex) => this.save({ query, regex }),
        toTree: () => this.focusTree(),
        openAll: (open) => this.openAll(open),
        fold: (on) => this.save({ fold_equal: on }),
      },
      id,
      this.guard,
    );
    this.verdict = make("div", { class: "verdict" });
    this.findings = make("div", { class: "findings" });
    /** @type {Map<string, string>} What failed, by what it was. */
    this.problems = new Map();
    this.failure = make("div", { class: "failure", role: "alert", hidden: true });
    this.panel = make("div", { class: "panel", id });
    this.details = make("div", {
      class: "details",
      role: "group",
      "aria-label": "Selected module",
      hidden: true,
    });
    this.said = make("div", { class: "said", role: "status" });
    this.root = make(
      "div",
      {
        class: "patchlab-tree",
        role: "group",
        "aria-label": "Module tree",
        // JupyterLab's command mode would take the keys otherwise: an "a" here would add a cell.
        "data-lm-suppress-shortcuts": "true",
      },
      this.verdict,
      this.failure,
      this.findings,
      this.toolbar.element,
      this.toolbar.problem,
      make("div", { class: "body" }, this.panel, this.details),
      this.said,
    );
    el.append(this.root);

    /** @type {[string, () => void][]} */
    this.listeners = [
      ["change:payload", () => this.takePayload()],
      ["change:highlight", () => this.takeMarks()],
      ["change:selected", () => this.takeSelected()],
      ["change:query change:regex", () => this.takeSearch()],
      ["change:tab change:changes_only change:fold_equal", () => this.takeSwitches()],
      ["change:details", () => this.drawDetails()],
      ["change:verdict", () => this.drawVerdict()],
      ["change:findings", () => this.drawFindings()],
      ["change:error", () => this.fail(this.model.get("error"), "error")],
    ].map(([names, work]) => [
      /** @type {string} */ (names),
      () => this.guard(/** @type {() => void} */ (work), /** @type {string} */ (names)),
    ]);
    for (const [names, work] of this.listeners) {
      for (const name of names.split(" ")) model.on(/** @type {any} */ (name), work);
    }
    for (const [names, work] of this.listeners) if (MADE_FROM.test(names)) work();
  }

  destroy() {
    for (const [names, work] of this.listeners) {
      for (const name of names.split(" ")) this.model.off(/** @type {any} */ (name), work);
    }
    clearTimeout(this.timer);
    clearTimeout(this.quiet);
    this.toolbar.destroy();
    this.grid?.destroy();
    this.root.remove();
  }

  /**
   * Runs a handler; an error in it is told to Python, and shown until the handler succeeds.
   * @param {() => void} work
   * @param {string} [of] What the handler takes; "" for what the user does.
   */
  guard(work, of = "") {
    let message = "";
    try {
      work();
    } catch (error) {
      message = error instanceof Error ? error.message : String(error);
      this.model.send({ type: "error", message });
    }
    this.fail(message, of);
  }

  /** @param {string} text @param {string} of */
  fail(text, of) {
    this.problems.set(of, text);
    const message = [...this.problems.values()].filter(Boolean).join(" · ");
    this.failure.textContent = message;
    this.failure.hidden = !message;
  }

  /** @param {Partial<Traits>} traits */
  save(traits) {
    for (const [name, value] of Object.entries(traits)) {
      this.model.set(/** @type {keyof Traits} */ (name), value);
    }
    this.model.save_changes();
  }

  /** Says something for a moment. @param {string} text */
  say(text) {
    this.said.textContent = text;
    clearTimeout(this.quiet);
    this.quiet = window.setTimeout(() => this.said.replaceChildren(), MOMENT);
  }

  takePayload() {
    this.grid?.destroy();
    this.grid = this.outline = null;
    this.problems.clear(); // Nearly all that can have failed is done anew.
    this.panel.replaceChildren();
    const columns = readTree(this.model.get("payload"));
    const outline = new Outline(columns);
    this.outline = outline;
    this.grid = new Grid({
      outline,
      onActive: (row) => this.chose(row),
      onSearch: () => this.toolbar.input.focus(),
      onCopy: () => this.copyFqn(),
      guard: this.guard,
    });
    this.panel.append(this.grid.element);
    const noted = [columns.shared, columns.tied].some((rows) => rows.some(Boolean));
    this.root.classList.toggle("plain", !columns.isDiff && !noted);
    if (columns.isDiff) {
      set(this.panel, "role", "tabpanel");
      set(this.panel, "aria-label", "Modules");
    }
    outline.folding = this.model.get("fold_equal");
    this.guard(() => outline.setMarks(this.readMarks()), "change:highlight");
    this.applySwitches();
    this.takeSearch();
    this.takeSelected();
  }

  readMarks() {
    const marks = readMarks(this.model.get("highlight"), this.outline?.columns.rows ?? 0);
    // Once there have been marks their column stays, or it would come and go as a key is typed.
    if (marks) this.root.classList.remove("plain");
    return marks;
  }

  takeMarks() {
    if (!this.outline || !this.grid) return;
    this.outline.setMarks(this.readMarks());
    this.refresh();
  }

  takeSwitches() {
    if (!this.outline) return;
    this.applySwitches();
    this.refresh();
  }

  applySwitches() {
    if (!this.outline) return;
    const { columns } = this.outline;
    this.outline.tab = columns.isDiff ? this.model.get("tab") : "before";
    this.outline.changesOnly = columns.isDiff && this.model.get("changes_only");
    this.outline.folding = this.model.get("fold_equal");
    if (!this.outline.folding) this.outline.unfolded.clear();
    this.outline.refilter();
  }

  takeSearch() {
    const { outline, grid } = this;
    if (!outline || !grid) return;
    this.problem = "";
    try {
      const matcher = makeMatcher(this.model.get("query"), this.model.get("regex"));
      outline.found = matcher && search(outline, matcher);
      grid.matcher = matcher;
      grid.element.scrollTop = 0;
    } catch (error) {
      // The rows stay as they were; half-typed patterns are wrong most of the time.
      this.problem = error instanceof Error ? error.message : String(error);
    }
    outline.refilter();
    this.refresh();
  }

  refresh() {
    const { outline, grid } = this;
    if (!outline || !grid) return;
    grid.refresh();
    const shown = outline.visibleCount > 0;
    grid.nothing.hidden = shown;
    grid.nothing.textContent = shown ? "" : this.whyNothing();
    this.toolbar.show({
      isDiff: outline.columns.isDiff,
      tab: outline.tab,
      changesOnly: outline.changesOnly,
      folding: outline.folding,
      query: this.model.get("query"),
      isRegex: this.model.get("regex"),
      problem: this.problem,
      count: this.countText(),
    });
  }

  whyNothing() {
    if (!this.outline?.columns.rows) return "There is no module here.";
    if (this.outline.found) return "No module or class fits the search.";
    return "Nothing is changed here.";
  }

  countText() {
    const { outline } = this;
    if (!outline) return "";
    const modules = counted(outline.keptCount, "module");
    if (outline.found) return `${exact(outline.found.count)} of ${modules}`;
    if (!outline.changesOnly) return modules;
    let changed = 0;
    for (const status of outline.columns.status) if (status) changed++;
    return `${exact(changed)} of ${modules}`;
  }

  /** The user moved to a row. @param {number} row */
  chose(row) {
    if (!this.outline) return;
    const fqn = this.outline.fqn(row);
    clearTimeout(this.timer);
    this.pending = fqn;
    this.drawDetails();
    this.timer = window.setTimeout(() => {
      this.pending = null;
      if (this.model.get("selected") !== fqn) this.save({ selected: fqn });
    }, SETTLE);
  }

  takeSelected() {
    const { outline, grid } = this;
    if (!outline || !grid) return;
    const fqn = this.model.get("selected");
    const row = fqn === null ? -1 : outline.find(fqn);
    if (row === grid.selected && row >= 0) return;
    grid.selected = row;
    if (row >= 0 && outline.reveal(row)) {
      grid.refresh();
      grid.activate(row, { focus: grid.hasFocus(), tell: false });
    }
    this.refresh();
    this.drawDetails();
  }

  /** @param {boolean} open */
  openAll(open) {
    this.outline?.openAll(open);
    this.refresh();
  }

  focusTree() {
    const { outline, grid } = this;
    if (!outline || !grid || !outline.visibleCount) return;
    const hits = outline.found?.hits;
    const first = hits
      ? outline.visible.subarray(0, outline.visibleCount).find((row) => hits[row] > 0)
      : -1;
    grid.activate(first !== undefined && first >= 0 ? first : grid.active);
  }

  async copyFqn() {
    const row = this.grid?.selected ?? -1;
    if (!this.outline || row < 0) return;
    const fqn = this.outline.fqn(row);
    this.say(
      (await copy(fqn, this.root)) ? `Copied ${fqn}` : "The browser does not allow copying.",
    );
  }

  drawVerdict() {
    const verdict = this.model.get("verdict");
    this.verdict.hidden = !verdict.text && !verdict.pill;
    this.verdict.replaceChildren(...makeVerdict(verdict));
  }

  drawFindings() {
    const findings = this.model.get("findings");
    this.findings.hidden = !findings.length;
    this.findings.replaceChildren(
      ...makeFindings(
        findings,
        this.allFindings,
        (finding) => this.makeFinding(finding),
        () => {
          this.allFindings = true;
          this.drawFindings();
        },
      ),
    );
  }

  /** @param {Finding} finding */
  makeFinding(finding) {
    return makeFinding(
      finding,
      ({ fqn }) => this.guard(() => this.show(fqn)),
      (key) => this.guard(() => this.suggest(key)),
    );
  }

  /** @param {string | null} fqn */
  show(fqn) {
    if (fqn === null) return;
    const row = this.outline?.find(fqn) ?? -1;
    // A search or a switch that hides the module gives way.
    if (row >= 0 && !this.outline?.keep[row]) {
      this.save({ query: "", changes_only: false, tab: "diff" });
    }
    this.save({ selected: fqn });
  }

  /** @param {string} key */
  async suggest(key) {
    this.model.send({ type: "suggestion", key });
    if (await copy(key, this.root)) this.say(`Copied ${key}`);
  }

  drawDetails() {
    const { outline, details } = this;
    const fqn = this.pending ?? this.model.get("selected");
    const row = outline && fqn !== null ? outline.find(fqn) : -1;
    details.hidden = row < 0;
    if (!outline || fqn === null || row < 0) return;
    const answer = /** @type {import("./details.js").Answer} */ (this.model.get("details"));
    const members = outline.isFolded(row) ? outline.members(row) : [];
    details.replaceChildren(
      ...makeDetails({
        fqn,
        stands: members.length
          ? `Stands for ${counted(members.length, "equal module")}, the last of them ${outline.fqn(members[members.length - 1])}.`
          : "",
        sides: sidesOf(outline, row),
        state: explain(outline, row),
        answer: answer.fqn === fqn ? answer : null,
        onCopy: () => void this.copyFqn(),
        onClose: () => this.closeDetails(),
        makeFinding: (finding) => this.makeFinding({ ...finding, fqn: null }),
      }),
    );
  }

  /** Closes them for this module; the next one that is chosen opens them again. */
  closeDetails() {
    this.details.hidden = true;
    this.grid?.activate(this.grid.active, { tell: false });
  }
}
