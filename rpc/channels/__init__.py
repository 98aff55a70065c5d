"""Channels: how the bytes of bodies and tensors travel, in the envelope, in shared memory, in chunks, or by broadcast."""
