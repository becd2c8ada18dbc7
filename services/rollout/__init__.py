"""The rollout service. On a CPU it forks its engine core (`engines/vllm_core.py`), which does not use gRPC. So gRPC's
preparations for a fork are switched off, by a variable that it reads when it is imported.
"""

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
