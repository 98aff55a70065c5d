"""Imports point one way: between packages, between the folders of rpc, and between modules."""

from tests.house.source import (
    MODULES,
    PACKAGES,
    ROOT,
    cycles,
    import_graph,
    imported_modules,
    module_name,
    path_id,
)

EVERYWHERE = {"errors", "torch_internals"}
ALSO = {
    "rpc/__init__.py": {"rref"},  # a face: it hands on RRef and remote
    "rpc/grpc_backend.py": {"extensions"},  # these start agents, which they hand all extensions
    "rpc/fault_injection.py": {"extensions"},
    "compat/extensions.py": {"extensions"},
    "compat/__main__.py": {"cli"},  # `python -m gradwire.compat` is `gradwire run`
    "cli/credential_checks.py": {"logs"},
    "cli/group.py": {"", "logs"},  # the version
    "cli/installation.py": {""},
    "cli/certs.py": {"certs"},
    "cli/spawn.py": {"spawn_hosting", "supervisor"},
    "cli/store.py": {"store"},
}
PACKAGE_ARROWS = {
    "proto": set(),
    "c10d": {"proto"},
    "rpc": {"proto", "c10d"},
    "rref": {"proto", "rpc"},
    "autograd": {"proto", "rpc"},
    "optim": {"rpc", "rref", "autograd", "c10d"},
    "nn": {"rpc", "rref", "autograd", "c10d"},
    "view": {"proto", "rpc", "rref", "autograd", "c10d"},
    "tracing": {"proto", "rpc", "rref", "view", "c10d"},
    "compat": {"rpc", "rref", "autograd", "optim", "nn", "c10d"},
    "cli": {"rpc", "c10d", "compat", "view"},
}
RPC_ARROWS = {
    "execution": set(),
    "contracts": {"execution"},
    "wire": {"contracts", "execution"},
    "transports": {"contracts", "execution", "wire"},
    "channels": {"contracts", "execution", "wire", "transports"},
    "policy": {"contracts", "execution", "wire"},
    "membership": {"contracts", "execution", "peers", "transports"},
    "collectives": {"contracts", "execution"},
    "profiling": {"contracts", "wire"},
    "streaming": {"contracts", "execution", "wire"},
    "peers": {"channels", "contracts", "execution", "transports", "wire"},
    "requests": {"channels", "contracts", "execution", "peers", "policy", "transports", "wire"},
    "agent": {
        "channels",
        "collectives",
        "contracts",
        "execution",
        "membership",
        "peers",
        "policy",
        "profiling",
        "requests",
        "streaming",
        "transports",
        "wire",
    },
}
"""The folders of rpc, which import no loose file of rpc. Loose files import all folders."""

RPC_MODULES = [path for path in MODULES if path.is_relative_to(ROOT / "rpc") and path.parent != ROOT / "rpc"]


def test_packages_import_one_way():
    wrong = {}
    for path in MODULES:
        package = path.relative_to(ROOT).parts[0]
        allowed = {package, *PACKAGE_ARROWS[package], *EVERYWHERE, *ALSO.get(path_id(path), ())}
        wrong[path_id(path)] = {name for name in imported_modules(path) if name.partition(".")[0] not in allowed}
    assert not {name: imports for name, imports in wrong.items() if imports}


def test_rooms_of_rpc_import_one_way():
    wrong = {}
    for path in RPC_MODULES:
        folder = path.relative_to(ROOT).parts[1]
        allowed = {f"rpc.{each}" for each in (folder, *RPC_ARROWS[folder])}
        inside = {name for name in imported_modules(path) if name.partition(".")[0] == "rpc"}
        wrong[path_id(path)] = {name for name in inside if ".".join(name.split(".")[:2]) not in allowed}
    assert not {name: imports for name, imports in wrong.items() if imports}


def test_credentials_need_nothing_but_errors():
    for path in (ROOT / "c10d" / "security").glob("*.py"):
        assert {name for name in imported_modules(path) if not name.startswith("c10d.security")} <= {"errors"}


def test_the_tables_list_every_folder_and_have_no_cycles():
    folders = {path.parent.name for path in (ROOT / "rpc").glob("*/__init__.py")}
    assert folders == set(RPC_ARROWS)
    assert set(PACKAGES) == set(PACKAGE_ARROWS)
    assert not cycles(RPC_ARROWS)
    assert not cycles(PACKAGE_ARROWS)


def test_modules_do_not_import_each_other():
    """Covers imports inside functions and for type checkers. Faces, which import what they show, are left out."""
    faces = {ROOT / name / "__init__.py" for name in PACKAGES}
    found = [set(cycle) for cycle in cycles(import_graph(path for path in MODULES if path not in faces))]
    assert found == []


def test_cycles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "f"}, "f": {"e"}}
    assert cycles(graph) == [["b", "c"], ["e", "f"]]


def test_imports_are_resolved():
    graph = import_graph(MODULES)
    assert "rpc.contracts.options" in graph["rpc.api"]
    assert "rpc.aio" in graph["rpc"]  # `from . import aio`
    assert module_name(ROOT / "c10d" / "engines" / "shm" / "engine.py") == "c10d.engines.shm.engine"
