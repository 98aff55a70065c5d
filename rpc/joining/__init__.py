"""How workers join a group, and take their place in one that has formed."""
