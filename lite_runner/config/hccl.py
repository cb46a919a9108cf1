"""HCCL's timeouts: how long a rank waits for a late one.

CANN 8.5: HCCL_CONNECT_TIMEOUT (envref_07_0149) is 120 to 7200 s, and 120 where it is not set, but
importing MindSpore 2.10 sets it to 600 (mindspore/context.py). HCCL_EXEC_TIMEOUT (envref_07_0078)
is 1836 s where it is not set; Atlas 800 (910A) takes up to 17340 and rounds down to a multiple of
68; with HCCL_OP_EXPANSION_MODE=AIV more than 1091 is 1091. Ranks load for minutes, and replicas
(data parallel) may end long after each other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

LEAST_S, MOST_S = 120, 7200
VARIABLES = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")


def timeouts(seconds: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that wait `seconds`, but for those that the user has set in `environ`."""
    return {name: str(seconds) for name in VARIABLES if not environ.get(name)}
