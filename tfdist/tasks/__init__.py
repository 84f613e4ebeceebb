"""The processes of a cluster: the first runs the program and dismisses the others, which serve until then."""

import os

# Without it a call to a task that has ended, or not started yet, waits instead of failing.
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
