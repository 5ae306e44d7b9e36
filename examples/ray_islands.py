"""Islands as tasks of Ray: each asks for what it needs, and is tried again where its node is lost.

    pip install ray
    python -m examples.ray_islands --islands 2                                   with a hub of its own, on this machine
    python -m examples.ray_islands tcp://hub:7001 --key keys/islands.secret --islands 8 --gpus 1      on a Ray cluster

Ray is no dependency of Atoll, and has nothing to do with how islands speak with each other: it starts their processes,
by the command that anybody would use. A task that ends with an error is one that Ray begins again, under the same
island id. On a cluster each node needs Atoll where its workers find it: in their image, or by ``runtime_env``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from examples import local_hub

#: Told to end (128 + SIGTERM), or settings that cannot work: neither is for another attempt.
FOR_GOOD = (2, 143)


def island(words: Sequence[str], key: tuple[str, str] | None, cwd: str | None) -> int:
    """Runs one island to its end, on whichever node Ray has chosen; returns its exit status.

    Where Ray cancels the task (``ray.cancel``), the island is told to end and hands over what it has trained.

    Args:
        words: Flags of ``atoll island``.
        key: The text of its secret key file, and of the broker's public one; None: no keys.
        cwd: A checkout to run in; None: where the worker runs, with Atoll installed.

    Raises:
        RuntimeError: It failed, and another attempt may help.
    """
    import tempfile

    with tempfile.TemporaryDirectory(prefix="atoll-ray-") as folder:
        flags = list(words)
        if key is not None:
            for name, text in zip(("island.secret", "broker.public"), key, strict=True):
                file = Path(folder, name)
                file.touch(mode=0o600)
                file.write_text(text)
            flags += ["--key", f"{folder}/island.secret"]
        environment = os.environ | {"ATOLL_NO_VENV": "1"}
        process = subprocess.Popen([sys.executable, "-m", "ops", "island", *flags], cwd=cwd, env=environment)
        try:
            status = process.wait()
        except BaseException:  # cancelled: Ray raises KeyboardInterrupt here
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            raise
    if status and status not in FOR_GOOD:
        raise RuntimeError(f"island {' '.join(words)} ended with status {status}")
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts islands on a Ray cluster, or on a Ray of this machine, and waits for the run's end.

    Args:
        arguments: Of the command line.
    """
    parser = local_hub.parser(__doc__)
    parser.add_argument("--islands", type=int, default=2, metavar="N", help="tasks to start (default: 2)")
    parser.add_argument("--task", default="examples.numpy_task:task", help="what to train (default: %(default)s)")
    parser.add_argument("--run", default="atoll", help="name of the run (default: %(default)s)")
    parser.add_argument("--key", type=Path, help="islands' secret key file, with broker.public beside it")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="X", help="processors of an island (default: 1)")
    parser.add_argument("--gpus", type=float, default=0.0, metavar="X", help="GPUs of an island (default: 0)")
    parser.add_argument(
        "--tokens", type=int, default=400_000, metavar="N", help="with a hub of its own (default: 400000)"
    )
    args = parser.parse_args(arguments)

    import ray

    key = None if args.key is None else (args.key.read_text(), (args.key.parent / "broker.public").read_text())
    here = str(Path(__file__).resolve().parents[1])
    # On this machine workers run in this checkout; nodes of a cluster have Atoll of their own.
    cwd = None if args.address else here
    ray.init(log_to_driver=True, include_dashboard=False)
    # retry_exceptions: also where the process of the island failed, not only where its node was lost.
    remote = ray.remote(max_retries=20, retry_exceptions=True, num_cpus=args.cpus, num_gpus=args.gpus)(island)
    with local_hub.at(args.address, run=args.run, tokens=args.tokens) as address:
        common = ["--run", args.run, "--broker", address, "--task", args.task]
        waiting = [remote.remote([*common, "--island-id", f"ray-{i}"], key, cwd) for i in range(args.islands)]
        statuses: list[int] = ray.get(waiting)
    print(f"the run has ended; statuses of its islands: {statuses}")
    ray.shutdown()
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
