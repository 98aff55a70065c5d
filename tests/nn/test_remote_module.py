"""Modules on other workers."""

import copy
import pickle

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import (
    NotInitializedError,
    RemoteError,
    SerializationError,
    UnknownWorkerError,
    WorkerLostError,
)
from gradwire.nn import RemoteModule
from gradwire.nn.remote_module import SENT_ATTRIBUTES
from gradwire.optim import DistributedOptimizer
from torch import Tensor, nn

from tests import remote_functions
from tests.nn.modules import Mlp, Reverse, attributes
from tests.remote_functions import wait_until


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError(f"nothing for {x.item():g}")


class WhereAreWe(nn.Module):
    """Tells on which devices its arguments are."""

    def forward(self, *args: object, **kwargs: object) -> list[str]:
        found = [*args, *kwargs.values()]
        return [str(each.device) if isinstance(each, Tensor) else type(each).__name__ for each in found]

    # "meta" stands for a device here: it has no memory.


class Nested(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> dict[str, object]:
        assert x["a"].is_cuda
        return {"sum": x["a"] + 1, "more": [x["a"] * 2, "text"]}


class NotAModule:
    def __init__(self, *args: object) -> None:
        pass


class Subclass(RemoteModule):
    pass


def no_module(*args: object) -> None:
    raise OSError("no disk")


def forward(module: RemoteModule, *args: object) -> object:
    return module.forward(*args)


def forward_async(module: RemoteModule, *args: object) -> object:
    return module.forward_async(*args).wait()


def is_training(rref: rpc.RRef) -> list[bool]:
    return [module.training for module in rref.local_value().modules()]


def hooked(rref: rpc.RRef) -> None:
    rref.local_value().register_forward_hook(lambda module, args, result: (*result, "hooked"))


def text(module: RemoteModule) -> str:
    return f"{module} {module(torch.ones(1), 5)} {'forward' in dir(module)}"


def test_forward(three_workers):
    def check() -> None:
        x = torch.ones(3)
        for where in ("worker1", "worker1/cpu", "rank:1", "rank:1/cpu", "worker0/cpu", "cpu"):
            module = RemoteModule(where, Reverse, (1,), {"second": 2})
            assert module.on == ("worker1" if "1" in where else "worker0")
            assert module.device == "cpu"
            for result in (module(x, 2), module.forward(x, number=2), module.forward_async(x, 2).wait()):
                assert result[:2] == ("default", 2)
                assert torch.equal(result[2], x)
            assert module.forward_async(x, 2, word="w").wait()[0] == "w"
            assert isinstance(module, nn.Module)
            assert repr(module).startswith(f"RemoteModule({module.on}/cpu, ")

    three_workers[0].run(check)


def test_hooks_run_on_the_worker(three_workers):
    def check() -> None:
        module = RemoteModule("worker1", Reverse, (1,))
        rpc.rpc_sync("worker1", hooked, (module.get_module_rref(),))
        assert module(torch.ones(1), 5)[-1] == "hooked"

    three_workers[0].run(check)


def test_the_module_itself(three_workers):
    def check() -> None:
        module = RemoteModule("worker1", Reverse, (1,), {"second": 2})
        reference = module.get_module_rref()
        assert reference is module.module_rref
        assert reference.owner_name() == "worker1"
        assert torch.equal(reference.to_here().weight, torch.tensor([1.0, 2.0]))

    three_workers[0].run(check)


def test_parameters(three_workers):
    def check() -> None:
        module = RemoteModule("worker1", Mlp)
        expected = Mlp()
        for recurse in (True, False):
            found = [parameter.to_here() for parameter in module.remote_parameters(recurse)]
            for a, b in zip(found, expected.parameters(recurse), strict=True):
                assert torch.equal(a, b)

    three_workers[0].run(check)


def test_training_equals_that_of_one_process(three_workers):
    def check() -> None:
        local = nn.Sequential(Mlp(1), Mlp(2)).eval()
        modules = [RemoteModule("worker1", Mlp, (1,)).eval(), RemoteModule("worker2/cpu", Mlp, (2,)).eval()]
        reference = torch.optim.SGD(local.parameters(), lr=0.1)
        parameters = [parameter for module in modules for parameter in module.remote_parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        for step in range(3):
            x = torch.full((2, 4), 0.3 + step, requires_grad=True)
            reference.zero_grad()
            loss = local(x).square().sum()
            loss.backward()
            reference.step()
            with autograd.context() as context_id:
                found = modules[1](modules[0].forward_async(x).wait()).square().sum()
                autograd.backward(context_id, [found])
                gradient = autograd.get_gradients(context_id)[x]
                optimizer.step(context_id)
            assert torch.allclose(found, loss)
            assert torch.allclose(gradient, x.grad)
        for a, b in zip(parameters, local.parameters(), strict=True):
            assert torch.allclose(a.to_here(), b, atol=1e-6)

    three_workers[0].run(check)


def test_training_mode(three_workers):
    def check() -> None:
        module = RemoteModule("worker1", Mlp)
        parent = nn.Module()
        parent.part = module
        rref = module.get_module_rref()
        for change, expected in (
            (module.eval, False),
            (module.train, True),
            (lambda: module.train(mode=False), False),
            (parent.train, True),
            (parent.eval, False),
        ):
            assert change() in (module, parent)
            assert set(rpc.rpc_sync("worker1", is_training, (rref,))) == {expected}
            assert module.training is expected
        with pytest.raises(ValueError, match="boolean"):
            module.train("yes")

    three_workers[0].run(check)


def test_errors_of_the_module(three_workers):
    def check() -> None:
        bad = RemoteModule("worker1/cpu", NotAModule, (1,))
        for use in (lambda: bad.forward(), lambda: bad.remote_parameters(), lambda: bad.eval()):
            expected = (
                r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of <class nn.Module>, .*NotAM"
            )
            with pytest.raises(ValueError, match=expected) as caught:
                use()
            assert isinstance(caught.value.__cause__, RemoteError)
        with pytest.raises(OSError, match="no disk"):
            RemoteModule("worker1", no_module)(1)
        with pytest.raises(LookupError, match="nothing for 7"):
            RemoteModule("worker1", Failing)(torch.tensor(7.0))
        with pytest.raises(TypeError, match="unexpected keyword argument 'third'"):
            RemoteModule("worker1", Reverse, (1,), {"third": 1}).forward()
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'number'"):
            RemoteModule("worker1", Reverse, (1,))(torch.ones(1))

    three_workers[0].run(check)


def test_a_lost_worker(workers):
    a, b = workers.rpc(2)
    a.run(make_and_keep)
    b.kill()

    def check() -> None:
        module = remote_functions.kept.pop()
        for use in (lambda: module(torch.ones(1), 2), module.remote_parameters, module.eval):
            with pytest.raises(WorkerLostError, match="worker1"):
                use()

    a.run(check)


def make_and_keep() -> None:
    module = RemoteModule("worker1", Reverse, (1,))
    module(torch.ones(1), 2)
    remote_functions.kept.append(module)


def test_bad_arguments(three_workers):
    def check() -> None:
        for where in ("worker1/cuda:0/cuda:1", "/", "/cuda:0", "", "rank:x/cpu", "rank:/cpu"):
            with pytest.raises(
                ValueError, match=f"Could not parse remote_device: {where}. The valid format is '<w"
            ):
                RemoteModule(where, Reverse, (1,))
        with pytest.raises(RuntimeError, match="Expected one of .+ device type at start of device string: foo"):
            RemoteModule("worker1/foo", Reverse, (1,))
        with pytest.raises(RuntimeError, match="Invalid device string: 'cpu2'"):
            RemoteModule("worker1/cpu2", Reverse, (1,))
        with pytest.raises(RuntimeError, match="Device string must not be empty"):
            RemoteModule("worker1/", Reverse, (1,))
        with pytest.raises(TypeError, match="remote_device is 1"):
            RemoteModule(1, Reverse, (1,))
        with pytest.raises(UnknownWorkerError, match="'nobody'"):
            RemoteModule("nobody/cpu", Reverse, (1,))
        with pytest.raises(UnknownWorkerError, match="3"):
            RemoteModule("rank:3", Reverse, (1,))
        with pytest.raises(SerializationError, match="importable name"):
            RemoteModule("worker1", lambda: Reverse(1))
        with pytest.raises(TypeError, match="args is 1: give a tuple"):
            RemoteModule("worker1", Reverse, 1)
        with pytest.raises(TypeError, match="Reverse.* cannot be called"):
            RemoteModule("worker1", "Reverse")
        with pytest.raises(TypeError, match="module_rref is of type Reverse"):
            RemoteModule.init_from_module_rref("worker1", Reverse(1))
        with pytest.raises(
            ValueError, match="module_interface_cls .*NotAModule.* decorated by @torch.jit.interface"
        ):
            RemoteModule("worker1", Reverse, (1,), _module_interface_cls=NotAModule)

    three_workers[0].run(check)


def test_before_init_rpc():
    with pytest.raises(NotInitializedError):
        RemoteModule("worker1", Reverse, (1,))


UNSUPPORTED = {
    "register_buffer": ("buffer", torch.ones(5)),
    "register_parameter": ("parameter", nn.Parameter(torch.ones(1))),
    "register_module": ("empty", None),
    "add_module": ("empty", None),
    "apply": (print,),
    "cuda": (),
    "xpu": (),
    "cpu": (),
    "type": (torch.FloatTensor,),
    "float": (),
    "double": (),
    "half": (),
    "bfloat16": (),
    "to": ("cpu", torch.int32),
    "to_empty": (),
    "register_backward_hook": (print,),
    "register_full_backward_hook": (print,),
    "register_forward_pre_hook": (print,),
    "register_forward_hook": (print,),
    "state_dict": (),
    "load_state_dict": ({},),
    "buffers": (),
    "named_buffers": (),
    "requires_grad_": (),
    "zero_grad": (),
    "share_memory": (),
    "extra_repr": (),
    "compile": (),
}


def test_methods_that_are_not_supported(three_workers):
    def check() -> None:
        module = RemoteModule("worker1", Reverse, (1,))
        for name, args in UNSUPPORTED.items():
            expected = (
                f"^Method ``{name}`` not supported for RemoteModule: the module is on worker1/cpu. Call a fu"
            )
            with pytest.raises(ValueError, match=expected):
                getattr(module, name)(*args)
        for name in ("parameters", "named_parameters"):
            with pytest.raises(ValueError, match=f"Method ``{name}`` not .*use ``remote_parameters`` instead."):
                getattr(module, name)()

    three_workers[0].run(check)


def test_modules_travel(three_workers):
    def check() -> None:
        module = RemoteModule("worker1", Reverse, (1,))
        module.note = "stays here"
        arrived = rpc.rpc_sync("worker2", attributes, (module,))
        assert list(arrived) == [*vars(nn.Module()), *SENT_ATTRIBUTES, "forward_async", "forward"]
        assert arrived["on"] == "worker1"
        assert arrived["device"] == "cpu"
        assert arrived["is_device_map_set"] is False
        assert arrived["is_scriptable"] is False
        assert arrived["forward"](torch.ones(1), 3)[1] == 3
        for to in ("worker0", "worker1", "worker2"):
            for function in (forward, forward_async):
                result = rpc.rpc_sync(to, function, (module, torch.ones(1), 3, "three"))
                assert result[:2] == ("three", 3)
            assert rpc.rpc_sync(to, text, (module,)).endswith(", tensor([1.])) True")

    three_workers[0].run(check)


def test_modules_over_one_reference(three_workers):
    def check() -> None:
        first = RemoteModule("worker1", Mlp)
        second = rpc.rpc_sync(
            "worker2", RemoteModule.init_from_module_rref, ("worker2/cpu", first.get_module_rref())
        )
        assert type(second) is RemoteModule
        assert second.on == "worker1"
        assert second.device == "cpu"
        second.eval()
        x = torch.ones(4)
        assert torch.equal(first(x), second(x))
        assert torch.equal(first(x), rpc.rpc_sync("worker2", forward, (second, x)))
        mine = RemoteModule.init_from_module_rref("worker0", rpc.RRef(Mlp().eval()))
        assert torch.equal(mine(x), first(x))

    three_workers[0].run(check)


def test_modules_pickle_only_in_calls(three_workers):
    def check() -> None:
        module = RemoteModule("worker1", Reverse, (1,))
        message = "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(RuntimeError, match=message):
                way(module)
        with pytest.raises(SerializationError, match=r"args\[1\].*Subclass not at all: send get_module_rref"):
            rpc.rpc_sync("worker1", forward, (1, Subclass("worker1", Reverse, (1,))))

    three_workers[0].run(check)


def test_a_module_lives_as_long_as_it_is_used(three_workers):
    def check() -> None:
        module = RemoteModule("worker1", Reverse, (1,))
        module(torch.ones(1), 2)
        assert rpc.rpc_sync("worker1", rpc.debug_info)["num_owner_rrefs"] == 1
        other = rpc.rpc_sync("worker2", RemoteModule.init_from_module_rref, ("worker1", module.module_rref))
        del module
        assert other(torch.ones(1), 2)[1] == 2
        del other
        wait_until(lambda: rpc.rpc_sync("worker1", rpc.debug_info)["num_owner_rrefs"] == 0)

    three_workers[0].run(check)


def test_arguments_are_moved_to_the_device(three_workers):
    def check() -> None:
        module = RemoteModule("worker1/meta", WhereAreWe)
        x = torch.ones(2)
        assert module(x, 1, more=x) == ["meta", "int", "meta"]
        assert RemoteModule("worker1/cpu", WhereAreWe)(x) == ["cpu"]

    three_workers[0].run(check)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_results_are_moved_to_the_cpu(three_workers):
    def check() -> None:
        for where in ("worker1/cuda:0", "rank:1/cuda:0"):
            result = RemoteModule(where, Nested)({"a": torch.ones(2)})
            assert torch.equal(result["sum"], torch.full((2,), 2.0))
            assert torch.equal(result["more"][0], torch.full((2,), 2.0))
            assert result["more"][1] == "text"
            layer = RemoteModule(where, nn.Linear, (2, 3))
            assert layer(torch.ones(5, 2)).shape == (5, 3)
            assert layer(torch.ones(5, 2)).device.type == "cpu"
            assert not layer.is_device_map_set

    three_workers[0].run(check)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_results_stay_on_gpus_that_a_device_map_joins(workers):
    a, _ = workers.rpc(2, device_maps={"worker1": {"cuda:0": "cuda:0"}})

    def check() -> None:
        layer = RemoteModule("worker1/cuda:0", nn.Linear, (2, 3))
        assert layer.is_device_map_set
        assert layer(torch.ones(5, 2)).device == torch.device("cuda:0")
        assert layer(torch.ones(5, 2, device="cuda:0")).device == torch.device("cuda:0")
        assert RemoteModule("worker1/cpu", nn.Linear, (2, 3))(torch.ones(5, 2)).device.type == "cpu"

    a.run(check)
