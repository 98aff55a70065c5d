"""The manifests of examples/kubernetes are valid, and the example trains on what they say."""

import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from gradwire.c10d.rendezvous.url import LaunchedProcess, find_launched_process
from gradwire.cli.doctor import VARIABLES
from gradwire.net.addresses import parse_ports

from examples import parameter_server
from tests.certificates import TOKEN
from tests.hosts import Network

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFESTS = {path.name: path for path in sorted(FOLDER.glob("*.yaml"))}


def load(name: str) -> Any:
    return yaml.safe_load(MANIFESTS[name].read_text())


@pytest.fixture
def job() -> Any:
    return load("job.yaml")


@pytest.fixture
def worker(job) -> Any:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def variables(container: Any) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


@pytest.mark.parametrize("name", MANIFESTS)
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_a_manifest_is_valid(name, version):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(load(name), version, strict=True)


def test_what_is_no_manifest_is_refused(job):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(validate.ValidationError, match="completionsMode"):
        validate.validate(job, "1.37", strict=True)


def test_the_manifests_fit_together(job, worker):
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    environment = variables(worker)
    service, policy = load("service.yaml"), load("network-policy.yaml")
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environment["WORLD_SIZE"])
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    ports = {each["name"]: each["containerPort"] for each in worker["ports"]}
    allowed = parse_ports(environment["GRADWIRE_PORTS"], "ports")
    assert ports == {"store": int(environment["MASTER_PORT"]), "agent": allowed.first}
    (rule,) = policy["spec"]["ingress"]
    assert [(each["port"], each.get("endPort")) for each in rule["ports"]] == [
        (ports["store"], None),
        (allowed.first, allowed.last),
    ]
    mounts = {mount["name"]: mount["mountPath"] for mount in worker["volumeMounts"]}
    assert Path(environment["GRADWIRE_TOKEN_FILE"]).parent == Path(mounts["token"])
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}


def test_its_variables_are_those_that_gradwire_reads(worker):
    environment = variables(worker)
    assert {name for name in environment if name.startswith("GRADWIRE_")} <= set(VARIABLES)
    found = find_launched_process({**environment, "JOB_COMPLETION_INDEX": "3"})
    assert found == LaunchedProcess(3, 4)


def run_container(environment: dict[str, str], arguments: list[str], names: str) -> str:
    """Runs the example in this process, on a host that resolves the names of the pods."""
    Path("/etc/hosts").write_text(names)  # of this host only
    os.environ.update(environment)
    sys.argv[:] = arguments
    with redirect_stdout(StringIO()) as output:
        parameter_server.main()
    return output.getvalue()


def pod_names(net: Network, count: int) -> str:
    lines = [f"{net.address(index)} parameter-server-{index}.parameter-server" for index in range(count)]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def test_the_example_trains_in_pods_like_these(hosts, job, worker, tmp_path):
    """Each in a network of its own, with the names that the Service gives, and the token in a file."""
    size = job["spec"]["completions"]
    net = hosts(*[1] * size)
    (tmp_path / "token").write_text(TOKEN)
    environment = {**variables(worker), "GRADWIRE_TOKEN_FILE": str(tmp_path / "token")}
    arguments = [*worker["command"][1:], "--epochs", "2"]
    started = [
        pod.start(
            run_container, {**environment, "JOB_COMPLETION_INDEX": str(index)}, arguments, pod_names(net, size)
        )
        for index, pod in enumerate(net.workers)
    ]
    output, *_ = [each.result() for each in started]
    assert "epoch  2" in output
    assert "trainer1" in output
