"""What a running job does, as people and programs can see it: docs/view.md."""

__all__: list[str] = []
