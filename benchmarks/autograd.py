"""The cost of distributed forward and backward passes, and of training steps."""

import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from .calls import PEER
from .harness import Case, seconds_of
from .systems import System, system_here, worker_name

__all__ = ["CASES", "LargeBackward", "Linear", "ManyNodes", "OneProcess", "Pipeline", "TinyBackward"]

LEARNING_RATE = 0.01


class _Backward(Case):
    """A function of some leaves, all of which get a gradient; only backward is measured."""

    leaves: ClassVar[int] = 1
    elements: ClassVar[int] = 16

    def __init__(self, system: System) -> None:
        super().__init__(system)
        torch.manual_seed(0)
        self._leaves = [torch.rand(self.elements, requires_grad=True) for _ in range(self.leaves)]

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """Returns the loss."""

    def step(self) -> float:
        """Runs forward, then measures backward."""
        with self._autograd.context() as context_id:
            loss = self.forward()
            return seconds_of(lambda: self._autograd.backward(context_id, [loss]))

    def results(self) -> list[torch.Tensor]:
        """Returns the gradients of the leaves."""
        with self._autograd.context() as context_id:
            self._autograd.backward(context_id, [self.forward()])
            gradients = self._autograd.get_gradients(context_id)
            return [gradients[leaf] for leaf in self._leaves]


class LargeBackward(_Backward):
    """Multiplies two large tensors on the peer."""

    name = "backward, gradients of 4 MiB"
    function = torch.mul
    leaves = 2
    elements = 1 << 20

    def forward(self) -> torch.Tensor:
        """Returns the sum of what the peer has computed."""
        result: torch.Tensor = self._rpc.rpc_sync(PEER, type(self).function, args=tuple(self._leaves)).sum()
        return result


class TinyBackward(LargeBackward):
    """Adds two small tensors on the peer, runs backward and reads the gradients; all of that is measured."""

    name = "tiny forward, backward, get_gradients"
    function = torch.add
    elements = 3

    def step(self) -> float:
        """Measures all of it."""
        return seconds_of(self.results)


class Stage:
    """A layer on a worker; several calls may use it at once."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._lock = threading.Lock()
        self._module = torch.nn.Sequential(torch.nn.Linear(inputs, outputs), torch.nn.Tanh())

    def forward(self, x: Any) -> torch.Tensor:
        """Applies the layer to a tensor, or to the value of an RRef."""
        if not isinstance(x, torch.Tensor):
            x = x.to_here()
        with self._lock:
            y: torch.Tensor = self._module(x)
        return y

    def parameters(self) -> list[Any]:
        """Returns RRefs to the parameters."""
        return [system_here().rpc.RRef(parameter) for parameter in self._module.parameters()]

    def gradients(self, context_id: int) -> list[torch.Tensor]:
        """Returns the gradients of the parameters in a context."""
        gradients = system_here().autograd.get_gradients(context_id)
        return [gradients[parameter] for parameter in self._module.parameters()]

    def values(self) -> list[torch.Tensor]:
        """Returns the parameters."""
        return [parameter.detach() for parameter in self._module.parameters()]


class _Training(Case):
    """A training step with stages on workers, whose parameters SGD updates in place."""

    def __init__(self, system: System, layers: Sequence[tuple[str, int, int]]) -> None:
        """Args: layers: the worker, the inputs and the outputs of each stage."""
        super().__init__(system)
        self._stages = [
            system.rpc.remote(worker, Stage, args=(inputs, outputs, seed))
            for seed, (worker, inputs, outputs) in enumerate(layers)
        ]
        parameters = [each for stage in self._stages for each in stage.rpc_sync().parameters()]
        self._optimizer = system.optimizer_class(torch.optim.SGD, parameters, lr=LEARNING_RATE)

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """Returns the loss."""

    def step(self) -> float:
        """Runs forward, backward and the optimizer's step; its time includes opening and ending the context."""
        return seconds_of(self._train)

    def results(self) -> list[torch.Tensor]:
        """Returns the gradients of all stages in a first step, and their parameters after it."""
        with self._autograd.context() as context_id:
            self._autograd.backward(context_id, [self.forward()])
            gradients = [each for stage in self._stages for each in stage.rpc_sync().gradients(context_id)]
            self._optimizer.step(context_id)
        return gradients + [each for stage in self._stages for each in stage.rpc_sync().values()]

    def _train(self) -> None:
        with self._autograd.context() as context_id:
            self._autograd.backward(context_id, [self.forward()])
            self._optimizer.step(context_id)


class Linear(_Training):
    """One layer on the peer, a batch of 32."""

    name = "training step, remote linear 256x256"

    def __init__(self, system: System) -> None:
        super().__init__(system, [(PEER, 256, 256)])
        self._x, self._y = torch.rand(32, 256), torch.rand(32, 256)

    def forward(self) -> torch.Tensor:
        """Returns the squared error."""
        predicted = self._stages[0].rpc_sync().forward(self._x)
        return torch.nn.functional.mse_loss(predicted, self._y)


class Pipeline(_Training):
    """Four stages on four workers. Micro-batches go from worker to worker as references."""

    name = "training step, 4-stage pipeline"
    workers = 4
    micro_batches = 4

    def __init__(self, system: System) -> None:
        super().__init__(system, [(worker_name(rank), 128, 128) for rank in range(self.workers)])
        self._x, self._y = torch.rand(64, 128), torch.rand(64, 128)

    def forward(self) -> torch.Tensor:
        """Returns the squared error. All micro-batches are in flight at once."""
        outputs = []
        for x in self._x.chunk(self.micro_batches):
            reference = self._rpc.RRef(x)
            for stage in self._stages[:-1]:
                reference = stage.remote().forward(reference)
            outputs.append(self._stages[-1].rpc_async().forward(reference))
        return torch.nn.functional.mse_loss(torch.cat(torch.futures.wait_all(outputs)), self._y)


SEGMENT = 498
"""Autograd nodes between two messages of `ManyNodes`."""

SEGMENTS = 10


def segment(x: torch.Tensor) -> torch.Tensor:
    """Builds a chain of autograd nodes."""
    for _ in range(SEGMENT // 2):
        x = (x * 1.001).sin()
    return x


class ManyNodes(_Backward):
    """A chain of 5,000 nodes goes back and forth between two workers."""

    name = "backward, 5,000 nodes on two workers"

    def forward(self) -> torch.Tensor:
        """Builds the chain."""
        (x,) = self._leaves
        for _ in range(SEGMENTS // 2):
            x = self._rpc.rpc_sync(PEER, segment, args=(segment(x),))
        return x.sum()


class OneProcess(_Backward):
    """The same chain with torch's backward in one process, without RPC: all systems should measure the same."""

    name = "backward, 5,000 nodes in one process"

    def forward(self) -> torch.Tensor:
        """Builds the chain."""
        (x,) = self._leaves
        for _ in range(SEGMENTS):
            x = segment(x)
        return x.sum()

    def step(self) -> float:
        """Builds the graph, then measures backward."""
        loss = self.forward()
        return seconds_of(lambda: torch.autograd.grad(loss, self._leaves))

    def results(self) -> list[torch.Tensor]:
        """Returns the gradient at the far end of the chain."""
        return list(torch.autograd.grad(self.forward(), self._leaves))


CASES: list[type[Case]] = [TinyBackward, LargeBackward, Linear, ManyNodes, OneProcess, Pipeline]
