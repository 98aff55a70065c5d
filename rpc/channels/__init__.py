"""Channels: how the bytes of bodies and tensors travel, inside the envelope or apart from it."""
