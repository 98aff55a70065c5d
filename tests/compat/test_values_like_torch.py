"""Values arrive in the same form on torch's own agent and on gradwire under torch's names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradwire import compat
from torch import Tensor, nn

from tests.nn.mixed_module import Mixed
from tests.remote_functions import identity

kept: list[Any] = []


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(2))
    made.mark = 1
    return made


def state() -> dict[str, Tensor]:
    return Mixed().state_dict()


def named_parameters() -> dict[str, Tensor]:
    return dict(Mixed().named_parameters())


def sparse_parameter() -> nn.Parameter:
    return nn.Parameter(torch.eye(2).to_sparse())


def plain_leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def model_and_weight() -> list[Any]:
    model = Mixed()
    return [model.first.weight, model]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(Mixed().parameters(), lr=0.1)


def keep_parameter() -> nn.Parameter:
    kept.append(parameter())
    return kept[-1]


@torch.jit.script
def twice(x: Tensor):
    return x + x


MAKERS = (
    Mixed,
    model_and_weight,
    named_parameters,
    optimizer,
    parameter,
    plain_leaf,
    sparse_parameter,
    state,
)


def describe(value: object) -> str:
    if isinstance(value, Mixed):
        tied = value.first.weight is value.second.weight
        parts = [describe(each) for each in (value.first.weight, value.frozen, value.offset, value.scale)]
        return f"Mixed({tied=}, {parts})"
    if isinstance(value, Tensor):
        kind = type(value).__name__
        return f"{kind}(leaf={value.is_leaf}, grad={value.requires_grad}, marked={hasattr(value, 'mark')})"
    if isinstance(value, list):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, dict):
        return str({name: describe(each) for name, each in value.items()})
    assert isinstance(value, torch.optim.Optimizer)
    return describe(value.param_groups[0]["params"])


def has_gradient(context_id: int) -> bool:
    import torch.distributed.autograd as dist_autograd

    return kept[-1] in dist_autograd.get_gradients(context_id)


def scaled(x: Tensor) -> Tensor:
    return (x * 2).sum()


def forms() -> dict[str, str]:
    """Returns a description of each value as it arrives, by how it was sent."""
    from torch.distributed import autograd, rpc

    def look() -> dict[str, str]:
        seen = {}
        for make in MAKERS:
            name = make.__name__
            for to in ("worker0", "worker1"):
                seen[f"{name} to {to}"] = rpc.rpc_sync(to, describe, (make(),))
                seen[f"{name} from {to}"] = describe(rpc.rpc_sync(to, make))
                seen[f"{name} fetched from {to}"] = describe(rpc.remote(to, make).to_here())
            seen[f"{name} there and back"] = describe(rpc.rpc_sync("worker1", identity, ([{"a": make()}],)))
        seen["operator"] = describe(rpc.rpc_sync("worker1", torch.add, (parameter(), 1)))
        return seen

    outside = look()
    with autograd.context():
        inside = {f"{name}, in a context": text for name, text in look().items()}
    return outside | inside


def flows() -> dict[str, object]:
    """Returns for which calls gradients reach the tensor that was sent."""
    from torch.distributed import autograd, rpc

    def reaches(call: Callable[[Tensor], Tensor], sent: Tensor) -> bool:
        with autograd.context() as context_id:
            autograd.backward(context_id, [call(sent).sum()])
            return sent in autograd.get_gradients(context_id)

    seen: dict[str, object] = {}
    calls: dict[str, Callable[[Any], Tensor]] = {
        "a function": lambda x: rpc.rpc_sync("worker1", scaled, (x,)),
        "an operator": lambda x: rpc.rpc_sync("worker1", torch.add, (x, 1)),
        "an operator, remote": lambda x: rpc.remote("worker1", torch.add, (x, 1)).to_here(),
        "TorchScript": lambda x: rpc.rpc_sync("worker1", twice, (x,)),
    }
    for name, call in calls.items():
        seen[f"a leaf to {name}"] = reaches(call, plain_leaf())
        seen[f"a parameter to {name}"] = reaches(call, parameter())
    with autograd.context() as context_id:
        arrived = rpc.rpc_sync("worker1", keep_parameter)
        autograd.backward(context_id, [(arrived * 2).sum()])
        seen["a parameter that was returned"] = arrived in autograd.get_gradients(context_id)
        seen["the owner of a parameter that was returned"] = rpc.rpc_sync("worker1", has_gradient, (context_id,))
    return seen


def join(name: str, rank: int, url: str, on_gradwire: bool) -> None:
    if on_gradwire:
        compat.install()
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=url, rpc_timeout=30)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def leave() -> None:
    from torch.distributed import rpc

    rpc.shutdown()


@pytest.fixture
def both(workers, tmp_path):
    """Returns a function that calls another on a worker with torch's agent and with gradwire's."""

    def run(function: Callable[[], Any]) -> list[Any]:
        groups = [workers(2), workers(2)]
        joining = [
            worker.start(join, f"worker{rank}", rank, f"file://{tmp_path / str(on_gradwire)}", bool(on_gradwire))
            for on_gradwire, group in enumerate(groups)
            for rank, worker in enumerate(group)
        ]
        for pending in joining:
            pending.result()
        answers = [group[0].start(function) for group in groups]
        results = [answer.result() for answer in answers]
        leaving = [worker.start(leave) for group in groups for worker in group]
        for pending in leaving:
            pending.result()
        return results

    return run


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_parameters(both):
    expected, found = both(lambda: forms() | flows())
    assert found == expected
    assert "leaf=True, grad=True, marked=True" in expected["parameter to worker1, in a context"]
    assert expected["a parameter to an operator"]
    assert not expected["a parameter to a function"]
