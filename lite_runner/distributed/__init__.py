"""Several ranks: rank tables, msrun started, watched and ended, or joined."""

import os
from collections.abc import Mapping

SOCKET_VARIABLE = "LITE_RUNNER_EVENTS"  # path of our launcher's socket, if that started the rank


def started_by_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """True if this process may be a rank: see `membership`, which is for those alone."""
    return "MS_ROLE" in environ or "RANK_ID" in environ
