"""How rows look: rows in, text, HTML, DOT, frames and payloads out. Knows nothing of patches."""
