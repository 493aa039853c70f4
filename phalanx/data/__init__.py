"""From text to packed micro-batches, prepared off the devices and without torch."""
