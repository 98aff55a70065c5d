"""Imports point one way: between packages, between the folders of rpc, and between modules."""

import pytest

from tests.house.source import (
    LOOSE,
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
    "cli/group.py": {"", "logs"},  # the version
    "cli/doctor.py": {"", "logs"},
    "launch/ray_cluster.py": {"logs"},  # a process of its own
    "view/overview.py": {"logs"},  # whose last lines it shows
}
PACKAGE_ARROWS = {
    "proto": set(),
    "net": set(),
    "c10d": {"proto", "net"},
    "launch": {"net", "c10d"},
    "rpc": {"proto", "net", "c10d"},
    "rref": {"proto", "rpc"},
    "autograd": {"proto", "rpc"},
    "optim": {"rpc", "rref", "autograd"},
    "nn": {"rpc", "rref"},
    "view": {"proto", "net", "rpc", "rref", "autograd", "c10d"},
    "tracing": {"proto", "net", "rpc", "rref", "view"},
    "compat": {"net", "rpc", "rref", "autograd", "optim", "nn", "c10d"},
    "cli": {"net", "rpc", "c10d", "compat", "view", "launch"},
}
C10D_ARROWS = {
    "stores": set(),
    "rendezvous": {"stores"},
    "engines": {"rendezvous", "stores"},
    "debug": {"engines", "stores"},
    "groups": {"debug", "engines", "rendezvous", "stores"},
}
"""The folders of c10d. Its loose files are its face, and torch's types."""

RPC_ARROWS = {
    "execution": set(),
    "contracts": {"execution"},
    "wire": {"contracts", "execution"},
    "transports": {"contracts", "execution", "wire"},
    "channels": {"contracts", "execution", "wire", "transports"},
    "membership": {"contracts", "execution", "peers", "transports"},
    "calls": {"contracts", "execution", "profiling", "wire"},
    "collectives": {"contracts", "execution"},
    "profiling": {"contracts", "wire"},
    "peers": {"channels", "contracts", "execution", "transports", "wire"},
    "requests": {"channels", "contracts", "execution", "peers", "transports", "wire"},
    "agent": {
        "channels",
        "collectives",
        "contracts",
        "execution",
        "membership",
        "peers",
        "profiling",
        "requests",
        "transports",
        "wire",
    },
}
"""The folders of rpc, which import no loose file of rpc but its `functions`. Loose files import all folders."""


def test_packages_import_one_way():
    wrong = {}
    for path in MODULES:
        package = path.relative_to(ROOT).parts[0]
        allowed = {package, *PACKAGE_ARROWS[package], *EVERYWHERE, *ALSO.get(path_id(path), ())}
        wrong[path_id(path)] = {name for name in imported_modules(path) if name.partition(".")[0] not in allowed}
    assert not {name: imports for name, imports in wrong.items() if imports}


@pytest.mark.parametrize(
    ("package", "arrows", "loose"),
    [("rpc", RPC_ARROWS, ("rpc.functions",)), ("c10d", C10D_ARROWS, ("c10d.torch_types",))],
)
def test_rooms_import_one_way(package, arrows, loose):
    wrong = {}
    for path in MODULES:
        room, *rest = path.relative_to(ROOT).parts[1:]
        if path.relative_to(ROOT).parts[0] == package and rest and room in arrows:
            allowed = {f"{package}.{each}" for each in (room, *arrows[room])}
            inside = {name for name in imported_modules(path) if name.partition(".")[0] == package}
            names = {name for name in inside if ".".join(name.split(".")[:2]) not in allowed}
            wrong[path_id(path)] = names.difference(loose)
    assert wrong
    assert not {name: imports for name, imports in wrong.items() if imports}


def test_credentials_need_little_else():
    needed = {"errors", "net.peer_text"}
    for path in (ROOT / "net" / "security").glob("*.py"):
        assert {name for name in imported_modules(path) if not name.startswith("net.security")} <= needed


def test_the_tables_list_every_folder_and_have_no_cycles():
    for package, arrows in (("rpc", RPC_ARROWS), ("c10d", C10D_ARROWS)):
        folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        assert folders == set(arrows)
        assert not cycles(arrows)
    assert set(PACKAGES) == set(PACKAGE_ARROWS)
    assert not cycles(PACKAGE_ARROWS)


def test_modules_do_not_import_each_other():
    """Covers imports inside functions and for type checkers. Faces, which import what they show, are left out."""
    faces = {ROOT / name / "__init__.py" for name in ("", *PACKAGES)}
    found = [
        set(cycle) for cycle in cycles(import_graph(path for path in [*MODULES, *LOOSE] if path not in faces))
    ]
    assert found == []


def test_cycles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "f"}, "f": {"e"}}
    assert cycles(graph) == [["b", "c"], ["e", "f"]]


def test_imports_are_resolved():
    graph = import_graph(MODULES)
    assert "rpc.contracts.options" in graph["rpc.api"]
    assert "rpc.aio" in graph["rpc"]  # `from . import aio`
    assert module_name(ROOT / "c10d" / "engines" / "shm" / "engine.py") == "c10d.engines.shm.engine"
