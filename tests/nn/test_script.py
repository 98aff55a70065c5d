"""RemoteModules in TorchScript, and sending compiled modules."""

import gc
import io

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import SerializationError
from gradwire.nn import RemoteModule
from torch import Tensor, nn
from torch.jit import Future

from tests.remote_functions import identity

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@torch.jit.interface
class Interface:
    def forward(self, tensor: Tensor, number: int, word: str = "default") -> tuple[str, int, Tensor]:
        pass


@torch.jit.interface
class AsyncInterface:
    def forward(self, tensor: Tensor, number: int, word: str = "default") -> tuple[str, int, Tensor]:
        pass

    def forward_async(self, tensor: Tensor, number: int, word: str = "default") -> Future[tuple[str, int, Tensor]]:
        pass


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, tensor: Tensor, number: int, word: str = "default") -> tuple[str, int, Tensor]:
        if number < 0:
            raise ValueError("negative")
        return word, number, tensor * self.factor


def compiled(factor: float) -> nn.Module:
    return torch.jit.script(Scale(factor))


def is_compiled(rref: rpc.RRef) -> bool:
    return isinstance(rref.local_value(), torch.jit.ScriptModule)


def gradients(context_id: int, rref: rpc.RRef) -> Tensor:
    return autograd.get_gradients(context_id)[rref.local_value().factor]


def in_script(module: Interface, x: Tensor) -> Tensor:
    word, number, tensor = module.forward(x, 2, "word")
    return tensor + number + len(word)


def in_script_async(module: AsyncInterface, x: Tensor) -> Tensor:
    first = module.forward_async(x, 2, "w")
    second = module.forward_async(x, 3, word="ww")
    return first.wait()[2] + second.wait()[2] * second.wait()[1]


@pytest.fixture
def two_workers(workers):
    """Two workers in an RPC group. References stay on them, since torch.jit keeps the modules that it compiles."""
    return workers.rpc(2)


def test_compiled_code_calls_the_module(two_workers):
    def check() -> None:
        modules = [RemoteModule("worker1", Scale, (f,), _module_interface_cls=Interface) for f in (2.0, 5.0)]
        x = torch.ones(1)
        for factor, module in zip((2.0, 5.0), modules, strict=True):
            assert module.is_scriptable
            assert rpc.rpc_sync("worker1", is_compiled, (module.module_rref,))
            assert module(x, 2) == ("default", 2, torch.tensor([factor]))
            scripted = torch.jit.script(module)
            assert scripted(x, 2, "w") == ("w", 2, torch.tensor([factor]))
            assert scripted.forward_async(x, 2).wait() == ("default", 2, torch.tensor([factor]))
            assert torch.jit.script(in_script)(scripted, x).item() == factor + 2 + len("word")
            assert torch.jit.script(in_script_async)(scripted, x).item() == factor * 4

    two_workers[0].run(check)


def test_gradients_flow_through_compiled_code(two_workers):
    def check() -> None:
        scripted = torch.jit.script(
            module := RemoteModule("worker1", Scale, (2.0,), _module_interface_cls=Interface)
        )
        for function in (in_script, in_script_async):
            x = torch.ones(1, requires_grad=True)
            with autograd.context() as context_id:
                autograd.backward(context_id, [torch.jit.script(function)(scripted, x).sum()])
                times = 1 if function is in_script else 4
                assert autograd.get_gradients(context_id)[x].item() == 2 * times
                found = rpc.rpc_sync("worker1", gradients, (context_id, module.module_rref))
                assert found.item() == times

    two_workers[0].run(check)


def test_errors_in_compiled_code(two_workers):
    def check() -> None:
        scripted = torch.jit.script(RemoteModule("worker1", Scale, (2.0,), _module_interface_cls=Interface))
        with pytest.raises(Exception, match="negative"):
            scripted(torch.ones(1), -1)
        with pytest.raises(Exception, match="negative"):
            scripted.forward_async(torch.ones(1), -1).wait()
        with pytest.raises(
            RuntimeError, match="has no interface for torch.jit.script: construct it with _module_int"
        ):
            torch.jit.script(RemoteModule("worker1", Scale, (2.0,)))

    two_workers[0].run(check)


def test_a_module_that_is_compiled_already(two_workers):
    def check() -> None:
        module = RemoteModule("worker1", compiled, (2.0,), _module_interface_cls=Interface)
        assert torch.jit.script(module)(torch.ones(1), 1) == ("default", 1, torch.tensor([2.0]))

    two_workers[0].run(check)


def test_compiled_modules_can_be_sent(two_workers):
    def check() -> None:
        arrived = rpc.rpc_sync("worker1", identity, (compiled(3.0),))
        assert arrived(torch.ones(1), 1) == ("default", 1, torch.tensor([3.0]))

    two_workers[0].run(check)


def test_a_remote_module_is_sent_before_it_is_compiled(two_workers):
    def check() -> None:
        module = RemoteModule("worker1", Scale, (2.0,), _module_interface_cls=Interface)
        arrived = rpc.rpc_sync("worker1", identity, (module,))
        assert torch.jit.script(arrived)(torch.ones(1), 3) == ("default", 3, torch.tensor([2.0]))
        scripted = torch.jit.script(module)
        with pytest.raises(SerializationError, match="Passing a script RemoteModule over RPC is not supported."):
            rpc.rpc_sync("worker1", identity, (scripted,))
        with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
            torch.save(scripted, io.BytesIO())
        del module, arrived, scripted
        gc.collect()

    two_workers[0].run(check)
