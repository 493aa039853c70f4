"""Is what is served what was trained? All forms of a run's model on the same tokens (`proof`)."""

from phalanx.engines.parity.proof import NUM_NEW, prove

__all__ = ["NUM_NEW", "prove"]
