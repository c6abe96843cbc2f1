"""Names of communications, shared by the communicator, its flight recorder and the plan of a step, and their largest
size."""

from __future__ import annotations

ALL_REDUCES = {how: f"all_reduce_{how}" for how in ("sum", "max", "min")}
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = ALL_REDUCES["sum"], "reduce_scatter_sum", "all_gather"
SEND, RECEIVE = "send", "receive"
BARRIER = "barrier"
BROADCAST, GATHER_JSON = "broadcast", "gather_json"
MAX_ELEMENTS = 2**31 - 1  # of one communication: the largest count that every MPI library takes
