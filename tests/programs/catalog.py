"""Lists the programs to run on torch's agent and on gradwire; add programs here.

Those in `packages/` use third-party libraries, which requirements-programs.txt pins. Those in `examples/` are
modelled on pytorch/examples, which is not on PyPI.
"""

from dataclasses import dataclass

__all__ = ["PROGRAMS", "Program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that prints its results in lines that begin with "result".

    name: its name on the command line.
    source: the origin of the code.
    path: the script, relative to this folder.
    arguments: the script's arguments.
    timeout_s: its time limit in seconds.
    tolerance: the largest difference of numbers in its results, relative to the larger of the number and 1.
    """

    name: str
    source: str
    path: str
    arguments: tuple[str, ...] = ()
    timeout_s: float = 180.0
    tolerance: float = 1e-4


EXAMPLES = "like pytorch/examples"

PROGRAMS = (
    Program(name="rnn", source=EXAMPLES, path="examples/rnn.py"),
    Program(name="rl", source=EXAMPLES, path="examples/reinforce.py"),
    Program(name="batch-rl", source=EXAMPLES, path="examples/reinforce.py", arguments=("--batch",)),
    Program(name="batch-parameter-server", source=EXAMPLES, path="examples/batch_parameter_server.py"),
    Program(name="parameter-server", source=EXAMPLES, path="examples/parameter_server.py"),
    Program(name="pipeline", source=EXAMPLES, path="examples/pipeline.py"),
    Program(name="ddp-rpc", source=EXAMPLES, path="examples/ddp_rpc.py"),
    Program(name="torchrl-collector", source="torchrl", path="packages/torchrl_collector.py"),
    Program(name="torchrl-replay-buffer", source="torchrl", path="packages/torchrl_replay_buffer.py"),
    Program(name="pyg-feature-store", source="torch_geometric", path="packages/pyg_feature_store.py"),
    Program(name="pyg-sampler", source="torch_geometric", path="packages/pyg_sampler.py"),
    Program(name="graphlearn-rpc", source="graphlearn-torch", path="packages/graphlearn_rpc.py"),
    Program(name="graphlearn-import", source="graphlearn-torch", path="packages/graphlearn_import.py"),
    Program(name="machin-world", source="machin", path="packages/machin_world.py"),
    Program(name="machin-import", source="machin", path="packages/machin_import.py"),
    Program(name="fairscale-pipeline", source="fairscale", path="packages/fairscale_pipeline.py"),
)
