"""How the bytes of tensors and bodies travel: inside the envelope, in chunks, or by broadcast."""
