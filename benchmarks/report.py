"""The table of `python -m benchmarks`: as text, as a page of the documentation, and as a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .harness import Comparison
from .systems import GRADWIRE, GRADWIRE_GRPC, GRADWIRE_TCP, TORCH, TORCH_UV, System

__all__ = ["DESCRIPTION", "Table", "plot"]

MILLISECONDS = 1e3

TICKS = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
"""Of the plot."""

DESCRIPTION = """\
Milliseconds of a call or of another operation, and ratios of the medians, of the 99th percentiles and of the
processor time of all workers together; below 1 gradwire needs less. In brackets, the lowest and the highest ratio
of the medians of a round."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two systems whose ratios are columns of the table."""

    title: str
    system: System
    peer: System


PAIRS = [
    Pair("to TensorPipe", GRADWIRE, TORCH),
    Pair("to its TCP", GRADWIRE, TORCH_UV),
    Pair("both by TCP", GRADWIRE_TCP, TORCH_UV),
    Pair("gRPC alone", GRADWIRE_GRPC, TORCH),
]
"""The columns: gradwire and TensorPipe with their default options; gradwire against TensorPipe over TCP; both over
TCP, as between hosts; gradwire over its gRPC stream alone, against TensorPipe with its default options."""

PLOTTED = [pair for pair in PAIRS if pair.title in ("to TensorPipe", "both by TCP")]
"""The pairs that the plot shows, beside each other."""


class Table:
    """The table of some systems: the pairs of which both are measured, and their times."""

    def __init__(self, systems: Sequence[System]) -> None:
        """Makes the table of the systems that are measured."""
        self._systems = systems
        self._pairs = [pair for pair in PAIRS if pair.system in systems and pair.peer in systems]
        self._names = [f"{systems[0].name} ms"]
        for number in range(len(self._pairs)):
            self._names += ["median", "p99", "cpu"] if number else ["median", "(rounds)", "p99", "cpu"]

    def text_header(self) -> str:
        """Returns the two lines above the rows."""
        titles = [f" {pair.title} ".center(22 if number else 37, "-") for number, pair in enumerate(self._pairs)]
        return f"{'':52}{''.join(f'  {title}' for title in titles)}\n{_line('case', self._names)}"

    def text_row(self, comparison: Comparison) -> str:
        """Returns the line of a case."""
        return _line(comparison.case, self._cells(comparison))

    def page(self, facts: dict[str, str], comparisons: Sequence[Comparison], plotted: str) -> str:
        """Returns the page for the documentation, in Markdown; `plotted` is the name of the plot."""
        titles = ["", *(pair.title for pair in self._pairs for _ in range(3))]
        titles[1:1] = titles[1:2]  # the first pair has a column more
        names = [f"{title}: {name}".removeprefix(": ") for title, name in zip(titles, self._names, strict=True)]
        ratios = [[each.case, *self._cells(each)] for each in comparisons]
        times = [[each.case, *(_times(each, system.name) for system in self._systems)] for each in comparisons]
        lines = [
            "# Figures",
            "",
            "Written by `make bench`; [benchmarks](../benchmarks.md) says what is measured, and how.",
            "",
            *(f"- {name}: {value}" for name, value in facts.items()),
            "",
            f"![ratios of the medians and of the processor time]({plotted})",
            "",
            "## Ratios",
            "",
            DESCRIPTION,
            "",
            *_markdown(["case", *names], ratios),
            "",
            "## Times",
            "",
            "Milliseconds: median / p99 / processor time of all workers together.",
            "",
            *_markdown(["case", *(system.name for system in self._systems)], times),
        ]
        return "\n".join(lines) + "\n"

    def _cells(self, comparison: Comparison) -> list[str]:
        cells = [f"{comparison.median(self._systems[0].name) * MILLISECONDS:.3f}"]
        for pair in self._pairs:
            first, second = pair.system.name, pair.peer.name
            cells.append(f"{comparison.ratio(first, second):.2f}")
            if pair is self._pairs[0]:
                ratios = comparison.ratios(first, second)
                cells.append(f"({min(ratios):.2f}-{max(ratios):.2f})")
            cells.append(f"{comparison.p99(first) / comparison.p99(second):.2f}")
            cells.append(f"{comparison.cpu_of(first) / comparison.cpu_of(second):.2f}")
        return cells


def _line(case: str, cells: Sequence[str]) -> str:
    """Returns a line of text; its columns are those of `Table._cells`."""
    widths = [14, 8, 13, *[6] * len(cells)]
    columns = [f"{cell:>{widths[number]}}" for number, cell in enumerate(cells)]
    return f"{case:38}" + "  ".join(columns)


def _times(comparison: Comparison, system: str) -> str:
    times = comparison.median(system), comparison.p99(system), comparison.cpu_of(system)
    return " / ".join(f"{seconds * MILLISECONDS:.3f}" for seconds in times)


def _markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows)]


def plot(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Plots the ratios of PLOTTED into a PNG file, as far as they are measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    measured = comparisons[0].rounds
    pairs = [pair for pair in PLOTTED if pair.system.name in measured and pair.peer.name in measured]
    size = 11, 1.5 + 0.35 * len(comparisons)
    figure, panels = plt.subplots(
        1, max(1, len(pairs)), figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    positions = np.arange(len(comparisons))
    for panel, pair in zip(panels[0], pairs, strict=False):
        first, second = pair.system.name, pair.peer.name
        medians = np.array([each.ratio(first, second) for each in comparisons])
        cpu = np.array([each.cpu_of(first) / each.cpu_of(second) for each in comparisons])
        panel.barh(positions - 0.2, medians - 1, 0.4, left=1, label="time (median)")
        panel.barh(positions + 0.2, cpu - 1, 0.4, left=1, label="processor time")
        panel.axvline(1, color="black", linewidth=1)
        panel.set_xscale("log")
        panel.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        panel.minorticks_off()
        panel.grid(axis="x", alpha=0.4)
        panel.set_title(f"{first} / {second}")
        panel.set_xlabel("ratio: below 1 gradwire needs less")
    panels[0][0].set_yticks(positions, [each.case for each in comparisons])
    panels[0][0].invert_yaxis()
    if pairs:
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)
