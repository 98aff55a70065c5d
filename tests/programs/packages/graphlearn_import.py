"""graphlearn-torch, unmodified: its extension is built for CUDA, and for an older torch."""

import graphlearn_torch.distributed

print("result", graphlearn_torch.distributed.__name__)
