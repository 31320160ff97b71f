// What Python sends of a routing trace: read and checked here, so that the rest may rely on it.
//
// patchlab/notebook/routing_widget.py writes it: facts as JSON, and the experts of each token as
// 16-bit integers `(layers, tokens, top_k)`, -1 where one is not known.

/**
 * @typedef {object} Routing
 * @property {string} caption
 * @property {number[]} layers Index of the layer of each row.
 * @property {number[][]} load Token slots of each expert, row by row.
 * @property {number} top_k
 * @property {number} tokens Tokens that are here.
 * @property {number} all_tokens Tokens of the trace.
 * @property {string[]} names Of the tokens; empty if they have none.
 * @property {boolean} compared Whether there is another trace.
 * @property {Int16Array} experts
 * @property {Int16Array} others Those of the other trace.
 */

export class RoutingPayloadError extends Error {
  name = "RoutingPayloadError";
}

/** @param {unknown} condition @param {string} problem @returns {asserts condition} */
function check(condition, problem) {
  if (!condition)
    throw new RoutingPayloadError(`The trace that Python sent cannot be read: ${problem}.`);
}

/** @param {unknown} value @returns {value is number} */
const isCount = (value) => Number.isSafeInteger(value) && /** @type {number} */ (value) >= 0;

/** @param {unknown} value @param {(item: unknown) => boolean} each @returns {boolean} */
const isList = (value, each) => Array.isArray(value) && value.every(each);

/** @param {unknown} view @param {number} count @param {string} what @returns {Int16Array} */
function numbers(view, count, what) {
  check(view instanceof DataView, `the experts of ${what} are missing`);
  check(view.byteLength === 2 * count, `the experts of ${what} do not fit its tokens`);
  // A copy, since 16-bit numbers may not begin at an odd byte.
  const end = view.byteOffset + view.byteLength;
  return new Int16Array(view.buffer.slice(view.byteOffset, end));
}

/** @param {any} facts @param {unknown} experts @param {unknown} others @returns {Routing} */
export function readRouting(facts, experts, others) {
  check(facts !== null && typeof facts === "object", "it is none");
  const { caption, layers, load, top_k, tokens, all_tokens, names, compared } = facts;
  check(typeof caption === "string", "its caption is no text");
  check(isList(layers, Number.isSafeInteger), "its layers are no list of numbers");
  check(
    isList(load, (row) => isList(row, isCount)) && load.length === layers.length,
    "its load does not fit its layers",
  );
  check(isCount(top_k) && top_k > 0, "it does not say how many experts a token has");
  check(isCount(tokens) && isCount(all_tokens), "it does not say how many tokens it has");
  check(
    isList(names, (name) => typeof name === "string") &&
      (names.length === 0 || names.length === tokens),
    "its tokens have too many names or too few",
  );
  const count = layers.length * tokens * top_k;
  return {
    caption,
    layers,
    load,
    top_k,
    tokens,
    all_tokens,
    names,
    compared: compared === true,
    experts: numbers(experts, count, "the trace"),
    others: compared === true ? numbers(others, count, "the other trace") : new Int16Array(0),
  };
}
