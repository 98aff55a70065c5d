"""Values as bytes: pickling, tensors, errors and device maps in messages."""
