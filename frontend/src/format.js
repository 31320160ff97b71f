// Numbers and lists as people read them.

const UNITS = ["", "k", "M", "B", "T"]; // As in "7 B parameters".

/**
 * A count with three significant digits: "22.7 M"; "" for none. As `human` in
 * patchlab/render/numbers.py.
 * @param {number} count
 */
export function human(count) {
  if (count <= 0) return count ? "uninitialized" : "";
  let value = count;
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit++;
  }
  if (unit === 0) return String(count);
  return `${Number(value.toPrecision(3))} ${UNITS[unit]}`;
}

/** @param {number} count */
export const exact = (count) => (count < 0 ? "uninitialized" : count.toLocaleString("en-US"));

/**
 * Writes control and format characters as escapes, as `printable` in patchlab/render/text.py does: a
 * name may hold a line break, or turn the direction of the text around it.
 * @param {string} text
 */
export const printable = (text) =>
  text.replace(
    /[\p{C}\p{Zl}\p{Zp}]/gu,
    (odd) => `\\u${/** @type {number} */ (odd.codePointAt(0)).toString(16).padStart(4, "0")}`,
  );

/** @param {number} count @param {string} noun */
export const counted = (count, noun) => `${exact(count)} ${noun}${count === 1 ? "" : "s"}`;

/**
 * Names of equal siblings in short: "0–11", "query, key, value", "0, 2 … 22". The same as
 * `join_names` in patchlab/model/folding.py writes.
 * @param {string[]} names
 */
export function joinNames(names) {
  if (names.length === 1) return names[0];
  /** @type {string[][]} */
  const runs = [];
  for (const name of names) {
    const run = runs[runs.length - 1];
    const last = run?.[run.length - 1];
    if (run && isNumber(name) && isNumber(last) && Number(name) === Number(last) + 1) run[1] = name;
    else runs.push([name]);
  }
  const labels = runs.map((run) => run.join("–"));
  if (labels.length <= 3) return labels.join(", ");
  return `${labels[0]}, ${labels[1]} … ${labels[labels.length - 1]}`;
}

/** @param {string} text */
const isNumber = (text) => /^\d+$/.test(text);
