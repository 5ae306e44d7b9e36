"""``python3 -m ops COMMAND`` in a bare checkout, ``python3 CHECKOUT/ops COMMAND`` elsewhere.

Any Python starts it, so there is only the standard library, and old syntax.
"""

import os
import shutil
import sys

if sys.version_info < (3, 11):  # noqa: UP036  a system's python3 is often older than the one we ask for
    for _name in ("python3.14", "python3.13", "python3.12", "python3.11"):
        if shutil.which(_name):
            os.execvp(_name, [_name, os.path.dirname(os.path.abspath(__file__)), *sys.argv[1:]])
    sys.exit(
        "atoll: needs Python 3.11 or newer, this is {}.{}; install it (Debian, Ubuntu: apt install python3.11 "
        "python3.11-venv) and run python3.11 -m ops ...".format(*sys.version_info)
    )

if not __package__:  # started as a folder or a file, which is where Python then looks for modules
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.append(os.getcwd())  # the user's own, behind all of ours

from ops import launcher  # a newer syntax from here on

launcher.enter_environment()

from ops.cli import main  # noqa: E402  needs the environment

sys.exit(main(prog=launcher.program()))
