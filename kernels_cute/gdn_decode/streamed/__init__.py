"""The fused decode step with a ring, for batches that fill the device: states stream through shared memory."""
