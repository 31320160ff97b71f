// The verdict on top and the findings under it.

import { emphasized, make } from "./dom.js";
import { counted } from "./format.js";

/** @typedef {import("./details.js").Finding} Finding */
/** @typedef {object} Verdict
 * @property {"ok" | "error" | "warning" | ""} tone "" shows no pill.
 * @property {string} pill "1 error"
 * @property {string} text With `**` around what is bold.
 */

const SIGNS = { ok: "✓", error: "✕", warning: "!", info: "i" };
const FEW = 3; // Findings shown before the rest is asked for.

/** @param {Verdict} verdict */
export function makeVerdict({ tone, pill, text }) {
  return [
    tone && make("span", { class: "pill", "data-tone": tone }, `${SIGNS[tone]} ${pill}`),
    make("span", { class: "says" }, ...emphasized(text)),
  ].filter((child) => child instanceof Node);
}

/**
 * @param {Finding} finding
 * @param {(finding: Finding) => void} onShow
 * @param {(key: string) => void} onSuggest
 */
export function makeFinding(finding, onShow, onSuggest) {
  const element = make(
    "div",
    { class: "finding", "data-tone": finding.severity },
    make(
      "details",
      {},
      make(
        "summary",
        {},
        make("span", { "aria-hidden": "true" }, `${SIGNS[finding.severity]} `),
        make("span", { class: "unseen" }, `${finding.severity}: `),
        `${finding.code} ${finding.title}`,
      ),
      finding.more,
    ),
    make("span", { class: "message" }, finding.message),
  );
  const actions = make("span", { class: "actions" });
  if (finding.suggestion) {
    const use = make("button", { type: "button", class: "link" });
    use.append("Use ", make("code", {}, finding.suggestion));
    use.addEventListener("click", () => onSuggest(finding.suggestion));
    actions.append(use);
  }
  if (finding.fqn !== null) {
    const show = make("button", { type: "button", class: "link" }, "Show in tree");
    show.addEventListener("click", () => onShow(finding));
    actions.append(show);
  }
  if (actions.childElementCount) element.append(actions);
  return element;
}

/**
 * @param {Finding[]} findings
 * @param {boolean} all Whether to show all of them.
 * @param {(finding: Finding) => HTMLElement} make_
 * @param {() => void} onMore
 */
export function makeFindings(findings, all, make_, onMore) {
  const shown = findings.slice(0, all ? undefined : FEW).map(make_);
  const rest = findings.length - shown.length;
  if (!rest) return shown;
  const more = make(
    "button",
    { type: "button", class: "link" },
    `Show ${counted(rest, "more finding")}`,
  );
  more.addEventListener("click", onMore);
  return [...shown, more];
}
