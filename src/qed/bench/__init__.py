"""Fair timings of the operator beside its peers: ``qed bench``.

Every peer gets the same tensors, passes the same error rule before it is timed, and runs in a process of its own with
a time limit. Rows are written as they are made. A failure, a time-out or a lack of memory is a status, never a number.
"""

from qed.bench.run import add_arguments, bench, main

__all__ = ["add_arguments", "bench", "main"]
