"""The encoding of messages: pickled values, tensors, errors and device maps."""
