"""Models: what they are (config, spec, operators: no torch) and their tensors (the rest)."""
