"""Messages as bytes: values, tensors and errors, and what a worker accepts of those that others send."""
