"""Of the daemons' collector of reference cycles: in a process of its own, as it is for good."""

import subprocess
import sys

from broker.process.collecting import THRESHOLDS


def test_what_is_there_is_never_looked_at_again_and_the_rest_seldom():
    asked = "gc.get_threshold(), gc.get_freeze_count() > 1000"
    code = f"import gc; from broker.process.collecting import collect_seldom; collect_seldom(); print({asked})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == f"{THRESHOLDS} True"
