"""Is what is served what was trained? `proof.prove` compares all forms of a run's model."""
