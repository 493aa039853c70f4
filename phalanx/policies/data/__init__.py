"""Data parallelism: who holds parameters, gradients and optimizer state, and when they travel."""
