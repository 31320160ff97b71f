// Load by layer and expert, experts by layer and token, and where two traces part. Draws what Python
// counted; a canvas with a grid's keys, and each selected cell in words, for those who cannot see it.

import "./routing.css";
import { make } from "./dom.js";
import {
  columnsOf,
  expertsAt,
  LABELS,
  shareAt,
  timesEven,
  VIEWS,
  wordsAt,
} from "./routing_cells.js";
import { readRouting } from "./routing_payload.js";

/** @typedef {import("./routing_payload.js").Routing} Routing */
/** @typedef {import("./routing_cells.js").View} View */

const ROW = 18; // Height of a cell in pixels; its width depends on how many there are.
const GUTTER = 46; // Width of the layers' numbers.
const WIDEST = 16_000; // Pixels of a canvas that every browser draws.
const SHADES = 32;
const SWATCHES = /** @type {Record<View, [string, string][]>} */ ({
  load: [
    ["unused", "unused"],
    ["half", "even load"],
    ["full", "3 × and more"],
  ],
  tokens: [["hue", "first expert; outlined: has the selected cell’s"]],
  divergence: [
    ["none", "same experts"],
    ["half", "half of them"],
    ["full", "none"],
  ],
});
const WATCHED = ["view", "cell", "facts", "experts", "other_experts"];

class RoutingView {
  /** @param {import("@anywidget/types").AnyModel} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    /** @type {Routing | null} */
    this.routing = null;
    this.caption = make("div", { class: "caption" });
    this.failure = make("div", { class: "failure", role: "alert", hidden: true });
    this.tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "View" });
    this.legend = make("div", { class: "legend" });
    this.ticks = make("div", { class: "ticks", "aria-hidden": "true" });
    this.layers = make("div", { class: "layers", "aria-hidden": "true" });
    this.canvas = make("canvas", { tabindex: 0, role: "application" });
    this.corner = make("div", { class: "corner", "aria-hidden": "true" });
    this.plot = make("div", { class: "plot" }, this.corner, this.ticks, this.layers, this.canvas);
    this.frame = make("div", { class: "frame" }, this.plot);
    this.status = make("div", { class: "status", "aria-live": "polite" });
    this.bar = make("div", { class: "bar" }, this.tabs, this.legend);
    this.root = make(
      "div",
      { class: "patchlab-routing" },
      this.caption,
      this.failure,
      this.bar,
      this.frame,
      this.status,
    );
    el.append(this.root);

    this.canvas.onkeydown = (event) => this.pressed(event);
    this.canvas.onclick = (event) => this.select(...this.at(event));
    this.canvas.onmousemove = (event) => this.say(...this.at(event));
    this.canvas.onmouseleave = () => this.say(...this.selected());
    this.tabs.onkeydown = (event) => this.pressedTab(event);
    this.refresh = () => this.guarded(() => this.draw());
    // The colors of a canvas do not follow style sheets by themselves; routing.css tells of a change.
    const styled = (/** @type {Event} */ event) => event.target === this.root && this.refresh();
    this.root.ontransitionend = this.root.onanimationstart = styled;
    this.take = () => this.guarded(() => this.read());
    for (const name of WATCHED) {
      const again = name === "view" || name === "cell" ? this.refresh : this.take;
      model.on(`change:${name}`, again);
    }
    this.sizes = globalThis.ResizeObserver && new ResizeObserver(() => this.resized());
    this.sizes?.observe(this.frame);
    this.take();
  }

  destroy() {
    this.sizes?.disconnect();
    for (const name of WATCHED) {
      this.model.off(`change:${name}`, this.refresh);
      this.model.off(`change:${name}`, this.take);
    }
  }

  /** @param {() => void} work Whatever it throws is shown, and told to Python. */
  guarded(work) {
    let message = "";
    try {
      work();
    } catch (error) {
      message = error instanceof Error ? error.message : String(error);
      this.model.send({ type: "error", message });
    }
    this.failure.textContent = message;
    this.failure.hidden = !message;
    for (const part of [this.bar, this.frame, this.status]) part.hidden = !this.routing;
  }

  read() {
    this.routing = null;
    const { model } = this;
    this.routing = readRouting(
      model.get("facts"),
      model.get("experts"),
      model.get("other_experts"),
    );
    this.draw();
  }

  /** @returns {View} */
  get view() {
    const view = this.model.get("view");
    return VIEWS.includes(view) ? view : "load";
  }

  /** @returns {[number, number]} */
  selected() {
    const cell = this.model.get("cell");
    const isCell = Array.isArray(cell) && cell.length === 2 && cell.every(Number.isSafeInteger);
    return isCell ? [Math.max(cell[0], 0), Math.max(cell[1], 0)] : [0, 0];
  }

  /** @param {string} name @param {unknown} value */
  choose(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
  }

  /** @param {number} row @param {number} column */
  select(row, column) {
    if (!this.routing) return;
    const within = (/** @type {number} */ value, /** @type {number} */ end) =>
      Math.max(0, Math.min(value, end - 1));
    const rows = this.routing.layers.length;
    this.choose("cell", [within(row, rows), within(column, columnsOf(this.routing, this.view))]);
    this.reveal();
  }

  /** @param {MouseEvent} event @returns {[number, number]} */
  at(event) {
    return [Math.floor(event.offsetY / ROW), Math.floor(event.offsetX / this.width())];
  }

  /** @param {KeyboardEvent} event */
  pressed(event) {
    if (!this.routing) return;
    const [row, column] = this.selected();
    const moves = /** @type {Record<string, [number, number]>} */ ({
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, columnsOf(this.routing, this.view) - 1],
      PageUp: [0, column],
      PageDown: [this.routing.layers.length - 1, column],
    });
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    event.stopPropagation(); // A notebook would move to another cell.
    this.select(...moves[event.key]);
  }

  /** @param {KeyboardEvent} event */
  pressedTab(event) {
    const views = this.offered();
    const steps = /** @type {Record<string, number>} */ ({ ArrowLeft: -1, ArrowRight: 1 });
    let place = views.indexOf(this.view) + (steps[event.key] ?? 0);
    if (event.key === "Home") place = 0;
    else if (event.key === "End") place = views.length - 1;
    else if (!Object.hasOwn(steps, event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    this.choose("view", views[(place + views.length) % views.length]);
    /** @type {HTMLElement | null} */ (this.tabs.querySelector('[aria-selected="true"]'))?.focus();
  }

  offered() {
    return VIEWS.filter((view) => view !== "divergence" || this.routing?.compared);
  }

  /** The width of a cell in pixels. */
  width() {
    const columns = this.routing ? columnsOf(this.routing, this.view) : 0;
    const space = (this.frame.clientWidth || 900) - GUTTER - 12;
    const named = this.view !== "load" && this.routing?.names.length;
    const least = named ? ROW : 5;
    return Math.max(least, Math.min(26, Math.floor(space / Math.max(columns, 1))));
  }

  resized() {
    if (this.routing && this.width() !== this.drawn) this.refresh();
  }

  /** @param {number} row @param {number} column */
  say(row, column) {
    const { routing, view } = this;
    if (!routing) return;
    const { tokens, all_tokens } = routing;
    const cut =
      view !== "load" && tokens < all_tokens
        ? ` · the first ${tokens} of ${all_tokens} tokens`
        : "";
    const words = wordsAt(routing, view, row, column);
    this.status.textContent = words + cut;
    return words;
  }

  reveal() {
    const [row, column] = this.selected();
    const { frame, corner } = this;
    const left = column * this.width();
    const top = row * ROW;
    const wide = frame.clientWidth - corner.offsetWidth - this.width();
    const high = frame.clientHeight - corner.offsetHeight - ROW;
    frame.scrollLeft = Math.max(left - wide, Math.min(frame.scrollLeft, left));
    frame.scrollTop = Math.max(top - high, Math.min(frame.scrollTop, top));
  }

  draw() {
    const { routing, view } = this;
    if (!routing) return;
    this.caption.textContent = routing.caption; // Never as HTML: names are user text.
    this.drawTabs();
    this.drawLegend();
    this.drawAxes(routing);
    this.drawCells(routing);
    const words = this.say(...this.selected());
    this.canvas.setAttribute(
      "aria-label",
      `${LABELS[view]}, ${routing.layers.length} layers. Arrow keys move. ${words}`,
    );
  }

  drawTabs() {
    const focused = this.tabs.contains(document.activeElement);
    const buttons = this.offered().map((view) => {
      const chosen = view === this.view;
      const button = make(
        "button",
        { type: "button", role: "tab", "aria-selected": String(chosen), tabindex: chosen ? 0 : -1 },
        LABELS[view],
      );
      button.onclick = () => this.choose("view", view);
      return button;
    });
    this.tabs.replaceChildren(...buttons);
    if (focused) buttons.find((button) => button.tabIndex === 0)?.focus();
  }

  drawLegend() {
    const swatches = SWATCHES[this.view].map(([kind, words]) =>
      make("span", {}, make("i", { class: kind }), words),
    );
    this.legend.dataset.view = this.view;
    this.legend.replaceChildren(...swatches);
  }

  /** @param {Routing} routing */
  drawAxes({ layers, names, tokens, load }) {
    const width = this.width();
    const columns =
      this.view === "load" ? columnsOf(/** @type {any} */ ({ load }), "load") : tokens;
    const named = this.view !== "load" && names.length > 0;
    const step = named
      ? 1
      : ([1, 2, 4, 8, 16, 32, 64, 128].find((each) => each * width >= 26) ?? 256);
    const ticks = [];
    for (let column = 0; column < columns; column += step) {
      const tick = make("span", {}, named ? names[column] : String(column));
      tick.style.left = `${column * width}px`;
      tick.style.width = `${width}px`;
      ticks.push(tick);
    }
    this.ticks.classList.toggle("named", named);
    this.ticks.replaceChildren(...ticks);
    this.ticks.style.width = `${columns * width}px`;
    this.layers.replaceChildren(
      ...layers.map((layer) => make("span", {}, layer < 0 ? "–" : String(layer))),
    );
    this.corner.replaceChildren(
      make("span", {}, this.view === "load" ? "expert" : "token"),
      make("span", {}, "layer"),
    );
  }

  /** @param {Routing} routing */
  drawCells(routing) {
    const { canvas, view } = this;
    const width = (this.drawn = this.width());
    const rows = routing.layers.length;
    const columns = columnsOf(routing, view);
    const across = Math.max(columns * width, 1);
    const scale = Math.min(globalThis.devicePixelRatio || 1, WIDEST / across);
    canvas.width = Math.round(across * scale);
    canvas.height = Math.round(Math.max(rows * ROW, 1) * scale);
    canvas.style.width = `${across}px`;
    canvas.style.height = `${rows * ROW}px`;
    const pen = canvas.getContext("2d");
    if (!pen) return;
    pen.scale(scale, scale);
    const style = getComputedStyle(this.root);
    const color = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
    const strong = color(view === "divergence" ? "--apart" : "--accent");
    const shades = Array.from(
      { length: SHADES + 1 },
      (_, shade) =>
        `color-mix(in oklab, ${strong} ${Math.round((shade * 100) / SHADES)}%, ${color("--empty")})`,
    );
    const lightness = color("--hue-lightness");
    const gap = width > 7 ? 2 : 1;
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const share = shareAt(routing, view, row, column);
        if (share === null) continue;
        const hue = () => (expertsAt(routing, row, column)[0] * 137.5) % 360; // Neighbors far apart.
        pen.fillStyle =
          view === "tokens" ? `hsl(${hue()} 52% ${lightness})` : shades[Math.round(share * SHADES)];
        pen.fillRect(column * width, row * ROW, width - gap, ROW - 2);
        if (view === "load" && !timesEven(routing.load[row], column)) {
          pen.fillStyle = color("--dim");
          pen.fillRect(column * width + (width - gap) / 2 - 1, row * ROW + ROW / 2 - 2, 2, 2);
        }
      }
    }
    this.drawSelection(routing, pen, width, gap, color("--fg"));
  }

  /** @param {Routing} routing @param {CanvasRenderingContext2D} pen @param {number} width @param {number} gap @param {string} color */
  drawSelection(routing, pen, width, gap, color) {
    const [row, column] = this.selected();
    const columns = columnsOf(routing, this.view);
    if (row >= routing.layers.length || column >= columns) return;
    pen.strokeStyle = color;
    const first = expertsAt(routing, row, column)[0];
    if (this.view === "tokens" && first !== undefined) {
      pen.lineWidth = 1;
      for (let other = 0; other < columns; other++) {
        if (expertsAt(routing, row, other).includes(first))
          pen.strokeRect(other * width + 0.5, row * ROW + 0.5, width - gap - 1, ROW - 3);
      }
    }
    pen.lineWidth = 2;
    pen.strokeRect(column * width + 1, row * ROW + 1, width - gap - 2, ROW - 4);
  }
}

/** @param {{ model: import("@anywidget/types").AnyModel, el: HTMLElement }} context */
function render({ model, el }) {
  const view = new RoutingView(model, el);
  return () => view.destroy();
}

export default { render };
