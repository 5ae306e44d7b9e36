"""``hub``: what a run of islands elsewhere needs of one host, in one command.

Redis (unless one is named), brokers, an aggregator and its standbys, with keys: what ``up`` starts, without islands.
Started again on the same directory it goes on with the run, however it ended.
"""

from __future__ import annotations

import argparse
import time

from broker.process.signals import Signals
from ops.run import local_plan
from ops.run.display import Display
from ops.run.end_of_run import keep
from ops.run.local_run import LocalRun
from ops.run.prepare import prepare_hub

#: Seconds between two lines where standard error is no terminal: a hub runs for weeks, and its lines are kept.
LINE_EVERY_S = 30.0

_EPILOG = """
It prints what islands dial and the command that starts one, and writes the address into hub.address in its directory.
status, dashboard, explain and export take that directory. The same command again goes on with the run, whether it ended
by Ctrl-C, by a signal or by a power failure; nothing that was merged is lost.

exit status:
  0    the run trained its tokens
  1    a process could not be kept alive; start it again
  2    a setting is wrong, or contradicts those of the run in the directory; starting it again cannot help
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hub``."""
    parser.add_argument("--json", action="store_true", help="the report as one JSON object, on standard output")
    local_plan.add_hub_arguments(parser)
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def run(args: argparse.Namespace) -> int:
    """Runs until the run has ended or a signal comes; returns the exit status that ``--help`` lists.

    Raises:
        ConfigError: A setting cannot work; nothing was started.
        Unavailable: A directory cannot be written; nothing is left running.
    """
    started_s = time.monotonic()
    with Signals() as signals, Display(every_s=LINE_EVERY_S) as display:
        plan, goes_on, made = prepare_hub(args)
        if goes_on and made:
            display.note(f"keys were missing in {plan.keys_dir}, and new ones were made: islands need these instead")
        run_ = LocalRun(plan=plan, started_s=started_s, resumed=goes_on, as_called=args.as_called)
        status = run_.train(display, signals)
    keep(plan, run_.report(status), as_json=args.json)
    return status
