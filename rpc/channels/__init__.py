"""Channels: how bytes of bodies and tensors travel: in the envelope, in shared memory, in chunks, by broadcast."""
