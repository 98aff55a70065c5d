"""Users' calls: how they are sent, what runs them on the other worker, and waiting for all of a block."""
