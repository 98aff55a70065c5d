"""torch's names under `compat`. The tests run in worker processes, where the names are patched."""

import gc
import sys
import warnings
import weakref

import pytest
import torch
from gradwire import compat, rpc
from gradwire.compat import group
from gradwire.rpc.contracts.agent import current_agent

from tests.ports import free_port
from tests.remote_functions import event, set_event


def on_torch_names(function, *args):
    """Runs `function(torch.distributed.rpc, *args)` with torch's names patched."""
    compat.install()
    return function(torch.distributed.rpc, *args)


@pytest.fixture
def torch_workers(workers, tmp_path):
    """Returns a function that starts workers which join through torch's init_rpc."""

    def start(count, make_options="TensorPipeRpcBackendOptions", **options):
        def join(torch_rpc, name, rank):
            home = torch_rpc if hasattr(torch_rpc, make_options) else torch_rpc._testing
            made = getattr(home, make_options)(init_method=f"file://{tmp_path / 'meeting'}", **options)
            torch_rpc.init_rpc(name, rank=rank, world_size=count, rpc_backend_options=made)

        started = workers(count)
        pending = [worker.start(on_torch_names, join, worker.name, rank) for rank, worker in enumerate(started)]
        for p in pending:
            p.result()
        return started

    return start


def append(rref, value):
    rref.local_value().append(value)


def fail(text):
    raise ValueError(text)


def test_the_agent_answers_as_torchs(torch_workers):
    a, _ = torch_workers(2, num_worker_threads=3, rpc_timeout=7)

    def look(torch_rpc):
        agent = torch_rpc.api._get_current_rpc_agent()
        assert isinstance(agent, torch_rpc.TensorPipeAgent)
        assert agent is torch_rpc._get_current_rpc_agent()
        assert torch._C._distributed_rpc._is_current_rpc_agent_set()
        assert [info.name for info in agent.get_worker_infos()] == ["worker0", "worker1"]
        assert agent.get_worker_info() == agent.get_worker_info("worker0") == torch_rpc.WorkerInfo("worker0", 0)
        assert agent.is_static_group
        assert torch_rpc.get_rpc_timeout() == 7
        debug = torch_rpc._get_debug_info()
        assert debug["agent.thread_pool_size"] == "3"
        assert all(isinstance(value, str) for value in debug.values())
        assert debug.keys() >= torch_rpc._rref_context_get_debug_info().keys()
        torch_rpc.enable_gil_profiling(enable=True)
        return float(agent.get_debug_info()["agent.gil_average_wait_time_us"])

    assert a.run(on_torch_names, look) > 0


def test_an_agent_that_was_looked_at_goes_after_shutdown(torch_workers):
    (worker,) = torch_workers(1)

    def look(torch_rpc):
        wrapped = torch_rpc.api._get_current_rpc_agent()
        agent = weakref.ref(wrapped._agent)
        torch_rpc.shutdown()
        del wrapped
        gc.collect()
        return agent() is None

    assert worker.run(on_torch_names, look)


def test_shutdown_finds_references_that_are_left(torch_workers):
    a, b = torch_workers(2)

    def hold(torch_rpc):
        sys.held = torch_rpc.remote("worker1", list)  # somewhere that outlives this function
        torch_rpc.rpc_sync("worker1", append, (sys.held, 1))

    def leave_without_release(torch_rpc):
        torch_rpc.api._ignore_rref_leak = False
        torch_rpc.api._delete_all_user_and_unforked_owner_rrefs = lambda: None
        torch_rpc.shutdown()

    a.run(on_torch_names, hold)
    leaving = [worker.start(on_torch_names, leave_without_release) for worker in (a, b)]
    leaving[0].result()
    with pytest.raises(RuntimeError, match="Leaking RRef: other workers still hold references to 1 value"):
        leaving[1].result()


def test_references_are_released_after_shutdown(torch_workers):
    a, b = torch_workers(2)

    def hold(torch_rpc):
        sys.held = torch_rpc.remote("worker1", list)
        assert sys.held.to_here() == []

    def leave(torch_rpc):
        torch_rpc.api._ignore_rref_leak = False
        torch_rpc.shutdown()

    def use(torch_rpc):
        with pytest.raises(RuntimeError, match="Cannot call to_here.. on it after deletion"):
            sys.held.to_here()
        with pytest.raises(RuntimeError, match="Cannot call fork an UserRRef after deletion"):
            torch_rpc.internal.serialize(sys.held)

    a.run(on_torch_names, hold)
    for leaving in [a.start(on_torch_names, leave), b.start(on_torch_names, leave)]:
        leaving.result()
    a.run(on_torch_names, use)


def test_shutdown_waits_for_calls_that_take_longer_than_releasing_references(torch_workers):
    a, b = torch_workers(2)

    def leave_with_a_call_in_flight(torch_rpc):
        group.RELEASE_TIMEOUT_S = 0.01
        release = torch_rpc.api._delete_all_user_and_unforked_owner_rrefs

        def release_and_end_the_call():
            release()
            assert not call.done()
            torch_rpc.rpc_sync("worker1", set_event, ("leave",))

        torch_rpc.api._delete_all_user_and_unforked_owner_rrefs = release_and_end_the_call
        call = torch_rpc.remote("worker1", event, ("leave",)).rpc_async(timeout=0).wait()
        torch_rpc.shutdown()
        return call.wait()

    leaving = a.start(on_torch_names, leave_with_a_call_in_flight)
    b.start(on_torch_names, lambda torch_rpc: torch_rpc.shutdown()).result()
    assert leaving.result()
    assert "deleting references to values of 'worker1'" in a.log.read_text()


def test_what_a_function_raises_is_printed_where_it_ran(torch_workers):
    a, b = torch_workers(2)

    def call(torch_rpc):
        with pytest.raises(ValueError, match="odd"):
            torch_rpc.rpc_sync("worker1", fail, ("odd",))
        with pytest.raises(ValueError, match="even"):
            torch_rpc.remote("worker1", fail, ("even",)).to_here()

    a.run(on_torch_names, call)
    a.run(on_torch_names, lambda torch_rpc: torch_rpc.rpc_sync("worker1", int))
    printed = b.log.read_text()
    assert printed.count("On WorkerInfo(id=1, name=worker1):") == 2
    assert "ValueError('odd')" in printed
    assert "ValueError('even')" in printed


def test_wait_all_does_not_wait_for_others_when_one_has_failed(torch_workers):
    a, _ = torch_workers(2)

    def wait(torch_rpc):
        never = torch.futures.Future()
        with pytest.raises(ValueError, match="odd"):
            torch.futures.wait_all([never, torch_rpc.rpc_async("worker1", fail, ("odd",))])
        never.set_result(None)
        return torch.futures.wait_all([torch_rpc.rpc_async("worker1", int, (i,)) for i in range(5)])

    assert a.run(on_torch_names, wait) == [0, 1, 2, 3, 4]
    assert a.run(on_torch_names, lambda _: torch.futures.wait_all([])) == []


def test_rpc_and_a_process_group_share_a_port(workers, tmp_path):
    """torch uses one store for both, so programs set MASTER_PORT once."""
    started = workers(2)

    def main(torch_rpc, rank, port):
        url = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
        options = torch_rpc.TensorPipeRpcBackendOptions(init_method=url)
        torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        summed = torch.ones(1)
        torch.distributed.all_reduce(summed)
        torch.distributed.barrier()
        answer = torch_rpc.rpc_sync(f"worker{1 - rank}", min, (5, 6))
        torch_rpc.shutdown()
        torch.distributed.destroy_process_group()
        return summed.item(), answer

    port = free_port()
    pending = [worker.start(on_torch_names, main, rank, port) for rank, worker in enumerate(started)]
    assert [p.result() for p in pending] == [(2.0, 5)] * 2


def test_options_are_torchs(workers):
    (worker,) = workers(1)

    def look(torch_rpc):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            options = torch_rpc.TensorPipeRpcBackendOptions(
                _transports=["uv"], _channels=["basic"], num_worker_threads=2
            )
        options.rpc_timeout = 3
        options.set_device_map("worker1", {"cuda:0": "cuda:1"})
        assert options.device_maps == {"worker1": {torch.device("cuda:0"): torch.device("cuda:1")}}
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            torch_rpc.TensorPipeRpcBackendOptions(rpc_timeout="soon")
        with pytest.raises(TypeError, match="must be a member of BackendType"):
            torch_rpc.init_rpc("me", backend="TENSORPIPE", rank=0, world_size=1)
        with pytest.raises(TypeError, match="must be an instance of RpcBackendOptions"):
            torch_rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options={})
        made = torch_rpc.backend_registry.construct_rpc_backend_options(
            torch_rpc.BackendType.TENSORPIPE, init_method="env://", num_worker_threads=5
        )
        assert type(made) is torch_rpc.TensorPipeRpcBackendOptions
        assert made.num_worker_threads == 5
        assert isinstance(made, rpc.RpcBackendOptions)

    worker.run(on_torch_names, look)


def test_names_that_are_missing_say_so(workers):
    (worker,) = workers(1)

    def call(torch_rpc):
        with pytest.raises(RuntimeError, match="_invoke_rpc_builtin is a part of torch's own agent"):
            torch_rpc.api._invoke_rpc_builtin("worker1", "aten::add")

    worker.run(on_torch_names, call)


def test_contexts_are_torchs(torch_workers):
    a, _ = torch_workers(2)

    def look(_):
        context = torch.distributed.autograd._new_context()
        identifier = context._context_id()
        assert torch.distributed.autograd._current_context()._context_id() == identifier
        assert torch.distributed.autograd._retrieve_context(identifier)._context_id() == identifier
        torch.distributed.autograd._is_valid_context(identifier)
        assert torch.distributed.autograd._get_debug_info()["num_autograd_contexts"] == "1"
        torch.distributed.autograd._release_context(identifier)
        with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {identifier}"):
            torch.distributed.autograd._is_valid_context(identifier)

    a.run(on_torch_names, look)


def double(x):
    return x * 2


def test_the_graph_at_a_context_is_torchs(torch_workers):
    a, _ = torch_workers(2)

    def look(torch_rpc):
        x = torch.ones(3, requires_grad=True)
        with torch.distributed.autograd.context():
            y = torch_rpc.rpc_sync("worker1", double, (x,))
            context = torch.distributed.autograd._current_context()
            (send,) = context._send_functions().values()
            (receive,) = context._recv_functions().values()
            assert context._known_worker_ids() == {1}
            assert send.next_functions[0][0].variable is x
            assert y.grad_fn is receive
            assert send.name() == "torch::distributed::autograd::SendRpcBackward"
            assert receive.name() == "torch::distributed::autograd::RecvRpcBackward"

    a.run(on_torch_names, look)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("in backward")


def fail_in_backward(x):
    return Fails.apply(x)


def test_backward_refuses_what_torch_refuses(torch_workers):
    a, _ = torch_workers(2)

    def look(torch_rpc):
        from torch.distributed import autograd

        leaf = torch.ones((), requires_grad=True)
        with autograd.context() as context_id:
            with pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"):
                autograd.context().__enter__()
            for arguments in [(context_id, None), (context_id, leaf), (None, [leaf * 1])]:
                with pytest.raises(TypeError, match="incompatible function arguments"):
                    autograd.backward(*arguments)
            with pytest.raises(RuntimeError, match="No tensors provided for gradient computation"):
                autograd.backward(context_id, [])
            with pytest.raises(RuntimeError, match="does not have a valid gradient function"):
                autograd.backward(context_id, [leaf])
            with pytest.raises(RuntimeError, match="Error on Node 1: 'in backward'"):
                autograd.backward(context_id, [torch_rpc.rpc_sync("worker1", fail_in_backward, (leaf,))])
            with pytest.raises(RuntimeError, match="Error on Node 0: 'in backward'"):
                autograd.backward(context_id, [Fails.apply(leaf)])

    a.run(on_torch_names, look)


def test_calls_show_in_the_legacy_profiler_only(torch_workers):
    a, _ = torch_workers(2)

    def profile(torch_rpc):
        with torch.autograd.profiler_legacy.profile() as legacy:
            rref = torch_rpc.remote("worker1", torch.add, (torch.ones(2), 1))
            rref._get_profiling_future().wait()
        with torch.profiler.profile() as kineto:
            torch_rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
        return [any("rpc_" in e.name for e in events) for events in (legacy.function_events, kineto.events())]

    assert a.run(on_torch_names, profile) == [True, False]


def test_torchs_names_of_messages_fail_and_delay_them(torch_workers):
    a, b = torch_workers(
        2,
        "FaultyTensorPipeRpcBackendOptions",
        num_worker_threads=4,
        rpc_timeout=30,
        messages_to_fail=["PYTHON_REMOTE_CALL", "RREF_USER_DELETE"],
        messages_to_delay={"SCRIPT_CALL": 1.5},
        num_fail_sends=1,
    )

    def call(torch_rpc):
        lost = torch_rpc.remote("worker1", list)
        with pytest.raises(RuntimeError, match="RRef creation"):
            lost.to_here()
        with pytest.raises(RuntimeError, match="RRef creation"):
            lost._serialize()
        kept = torch_rpc.remote("worker1", list)
        assert kept.to_here() == []
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            torch_rpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1), timeout=0.2)

    def leave(torch_rpc):
        torch_rpc.api._ignore_rref_leak = False
        torch_rpc.shutdown()

    a.run(on_torch_names, call)
    for leaving in [a.start(on_torch_names, leave), b.start(on_torch_names, leave)]:
        leaving.result()


def test_unknown_messages_are_refused(workers, tmp_path):
    (worker,) = workers(1)

    def join(torch_rpc):
        options = torch_rpc._testing.FaultyTensorPipeRpcBackendOptions(
            4, 30, f"file://{tmp_path / 'meeting'}", messages_to_fail=["PYTHON_COLL"], messages_to_delay={}
        )
        with pytest.raises(ValueError, match="message type 'PYTHON_COLL' cannot fail or be delayed"):
            torch_rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
        assert not torch_rpc._is_current_rpc_agent_set()

    worker.run(on_torch_names, join)


def test_options_that_torch_lacks_reach_the_faulty_agent(workers, tmp_path):
    (worker,) = workers(1)

    def join(torch_rpc):
        options = torch_rpc._testing.FaultyTensorPipeRpcBackendOptions(
            4, 30, f"file://{tmp_path / 'meeting'}", messages_to_fail=["PYTHON_CALL"], messages_to_delay={}
        )
        options.busy_poll = 0
        torch_rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
        used = current_agent().options
        assert (used.busy_poll, used.messages_to_fail) == (0, ["CALL"])
        torch_rpc.shutdown()

    worker.run(on_torch_names, join)


@torch.jit.script
def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def calls_from_script(to: str, x: torch.Tensor) -> torch.Tensor:
    return torch.distributed.rpc.rpc_sync(to, plus_one, (x,))


class CallsFromScript(torch.nn.Module):
    def forward(self, to: str, x: torch.Tensor) -> torch.Tensor:
        return calls_from_script(to, x)


def warn_of_calls_from_script(_torch_rpc):
    linear = torch.jit.script(torch.nn.Linear(2, 2))
    assert linear(torch.zeros(1, 2)).shape == (1, 2)
    for scripted in (calls_from_script, CallsFromScript()):
        with pytest.warns(RuntimeWarning, match="calls rpc_sync from inside TorchScript.* calling it will fail"):
            compiled = torch.jit.script(scripted)
        with pytest.raises(RuntimeError, match="Current RPC agent is not set"):
            compiled("worker1", torch.ones(1))


def test_calls_from_torchscript_warn(workers):
    workers(1)[0].run(on_torch_names, warn_of_calls_from_script)


def returns_a_reference(rref: torch.distributed.rpc.RRef[int]) -> torch.distributed.rpc.RRef[int]:
    return rref


def warn_of_references_in_script(_torch_rpc):
    with pytest.warns(
        RuntimeWarning, match=r"will fail: 'rref', RRef\[int\], is used by prim::Return in TorchScript"
    ):
        compiled = torch.jit.script(returns_a_reference)
    with pytest.raises(RuntimeError, match="Expected a value of type 'RRef"):
        compiled(object())


def test_references_in_torchscript_warn(workers):
    workers(1)[0].run(on_torch_names, warn_of_references_in_script)


def test_traversals_are_refused_where_torch_refuses_them(torch_workers):
    a, _ = torch_workers(2)

    def check(torch_rpc):
        import torch.distributed.nn
        from torch.distributed.nn.api.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES

        module = torch.distributed.nn.RemoteModule("worker1", torch.nn.Linear, (2, 2))
        for name in ("children", "modules", "named_children", "named_modules"):
            with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
                getattr(module, name)()
        parent = torch.nn.Sequential(module)
        assert [name for name, _ in parent.named_modules()] == ["", "0"]
        arrived = torch_rpc.rpc_sync("worker1", vars, (module,))
        assert list(arrived) == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
        compat.uninstall()
        assert list(module.modules()) == [module]
        compat.install()

    a.run(on_torch_names, check)


class RemoteModulesAreLeaves(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        from torch.distributed.nn import RemoteModule

        return isinstance(module, RemoteModule)


def trace(model):
    """Traces as fairscale's pipelines do: with nn.Module's own traversal methods in place meanwhile."""
    from torch.distributed.nn import RemoteModule

    names = ("named_modules", "named_children")
    before = {name: getattr(RemoteModule, name) for name in names}
    try:
        for name in names:
            setattr(RemoteModule, name, getattr(torch.nn.Module, name))
        graph = RemoteModulesAreLeaves().trace(model)
    finally:
        for name in names:
            setattr(RemoteModule, name, before[name])
    traced = torch.fx.GraphModule(model, graph)
    assert torch.equal(traced(torch.ones(2)), model(torch.ones(2)))
    return [node.target for node in graph.nodes if node.op == "call_module"]


def test_received_modules_can_be_traced_as_fairscale_does(torch_workers):
    a, _ = torch_workers(2)

    def check(torch_rpc):
        from torch.distributed.nn import RemoteModule

        model = torch.nn.Sequential(
            RemoteModule("worker1", torch.nn.Linear, (2, 2)), RemoteModule("worker0", torch.nn.Tanh)
        )
        assert trace(model) == ["0", "1"]
        assert torch_rpc.rpc_sync("worker1", trace, (model,)) == ["0", "1"]
        assert torch_rpc.remote("worker1", trace, (model,)).to_here() == ["0", "1"]

    a.run(on_torch_names, check)
