"""A private Slurm cluster of one node: munged, slurmctld and slurmd, with all their files in one folder.

    with SlurmCluster(folder) as cluster:
        cluster.run("srun", "--ntasks", "2", "hostname")

It needs Debian's packages slurm-wlm and munge, and root, and does not touch a cluster of the machine.
"""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.ports import free_port
from tests.remote_functions import wait_until

__all__ = ["SlurmCluster", "why_unavailable"]

NODE = "localhost"
"""The node's name in Slurm, which has to resolve."""

DAEMONS = ("munged", "slurmctld", "slurmd")

CONFIGURATION = """\
ClusterName=gradwire
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
MpiDefault=none
KillWait=2
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 State=IDLE
PartitionName=all Nodes={node} Default=YES State=UP
"""


def why_unavailable() -> str:
    """Returns why no cluster can be started here; empty if one can."""
    missing = [name for name in (*DAEMONS, "srun", "sbatch") if not _find(name)]
    if missing:
        return f"Slurm is not installed (apt-get install slurm-wlm munge): there is no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "slurmd needs root to start tasks"


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class SlurmCluster:
    """A cluster, from `__enter__` to `__exit__`; a daemon that does not start is shown with its output."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._logs = ExitStack()
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "SlurmCluster":
        munge = self._folder / "munge"
        for each in (munge, self._folder / "state", self._folder / "spool"):
            each.mkdir(parents=True)
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        text = CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            ports=(free_port(), free_port()),
            folder=self._folder,
            node=NODE,
        )
        (self._folder / "slurm.conf").write_text(text)
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "log", "pid", "seed")]
        try:
            # By force, since munged wants a socket that all users can reach. All of this is root's.
            self._start("munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
            wait_until(lambda: self._check() and (munge / "socket").exists(), 20)
            self._start("slurmctld", "-D", "-c")
            self._start("slurmd", "-D", "-c")
            wait_until(
                lambda: self._check() and self.run("sinfo", "--noheader", check=False).count("idle") == 1, 40
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._cancel_all()
        finally:
            self._stop_daemons()

    def _cancel_all(self) -> None:
        """Ends what still runs, which would outlive the daemons."""
        if len(self._daemons) == len(DAEMONS) and all(process.poll() is None for process, _ in self._daemons):
            self.run("scancel", f"--user={getpass.getuser()}")
            wait_until(lambda: not self.run("squeue", "--noheader"), 20)

    def _stop_daemons(self) -> None:
        for process, _ in reversed(self._daemons):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._logs.close()

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """Runs a command of Slurm; returns what it prints. Fails with that if its status is not 0."""
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=110,
            check=False,
            env={**self.environment, **environment},
        )
        assert not check or done.returncode == 0, done.stdout + self.describe()
        return done.stdout

    def describe(self) -> str:
        """Returns the ends of what the daemons have printed."""
        return "".join(f"\n{log.name}:\n{log.read_text()[-2000:]}" for _, log in self._daemons)

    def _start(self, name: str, *arguments: str) -> None:
        path = _find(name)
        assert path is not None
        log = self._folder / f"{name}.out"
        output: IO[bytes] = self._logs.enter_context(log.open("wb"))
        process = subprocess.Popen([path, *arguments], stdout=output, stderr=output, env=self.environment)
        self._daemons.append((process, log))

    def _check(self) -> bool:
        assert all(process.poll() is None for process, _ in self._daemons), self.describe()
        return True
