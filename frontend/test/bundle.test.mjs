// @vitest-environment node
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { expect, test } from "vitest";

const FRONTEND = new URL("..", import.meta.url).pathname;
const COMMITTED = join(FRONTEND, "../patchlab/notebook/static");

test("the committed bundle is what the sources give; `npm run build` makes it anew", () => {
  const folder = mkdtempSync(join(tmpdir(), "patchlab-"));
  execFileSync(process.execPath, ["build.mjs", folder], { cwd: FRONTEND });
  for (const file of ["tree.js", "tree.css", "routing.js", "routing.css"]) {
    const built = readFileSync(join(folder, file), "utf8");
    expect(readFileSync(join(COMMITTED, file), "utf8") === built, `${file} is out of date`).toBe(
      true,
    );
  }
  rmSync(folder, { recursive: true });
});

test.each(["tree.js", "routing.js"])("%s has one export and asks for no other file", (file) => {
  const bundle = readFileSync(join(COMMITTED, file), "utf8");
  expect(bundle.match(/\bexport\b/g)).toHaveLength(1);
  expect(bundle).not.toMatch(/\bimport\b/);
  expect(bundle).not.toMatch(/innerHTML|insertAdjacentHTML|eval\(|new Function/);
});
