// What a row says: names, classes, counts and states in words. Pure functions on an outline.

import { exact, human, joinNames, printable } from "./format.js";
import { MARKS, STATUSES } from "./payload.js";

/** @typedef {import("./outline.js").Outline} Outline */
/** @typedef {import("./details.js").Side} Side */

const MATCHES = new Set(["exact", "pattern"]);
/** @type {Record<string, string>} */
const WORDS = { exact: "exact match", pattern: "pattern match" };
/** @type {Record<string, string>} */
const SAYS = {
  exact: "The key is this class's name.",
  pattern: "The key, as a pattern, matches this class's name.",
  container: "Matched, and holds modules that would go with it: replacing it drops them.",
  swallowed: "Would be dropped, together with the container it is in.",
  shadowed: "The key matches, but another rule decides this class.",
  replaced: "Another class stands here after the patch.",
  added: "Only in the tree after.",
  removed: "Only in the tree before.",
  changed: "The same class with other parameters or buffers.",
};

/**
 * The state of a row. A mark of the key comes before the status of the diff, except that a module
 * that is replaced says more than that the key matches it.
 * @param {Outline} outline
 * @param {number} row
 */
export function stateOf({ marks, tab, columns }, row) {
  const status = STATUSES[columns.status[row]];
  let mark = marks && tab !== "after" ? MARKS[marks[row]] : "none";
  if (status !== "same" && MATCHES.has(mark)) mark = "none";
  const quiet = columns.shared[row] ? "shared" : columns.tied[row] ? "tied" : "";
  const note = mark !== "none" ? mark : status !== "same" ? status : quiet;
  return { mark, status, note, word: WORDS[note] ?? note };
}

/** @param {Outline} outline @param {number} row @returns {string} The state in sentences. */
export function explain(outline, row) {
  const { mark, status } = stateOf(outline, row);
  return [SAYS[mark], SAYS[status]].filter(Boolean).join("\n");
}

/**
 * What a row has in common with one before it, as the details pane has it from Python.
 * @param {Outline} outline
 * @param {number} row
 */
export function relation(outline, row) {
  const { shared, tied } = outline.columns;
  const first = shared[row] || tied[row];
  if (!first) return "";
  const what = shared[row] ? "The same module as" : "Has a parameter in common with";
  return `${what} ${outline.fqn(first - 1) || "the root"}.`;
}

/** @param {Outline} outline @param {number} row @returns {string} The last part of its FQN. */
export function nameOf(outline, row) {
  const { names, name, classes } = outline.columns;
  if (row > 0) return printable(names[name[row]]);
  const shown = classesOf(outline, row);
  return shown.length ? classes[shown[shown.length - 1] - 1][0] : "model";
}

/** @param {Outline} outline @param {number} row @returns {string} The names a folded row stands for. */
export const foldName = (outline, row) =>
  joinNames(outline.members(row).map((member) => nameOf(outline, member)));

/**
 * The classes of a row, as places in the table plus 1: one, or those before and after.
 * @param {Outline} outline
 * @param {number} row
 */
export function classesOf({ columns, tab }, row) {
  const before = columns.before[row];
  const after = columns.after[row];
  const wanted = tab === "before" ? [before] : tab === "after" ? [after] : [before, after];
  return [...new Set(wanted)].filter((index) => index > 0);
}

/**
 * The number of parameters, in short and exactly.
 * @param {Outline} outline
 * @param {number} row
 * @returns {[string, string]}
 */
export function countOf({ columns, tab }, row) {
  const before = columns.numbers[columns.paramsBefore[row]];
  const after = columns.numbers[columns.paramsAfter[row]];
  const both = columns.before[row] && columns.after[row];
  if (tab === "diff" && both && before !== after) {
    const difference = `${after > before ? "+" : "−"}${exact(Math.abs(after - before))}`;
    return [human(after), `${exact(before)} → ${exact(after)} parameters (${difference})`];
  }
  const shown = tab === "before" || (tab === "diff" && !columns.after[row]) ? before : after;
  return [human(shown), `${exact(shown)} parameters`];
}

/** @param {Outline} outline @param {number} row @returns {number} Its share of all parameters. */
export function shareOf({ columns }, row) {
  const { numbers, paramsBefore, paramsAfter } = columns;
  /** @param {number} at */
  const most = (at) => Math.max(numbers[paramsBefore[at]], numbers[paramsAfter[at]], 0);
  return most(row) / (most(0) || 1);
}

/**
 * What the payload knows of a module, in the form of the details pane.
 * @param {Outline} outline
 * @param {number} row
 * @returns {Side[]}
 */
export function sidesOf({ columns }, row) {
  const two = columns.isDiff && columns.status[row] !== 0;
  /** @type {[string, number, number][]} */
  const sides = [
    ["Before", columns.before[row], columns.numbers[columns.paramsBefore[row]]],
    ["After", columns.after[row], columns.numbers[columns.paramsAfter[row]]],
  ];
  return sides
    .filter(([title, index]) => index > 0 && (two || title === "Before"))
    .map(([title, index, count]) => ({
      title: two ? title : "",
      class_name: columns.classes[index - 1][0],
      python_module: columns.classes[index - 1][1],
      signature: "",
      parameters: [],
      buffers: [],
      num_parameters: count,
    }));
}
