"""Regenerates `proto/v1` from the `.proto` files: `make proto`.

The files are compiled under their canonical names `gradwire/v1/x.proto`, by which protobuf registers them
process-wide. The Python modules are in the package `gradwire.proto.v1`.
"""

import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).parent


def generate(target: Path) -> list[Path]:
    """Writes the generated modules and their stubs to the folder `target`, and returns their paths.

    Raises:
        RuntimeError: protoc failed; its error is on stderr.
    """
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(HERE)) for path in HERE.glob("gradwire/v1/*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={HERE}",
                f"--proto_path={files('grpc_tools') / '_proto'}",
                f"--plugin=protoc-gen-mypy={Path(sys.executable).with_name('protoc-gen-mypy')}",
                f"--python_out={scratch}",
                f"--mypy_out={scratch}",
                *sources,
            ]
        )
        if status != 0:
            raise RuntimeError(f"protoc failed on {', '.join(sources)} (status {status})")
        target.mkdir(parents=True, exist_ok=True)
        generated = sorted(Path(scratch, "gradwire", "v1").iterdir())
        return [Path(shutil.copy(path, target / path.name)) for path in generated]


if __name__ == "__main__":
    for written in generate(HERE / "v1"):
        print(written.relative_to(HERE))
