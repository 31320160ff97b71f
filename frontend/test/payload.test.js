import { describe, expect, test } from "vitest";
import { Outline } from "../src/outline.js";
import { MARKS, PayloadError, readMarks, readTree } from "../src/payload.js";
import { traits } from "./setup.js";

/** @param {DataView} view @param {(bytes: Uint8Array) => Uint8Array | void} damage */
function damaged(view, damage) {
  const bytes = new Uint8Array(view.buffer.slice(0));
  return new DataView((damage(bytes) ?? bytes).slice().buffer);
}

/** Reads and uses a payload; says how it was refused, "" if it was not. @param {DataView} view */
function refusal(view) {
  try {
    new Outline(readTree(view)).openAll(true);
    return "";
  } catch (error) {
    if (!(error instanceof PayloadError)) throw error;
    return error.message;
  }
}

describe("a payload from Python", () => {
  test("has a row for each module, with its class and its parameters", () => {
    const tree = readTree(traits("tree").payload);
    const shown = new Outline(tree);
    const row = shown.find("layers.2.attention.self");
    expect(tree.rows).toBe(35);
    expect(tree.classes[tree.before[row] - 1]).toEqual(["SelfAttention", "toys"]);
    expect(tree.numbers[tree.paramsBefore[row]]).toBe(40);
    expect(tree.after).toBe(tree.before);
  });

  test("of a difference has both classes and where one is missing", () => {
    const tree = readTree(traits("diff").payload);
    const shown = new Outline(tree);
    expect(tree.after[shown.find("embed")]).toBe(0);
    expect(tree.before[shown.find("head")]).toBe(0);
    expect(tree.before[shown.find("layers.0.attention.self")]).not.toBe(
      tree.after[shown.find("layers.0.attention.self")],
    );
  });

  test("is read the same where it does not begin at the start of its buffer", () => {
    const view = traits("tree").payload;
    const bytes = new Uint8Array(view.byteLength + 3);
    bytes.set(new Uint8Array(view.buffer), 3);
    expect(readTree(new DataView(bytes.buffer, 3))).toEqual(readTree(view));
  });
});

describe("a damaged payload", () => {
  const view = traits("diff").payload;

  test("is refused with a reason wherever it is cut off", () => {
    for (let length = 0; length < view.byteLength - 8; length++) {
      expect(refusal(damaged(view, (bytes) => bytes.slice(0, length)))).toMatch(/cannot be read/);
    }
  });

  test("is read or refused, and nothing else, whichever byte is wrong", () => {
    let refused = 0;
    for (let at = 0; at < view.byteLength; at++) {
      for (const value of [0, 1, 127, 255]) {
        const problem = refusal(damaged(view, (bytes) => void (bytes[at] = value)));
        if (problem) refused++;
      }
    }
    expect(refused).toBeGreaterThan(view.byteLength);
  });

  test.each([
    ["rows", -1],
    ["rows", 2 ** 31],
    ["names", [1]],
    ["classes", [["A"]]],
    ["numbers", [null]],
    ["columns", null],
    ["columns", { depth: ["u9", 0] }],
    ["columns", { depth: ["toString", 0] }],
    ["columns", { depth: ["u1", -8] }],
  ])("with %s = %j is refused", (name, value) => {
    const length = view.getUint32(4, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(view.buffer, 8, length)));
    const text = new TextEncoder().encode(JSON.stringify({ ...header, [name]: value }));
    const bytes = new Uint8Array(8 + text.length + view.byteLength);
    bytes.set(new Uint8Array(view.buffer, 0, 8));
    new DataView(bytes.buffer).setUint32(4, text.length, true);
    bytes.set(text, 8);
    expect(refusal(new DataView(bytes.buffer))).toMatch(/cannot be read/);
  });
});

describe("marks", () => {
  test("from Python are one for each row", () => {
    const { payload, highlight } = traits("tree");
    const shown = new Outline(readTree(payload));
    const marks = /** @type {Uint8Array} */ (readMarks(highlight, shown.columns.rows));
    expect(MARKS[marks[shown.find("layers.3.attention")]]).toBe("container");
    expect(MARKS[marks[shown.find("layers.3.attention.self.key")]]).toBe("swallowed");
    expect(MARKS[marks[shown.find("layers.3.norm")]]).toBe("none");
  });

  test("for another tree are refused", () => {
    const { highlight } = traits("tree");
    expect(() => readMarks(highlight, 3)).toThrow(PayloadError);
    expect(() => readMarks(new DataView(new ArrayBuffer(3)), 3)).toThrow(PayloadError);
  });

  test("are none if nothing was sent", () => {
    expect(readMarks(new DataView(new ArrayBuffer(0)), 3)).toBeNull();
  });
});
