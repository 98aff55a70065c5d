"""`gradwire doctor` says what is wrong with a machine, and what to do."""

import json
import os
import re
import socket
import sys
import time

import pytest
from click.testing import CliRunner, Result
from gradwire.c10d import TCPStore
from gradwire.c10d.stores import remote, server
from gradwire.cli import doctor
from gradwire.cli.doctor import check_clock, check_limits, check_memory, check_network, check_ports, check_versions
from gradwire.cli.group import gradwire
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import EXPIRED, TOKEN, make_authority, write
from tests.house.source import LOOSE, MODULES


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith(("GRADWIRE_", "MASTER_", "GLOO_"))]:
        monkeypatch.delenv(name)
    return monkeypatch


def levels(findings) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def test_a_machine_that_can_run_gradwire_has_no_problems():
    done: Result = CliRunner().invoke(gradwire, ["doctor"], standalone_mode=False)
    assert (done.return_value, done.exception) == (0, None)
    lines = done.output.splitlines()
    assert "Engines of process groups" in lines
    assert "  ok       gloo: available" in lines
    assert lines[-1].startswith("problems: 0, ")


def test_problems_have_advice_and_an_exit_status(environment, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o644)
    environment.setenv("GRADWIRE_TOKEN_FILE", str(tmp_path / "token"))
    environment.setenv("GRADWIRE_TOKEN_FIEL", "x")
    environment.setenv("GRADWIRE_INSECURE", "yes")
    environment.setenv("GRADWIRE_LOG", "rcp=debug")
    environment.setenv("MASTER_ADDR", "no such host.invalid")
    done = CliRunner().invoke(gradwire, ["doctor", "--json"], standalone_mode=False)
    assert done.return_value == 1
    found = {each["check"]: each for each in json.loads(done.output)}
    assert {name for name, each in found.items() if each["level"] == "problem"} == {
        "MASTER_ADDR",
        "GRADWIRE_INSECURE",
        "GRADWIRE_LOG",
    }
    assert found["GRADWIRE_TOKEN_FILE"]["advice"] == f"chmod 600 {tmp_path / 'token'}"
    assert found["GRADWIRE_TOKEN_FIEL"]["advice"] == "did you mean GRADWIRE_TOKEN_FILE?"
    assert all(each["advice"] for each in found.values() if each["level"] != "ok")
    assert TOKEN not in done.output


def test_certificates_are_valid_until(environment, tmp_path):
    authority = make_authority()  # valid for a day
    write(tmp_path, authority, "a")
    for variable in ("CA", "CERTIFICATE", "KEY"):
        environment.setenv(f"GRADWIRE_{variable}", str(tmp_path / variable.lower()))
    (tmp_path / "key").chmod(0o600)
    found = {finding.check: finding for finding in doctor.check_credentials()}
    assert {name: finding.level for name, finding in found.items()} == {
        "credentials": "ok",
        "GRADWIRE_KEY": "ok",
        "GRADWIRE_CA": "warning",  # for less than two days
        "GRADWIRE_CERTIFICATE": "warning",
    }
    write(tmp_path, authority, "a", EXPIRED)
    assert levels(doctor.check_credentials()) == {"credentials": "problem"}


def test_limits_and_small_memory_are_warned_of(monkeypatch):
    monkeypatch.setattr(doctor, "FEW_FILES", 1 << 40)
    monkeypatch.setattr(doctor, "SMALL_SHARED_MEMORY_BYTES", 1 << 60)
    assert levels(check_limits())["open files"] == "warning"
    assert levels(check_memory()) == {"memfd": "ok", "/dev/shm": "warning"}


def test_a_port_in_use_and_an_interface_that_is_not_there(environment):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        environment.setenv("MASTER_PORT", str(port))
        assert levels(check_ports())[f"port {port}"] == "warning"
    environment.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert levels(check_network())["address for other hosts"] == "problem"
    environment.setenv("MASTER_PORT", "many")
    assert levels(check_ports())["MASTER_PORT"] == "problem"


def test_a_torch_that_is_not_tested_is_warned_of(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.99.0+cpu")
    assert levels(check_versions())["torch"] == "warning"


def test_without_torch_the_rest_is_not_checked(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(gradwire, ["doctor", "--json"], standalone_mode=False)
    assert done.return_value == 1
    found = json.loads(done.output)
    assert [(each["check"], each["advice"]) for each in found if each["level"] == "problem"] == [
        ("torch", "install torch anew")
    ]
    assert "gloo" not in [each["check"] for each in found]


def test_it_knows_every_variable_that_gradwire_reads():
    others = [path for path in [*MODULES, *LOOSE] if path.name != "doctor.py"]
    read = {name for path in others for name in re.findall(r'"(GRADWIRE_[A-Z_]+)"', path.read_text())}
    assert read == set(doctor.VARIABLES)


@pytest.mark.parametrize(("ahead", "level"), [(0, "ok"), (30, "warning"), (-30, "warning")])
def test_clocks_are_compared_with_that_of_the_store(environment, ahead, level):
    real = time.time_ns
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        environment.setattr(server.time, "time_ns", lambda: real() + ahead * 10**9)
        (finding,) = check_clock(f"127.0.0.1:{store.port}")
    assert (finding.check, finding.level) == ("clock", level)
    if ahead:
        told = re.fullmatch(
            r"that of 127\.0\.0\.1 is ([\d.]+) s (ahead|behind), give or take [\d.]+ s", finding.text
        )
        assert told
        assert 25 < float(told[1]) < 35
        assert told[2] == ("ahead" if ahead > 0 else "behind")


def test_a_clock_that_cannot_be_compared(environment, free_port):
    assert [each.level for each in check_clock()] == ["ok"]
    environment.setenv("GRADWIRE_STORE", "node0")
    assert [each.level for each in check_clock()] == ["problem"]
    environment.setattr(remote.clock_offset, "__defaults__", (0.2,))
    (finding,) = check_clock(f"127.0.0.1:{free_port}")
    assert (finding.level, "does not tell its time: no store of this user" in finding.text) == ("warning", True)
    environment.setattr(remote.clock_offset, "__defaults__", (30.0,))
    environment.setattr(remote, "DIAGNOSIS_INTERVAL_S", 30.0)
    environment.setenv("GRADWIRE_TOKEN", TOKEN)
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        assert [each.level for each in check_clock(f"127.0.0.1:{store.port}")] == ["ok"]
        environment.delenv("GRADWIRE_TOKEN")
        environment.setattr(remote.clock_offset, "__defaults__", (1.0,))
        (finding,) = check_clock(f"127.0.0.1:{store.port}")
    assert "demands credentials" in finding.text


@given(
    ahead=st.floats(-1e6, 1e6),
    trips=st.lists(
        st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=remote.CLOCK_ROUNDS, max_size=remote.CLOCK_ROUNDS
    ),
)
def test_the_offset_of_a_clock_is_as_exact_as_it_says(ahead, trips):
    here, left = [1000.0], [*trips]

    def read() -> float:
        there, back = left.pop()
        here[0] += there
        told = here[0] + ahead
        here[0] += back
        return told

    found = remote.offset_by(read, lambda: here[0], lambda: here[0])
    assert abs(found.seconds - ahead) <= found.error + 1e-6
    assert found.error == pytest.approx(min(sum(trip) for trip in trips) / 2, abs=1e-6)
