"""How processes find each other: URLs, launchers' variables, and the barrier at which a group begins."""
