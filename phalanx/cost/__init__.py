"""Cost models: plain floats in, seconds and bytes out. Nothing here needs torch."""
