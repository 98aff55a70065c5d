"""The report of a run."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from .fork_server import Outcome

__all__ = ["Report"]

COLUMNS = ("passed", "failed", "excepted", "skipped")


class Report:
    """Compares the outcomes of a run with the known exceptions."""

    def __init__(self, outcomes: Sequence[Outcome], exceptions: Mapping[str, str], *, complete: bool) -> None:
        """Args: outcomes: of each test. exceptions: reasons by test. complete: whether all tests ran."""
        self._outcomes = outcomes
        self._exceptions = exceptions
        self._complete = complete

    @property
    def unexpected(self) -> list[str]:
        """Tests that failed without an exception."""
        return [each.test for each in self._outcomes if self._kind(each) == "failed"]

    @property
    def outdated(self) -> list[str]:
        """Exceptions that no longer hold: the test passed, or there is no such test."""
        failed = {each.test for each in self._outcomes if each.kind == "failed"}
        others = {each.test for each in self._outcomes} - failed
        return [test for test in self._exceptions if test in others or (self._complete and test not in failed)]

    @property
    def good(self) -> bool:
        """Whether tests ran, and all outcomes are as expected."""
        return bool(self._outcomes) and not self.unexpected and not self.outdated

    def table(self) -> str:
        """Returns the number of outcomes by suite, and the names of tests that did not pass."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for outcome in self._outcomes:
            counts[outcome.test.partition(".")[0]][self._kind(outcome)] += 1
        rows = [*counts.items(), ("all", sum(counts.values(), Counter()))]
        lines = [f"{'suite':<32}" + "".join(f"{column:>10}" for column in COLUMNS)]
        lines += [f"{suite:<32}" + "".join(f"{count[c]:>10}" for c in COLUMNS) for suite, count in rows]
        return "\n".join([*lines, "", *self._notes()])

    def _kind(self, outcome: Outcome) -> str:
        excepted = outcome.kind == "failed" and outcome.test in self._exceptions
        return "excepted" if excepted else outcome.kind

    def _notes(self) -> list[str]:
        kinds = [(self._kind(outcome), outcome) for outcome in self._outcomes]
        return [
            *(f"skipped   {each.test}: {each.text}" for kind, each in kinds if kind == "skipped"),
            *(
                f"excepted  {each.test}: {self._exceptions[each.test]}"
                for kind, each in kinds
                if kind == "excepted"
            ),
            *(f"failed    {test}" for test in self.unexpected),
            *(f"outdated  {test}: remove it from exceptions.toml" for test in self.outdated),
        ]
