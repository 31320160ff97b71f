// Load by layer and expert, experts by layer and token, and where two traces part. Draws what Python
// counted; a canvas with a grid's keys, and each selected cell in words, for those who cannot see it.

import "./routing.css";

/** @typedef {{ caption: string, layers: number[], routers: string[], load: number[][], top_k: number, tokens: number, all_tokens: number, names: string[], compared: boolean }} Facts */

const LABELS = { load: "Load", tokens: "Tokens", divergence: "Divergence" };

/** The experts of one token in one layer. @param {Int16Array} experts @param {Facts} facts @param {number} row @param {number} column */
function expertsAt(experts, facts, row, column) {
  const start = (row * facts.tokens + column) * facts.top_k;
  return Array.from(experts.subarray(start, start + facts.top_k)).filter((expert) => expert >= 0);
}

/** @param {number} share How much of the strongest color, 0 to 1. @param {string} color */
const mixed = (share, color) =>
  `color-mix(in srgb, ${color} ${Math.round(share * 100)}%, var(--bg))`;

/** @param {{ model: import("@anywidget/types").AnyModel, el: HTMLElement }} context */
function render({ model, el }) {
  const root = el.ownerDocument.createElement("div");
  root.className = "patchlab-routing";
  const make = (/** @type {string} */ tag, /** @type {HTMLElement} */ parent) =>
    parent.appendChild(el.ownerDocument.createElement(tag));
  const caption = make("div", root);
  const tabs = make("div", root);
  tabs.setAttribute("role", "tablist");
  const frame = make("div", root);
  frame.className = "frame";
  const canvas = /** @type {HTMLCanvasElement} */ (make("canvas", frame));
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  const status = make("div", root);
  status.className = "status";
  status.setAttribute("aria-live", "polite");
  el.appendChild(root);

  const facts = () => /** @type {Facts} */ (model.get("facts"));
  const numbers = (/** @type {string} */ name) => {
    const bytes = /** @type {DataView} */ (model.get(name));
    // A copy, since 16-bit numbers may not begin at an odd byte.
    return new Int16Array(
      bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength),
    );
  };
  let experts = numbers("experts");
  let others = numbers("other_experts");

  const columns = () =>
    model.get("view") === "load"
      ? Math.max(...facts().load.map((row) => row.length))
      : facts().tokens;
  const side = () => Math.max(6, Math.min(18, Math.floor(900 / Math.max(columns(), 1))));

  /** How many experts of a token both traces have. @param {number} row @param {number} column */
  function shared(row, column) {
    const there = expertsAt(others, facts(), row, column);
    return expertsAt(experts, facts(), row, column).filter((expert) => there.includes(expert))
      .length;
  }

  /** @param {number} row @param {number} column */
  function colorOf(row, column) {
    const { load, top_k, layers } = facts();
    if (model.get("view") === "load") {
      const values = load[row];
      if (column >= values.length) return "transparent";
      const ideal = values.reduce((sum, value) => sum + value, 0) / values.length || 1;
      // Half the color is the ideal load; three times the ideal and more is all of it.
      const times = values[column] / ideal;
      return mixed(Math.min(times <= 1 ? times / 2 : 0.5 + (times - 1) / 4, 1), "var(--accent)");
    }
    const own = expertsAt(experts, facts(), row, column);
    if (!own.length) return "transparent";
    if (model.get("view") === "divergence")
      return mixed(1 - shared(row, column) / top_k, "#c2410c");
    // Neighboring experts far apart on the wheel; the layer does not matter.
    return `hsl(${(own[0] * 137.5) % 360} 55% ${layers.length ? 55 : 50}%)`;
  }

  /** What a cell says, in words. @param {number} row @param {number} column */
  function wordsOf(row, column) {
    const { layers, load, names, top_k } = facts();
    const layer = `layer ${layers[row]}`;
    if (model.get("view") === "load") {
      const values = load[row];
      if (column >= values.length) return `${layer}: ${values.length} experts`;
      const ideal = values.reduce((sum, value) => sum + value, 0) / values.length || 1;
      return `${layer}, expert ${column}: ${values[column].toLocaleString("en")} token slots, ${(values[column] / ideal).toFixed(2)} × an even load`;
    }
    const name = names[column] === undefined ? "" : ` “${names[column]}”`;
    const own = expertsAt(experts, facts(), row, column);
    const said = own.length ? `experts ${own.join(", ")}` : "no experts known";
    if (model.get("view") !== "divergence") return `${layer}, token ${column}${name}: ${said}`;
    const there = expertsAt(others, facts(), row, column);
    return `${layer}, token ${column}${name}: ${said}, in the other trace ${there.join(", ") || "unknown"}; ${shared(row, column)} of ${top_k} shared`;
  }

  function draw() {
    const { layers, compared, tokens, all_tokens } = facts();
    caption.textContent = facts().caption; // Never innerHTML: names are user text.
    tabs.replaceChildren(
      ...["load", "tokens", ...(compared ? ["divergence"] : [])].map((view) => {
        const button = el.ownerDocument.createElement("button");
        button.type = "button";
        button.setAttribute("role", "tab");
        button.setAttribute("aria-selected", String(model.get("view") === view));
        button.textContent = LABELS[/** @type {keyof typeof LABELS} */ (view)];
        button.onclick = () => choose("view", view);
        return button;
      }),
    );
    const [row, column] = model.get("cell");
    const size = side();
    canvas.width = columns() * size;
    canvas.height = layers.length * size;
    const pen = canvas.getContext("2d");
    if (pen) {
      const style = getComputedStyle(root);
      const resolve = (/** @type {string} */ color) =>
        color.replaceAll(/var\((--\w+)\)/g, (_, name) => style.getPropertyValue(name));
      for (let y = 0; y < layers.length; y++) {
        for (let x = 0; x < columns(); x++) {
          pen.fillStyle = resolve(colorOf(y, x));
          pen.fillRect(x * size, y * size, size - 1, size - 1);
        }
      }
      pen.strokeStyle = style.getPropertyValue("--fg");
      pen.lineWidth = 2;
      pen.strokeRect(column * size, row * size, size - 1, size - 1);
    }
    const words = row < layers.length && column < columns() ? wordsOf(row, column) : "";
    const cut =
      model.get("view") !== "load" && tokens < all_tokens
        ? ` · the first ${tokens} of ${all_tokens} tokens`
        : "";
    status.textContent = words + cut;
    canvas.setAttribute(
      "aria-label",
      `${LABELS[/** @type {keyof typeof LABELS} */ (model.get("view"))]}, ${layers.length} layers. Arrow keys move. ${words}`,
    );
  }

  /** @param {string} name @param {unknown} value */
  function choose(name, value) {
    model.set(name, value);
    model.save_changes();
  }

  /** @param {number} row @param {number} column */
  function select(row, column) {
    const within = (/** @type {number} */ value, /** @type {number} */ end) =>
      Math.max(0, Math.min(value, end - 1));
    choose("cell", [within(row, facts().layers.length), within(column, columns())]);
  }

  canvas.onkeydown = (event) => {
    const [row, column] = model.get("cell");
    const moves = /** @type {Record<string, [number, number]>} */ ({
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, columns() - 1],
      PageUp: [0, column],
      PageDown: [facts().layers.length - 1, column],
    });
    if (!moves[event.key]) return;
    event.preventDefault();
    event.stopPropagation(); // A notebook would move to another cell.
    select(...moves[event.key]);
  };
  const at = (/** @type {MouseEvent} */ event) =>
    /** @type {[number, number]} */ ([
      Math.floor(event.offsetY / side()),
      Math.floor(event.offsetX / side()),
    ]);
  canvas.onclick = (event) => select(...at(event));
  canvas.onmousemove = (event) => {
    const [row, column] = at(event);
    if (row < facts().layers.length && column < columns())
      status.textContent = wordsOf(row, column);
  };
  canvas.onmouseleave = draw;

  function guarded() {
    try {
      experts = numbers("experts");
      others = numbers("other_experts");
      draw();
    } catch (error) {
      model.send({ type: "error", message: String(error) });
    }
  }
  const watched = [
    "change:view",
    "change:cell",
    "change:facts",
    "change:experts",
    "change:other_experts",
  ];
  for (const name of watched) model.on(name, guarded);
  guarded();
  return () => {
    for (const name of watched) model.off(name, guarded);
  };
}

export default { render };
