"""Process groups: the object that users and torch hold, its collectives, and what runs them on an engine."""
