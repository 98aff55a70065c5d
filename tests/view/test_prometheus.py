"""Prometheus itself scrapes a running job, as docs/view.md says how. `make browser` runs this."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from gradwire import c10d, rpc
from gradwire.cli.authority import make_authority, make_worker

from tests import ports
from tests.remote_functions import add, wait_until
from tests.view import programs
from tests.view.browser import LONGER

ROOT = Path(__file__).parents[2]
PROMETHEUS = shutil.which("prometheus")
CALLS = 37

pytestmark = [
    LONGER,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROMETHEUS is None, reason="there is no Prometheus: apt-get install prometheus"),
]


def documented_config(number):
    """Returns one of the scrape configurations in docs/view.md."""
    return re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "view.md").read_text(), flags=re.S)[number]


@pytest.fixture
def prometheus(tmp_path):
    """Starts Prometheus with a configuration; returns what asks it for the value of an expression."""
    started = []

    def start(config):
        (tmp_path / "prometheus.yml").write_text(config)
        address = f"127.0.0.1:{ports.free_port()}"
        arguments = [
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
        ]
        with (tmp_path / "prometheus.log").open("w") as log:
            started.append(subprocess.Popen([PROMETHEUS, *arguments], stdout=log, stderr=log))

        def query(expression):
            """Returns the labels and values that it has; none while it does not answer yet."""
            where = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
            try:
                with urllib.request.urlopen(where, timeout=60) as answer:
                    found = json.load(answer)["data"]["result"]
            except OSError:
                assert started[0].poll() is None, (tmp_path / "prometheus.log").read_text()
                return []
            return [(each["metric"], float(each["value"][1])) for each in found]

        return query

    yield start
    for each in started:
        each.terminate()
        each.wait()


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_prometheus_scrapes_the_calls_of_a_job(workers, prometheus, tmp_path, is_encrypted):
    credentials = None
    if is_encrypted:
        make_authority(tmp_path, days=2)
        make_worker("worker0", tmp_path, tmp_path, days=1)
        names = {"ca": "ca.pem", "certificate": "worker0.pem", "key": "worker0-key.pem"}
        credentials = c10d.Credentials(**{name: tmp_path / file for name, file in names.items()})
    members = workers.rpc(1 if is_encrypted else 2, view=rpc.View(address="0"), credentials=credentials)
    a, callee = members[0], members[-1].name
    base, _, key = a.run(programs.url).partition("/?key=")
    (tmp_path / "view.key").write_text(key)
    config = documented_config(int(is_encrypted)).replace("10.0.0.2:8080", "127.0.0.1:8080")
    query = prometheus(config.replace("127.0.0.1:8080", base.partition("://")[2]).replace("5s", "1s"))
    a.run(lambda: [rpc.rpc_sync(callee, add, (1, 2)) for _ in range(CALLS)] and None)
    calls = f'gradwire_calls_sent_seconds_count{{function="{add.__module__}.add"}}'
    wait_until(lambda: [value for _, value in query(calls)] == [CALLS], seconds=300, pause=0.5)
    ((labels, _),) = query(calls)
    assert (labels["job"], labels["worker"], labels["callee"]) == ("gradwire", "worker0", callee)
    up = {labels["worker"]: value for labels, value in query("gradwire_worker_up")}
    assert up == {each.name: 1 for each in members}
    assert [value for _, value in query('up{job="gradwire"}')] == [1]
    assert query(f'gradwire_link_bytes_sent_total{{worker="worker0",peer="{callee}",channel="inline"}}')[0][1] > 0
