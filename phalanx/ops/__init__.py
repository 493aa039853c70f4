"""Tensor functions, each with a pure-torch reference: norm, rope, attention, loss."""
