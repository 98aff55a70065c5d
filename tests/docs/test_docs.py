"""The programs in the docs run as they are printed."""

import ast
import asyncio
import contextlib
import importlib
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import gradwire
import pytest
from gradwire import launch, rpc

ROOT = Path(gradwire.__file__).parent
NAMES = ["worker0", "worker1", "worker2", "worker3", "server", "reader"]


CALLS = tuple(f"docs/{name}.md" for name in ("rpc", "call_failures", "flow_control", "worker_groups", "options"))
"""Pages that share their names: they are read together."""


def snippets(page: str, language: str = "python") -> list[str]:
    """The blocks of code of a page, without what a list indents them by."""
    pages = CALLS if page == CALLS[0] else (page,)
    text = "\n".join((ROOT / each).read_text() for each in pages)
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.M | re.S)
    return [re.sub(f"^{indent}", "", code, flags=re.M) for indent, code in found]


# What a page leaves to its reader, in a module that all workers can import, before what the page defines.
BEFORE = {
    "docs/rpc.md": """
        weights = torch.ones(1 << 18)

        def evaluate(weights):
            return weights.sum()
        """,
    "docs/rref.md": "from tests.remote_functions import wait_until",
    "docs/policy.md": "",
    "docs/recipes.md": "import multiprocessing",
    "docs/streams.md": """
        taken = []
        train = taken.append
        """,
    "docs/asyncio.md": """
        import torch
        from gradwire import rpc

        a, b = torch.ones(2), torch.ones(2)

        def f():
            return 1

        def read():
            yield 1

        def use(future):
            return future.wait()
        """,
    "docs/autograd.md": """
        import torch
        from gradwire import c10d

        x = torch.ones(2, requires_grad=True)
        indices = torch.tensor([0, 1])
        table = torch.ones(4, 64, requires_grad=True)

        def first_half(x):
            return x * 2

        def second_half(h):
            return h * 3

        def lookup(indices):
            return table[indices]
        """,
    "docs/optim.md": """
        import torch

        class Model:
            def __init__(self):
                self.weight = torch.ones(3, requires_grad=True)

            def forward(self, x):
                return self.weight * x

            def parameter(self):
                return self.weight

        batches = [(torch.ones(3), torch.zeros(3))]
        loss_function = torch.nn.functional.mse_loss
        path = "state.pt"
        """,
    "docs/troubleshooting.md": "",
    "docs/nn.md": """
        import os

        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        x, weight, target = torch.ones(2), torch.ones(2, requires_grad=True), torch.zeros(2)

        @torch.jit.interface
        class NetInterface:
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                pass

        class Net(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x
        """,
}

# What worker0 runs first: what needs the other workers.
FIRST = {
    "docs/recipes.md": """
        # The workers of tests are daemons, which multiprocessing lets start no processes.
        multiprocessing.current_process()._config["daemon"] = False
        """,
    "docs/asyncio.md": """
        rref = rpc.remote("worker1", torch.ones, (3,))
        future = rpc.rpc_async("worker1", f)
        """,
    "docs/autograd.md": """
        c10d.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
        """,
    "docs/optim.md": """
        from gradwire import rpc

        model = rpc.remote("worker1", Model)
        parameter_rrefs = [model.remote().parameter()]
        embedding_rrefs = [rpc.remote("worker2", torch.ones, (3,), {"requires_grad": True})]
        decoder_rrefs = [rpc.remote("worker3", torch.ones, (3,), {"requires_grad": True})]
        """,
}

# What must be true afterwards.
AFTER = {
    "docs/rpc.md": """
        assert [future.wait().item() for future in futures] == [1 << 18] * 3
        assert rpc.rpc_sync("worker1", add_three, ("worker2", torch.ones(1), 1, 1)).item() == 3
        assert [worker.name for worker in present] == [worker.name for worker in rpc.get_worker_infos()]
        assert weight.shape == (4, 3)
        """,
    "docs/rref.md": """
        assert repr(model).startswith("RRef(owner='server', id=0.")
        wait_until(lambda: repr(model).endswith(", type=Linear, confirmed)"))
        """,
    "docs/policy.md": """
        assert model.rpc_sync().step(torch.ones(3)).shape == (3,)
        assert options.policy.of("trainer3").accepts == "exposed"
        """,
    "docs/recipes.md": """
        assert torch.equal(restored.rpc_sync().weight(), servers[0].rpc_sync().weight())
        assert torch.stack(means).tolist() == list(range(8))
        assert len(sums) == 4
        """,
    "docs/streams.md": "assert [len(each) for each in taken] == [1 << 20, 5]",
    "docs/asyncio.md": "assert (total.tolist(), x, y, value.tolist(), done) == ([2, 2], 1, 1, [1, 1, 1], 1)",
    "docs/autograd.md": "assert len(gradients) == 2",
    "docs/optim.md": "assert not torch.equal(model.rpc_sync().parameter(), torch.ones(3))",
    "docs/nn.md": "assert weight.grad is not None",
    "docs/troubleshooting.md": "assert info['unanswered_calls'] == {}",
}

Import = ast.Import | ast.ImportFrom

STARTS = "rpc.init_rpc("
"""Snippets that run on workers of their own."""

ENDLESS = "async for event in aio.worker_events():"
"""Snippets that end when the worker shuts down."""


def is_definition(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | Import)


def run_code(code: str, module: ModuleType) -> None:
    """Runs statements, which may await, in the namespace of a module."""
    compiled = compile(code, module.__name__, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, module.__dict__)
    if compiled.co_flags & inspect.CO_COROUTINE:
        asyncio.run(result)


def run_page(module_name: str, codes: list[str]) -> None:
    module = importlib.import_module(module_name)
    for code in codes:
        statements = [node for node in ast.parse(code).body if not is_definition(node)]
        run_code("\n".join(map(ast.unparse, statements)), module)


def prepare(folder: str, name: str, rank: int, url: str) -> None:
    """Joins the group of the pages' workers; what pages define can be imported from the folder."""
    sys.path.append(folder)
    os.chdir(folder)
    rpc.init_rpc(
        name, rank=rank, world_size=len(NAMES), rpc_backend_options=rpc.RpcBackendOptions(init_method=url)
    )


def dedent(text: str) -> str:
    return inspect.cleandoc("\n" + text)


def module_with(**names: object) -> ModuleType:
    module = ModuleType("snippet")
    module.__dict__.update(names)
    return module


def imports(code: str) -> str:
    """The imports of a snippet."""
    return "\n".join(ast.unparse(node) for node in ast.parse(code).body if isinstance(node, Import))


def definitions(codes: list[str]) -> str:
    """Returns the imports and definitions of the snippets, and what the definitions need."""
    nodes = [node for code in codes for node in ast.parse(code).body]
    return "\n".join(ast.unparse(node) for node in nodes if is_definition(node))


@pytest.mark.parametrize("page", BEFORE)
def test_the_snippets_of_a_page_run(workers, tmp_path, page):
    first, *_ = snippets(page)  # which imports what the whole page needs
    codes = [code for code in snippets(page) if STARTS not in code]
    codes = [code.replace(ENDLESS, "for event in ():") for code in codes]
    assert codes
    module_name = "page_" + Path(page).stem
    (tmp_path / "train.bin").write_bytes(bytes((1 << 20) + 5))
    (tmp_path / f"{module_name}.py").write_text(
        "\n".join([imports(first), dedent(BEFORE[page]), definitions(codes)])
    )
    started = workers(len(NAMES))
    url = f"file://{tmp_path / 'meeting'}"
    pending = [
        worker.start(prepare, str(tmp_path), name, rank, url)
        for rank, (worker, name) in enumerate(zip(started, NAMES, strict=True))
    ]
    for p in pending:
        p.result()
    started[0].run(run_page, module_name, [dedent(FIRST.get(page, "")), *codes, dedent(AFTER[page])])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_snippets_that_start_workers_run(workers, free_port, number):
    code = [code for code in snippets("docs/rpc.md") if STARTS in code][number]

    def use_port() -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))

    def run_it() -> None:
        use_port()
        run_code(code, module_with(rpc=rpc))
        with contextlib.suppress(RuntimeError):  # the snippet has shut down itself
            rpc.shutdown()

    def be_the_other() -> None:
        use_port()
        rpc.init_rpc("worker1", rank=1, world_size=2)
        rpc.shutdown()

    a, b = workers(2)
    other = b.start(be_the_other)
    a.run(run_it)
    other.result()


@pytest.mark.parametrize("number", [0, 4])
def test_the_snippets_that_make_process_groups_run(workers, free_port, number):
    """Those that name an address of another network, and that of a training which loses a rank, aside."""
    code = snippets("docs/process_groups.md")[number]

    def run_it() -> None:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
        from gradwire import c10d as dist

        run_code(code, module_with(dist=dist))
        assert dist.get_world_size() == 1
        dist.destroy_process_group()

    (worker,) = workers(1)
    worker.run(run_it)


def test_the_programs_of_the_readme_run_as_printed(python, tmp_path, free_port):
    programs = {found[1]: code for code in snippets("README.md") if (found := re.match(r"# (\w+\.py)\n", code))}
    assert programs.keys() == {"trainer.py", "server.py"}
    for name, code in programs.items():
        (tmp_path / name).write_text(code)
    (commands,) = [code for code in snippets("README.md", "") if "trainer.py" in code]
    assert "MASTER_PORT=29500" in commands
    done = subprocess.run(
        ["bash", "-e", "-c", commands.replace("29500", str(free_port)) + "wait $!"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{python.executable.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    numbers = re.fullmatch(r"tensor\(\[(.*)\], requires_grad=True\)\n", done.stdout)[1]
    assert all(0.9 <= float(number) <= 1 for number in numbers.split(", "))


def test_every_snippet_of_the_readme_and_the_docs_is_python():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for code in snippets(str(page)):
            compile(code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_readme_names_the_supported_torch():
    first, below = re.search(r'"torch>=(\d+\.\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    assert f"PyTorch {first} to 2.{int(below) - 1}" in (ROOT / "README.md").read_text()


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def run_program(_: int, program: str, folder: str) -> None:
    for name in "RANK", "WORLD_SIZE":
        del os.environ[name]
    sys.path.append(folder)
    with (Path(folder) / "printed").open("w") as printed, contextlib.redirect_stdout(printed):
        runpy.run_path(f"{folder}/{program}", run_name="__main__")


def test_the_loaders_that_are_workers(tmp_path, capfd):
    page = snippets("docs/child_processes.md")
    programs = {found[1]: code for code in page if (found := re.match(r"# (\w+\.py)\n", code))}
    for name, code in programs.items():
        (tmp_path / name).write_text(code.replace("/tmp/features.store", f"{tmp_path}/store"))
    launch.spawn(run_program, 1, ("train.py", str(tmp_path)), start_method="forkserver")
    assert (tmp_path / "printed").read_text() == "[0.0, 0.5, 1.0, 1.5]\n[2.0, 2.5, 3.0, 3.5]\n"
    assert capfd.readouterr().err == ""
