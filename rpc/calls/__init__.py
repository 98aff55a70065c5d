"""Users' calls and streams: how they are sent, and what runs them on the other worker."""
