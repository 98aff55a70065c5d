"""The table that a chaos run prints."""

from collections import Counter
from collections.abc import Sequence

from tests.chaos.judgement import Verdict
from tests.chaos.plan import KINDS, Fault
from tests.chaos.records import CALLER_DIED, LOST, NOT_SENT, RAN, SUCCEEDED, UNKNOWN, WRONG

__all__ = ["describe", "describe_fault", "describe_plan"]

COLUMNS = (SUCCEEDED, NOT_SENT, UNKNOWN, RAN, CALLER_DIED, LOST, WRONG)
MAX_LINES = 30


def describe_fault(fault: Fault, *, is_end: bool) -> str:
    """Returns one line about the beginning or the end of a fault."""
    scope = KINDS[fault.kind].scope
    name = {"worker": f"worker{fault.target}", "host": f"host{fault.target}"}.get(scope, scope)
    if scope == "hosts":
        name = f"host{fault.target} to host{fault.other}"
    return f"{fault.kind} of {name} " + ("ends" if is_end else f"for {fault.seconds:g} s")


def describe_plan(plan: Sequence[Fault]) -> str:
    """Returns a line for each fault."""
    return "\n".join(f"{fault.start:7.1f} s  {describe_fault(fault, is_end=False)}" for fault in plan)


def describe(plan: Sequence[Fault], verdict: Verdict) -> str:
    """Returns the table of a run."""
    findings = verdict.findings
    lines = ["", f"{'faults':<60} number"]
    kinds = Counter(fault.kind for fault in plan)
    lines += [f"{KINDS[kind].text:<60} {kinds[kind]:6}" for kind in KINDS if kinds[kind]]
    lines += ["", f"{'calls':<14}{'made':>9}" + "".join(f"{column:>12}" for column in COLUMNS)]
    names = sorted({kind for kind, _ in findings.calls})
    for name in [*names, "all"]:
        of_kind = Counter(dict.fromkeys(COLUMNS, 0))
        for (kind, outcome), count in findings.calls.items():
            if name in (kind, "all"):
                of_kind[outcome] += count
        row = "".join(f"{of_kind[column]:>12}" for column in COLUMNS)
        lines.append(f"{name:<14}{of_kind.total():>9}{row}")
    lines += [
        "",
        f"lost {findings.count(LOST)}, doubled {findings.doubled}, wrong {findings.count(WRONG)}, "
        f"run though not sent {findings.ran_though_not_sent}, answered though not run {findings.never_ran}, "
        f"contradictory all_gathers {len(verdict.gathers)}",
        f"processes started again: {_counts(verdict.deaths.restarts)}; crashed: {len(verdict.deaths.crashes)}; "
        f"attempts to join that failed: {len(verdict.deaths.failed_joins)}",
        f"leaks: {len(verdict.leaks) + len(verdict.left) + len(verdict.threads_left)}",
    ]
    if len(verdict.figures) == 2:
        before, after = verdict.figures
        lines += ["", f"{'the most that a worker has':<40} before  after"]
        lines += [
            f"{kind:<40} {before.get(kind, 0):6} {after.get(kind, 0):6}" for kind in sorted({*before, *after})
        ]
    if verdict.thirds:
        lines += ["", f"{'workers without faults, by thirds of the run':<48}" + f"{'1st':>8}{'2nd':>8}{'3rd':>8}"]
        lines += [
            f"{f'{name}: {kind}':<48}" + "".join(f"{each:8.0f}" for each in thirds)
            for name, kinds in verdict.thirds.items()
            for kind, thirds in kinds.items()
        ]
    details = [f"{fault}: {text}" for fault, texts in findings.examples.items() for text in texts]
    details += [f"all_gather: {text}" for text in verdict.gathers]
    details += [f"crashed: {text}" for text in verdict.deaths.crashes]
    details += [f"could not join: {text}" for text in verdict.deaths.failed_joins[:5]]
    details += [f"leak: {text}" for text in [*verdict.leaks, *verdict.left, *verdict.threads_left]]
    details += [f"growth: {text}" for text in verdict.growth]
    details += [f"stuck: {verdict.stuck}"] if verdict.stuck else []
    return "\n".join([*lines, "", *details[:MAX_LINES], "", "all is well" if verdict.is_good else "NOT WELL"])


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "none"
