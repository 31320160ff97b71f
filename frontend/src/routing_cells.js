// What a cell of the routing widget stands for: a share of the strongest color, and words.

/** @typedef {import("./routing_payload.js").Routing} Routing */
/** @typedef {"load" | "tokens" | "divergence"} View */

export const VIEWS = /** @type {View[]} */ (["load", "tokens", "divergence"]);
export const LABELS = { load: "Load", tokens: "Tokens", divergence: "Divergence" };

/** @param {Routing} routing @param {View} view @returns {number} */
export function columnsOf(routing, view) {
  if (view !== "load") return routing.tokens;
  return routing.load.reduce((most, row) => Math.max(most, row.length), 0);
}

/**
 * The known experts of one token in one layer, by falling score where the router sorts.
 * @param {Routing} routing @param {number} row @param {number} column @param {Int16Array} [from]
 */
export function expertsAt(routing, row, column, from = routing.experts) {
  const start = (row * routing.tokens + column) * routing.top_k;
  return Array.from(from.subarray(start, start + routing.top_k)).filter((expert) => expert >= 0);
}

/** How many experts of a token both traces have. @param {Routing} routing @param {number} row @param {number} column */
export function sharedAt(routing, row, column) {
  const there = new Set(expertsAt(routing, row, column, routing.others));
  return expertsAt(routing, row, column).filter((expert) => there.has(expert)).length;
}

/** The load of an expert as a multiple of an even one. @param {number[]} values @param {number} expert */
export function timesEven(values, expert) {
  const sum = values.reduce((total, value) => total + value, 0);
  return sum ? (values[expert] * values.length) / sum : 0;
}

/**
 * How much of the strongest color a cell has, 0 to 1; null where there is nothing to say.
 * @param {Routing} routing @param {View} view @param {number} row @param {number} column
 */
export function shareAt(routing, view, row, column) {
  if (view === "load") {
    const values = routing.load[row];
    if (column >= values.length) return null;
    // Half the color is an even load; three times that and more is all of it.
    const times = timesEven(values, column);
    return Math.min(times <= 1 ? times / 2 : 0.5 + (times - 1) / 4, 1);
  }
  const own = expertsAt(routing, row, column);
  if (!own.length) return null;
  if (view === "tokens") return 1;
  if (!expertsAt(routing, row, column, routing.others).length) return null;
  return 1 - sharedAt(routing, row, column) / own.length;
}

/** What a cell says, in words. @param {Routing} routing @param {View} view @param {number} row @param {number} column */
export function wordsAt(routing, view, row, column) {
  if (row >= routing.layers.length || column >= columnsOf(routing, view)) return "";
  const layer = routing.layers[row] < 0 ? "router" : `layer ${routing.layers[row]}`;
  if (view === "load") {
    const values = routing.load[row];
    if (column >= values.length) return `${layer}: ${values.length} experts`;
    const slots = values[column].toLocaleString("en");
    const times = timesEven(values, column).toFixed(2);
    return `${layer}, expert ${column}: ${slots} token slots, ${times} × an even load`;
  }
  const name = routing.names[column] === undefined ? "" : ` “${routing.names[column]}”`;
  const own = expertsAt(routing, row, column);
  const said = own.length ? `experts ${own.join(", ")}` : "no experts known";
  const place = `${layer}, token ${column}${name}: ${said}`;
  if (view === "tokens") return place;
  const there = expertsAt(routing, row, column, routing.others);
  const other = `${place}, in the other trace ${there.join(", ") || "unknown"}`;
  if (!own.length || !there.length) return other;
  return `${other}; ${sharedAt(routing, row, column)} of ${own.length} shared`;
}
