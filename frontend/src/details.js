// The pane for the selected module. What the payload knows is shown at once; tensors, signature, rule
// and findings follow when Python has answered.

import { make } from "./dom.js";
import { counted, exact, printable } from "./format.js";
import { icon } from "./icons.js";

/**
 * @typedef {object} Side The module in one of the trees.
 * @property {string} title "Before" or "After"; "" where there is one tree only.
 * @property {string} class_name
 * @property {string} python_module
 * @property {string} signature "" if it cannot be read.
 * @property {[string, string, string][]} parameters Name, shape, dtype.
 * @property {[string, string, string][]} buffers
 * @property {number} num_parameters With those of its submodules.
 */
/**
 * @typedef {object} Finding
 * @property {string} code
 * @property {"error" | "warning" | "info"} severity
 * @property {string} title
 * @property {string} message
 * @property {string} suggestion
 * @property {string} [more] What its code means; shown when the code is opened.
 * @property {string | null} fqn A module it is about.
 */
/**
 * @typedef {object} Answer
 * @property {string} fqn
 * @property {Side[]} sides
 * @property {string} rule
 * @property {string[]} notes
 * @property {Finding[]} findings
 */

const MOST = 40; // Tensors listed in one table; more are counted.

/**
 * @param {object} options
 * @param {string} options.fqn
 * @param {string} options.stands What a folded row stands for, "" if it is not folded.
 * @param {Side[]} options.sides What the payload knows.
 * @param {string} options.state The row's state, in a sentence.
 * @param {Answer | null} options.answer
 * @param {() => void} options.onCopy
 * @param {() => void} options.onClose
 * @param {(finding: Finding) => HTMLElement} options.makeFinding
 */
export function makeDetails({ fqn, stands, sides, state, answer, onCopy, onClose, makeFinding }) {
  const copyButton = button("copy", "Copy FQN", onCopy);
  const closeButton = button("close", "Close details", onClose);
  const shown = answer?.sides.length ? answer.sides : sides;
  return [
    make(
      "div",
      { class: "top" },
      make("h3", { title: fqn }, ...breakable(printable(fqn) || "(the root)")),
      copyButton,
      closeButton,
    ),
    stands && make("p", { class: "dim" }, stands),
    state && make("p", {}, state),
    ...shown.flatMap((side) => makeSide(side, Boolean(answer))),
    answer?.rule && part("Rule", make("p", {}, answer.rule)),
    ...(answer?.notes ?? []).map((note) => make("p", { class: "dim" }, note)),
    ...(answer?.findings ?? []).map(makeFinding),
  ].filter((child) => child instanceof Node);
}

/** @param {Side} side @param {boolean} complete */
function makeSide(side, complete) {
  const facts = make(
    "dl",
    {},
    ...fact("Class", side.class_name),
    ...fact("Python module", ...breakable(side.python_module)),
    ...(side.signature ? fact("Signature", side.signature) : []),
    make("dt", {}, "Parameters"),
    make("dd", { class: "plain" }, `${exact(side.num_parameters)} with submodules`),
  );
  return [
    side.title && make("h4", {}, side.title),
    facts,
    ...tensors("Own parameters", side.parameters),
    ...tensors("Buffers", side.buffers),
    !complete && make("p", { class: "dim" }, "…"),
  ];
}

/** @param {string} title @param {...(Node | string)} values */
const fact = (title, ...values) => [make("dt", {}, title), make("dd", {}, ...values)];

/** @param {string} title @param {[string, string, string][]} rows */
function tensors(title, rows) {
  if (!rows.length) return [];
  return [
    make(
      "table",
      {},
      make("caption", {}, title),
      ...rows
        .slice(0, MOST)
        .map((cells) => make("tr", {}, ...cells.map((text) => make("td", {}, text)))),
    ),
    rows.length > MOST && make("p", { class: "dim" }, `and ${counted(rows.length - MOST, "more")}`),
  ];
}

/** @param {string} title @param {HTMLElement} content */
const part = (title, content) => make("section", {}, make("h4", {}, title), content);

/** Lets a line end after each dot. @param {string} text */
const breakable = (text) =>
  text.split(/(?<=\.)/).flatMap((piece, index) => (index ? [make("wbr"), piece] : [piece]));

/** @param {"copy" | "close"} name @param {string} title @param {() => void} work */
function button(name, title, work) {
  const element = make(
    "button",
    { type: "button", class: "tool", title, "aria-label": title },
    icon(name),
  );
  element.addEventListener("click", work);
  return element;
}
