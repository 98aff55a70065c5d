"""The MPI engine: CPU collectives and messages, on mpi4py."""
