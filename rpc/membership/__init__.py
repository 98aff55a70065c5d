"""The members of a group: how they find each other, where they listen, and the log of who joins and leaves."""
