"""How the ranks of a group learn that one of them has died or left, and what that means for their operations."""
