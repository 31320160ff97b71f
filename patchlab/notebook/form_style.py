"""How the form and the laboratory look: one style sheet, and the HTML of their small pieces.

Colors are JupyterLab's variables, then VS Code's, then literals, as in the tree widget. All text
that comes from outside is escaped here, in one place.
"""

from __future__ import annotations

from patchlab.plan.explain import more_about
from patchlab.plan.findings import Finding
from patchlab.render.html import text_html

FITS = 34  # Characters that the field shows beside the tree.
FITS_WIDE = 72  # Characters that it shows below the tree.
_SIGNS = {"error": "✕", "warning": "!", "info": "i", "ok": "✓"}

CSS = """
.patchlab-form, .patchlab-lab {
  --bg0: #fff; --fg0: #1d2127;
  --bg: var(--jp-layout-color0, var(--vscode-editor-background, var(--bg0)));
  --fg: var(--jp-ui-font-color1, var(--vscode-editor-foreground, var(--fg0)));
  --accent: #2563cf; --error: #b42a1f; --warning: #855800; --ok: #1f6e40; --on: 8%;
  color-scheme: light;
}
:where([data-jp-theme-light="false"], .vscode-dark, html[theme="dark"])
  :is(.patchlab-form, .patchlab-lab) {
  --bg0: #15181d; --fg0: #e4e7ec;
  --accent: #82adff; --error: #ff9187; --warning: #e3b341; --ok: #74d39b; --on: 13%;
  color-scheme: dark;
}
.patchlab-form, .patchlab-lab {
  --dim: color-mix(in srgb, var(--fg) 75%, var(--bg));
  --faint: color-mix(in srgb, var(--fg) 4%, var(--bg));
  --line: color-mix(in srgb, var(--fg) 13%, var(--bg));
  --edge: color-mix(in srgb, var(--fg) 46%, var(--bg));
  --mono: var(--jp-code-font-family, var(--vscode-editor-font-family, ui-monospace,
    SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace));
  --sans: var(--jp-ui-font-family, var(--vscode-font-family, system-ui, "DejaVu Sans",
    sans-serif));
  box-sizing: border-box; color: var(--fg); background: var(--bg);
  font: 13px/1.45 var(--sans); text-align: left;
  *, *::before { box-sizing: border-box; }
  .widget-html, .widget-html-content, .widget-vbox, .widget-hbox, .widget-checkbox {
    margin: 0; min-width: 0; height: auto; line-height: inherit; font: inherit;
    overflow: visible; color: inherit;
  }
  .widget-html-content { width: 100%; align-self: auto; overflow-wrap: anywhere; }
  .widget-html:not(:has(.widget-html-content > *)) { display: none; }
  p { margin: 0; }
  code { padding: 0; font: 12px/1.45 var(--mono); color: inherit; background: none; }
  b { font-weight: 600; }
  .dim { color: var(--dim); }
  .unseen { position: absolute; width: 1px; height: 1px; overflow: hidden;
    clip-path: inset(50%); white-space: nowrap; }
  [data-tone="ok"] { --tone: var(--ok); }
  [data-tone="error"] { --tone: var(--error); }
  [data-tone="warning"] { --tone: var(--warning); }
  [data-tone="info"] { --tone: var(--dim); }
  .said { padding: 6px 10px; border-left: 3px solid var(--tone); border-radius: 0 5px 5px 0;
    background: color-mix(in srgb, var(--tone) var(--on), var(--bg)); }
  .said strong { display: block; color: var(--tone); font-size: 12px; font-weight: 600; }
  .pill { flex: none; padding: 1px 9px; border-radius: 10px; font-size: 12px; font-weight: 600;
    color: var(--tone); background: color-mix(in srgb, var(--tone) var(--on), var(--bg)); }
  .code { display: block; padding: 6px 10px; border: 1px solid var(--line); border-radius: 5px;
    background: var(--faint); font: 12px/1.45 var(--mono); user-select: all;
    white-space: pre-wrap; overflow-wrap: anywhere; }

  .widget-text, .widget-combobox { display: flex; flex-direction: column; align-items: stretch;
    width: 100%; height: auto; margin: 0; }
  .widget-text > .widget-label, .widget-combobox > .widget-label {
    width: auto; max-width: none; height: auto; margin: 0 0 3px; padding: 0; text-align: left;
    font: 12px/1.45 var(--sans); color: var(--dim); }
  .widget-text input[type="text"] { width: 100%; height: 30px; padding: 4px 8px;
    font: 13px var(--mono); color: var(--fg); background: var(--bg);
    border: 1px solid var(--edge); border-radius: 5px; }
  .widget-text input[type="text"]::placeholder { color: var(--dim); opacity: 1; }
  .widget-text input[type="text"]:focus { border-color: var(--accent);
    outline: 1px solid var(--accent); outline-offset: 0; }
  .patchlab-wrong input[type="text"], .patchlab-wrong input[type="text"]:focus {
    border-color: var(--error); outline-color: var(--error); }
  .widget-checkbox { width: auto; }
  .widget-checkbox label { display: flex; gap: 6px; align-items: center; width: auto;
    margin: 0; font: 13px/1.45 var(--sans); color: var(--fg); }
  .widget-checkbox label > input { width: 14px; height: 14px; margin: 0;
    accent-color: var(--accent); }
  .widget-checkbox .widget-label:not(:has(input)) { display: none; }
  .widget-label-basic { padding: 0; }

  .patchlab-button, .widget-button { width: auto; height: 28px; margin: 0; padding: 0 8px;
    font: 600 12px/26px var(--sans); color: var(--fg); background: var(--faint);
    border: 1px solid var(--edge); border-radius: 5px; box-shadow: none; cursor: pointer; }
  .widget-button:hover:enabled, .patchlab-button:hover {
    background: var(--line); box-shadow: none; color: var(--fg); }
  .widget-button:focus-visible, .patchlab-button:focus-visible, .code:focus-visible,
  input[type="checkbox"]:focus-visible {
    outline: 2px solid var(--accent); outline-offset: 1px; }
  .widget-button:disabled { opacity: 1; color: var(--dim); border-color: var(--line);
    background: none; cursor: not-allowed; }
  .widget-button.patchlab-first { color: var(--bg); background: var(--accent);
    border-color: var(--accent); }
  .widget-button.patchlab-first:hover:enabled { color: var(--bg);
    background: color-mix(in srgb, var(--accent) 85%, var(--fg)); }
  .widget-button.patchlab-link, .widget-button.patchlab-link:hover:enabled {
    height: auto; padding: 0; border: 0; background: none; color: var(--accent);
    line-height: 1.45; text-align: left; white-space: normal; overflow-wrap: anywhere;
    text-decoration: underline; text-underline-offset: 3px;
    text-decoration-color: color-mix(in srgb, var(--accent) 40%, transparent); }
  .widget-button.patchlab-link:hover:enabled { text-decoration-color: currentColor; }
  .widget-button.patchlab-link:disabled { color: var(--dim); text-decoration: none; }
  .widget-button.patchlab-key { font-family: var(--mono); }

  .patchlab-row { display: flex; flex-flow: row wrap; gap: 6px; align-items: center; }
  .patchlab-row:has(> .patchlab-link) { gap: 14px; }
  .patchlab-stack { display: flex; flex-flow: column; gap: 6px; }
  .patchlab-card { display: flex; flex-flow: column; gap: 3px; align-items: flex-start;
    padding: 6px 10px; border-left: 3px solid var(--tone); border-radius: 0 5px 5px 0;
    background: color-mix(in srgb, var(--tone) var(--on), var(--bg)); }
  .patchlab-card summary { cursor: pointer; }
  .patchlab-card summary:focus-visible { outline: 2px solid var(--accent); }
  .patchlab-card strong { color: var(--tone); font-size: 12px; font-weight: 600; }
  .patchlab-error { --tone: var(--error); }
  .patchlab-warning { --tone: var(--warning); }
  .patchlab-info { --tone: var(--dim); }
  .patchlab-entries { display: flex; flex-flow: column; gap: 0; }
  .patchlab-entries h4, .patchlab-entries .head { margin: 0 0 4px; font: 600 12px var(--sans);
    color: var(--dim); }
  .patchlab-entry { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 2px 10px;
    padding: 6px 0; border-top: 1px solid var(--line); align-items: start; }
  .patchlab-entry small { display: block; font-size: 12px; color: var(--dim); }
  .patchlab-entry small[data-tone] { color: var(--tone); }
  .busy { display: flex; gap: 8px; align-items: center; color: var(--dim); }
  .busy i { flex: none; width: 10px; height: 10px; border: 2px solid var(--line);
    border-top-color: var(--accent); border-radius: 50%; animation: patchlab-turn 0.9s linear
    infinite; }
  @media (prefers-reduced-motion: reduce) { .busy i { animation: none; } }
}
@keyframes patchlab-turn { to { transform: rotate(1turn); } }
.patchlab-form { display: flex; flex-flow: column; gap: 10px; max-width: 560px; margin: 2px 0;
  padding: 12px 14px; border: 1px solid var(--line); border-radius: 6px; overflow: visible; }
.patchlab-form > .widget-box:not(:has(*)), .patchlab-hidden { display: none !important; }

.patchlab-lab { display: block; container: patchlab-lab / inline-size; margin: 2px 0;
  border: 1px solid var(--line); border-radius: 6px; overflow: hidden;
  .patchlab-head { display: flex; flex-flow: row wrap; gap: 6px 10px; align-items: center;
    padding: 8px 14px; background: var(--faint); border-bottom: 1px solid var(--line); }
  .patchlab-head > .widget-html { flex: 1 1 300px; }
  .verdict { display: flex; gap: 10px; align-items: baseline; }
  .patchlab-panes { display: grid; grid-template-columns: minmax(0, 1fr) clamp(324px, 34%, 360px);
    align-items: stretch; overflow: visible; }
  .patchlab-panes > * { min-width: 0; width: auto; }
  .patchlab-panes.patchlab-alone { grid-template-columns: minmax(0, 1fr); }
  .patchlab-panes > .patchlab-form { max-width: none; margin: 0; border: 0; border-radius: 0;
    border-left: 1px solid var(--line); }
  .patchlab-alone > .patchlab-form { border-left: 0; }
  .patchlab-panes .patchlab-tree { margin: 0; border: 0; border-radius: 0; }
  .patchlab-panes .patchlab-tree > :is(.verdict, .findings) { display: none; }
  @container patchlab-lab (max-width: 840px) {
    .patchlab-panes { grid-template-columns: minmax(0, 1fr); }
    .patchlab-panes > .patchlab-form { border-left: 0; border-top: 1px solid var(--line); }
  }
  @container patchlab-lab (width > 640px) and (width <= 840px) {
    .fits-wide { display: none; }
  }
}
"""


def style_html() -> str:
    """Return the style sheet as a piece of HTML."""
    return f"<style>{CSS}</style>"


def line_html(text: str, tone: str = "") -> str:
    """Write a quiet line, "" for nothing."""
    if not text:
        return ""
    look = f'style="color:var(--{tone})"' if tone in ("error", "warning") else 'class="dim"'
    return f"<p {look}>{text_html(text)}</p>"


def key_html(key: str) -> str:
    """Write a key that its field is too narrow for, once more and whole; "" for one that fits."""
    if len(key) <= FITS:
        return ""
    look = ' class="fits-wide"' if len(key) <= FITS_WIDE else ""
    # A screen reader reads the field.
    return f'<p aria-hidden="true"{look}><code>{text_html(key)}</code></p>'


def error_html(text: str) -> str:
    """Write what went wrong, for a screen reader too."""
    if not text:
        return ""
    head = '<p class="said" data-tone="error" role="alert"><strong>✕ Error</strong>'
    return f"{head}{text_html(text)}</p>"


def note_html(text: str) -> str:
    """Write what was done."""
    if not text:
        return ""
    return f'<p class="said" data-tone="ok" role="status">{text_html(text)}</p>'


def finding_html(finding: Finding) -> str:
    """Write a finding: its severity by color, sign and word; its code opens what it means."""
    sign = _SIGNS[finding.severity]
    return (
        f'<details><summary><strong><span aria-hidden="true">{sign} </span>'
        f'<span class="unseen">{finding.severity}: </span>{finding.code} '
        f"{text_html(finding.title)}</strong></summary>{text_html(more_about(finding))}</details>"
        f"<div>{text_html(finding.message)}</div>"
    )


def code_html(code: str) -> str:
    """Write a line of Python that one click selects."""
    return f'<code class="code" tabindex="0">{text_html(code)}</code>' if code else ""


def busy_html(text: str) -> str:
    """Write what is being worked on."""
    return f'<p class="busy" role="status"><i></i>{text_html(text)}</p>'


def verdict_html(tone: str, pill: str, text: str) -> str:
    """Write the line on top; `**words**` are bold. It is read out from a part that stays."""
    said = "".join(
        f"<b>{text_html(part)}</b>" if place % 2 else text_html(part)
        for place, part in enumerate(text.split("**"))
    )
    shown = ""
    if tone:
        shown = f'<span class="pill" data-tone="{tone}">{_SIGNS[tone]} {text_html(pill)}</span>'
    return f'<div class="verdict">{shown}<span>{said}</span></div>'
