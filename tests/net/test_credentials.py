"""Credentials: what is accepted, what is refused and with which words, and connections between two identities."""

import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from gradwire.errors import CredentialsError
from gradwire.net.security import SHARED_HOST_NAME, Credentials, Identity, certified_names, worker_host_name
from gradwire.net.security.issuing import Validity

from tests.certificates import EXPIRED, OTHER_TOKEN, TOKEN, ca_pem, make_authority, write


def connect(
    server: Identity, client: Identity, host_name: str = SHARED_HOST_NAME
) -> tuple[frozenset[str], str | None]:
    """Connects two identities by TLS. Returns the names that the server sees, and the version of TLS."""
    seen: list[tuple[frozenset[str], str | None] | Exception] = []
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with theirs, server.server_context().wrap_socket(theirs, server_side=True) as connection:
                seen.append((certified_names(connection.getpeercert()), connection.version()))
                connection.sendall(b".")
        except Exception as error:
            seen.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours, client.client_context().wrap_socket(ours, server_hostname=host_name) as connection:
            connection.settimeout(20)
            connection.recv(1)  # the server has accepted the client's certificate
    finally:
        ours.close()
        thread.join()
    if isinstance(seen[0], Exception):
        raise seen[0]
    return seen[0]


def test_two_processes_with_a_token_know_each_other():
    server, client = (Credentials(token=TOKEN).identity(name) for name in ("a", "b"))
    names, version = connect(server, client, worker_host_name("a"))
    assert names == {SHARED_HOST_NAME, worker_host_name("b")}
    assert version == "TLSv1.3"


def test_a_process_need_not_be_a_worker():
    credentials = Credentials(token=TOKEN)
    assert connect(credentials.identity(), credentials.identity())[0] == {SHARED_HOST_NAME}


def test_another_token_is_refused():
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(Credentials(token=TOKEN).identity(), Credentials(token=OTHER_TOKEN).identity())


def test_a_server_under_the_name_of_another_worker_is_refused():
    credentials = Credentials(token=TOKEN)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        connect(credentials.identity("a"), credentials.identity("b"), worker_host_name("c"))


def test_a_client_without_a_certificate_is_refused():
    credentials = Credentials(token=TOKEN).identity()
    client = Credentials(token=TOKEN).identity()
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    client.client_context = lambda: bare
    with pytest.raises(ssl.SSLError):
        connect(credentials, client)


def test_older_tls_is_refused():
    credentials = Credentials(token=TOKEN)
    client = credentials.identity()
    client.client_context().minimum_version = ssl.TLSVersion.TLSv1_2
    client.client_context().maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="(?i)version"):
        connect(credentials.identity(), client)


def test_certificates_from_files_and_from_memory(tmp_path):
    ca = make_authority()
    in_files = write(tmp_path / "a", ca, "a")
    certificate, key = ca.issue("b", Validity.days(1))
    in_memory = Credentials(ca=ca_pem(ca), certificate=certificate, key=key)
    assert worker_host_name("b") in connect(in_files.identity("a"), in_memory.identity("b"))[0]


def test_a_replaced_certificate_is_used_for_new_connections(tmp_path):
    ca, client = make_authority(), write(tmp_path / "client", make_authority(), None).identity()
    server = write(tmp_path / "server", ca, None).identity()
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(server, client)
    before = server.server_context()
    assert server.server_context() is before
    write(tmp_path / "client", ca, None)
    write(tmp_path / "server", ca, "a")
    assert server.server_context() is not before
    connect(server, client, worker_host_name("a"))


def test_a_certificate_that_is_not_valid_does_not_replace_one(tmp_path):
    ca = make_authority()
    server, client = (
        write(tmp_path / "server", ca, "a").identity("a"),
        write(tmp_path / "client", ca, "b").identity(),
    )
    write(tmp_path / "server", ca, "a", EXPIRED)
    connect(server, client, worker_host_name("a"))
    (tmp_path / "server" / "certificate").unlink()
    connect(server, client, worker_host_name("a"))


def test_what_is_wrong_with_files_is_said(tmp_path):
    ca = make_authority()

    def refused(credentials: Credentials, *words: str, worker: str | None = "a") -> None:
        with pytest.raises(CredentialsError) as caught:
            credentials.identity(worker)
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
        assert isinstance(caught.value, ValueError)

    good = write(tmp_path / "good", ca, "a")
    path = str(tmp_path / "good" / "key")
    good.identity("a")
    good.identity()
    refused(
        Credentials(ca="/no/file", certificate=good.certificate, key=good.key), "ca file '/no/file'", "No such"
    )
    refused(
        Credentials(ca=good.ca, certificate=good.certificate, key="/no/file"), "key file '/no/file'", "No such"
    )
    refused(Credentials(ca=good.ca, certificate=good.key, key=good.key), f"certificate in {path!r} is not in PEM")
    refused(Credentials(ca=good.ca, certificate=good.certificate, key=good.ca), "is not a private key")
    refused(write(tmp_path / "old", ca, "a", EXPIRED), "expired on")
    refused(
        write(tmp_path / "young", ca, "a", Validity(datetime.now(UTC) + timedelta(1), EXPIRED.end + timedelta(9))),
        "is valid from",
    )
    refused(write(tmp_path / "b", ca, "b"), "not for worker 'a'", "b.worker.gradwire.invalid")
    refused(write(tmp_path / "none", ca, None), "not for worker 'a'")
    other = write(tmp_path / "other", make_authority(), "a")
    refused(Credentials(ca=good.ca, certificate=other.certificate, key=other.key), "not signed by the CA")
    refused(Credentials(ca=good.ca, certificate=good.certificate, key=other.key), "does not belong to")
    encrypted = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a passphrase")
    )
    refused(Credentials(ca=good.ca, certificate=good.certificate, key=encrypted), "is encrypted")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "no ca and no certificate and no key"),
        ({"ca": "x", "key": "y"}, "no certificate"),
        ({"token": TOKEN, "ca": "x"}, "a token and ca"),
        ({"token": "", "ca": None}, "not empty"),
        ({"token": 7}, "type int"),
        ({"token": TOKEN[:-3]}, r"it has 21 characters \(21 different\), and needs 22 "),
        ({"token": "0123456789abcdef0123456789abcde"}, "31 hexadecimal characters .* needs 32 "),
        ({"token": "12345678901234567890123456789012"}, "32 decimal characters .* needs 39 "),
        ({"token": "abcabcabcabcabcabcabcabcabcabcabcabcz"}, r"\(4 different\), and needs 22 \(8 different\)"),
        ({"token": TOKEN + "é"}, "printable"),
        ({"ca": 7, "certificate": "x", "key": "y"}, "ca is of type int"),
    ],
)
def test_what_is_wrong_with_arguments_is_said(arguments, text):
    with pytest.raises(CredentialsError, match=text) as caught:
        Credentials(**arguments)
    assert str(arguments.get("token") or "nothing") not in str(caught.value)


def test_secrets_are_not_shown(tmp_path):
    assert TOKEN not in repr(Credentials(token=TOKEN))
    ca = make_authority()
    certificate, key = ca.issue("a", Validity.days(1))
    credentials = Credentials(ca=ca_pem(ca), certificate=certificate, key=key)
    assert repr(credentials) == "Credentials(ca=<bytes>, certificate=<bytes>, key=<bytes>)"
    assert "/x/key" in repr(Credentials(ca="/x/ca", certificate="/x/cert", key="/x/key"))
    assert TOKEN not in repr(vars(Credentials(token=TOKEN).identity()))


def test_credentials_from_the_environment(tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    files = {"GRADWIRE_CA": "/ca", "GRADWIRE_CERTIFICATE": "/cert", "GRADWIRE_KEY": "/key"}
    found = Credentials.from_environment
    assert found({}) is None
    assert found({"GRADWIRE_TOKEN": ""}) is None
    assert found({"GRADWIRE_TOKEN": TOKEN}) == Credentials(token=TOKEN)
    assert found({"GRADWIRE_TOKEN_FILE": str(token_file)}) == Credentials(token=TOKEN)
    assert found(files) == Credentials(ca="/ca", certificate="/cert", key="/key")
    with pytest.raises(CredentialsError, match="GRADWIRE_TOKEN and GRADWIRE_KEY are set"):
        found({"GRADWIRE_TOKEN": TOKEN, "GRADWIRE_KEY": "/key"})
    with pytest.raises(CredentialsError, match="GRADWIRE_CA without GRADWIRE_CERTIFICATE and GRADWIRE_KEY"):
        found({"GRADWIRE_CA": "/ca"})
    with pytest.raises(CredentialsError, match="'/no/file' cannot be read: No such"):
        found({"GRADWIRE_TOKEN_FILE": "/no/file"})


def test_each_worker_name_has_a_host_name_of_its_own():
    names = ["worker0", "Worker0", "worker_0", "worker-0", "a:b", "a.b", "x--y", "n" * 48, "n" * 49, "n" * 127]
    found = [worker_host_name(name) for name in names]
    assert len({name.lower() for name in found}) == len(names)
    assert found[0] == "worker0.worker.gradwire.invalid"
    assert all(name.count(".") == 3 and len(name.split(".")[0]) <= 63 for name in found)
