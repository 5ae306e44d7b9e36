"""A broker may have more files open than it starts with."""

import subprocess
import sys

CODE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
from broker.process.open_files import raise_limit
print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE), raise_limit())
"""


def test_the_limit_is_raised_as_far_as_the_system_allows():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split() == ["512"] * 4
