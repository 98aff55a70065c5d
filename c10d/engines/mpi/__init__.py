"""The MPI engine: collectives and messages through mpi4py."""
