"""Channels: how the bytes of bodies and tensors travel, in the envelope, in chunks, or by broadcast."""
