"""What is between this worker and the others: links, connections, windows, control messages."""
