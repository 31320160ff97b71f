// The widget as the browser sees it: types only.

/** @typedef {import("./outline.js").Tab} Tab */
/** @typedef {import("./details.js").Finding} Finding */
/**
 * The synced traits of TreeWidget; patchlab/notebook/tree_widget.py says what each is.
 * @typedef {object} Traits
 * @property {DataView} payload
 * @property {DataView} highlight
 * @property {string | null} selected
 * @property {string} query
 * @property {boolean} regex
 * @property {Tab} tab
 * @property {boolean} changes_only
 * @property {boolean} fold_equal
 * @property {import("./details.js").Answer | {}} details
 * @property {import("./findings.js").Verdict} verdict
 * @property {Finding[]} findings
 * @property {string} error
 */
/** @typedef {import("@anywidget/types").AnyModel<Traits>} Model */

export {};
