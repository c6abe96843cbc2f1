"""Tests that need ranks: started by ``tests/test_mpi.py`` as ``mpirun -n N python -m tests.mpi.run``, one N at a
time."""
