"""Channels carry the bytes of bodies and tensors; transports carry the envelopes that name them."""
