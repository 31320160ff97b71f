"""Does it hold: in the process, on the patched skeleton, on the weights, on the outputs."""
