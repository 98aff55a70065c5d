"""`gradwire doctor`: checks of this machine."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial

import click

from .clock_check import STORE_VARIABLE, check_clock
from .credential_checks import check_credentials
from .examples import Command
from .findings import Finding
from .host_checks import check_limits, check_memory, check_network, check_ports, check_sockets
from .installation import check_engines, check_versions

__all__ = ["command"]

SECTIONS: dict[str, Callable[[], Iterable[Finding]]] = {
    "Versions": check_versions,
    "Engines of process groups": check_engines,
    "Network": check_network,
    "Ports": check_ports,
    "Sockets of one host": check_sockets,
    "Shared memory": check_memory,
    "Limits": check_limits,
    "Credentials": check_credentials,
}
COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command(
    "doctor",
    cls=Command,
    epilog="""
    gradwire doctor
    gradwire doctor --store node0:29500       # compares the clock with that host's
    gradwire doctor --json | jq '.[] | select(.level != "ok")'
    """,
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects: level, check, text, advice.")
@click.option(
    "--store", metavar="HOST:PORT", help=f"A running `gradwire store`; by default that of {STORE_VARIABLE}."
)
def command(*, as_json: bool, store: str | None) -> int:
    """Checks whether gradwire can run here, and says what to do if not.

    Each line is ok, a warning (something will not work, or be slow, in some programs) or a problem (nothing will
    work). The exit status is 1 if there is a problem. The environment counts, so run it as the program is run.
    """
    checks: dict[str, Callable[[], Iterable[Finding]]] = {**SECTIONS, "Clock": partial(check_clock, store)}
    sections: dict[str, list[Finding]] = {}
    for name, check in checks.items():
        sections[name] = list(check())
        if name == "Versions" and _has_problem(sections[name]):
            break  # the other checks need what is missing
    findings = [finding for section in sections.values() for finding in section]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for name, section in sections.items():
            click.echo(name)
            for finding in section:
                _show(finding)
        counts = {level: sum(finding.level == level for finding in findings) for level in ("warning", "problem")}
        click.echo(f"problems: {counts['problem']}, warnings: {counts['warning']}")
    return int(_has_problem(findings))


def _has_problem(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "problem" for finding in findings)


def _show(finding: Finding) -> None:
    click.echo(f"  {click.style(f'{finding.level:<8}', fg=COLORS[finding.level])} {finding.check}: {finding.text}")
    if finding.advice:
        click.echo(f"           {finding.advice}")
