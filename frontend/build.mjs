// Builds the committed bundle in patchlab/notebook/static. The same sources give the same bytes.
import { build } from "esbuild";
import { statSync } from "node:fs";

const target = process.argv[2] ?? new URL("../patchlab/notebook/static", import.meta.url).pathname;
// Names of our own fields and methods, which no browser interface and no trait has; shortened.
const OWN = `
  actions activate active allFindings depth element hits input marks parent problem shape shared tied allFqns applySwitches changesOnly chose clicked clickedTab clickedTwice closeDetails columns copyFqn countText
  drawDetails drawError drawFindings drawVerdict failure fillClass focusTree foldNameOf foldNames grid folding
  folds found fqns group groupSize guard hasChildren hasFocus isDiff isFolded isRegex keep keptCount
  leastHeight lineOf lines listeners looksLike makeButton makeFinding makeLine makeSwitch matcher
  members nearestVisible nothing onActive onClose onCopy onSearch openAll openByDefault
  openFiltered openMarked openSiblings openUnmarked opened outline paint paramsAfter paramsBefore
  placeInSet position pressed pressedSearch panel pending pressedTab problems quiet readMarks refilter refold refresh relist
  reveal schedule root rowsOnScreen setMarks setSize spare suggest tablist takeMarks takePayload takeSearch
  takeSelected takeSwitches timer toTree toggleFold toolbar typeAhead typed typedAt unfolded visible
  visibleCount whyNothing
`
  .trim()
  .split(/\s+/);
const LIMIT = 40_000; // Bytes: anywidget sends the bundle once for each widget that is made.

await build({
  entryPoints: { tree: "src/tree.js" },
  absWorkingDir: new URL(".", import.meta.url).pathname,
  outdir: target,
  bundle: true,
  format: "esm",
  minify: true,
  charset: "utf8",
  mangleProps: new RegExp(`^(${OWN.join("|")})$`),
  target: ["chrome120", "firefox117", "safari17.2"],
  logLevel: "warning",
});

// The routing widget is small and has names in common with traits: nothing in it is shortened.
await build({
  entryPoints: { routing: "src/routing.js" },
  absWorkingDir: new URL(".", import.meta.url).pathname,
  outdir: target,
  bundle: true,
  format: "esm",
  minify: true,
  charset: "utf8",
  target: ["chrome120", "firefox117", "safari17.2"],
  logLevel: "warning",
});

const total = ["tree.js", "tree.css"]
  .map((file) => statSync(`${target}/${file}`).size)
  .reduce((sum, size) => sum + size, 0);
console.log(`tree.js + tree.css: ${total} bytes of ${LIMIT}`);
if (total > LIMIT) {
  console.error("The bundle is over its limit.");
  process.exit(1);
}
