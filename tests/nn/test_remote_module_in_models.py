"""RemoteModule as an nn.Module: traversals, and models that contain one."""

import copy

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.nn import RemoteModule
from torch import Tensor, nn

from tests import remote_functions
from tests.nn.modules import Mlp, Reverse, attributes


def check_walks(module: nn.Module) -> None:
    """Checks all traversals of a RemoteModule."""
    assert all(vars(module)[name] == value for name, value in vars(nn.Module()).items() if name != "training")
    assert list(module.modules()) == [module]
    assert list(module.named_modules(prefix="it")) == [("it", module)]
    assert list(module.children()) == list(module.named_children()) == []
    for of_its_own in (module.parameters, module.named_parameters, module.buffers, module.named_buffers):
        assert list(of_its_own(recurse=False)) == []
    assert set(dir(nn.Module())) <= set(dir(module))


class Hybrid(nn.Module):
    """A model with one layer in this process and one on worker1."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Linear(4, 4)
        self.far = nn.Sequential(RemoteModule("worker1", Mlp).eval(), RemoteModule("worker1", Split))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.far(self.near(x))
        return first - second


class Split(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x[:2], x[2:]]


class RemoteModulesAreLeaves(torch.fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, RemoteModule) or super().is_leaf_module(module, name)


def check_hybrid(model: Hybrid) -> None:
    remotes = list(model.far.children())
    for remote in remotes:
        check_walks(remote)
    assert [name for name, _ in model.named_modules()] == ["", "near", "far", "far.0", "far.1"]
    assert list(model.modules()) == [model, model.near, model.far, *remotes]
    assert model.get_submodule("far.0") is remotes[0]
    assert list(model.parameters()) == list(model.near.parameters())
    assert list(model.buffers()) == []
    assert f"(0): RemoteModule(worker1/cpu, {remotes[0].module_rref!r})" in repr(model)
    x = torch.arange(4.0)
    expected = model(x)
    traced = torch.fx.GraphModule(model, RemoteModulesAreLeaves().trace(model))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["near", "far.0", "far.1"]
    assert torch.equal(traced(x), expected)
    assert model.double().float().to("cpu").requires_grad_().share_memory() is model
    assert torch.equal(model(x), expected)
    with autograd.context() as context_id:
        autograd.backward(context_id, [model(x).sum()])
        assert set(autograd.get_gradients(context_id)) >= set(model.parameters())
    for refused, name in ((lambda: model.apply(print), "apply"), (model.state_dict, "state_dict")):
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule: .* worker1/cpu"):
            refused()
    with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
        copy.deepcopy(model)


def test_walks_find_no_parts(three_workers):
    def check() -> None:
        module = RemoteModule("worker1", Reverse, (1,))
        check_walks(module)
        check_walks(RemoteModule.init_from_module_rref("worker1", module.module_rref))
        for to in ("worker0", "worker1", "worker2"):
            rpc.rpc_sync(to, check_walks, (module,))
        module.eval()
        assert rpc.rpc_sync("worker2", attributes, (module,))["training"] is False

    three_workers[0].run(check)


def test_a_part_of_another_module(three_workers):
    def check() -> None:
        torch.manual_seed(0)
        model = Hybrid()
        check_hybrid(model)
        for to in ("worker0", "worker1", "worker2"):
            rpc.rpc_sync(to, check_hybrid, (model,))
        check_hybrid(rpc.rpc_sync("worker2", Hybrid))
        assert "far.0" in dict(rpc.rpc_sync("worker2", remote_functions.identity, (model,)).named_modules())

    three_workers[0].run(check)
