"""A run with momentum and recorded payloads: ``up`` is killed by SIGKILL, nothing survives, and it goes on."""

import signal

from ops.dashboard.plot import WholeRun
from tests.local_run import Process, Up, descendants, is_alive, merged_tokens, ops, wait_for

#: Tokens to train after the kill.
MORE = 30_000


def resumed(folder):
    """Kills it after two versions of each fragment, and resumes it to its end."""
    rule = ("--outer-momentum", 0.5, "--record-payloads")
    with Up(folder / "run", "--islands", 2, "--tokens", 10_000_000, "--pace", 0.02, *rule) as up:
        up.wait_for_progress(2)
        second = ops("up", "--resume", up.run_dir)
        below = descendants(up.pid)
        up.signal(signal.SIGKILL)
        assert up.wait() == -signal.SIGKILL
        wait_for(lambda: not any(map(is_alive, below)), f"end of all of {below}")
    before, sent = up.ledger(), {name: each.bytes_up for name, each in WholeRun(up.run_dir).history.islands.items()}
    tokens = merged_tokens(before) + MORE
    with Process(folder / "again", "up", "--resume", up.run_dir, "--tokens", tokens, "--json") as again:
        exit = again.wait()
        return {
            "second": [second.returncode, second.stderr],
            "before": before,
            "sent_before": sent,
            "tokens": tokens,
            "exit": exit,
            "err": again.err,
            "out": again.out,
        }
