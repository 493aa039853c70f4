"""Questions asked of traces and of recorded runs. No torch."""
