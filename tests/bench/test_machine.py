from __future__ import annotations

import os
import subprocess
import sys

from lite_runner.bench.machine import Others, this_machine


def test_the_machine_has_a_name_cores_and_memory() -> None:
    machine = this_machine()
    assert machine.processor and machine.memory_mib > 0
    assert machine.cores == len(os.sched_getaffinity(0))


def test_what_children_that_ended_have_spent_is_not_others() -> None:
    others = Others()
    spin = "import time\nwhile time.process_time() < 1.5: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    mine = others.busy_cores()
    spinning = subprocess.Popen([sys.executable, "-c", spin.replace("1.5", "600")])
    try:
        others = Others()
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1.5)"], check=True)
        busy = others.busy_cores()  # of one that goes on, which is not counted yet
    finally:
        spinning.kill()
        spinning.wait()
    assert 0 <= mine < len(os.sched_getaffinity(0))
    assert busy > 0.2
