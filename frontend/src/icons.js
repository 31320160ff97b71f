// The few icons of the toolbar, as strokes on a 16 × 16 field.

const PATHS = {
  expand: "M4 3l4 4 4-4M4 9l4 4 4-4",
  collapse: "M4 7l4-4 4 4M4 13l4-4 4 4",
  copy: "M6 6h7v7H6zM3.5 10H3V3h7v.5",
  close: "M4 4l8 8M12 4l-8 8",
  search: "M7 11.5a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9zM10.5 10.5 14 14",
};

/** @param {keyof typeof PATHS} name */
export function icon(name) {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  const path = document.createElementNS(namespace, "path");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}
