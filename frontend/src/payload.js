// The payload: one run of bytes that holds a whole module tree as columns.
//
// patchlab/render/payload.py writes it and describes the layout. Here it is read and checked, so that
// the rest of the code may rely on every index; what does not fit is refused with a reason.

import { printable } from "./format.js";

/**
 * A tree of modules in preorder. Where a model is shown alone, `after` is `before`.
 * @typedef {object} Columns
 * @property {number} rows
 * @property {string[]} names Own names, the last part of each FQN; rows point into it.
 * @property {[string, string][]} classes Class name and Python module.
 * @property {number[]} numbers Parameter counts; -1 where a parameter is not initialized yet.
 * @property {boolean} isDiff
 * @property {Indices} depth
 * @property {Indices} name Index into `names`.
 * @property {Indices} before Class in the tree before, as index into `classes` plus 1; 0 if absent.
 * @property {Indices} after The same in the tree after.
 * @property {Indices} paramsBefore Index into `numbers`.
 * @property {Indices} paramsAfter
 * @property {Indices} status Index into `STATUSES`.
 * @property {Indices} shape Equal for siblings that are equal with all that is in them.
 * @property {Indices} shared Row of the first place of a shared module, plus 1; 0 if not shared.
 * @property {Indices} tied Row of the module that has one of its parameters first, plus 1; 0 if none.
 */
/** @typedef {Uint8Array | Uint16Array | Uint32Array} Indices */

export const STATUSES = ["same", "added", "removed", "replaced", "changed"];
export const MARKS = ["none", "exact", "pattern", "container", "swallowed", "shadowed"];

const MAGIC = 0x31544c50; // "PLT1", little-endian
/** @type {Record<string, Uint8ArrayConstructor | Uint16ArrayConstructor | Uint32ArrayConstructor>} */
const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };

export class PayloadError extends Error {
  name = "PayloadError";
}

/**
 * @param {boolean} condition
 * @param {string} problem
 * @returns {asserts condition}
 */
function check(condition, problem) {
  if (!condition) throw new PayloadError(`The tree that Python sent cannot be read: ${problem}.`);
}

/** @param {unknown} value @returns {value is string[]} */
const isTexts = (value) => Array.isArray(value) && value.every((item) => typeof item === "string");

/**
 * @param {DataView} view
 * @returns {Columns}
 */
export function readTree(view) {
  check(view.byteLength >= 8 && view.getUint32(0, true) === MAGIC, "it does not begin as one");
  const headerLength = view.getUint32(4, true);
  check(8 + headerLength <= view.byteLength, "its header is cut off");
  /** @type {any} */
  let header;
  try {
    header = JSON.parse(new TextDecoder().decode(bytes(view, 8, headerLength)));
  } catch {
    check(false, "its header is no JSON");
  }
  check(header !== null && typeof header === "object", "its header is no object");
  const { rows, names, classes, numbers, diff } = header;
  const columns = header["columns"]; // In quotes, since the build shortens the name elsewhere.
  // A row has bytes of its own, so a wrong number of rows cannot ask for more memory than was sent.
  const known = Number.isInteger(rows) && rows >= 0 && rows <= view.byteLength;
  check(known, "the number of rows is missing");
  check(isTexts(names), "the names are no list of strings");
  check(
    Array.isArray(classes) && classes.every((item) => isTexts(item) && item.length === 2),
    "the classes are no list of pairs",
  );
  check(Array.isArray(numbers) && numbers.every(Number.isFinite), "the numbers are none");
  check(columns !== null && typeof columns === "object", "the columns are missing");

  /** @param {string} title @param {number} limit @param {Indices} [fallback] @returns {Indices} */
  const column = (title, limit, fallback) => {
    const place = columns[title];
    if (place === undefined && fallback) return fallback;
    check(Array.isArray(place) && place.length === 2, `column ${title} is missing`);
    check(Object.hasOwn(TYPES, place[0]), `column ${title} has an unknown type`);
    const ArrayType = TYPES[place[0]];
    const start = place[1];
    const size = rows * ArrayType.BYTES_PER_ELEMENT;
    check(
      Number.isInteger(start) && start >= 0 && start + size <= view.byteLength,
      `column ${title} is cut off`,
    );
    // A copy, since a typed array must begin at a multiple of its element's size.
    const values = new ArrayType(bytes(view, start, size).slice().buffer);
    for (const value of values) check(value < limit, `column ${title} points outside its table`);
    return values;
  };
  const empty = new Uint8Array(rows);
  const before = column("before", classes.length + 1);
  const paramsBefore = column("params_before", numbers.length);
  const depth = column("depth", 0x10000);
  check(depth.length === 0 || depth[0] === 0, "the first row is no root");
  for (let row = 1; row < rows; row++) {
    check(depth[row] >= 1 && depth[row] <= depth[row - 1] + 1, `row ${row} has no parent`);
  }
  return {
    rows,
    names,
    classes: classes.map(([label, place]) => [printable(label), place]),
    numbers,
    isDiff: diff === true,
    depth,
    name: column("name", names.length),
    before,
    after: column("after", classes.length + 1, before),
    paramsBefore,
    paramsAfter: column("params_after", numbers.length, paramsBefore),
    status: column("status", STATUSES.length, empty),
    shape: column("shape", 0x100000000),
    shared: column("shared", rows + 1, empty),
    tied: column("tied", rows + 1, empty),
  };
}

/**
 * Reads the marks: runs of equal codes, each a 32-bit number of `count * 8 + code`.
 * @param {DataView | null} view Empty where no key is being tried.
 * @param {number} rows
 * @returns {Uint8Array | null} A code for each row, an index into `MARKS`; null if there are none.
 */
export function readMarks(view, rows) {
  if (!view || view.byteLength === 0) return null;
  check(view.byteLength % 4 === 0, "the marks are cut off");
  const marks = new Uint8Array(rows);
  let row = 0;
  for (let at = 0; at < view.byteLength; at += 4) {
    const run = view.getUint32(at, true);
    const next = row + (run >>> 3);
    check(next <= rows && (run & 7) < MARKS.length, "the marks do not fit the tree");
    marks.fill(run & 7, row, next);
    row = next;
  }
  return marks;
}

/** @param {DataView} view @param {number} start @param {number} length */
function bytes(view, start, length) {
  return new Uint8Array(view.buffer, view.byteOffset + start, length);
}
