import { describe, expect, test } from "vitest";
import { exact, human, joinNames } from "../src/format.js";
import { Outline } from "../src/outline.js";
import { readMarks } from "../src/payload.js";
import { makeMatcher, search } from "../src/search.js";
import { outline, seen, traits } from "./setup.js";

/** @param {import("../src/outline.js").Outline} shown @param {string} query @param {boolean} [regex] */
function find(shown, query, regex = false) {
  const matcher = makeMatcher(query, regex);
  shown.found = matcher && search(shown, matcher);
  shown.refilter();
  return shown;
}

describe("folding", () => {
  test("shows equal siblings once, and each of them when unfolded", () => {
    const shown = outline("tree");
    shown.openAll(true);
    const layer = shown.find("layers.0");
    expect(shown.groupSize[layer]).toBe(4);
    expect(shown.position[shown.find("layers.1")]).toBe(-1);
    shown.toggleFold(layer);
    expect(seen(shown)).toContain("layers.3");
    shown.toggleFold(layer);
    expect(seen(shown)).not.toContain("layers.3");
  });

  test("does not fold what is replaced into what is not", () => {
    const shown = outline("diff");
    expect(shown.members(shown.find("layers.0")).map((row) => shown.fqn(row))).toEqual([
      "layers.0",
      "layers.2",
      "layers.3",
    ]);
  });

  test("does not fold a marked module into an unmarked one", () => {
    const shown = outline("tree");
    const marks = new Uint8Array(shown.columns.rows);
    marks[shown.find("layers.2.attention")] = 1;
    shown.setMarks(marks);
    expect(seen(shown)).toContain("layers.2.attention");
    expect(shown.groupSize[shown.find("layers.0")]).toBe(3);
  });

  test("stays off where it is switched off", () => {
    const shown = outline("tree");
    shown.folding = false;
    shown.refilter();
    shown.openAll(true);
    expect(shown.visibleCount).toBe(shown.columns.rows);
  });

  test("opening and closing everything twice changes nothing", () => {
    const shown = outline("tree");
    shown.openAll(true);
    const all = seen(shown);
    shown.openAll(false);
    expect(seen(shown)).toEqual(["", "embed", "layers"]);
    shown.openAll(true);
    expect(seen(shown)).toEqual(all);
  });
});

describe("marks", () => {
  test("open what holds them, one level into a container, and close it again when they go", () => {
    const shown = outline("tree");
    shown.openAll(false);
    const before = seen(shown);
    shown.setMarks(readMarks(traits("tree").highlight, shown.columns.rows));
    expect(seen(shown)).toContain("layers.0.attention.self");
    expect(seen(shown)).not.toContain("layers.0.attention.self.query");
    shown.setMarks(null);
    expect(seen(shown)).toEqual(before);
  });
});

describe("the first look at a difference", () => {
  test("shows what is changed, also in what is replaced, but not what is in something added", () => {
    const shown = outline("diff");
    const { columns, parent } = shown;
    for (let row = 0; row < columns.rows; row++) {
      if (!columns.status[row] || shown.group[row] !== row) continue;
      const inside = [1, 2].includes(columns.status[parent[row]]); // Added or removed.
      expect([shown.fqn(row), shown.position[row] >= 0]).toEqual([
        shown.fqn(row),
        !inside && !shown.fqn(row).startsWith("layers.2") && !shown.fqn(row).startsWith("layers.3"),
      ]);
    }
    expect(seen(shown)).toContain("layers.0.attention.self.scale");
    expect(seen(shown)).not.toContain("layers.0.attention.self.scale.factor");
  });

  test("leaves what is replaced closed where that would be thousands of rows", () => {
    // A root, 400 replaced modules that are all different, in each of them one that was added.
    const columns = { ...outline("diff").columns, rows: 801, names: [] };
    const fill = (/** @type {(row: number) => number} */ value) =>
      Uint16Array.from({ length: 801 }, (_, row) => value(row));
    const [zero, one] = [fill(() => 0), fill(() => 1)];
    const shown = new Outline({
      ...columns,
      depth: fill((row) => (row ? 2 - (row % 2) : 0)),
      shape: fill((row) => row),
      status: fill((row) => (row ? (row % 2 ? 3 : 1) : 0)),
      ...{ name: zero, shared: zero, tied: zero, before: one, after: one },
    });
    expect(shown.visibleCount).toBe(401);
  });
});

describe("the search", () => {
  test("finds by the last part of an FQN, and not all that is inside", () => {
    const shown = find(outline("tree"), "attention.self");
    expect(shown.found?.count).toBe(4);
  });

  test("finds by class name", () => {
    expect(find(outline("tree"), "layernorm").found?.count).toBe(4);
  });

  test("keeps what holds a hit, and lets a hit be opened", () => {
    const shown = find(outline("tree"), "output");
    expect(seen(shown)).toEqual([
      "",
      "layers",
      "layers.0",
      "layers.0.attention",
      "layers.0.attention.output",
    ]);
    shown.toggle(shown.find("layers.0.attention.output"));
    expect(seen(shown)).toContain("layers.0.attention.output.dense");
  });

  test("takes a text literally and a regular expression as one", () => {
    expect(find(outline("tree"), "layers\\.[02]$").found?.count).toBe(0);
    expect(find(outline("tree"), "layers\\.[02]$", true).found?.count).toBe(2);
    expect(() => makeMatcher("layers.(", true)).toThrow(SyntaxError);
    expect(makeMatcher("layers.(", false)).not.toBeNull();
  });

  test("agrees with looking at every FQN", () => {
    for (const query of ["layers.1", "self.", "e", "dense", "Norm", "0.attention.o"]) {
      const shown = find(outline("tree"), query);
      const wanted = query.toLowerCase();
      shown.fqns().forEach((fqn, row) => {
        const { classes, before } = shown.columns;
        const fits = [fqn, classes[before[row] - 1][0]].some((text) =>
          text.toLowerCase().includes(wanted),
        );
        if (shown.found?.hits[row]) expect(fits).toBe(true);
        else if (fits) expect(shown.fqn(shown.parent[row]).toLowerCase()).toContain(wanted);
      });
    }
  });

  test("restores the rows that were open", () => {
    const shown = outline("tree");
    const before = seen(shown);
    find(shown, "dense");
    expect(seen(shown)).not.toEqual(before);
    expect(seen(find(shown, ""))).toEqual(before);
  });
});

describe("the tabs of a difference", () => {
  test("show what is there before, after, and in either", () => {
    const shown = outline("diff");
    const rows = /** @type {const} */ (["before", "after", "diff"]).map((tab) => {
      shown.tab = tab;
      shown.refilter();
      shown.openAll(true);
      return seen(shown);
    });
    expect(rows[0]).toContain("embed");
    expect(rows[0]).not.toContain("head");
    expect(rows[1]).toContain("head");
    expect(rows[1]).not.toContain("embed");
    expect(rows[2]).toEqual(expect.arrayContaining(["embed", "head"]));
  });

  test("with changes only, every row is changed or holds a change", () => {
    const shown = outline("diff");
    shown.changesOnly = true;
    shown.refilter();
    shown.openAll(true);
    const { status } = shown.columns;
    for (const row of shown.visible.subarray(0, shown.visibleCount)) {
      expect(status.subarray(row, shown.end[row]).some((code) => code > 0)).toBe(true);
    }
    expect(seen(shown)).not.toContain("layers.0.norm");
    expect(seen(shown)).toContain("layers.1.norm");
  });
});

describe("revealing a module", () => {
  test("opens and unfolds what hides it", () => {
    const shown = outline("tree");
    shown.openAll(false);
    expect(shown.reveal(shown.find("layers.2.attention.self.key"))).toBe(true);
    expect(seen(shown)).toContain("layers.2.attention.self.key");
  });

  test("says so where the search leaves it out", () => {
    const shown = find(outline("tree"), "embed");
    expect(shown.reveal(shown.find("layers.0.norm"))).toBe(false);
  });
});

describe("numbers and names", () => {
  test("are written as Python writes them", () => {
    expect([999, 1000, 592128, 999950, 22713216, 671026404352].map(human)).toEqual([
      "999",
      "1 k",
      "592 k",
      "1 M",
      "22.7 M",
      "671 B",
    ]);
    expect(exact(22713216)).toBe("22,713,216");
    expect([human(-1), human(0)]).toEqual(["uninitialized", ""]);
    expect(joinNames(["0", "1", "2", "5"])).toBe("0–2, 5");
    expect(joinNames(["q", "k", "v", "o"])).toBe("q, k … o");
    expect(joinNames(["0", "2", "4", "6"])).toBe("0, 2 … 6");
  });
});
