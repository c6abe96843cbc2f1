"""Tests that need ranks: ``tests/test_mpi.py`` starts ``mpirun -n 8 python -m tests.mpi.run --all``, which runs them on
each number of ranks in turn; ``python -m tests.mpi.start N -m tests.mpi.run`` runs them on N ranks."""
