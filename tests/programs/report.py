"""Compares the outcomes of programs, and formats them as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from .catalog import Program
from .runner import Outcome, agree

__all__ = ["Comparison", "table"]

HEADER = ("program", "code", "torch", "gradwire", "difference")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A program and its outcomes on both agents."""

    program: Program
    torch: Outcome
    gradwire: Outcome

    @property
    def difference(self) -> str:
        """The difference of the outcomes; "" if they agree, or if the program fails on both."""
        if self.torch.succeeded and self.gradwire.succeeded:
            same = agree(self.torch.results, self.gradwire.results, self.program.tolerance)
            return "" if same else "other results"
        if self.torch.succeeded:
            return f"fails on gradwire: {self.gradwire.reason}"
        if self.gradwire.succeeded:
            return f"fails on torch's agent: {self.torch.reason}"
        return ""

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of its line in the table."""
        verdict = self.difference or "none"
        if not self.torch.succeeded and not self.gradwire.succeeded:
            verdict = f"none; fails on both: {self.torch.reason}"
        return (self.program.name, self.program.source, _cell(self.torch), _cell(self.gradwire), verdict)


def table(comparisons: Sequence[Comparison]) -> str:
    """Returns a Markdown table of all comparisons, aligned so that it is readable as plain text."""
    rows = [HEADER, *(comparison.row for comparison in comparisons)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([lines[0], _line(["-" * width for width in [*widths, 10]], widths), *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
    return f"| {' | '.join([*cells, row[-1]])} |"


def _cell(outcome: Outcome) -> str:
    kind = "ok" if outcome.succeeded else "too slow" if outcome.status is None else "fails"
    return f"{kind} {outcome.seconds:.1f} s"
