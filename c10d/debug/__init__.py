"""Help when ranks do not agree: a flight recorder, a check of every call, a barrier that names who is missing."""
