// The search box: which rows a text or a regular expression finds.

/** @typedef {import("./outline.js").Outline} Outline */

const PATIENCE = 1000; // Milliseconds after which a pattern counts as too slow to go on with.

/**
 * A matcher gives the span of the first match, or null.
 * @typedef {(text: string) => [number, number] | null} Matcher
 */

/**
 * @param {string} query
 * @param {boolean} isRegex
 * @returns {Matcher | null} Null for an empty query.
 * @throws {SyntaxError} The query is no regular expression.
 */
export function makeMatcher(query, isRegex) {
  if (!query) return null;
  if (isRegex) {
    const pattern = new RegExp(query, "u");
    return (text) => {
      const match = pattern.exec(text);
      return match && [match.index, match.index + match[0].length];
    };
  }
  const wanted = query.toLowerCase();
  return (text) => {
    const at = text.toLowerCase().indexOf(wanted);
    return at < 0 ? null : [at, at + wanted.length];
  };
}

/**
 * Finds rows by FQN or class name. A row whose parent's FQN fits already is no hit by its FQN, or
 * "attention" would find everything inside each attention too.
 * @param {Outline} outline
 * @param {Matcher} matcher
 * @returns {import("./outline.js").Found}
 * @throws {Error} The pattern takes too long.
 */
export function search(outline, matcher) {
  const { columns, parent } = outline;
  const { rows, names, name, before, after, classes } = columns;
  const fqns = outline.fqns();
  const hits = new Uint8Array(rows);
  const fits = new Uint8Array(rows);
  const byClass = new Uint8Array(classes.length + 1);
  classes.forEach(([className], index) => {
    byClass[index + 1] = matcher(className) ? 1 : 0;
  });
  /** @type {(0 | 1 | undefined)[]} */
  const byName = new Array(names.length);
  const start = performance.now();
  let count = 0;
  for (let row = 0; row < rows; row++) {
    if (row % 64 === 0 && performance.now() - start > PATIENCE) {
      throw new Error("This pattern takes too long; try a simpler one.");
    }
    fits[row] = matcher(fqns[row]) ? 1 : 0;
    let hit = byClass[before[row]] || byClass[after[row]];
    if (!hit && fits[row]) {
      const own = (byName[name[row]] ??= matcher(names[name[row]]) ? 1 : 0);
      hit = own || !fits[parent[row]] ? 1 : 0;
    }
    if (hit) {
      hits[row] = 1;
      count++;
    }
  }
  return { hits, count };
}
