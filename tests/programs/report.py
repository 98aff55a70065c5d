"""The table of all programs."""

from collections.abc import Sequence
from dataclasses import dataclass

from .catalog import Program
from .runner import Outcome, agree

__all__ = ["Comparison", "table"]

HEADER = ("program", "code", "torch", "gradwire", "difference")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A program, and what became of it on both."""

    program: Program
    torch: Outcome
    gradwire: Outcome

    @property
    def difference(self) -> str:
        """In what the outcomes differ; "" if in nothing, and also where the program fails on both."""
        if self.torch.good and self.gradwire.good:
            alike = agree(self.torch.results, self.gradwire.results, self.program.tolerance)
            return "" if alike else "other results"
        if self.torch.good:
            return f"fails on gradwire: {self.gradwire.reason}"
        if self.gradwire.good:
            return f"fails on torch's agent: {self.torch.reason}"
        return ""

    @property
    def row(self) -> tuple[str, ...]:
        """Its line of the table."""
        told = self.difference or "none"
        if not self.torch.good and not self.gradwire.good:
            told = f"none; fails on both: {self.torch.reason}"
        return (self.program.name, self.program.source, _cell(self.torch), _cell(self.gradwire), told)


def table(comparisons: Sequence[Comparison]) -> str:
    """All of them as a table in Markdown, which reads well as text too."""
    rows = [HEADER, *(comparison.row for comparison in comparisons)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([lines[0], _line(["-" * width for width in [*widths, 10]], widths), *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
    return f"| {' | '.join([*cells, row[-1]])} |"


def _cell(outcome: Outcome) -> str:
    kind = "ok" if outcome.good else "too slow" if outcome.status is None else "fails"
    return f"{kind} {outcome.seconds:.1f} s"
