"""`python -m lite_runner ARGS`: run_lite.py of an installed package.

The ranks that a run starts execute it, and so does their scheduler.
"""

import os

from lite_runner.app import console
from lite_runner.distributed.msrun_wrapper import PARENT_VARIABLE

if __name__ == "__main__":
    if os.environ.get("MS_ROLE") == "MS_SCHED" and PARENT_VARIABLE in os.environ:
        from lite_runner.backends.collectives import schedule

        schedule()  # its ranks have a config
    else:
        console()
