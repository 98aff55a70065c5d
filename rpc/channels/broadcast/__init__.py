"""Large payloads sent to several workers at once, through a process group."""
