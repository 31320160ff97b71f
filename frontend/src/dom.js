// Elements made from text alone. Names come from models and users, so nothing here takes HTML.

/** @typedef {Node | string | null | undefined | false} Child */

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | number | boolean | null | undefined>} [attributes]
 *   `class` and so on; null, undefined and false leave an attribute out, true sets it empty.
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) set(element, name, value);
  for (const child of children) if (child) element.append(child);
  return element;
}

/**
 * @param {Element} element
 * @param {string} name
 * @param {string | number | boolean | null | undefined} value
 */
export function set(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : String(value));
}

/**
 * Text in which `**words**` are bold.
 * @param {string} text
 * @returns {Child[]}
 */
export function emphasized(text) {
  return text.split("**").map((part, index) => (index % 2 ? make("b", {}, part) : part));
}

/**
 * Copies text; where the browser does not allow it, selects it in a field and asks once more.
 * @param {string} text
 * @param {HTMLElement} near
 * @returns {Promise<boolean>}
 */
export async function copy(text, near) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = make("textarea", { class: "unseen", "aria-hidden": "true" });
    field.value = text;
    near.append(field);
    const focused = /** @type {HTMLElement | null} */ (document.activeElement);
    field.select();
    const done = document.execCommand?.("copy") ?? false;
    field.remove();
    focused?.focus();
    return done;
  }
}
