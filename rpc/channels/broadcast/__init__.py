"""The channel for large payloads that go to several workers at once, by the broadcast of a process group."""
