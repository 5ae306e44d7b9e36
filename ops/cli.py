"""The command line: its commands, their help and their errors.

Each command lives in its own module, which has ``add_arguments(parser)`` and ``run(args) -> int``. It is imported when
it is called for and not before, so that ``status`` does not wait for JAX, and a numpy island never loads it.

Exit codes: 0 done; 1 it failed, and a line says why; 2 the settings or the command line are wrong; 130 interrupted.
A command may document more (``up --help``).
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from broker.base.errors import ConfigError, Unavailable
from broker.base.settings import nearest
from broker.base.sources import CommandParser
from broker.process.release import installed
from islands.interface import installation
from ops.launcher import find_modules_here

DESCRIPTION = """\
Atoll trains one model on islands of machines that are far apart, unequal and unreliable
(asynchronous Decoupled DiLoCo in JAX)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        module: Where its ``add_arguments`` and ``run`` are.
        summary: One line of help.
        example: Arguments that show what it is for.
        hidden: Left out of the overview: other commands call it.
        passes_on: Unknown arguments are no error: the command gets them as ``args.rest``.
        elsewhere: Flag that is looked for here -> what there is in its place.
        everyday: Heading -> flags that ``--help`` shows, a dozen at most; empty: it shows all. What is everyday
            depends on the command and not on the setting: ``up`` and ``aggregator`` share most settings, and few of
            their users' questions.
    """

    module: str
    summary: str
    example: str
    hidden: bool = False
    passes_on: bool = False
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    everyday: Mapping[str, Sequence[str]] = field(default_factory=dict)


COMMANDS: dict[str, Command] = {
    "up": Command(
        module="ops.run.up",
        summary="trains a model on this machine: starts Redis, broker, aggregator and islands, shows progress, reports",
        example="--islands 4 --tokens 2000000 --pace 0.05,0.05,0.05,0.4",
        everyday={
            "what to train": ("--task", "--task-option", "--data", "--model"),
            "how much, and on how many islands": ("--tokens", "--islands", "--pace", "--evaluate-every"),
            "where": ("--run-dir", "--resume", "--config", "--dashboard"),
        },
    ),
    "hub": Command(
        module="ops.run.hub",
        summary="starts and supervises the hub of a run: Redis, broker, aggregator, standbys and keys",
        example="--run demo --host 0.0.0.0 --islands 4 --standbys 1",
        everyday={
            "which run, and where": ("--run", "--host", "--port", "--address", "--run-dir", "--config"),
            "the run": ("--islands", "--tokens"),
            "what is kept, and who takes over": ("--standbys", "--copy-to"),
            "who may connect": ("--keys",),
        },
        elsewhere=dict.fromkeys(
            ("--task", "--task-option", "--data", "--model", "--pace"),
            "is a flag of up, or of islands: a hub trains nothing",
        )
        | {
            "--key": "is no flag here: --key-dir DIR is the directory of the keys, which are made if they are missing",
            "--insecure": "is no flag here: --no-keys lets anybody take part who reaches the ports",
            "--broker": "is no flag here: --host and --port are where it listens, --address is what islands dial",
            "--failover": "is no flag here: --standbys 1 starts a second aggregator, and both with it",
        },
    ),
    "test": Command(
        module="ops.test",
        summary="checks this checkout: lint, types, and the fast tests, or with --full all of them",
        example="tests/unit -k settings",
        passes_on=True,
    ),
    "broker": Command(
        module="broker.server",
        summary="runs the broker, which all islands and aggregators connect to",
        example="--config config.toml --host 0.0.0.0 --key keys/broker.secret",
        everyday={
            "which run, and where to listen": ("--run", "--host", "--port", "--config"),
            "who may connect": ("--key", "--insecure"),
            "status": ("--redis-url", "--broker-name"),
        },
    ),
    "aggregator": Command(
        module="aggregator.daemon",
        summary="runs the aggregator, which merges pseudo-gradients and publishes versions of the model",
        example="--run demo --broker tcp://hub:7001 --key keys/aggregator.secret --store /var/lib/atoll --islands 4",
        everyday={
            "which run, and where": ("--run", "--broker", "--key", "--redis-url", "--config"),
            "the run": ("--islands", "--tokens", "--sync-interval", "--quorum"),
            "what is kept, and who takes over": ("--store", "--tape", "--failover"),
        },
    ),
    "island": Command(
        module="islands.daemon",
        summary="runs one island, which trains",
        example="--broker tcp://hub:7001 --key keys/island-paris.secret --run demo",
        everyday={
            "which run, and where": ("--run", "--broker", "--key", "--insecure", "--config"),
            "this island": ("--island-id", "--task", "--state-dir"),
            "checks": ("--check", "--health"),
        },
        elsewhere=dict.fromkeys(
            ("--task-option", "--data", "--model"),
            "is a flag of up; here options of the task, such as data, stand in the table [task] of the --config file",
        ),
    ),
    "status": Command(
        module="ops.inspect.status",
        summary="shows the islands of a run, their steps, and the versions of the model",
        example="--watch",
    ),
    "doctor": Command(
        module="ops.doctor.command",
        summary="looks at this machine, Redis, keys and the way to the broker, and says what to do about what it finds",
        example="--broker tcp://hub:7001 --key keys/island-paris.secret",
    ),
    "dashboard": Command(
        module="ops.dashboard.command",
        summary="serves a page with the loss, islands and rounds of a run, live or ended; it only reads",
        example="runs/20260131-120304 --port 7080",
    ),
    "plot": Command(
        module="ops.dashboard.plot",
        summary="writes that page as one file, to look at without a server",
        example="runs/20260131-120304 --out report.html",
    ),
    "log": Command(
        module="ops.sinks.command",
        summary="writes the figures of a run to TensorBoard, Weights & Biases or MLflow, live or ended; it only reads",
        example="runs/20260131-120304 --to tensorboard:runs/board",
    ),
    "chaos": Command(
        module="ops.chaos.command",
        summary="strikes a local run with faults while it trains, reports what healed, and checks the invariants",
        example="examples/chaos/storm.toml --seconds 120",
        everyday={
            "faults": ("--seconds", "--fault-every-s", "--fault-kinds", "--fault-seed"),
            "the run (all settings of up, too)": ("--task", "--islands", "--pace", "--standbys", "--run-dir"),
            "answers": ("--check", "--json"),
        },
    ),
    "init": Command(
        module="ops.init",
        summary="writes commented files of settings for a fleet: one for the hub, one for each region",
        example="fleet --hub hub.example.com --regions paris rome",
    ),
    "keys": Command(
        module="ops.keys",
        summary="makes key pairs, and edits the broker's list of allowed keys",
        example="new island paris",
    ),
    "lab": Command(
        module="ops.lab.command",
        summary="runs learning experiments in virtual time: real training in a modelled fleet, on one machine",
        example="run examples/lab/parity.toml",
    ),
    "simulate": Command(
        module="ops.forecast_commands.simulate",
        summary="computes goodput, uptime and waste of a fleet of up to millions of chips, from drawn failures",
        example="--chips 1200000 --islands 8 --mode decoupled --days 30",
        everyday={
            "the fleet": ("--chips", "--islands", "--mode"),
            "the simulation": ("--days", "--seed", "--mtbi-years"),
            "answers": ("--json",),
        },
    ),
    "plan": Command(
        module="ops.forecast_commands.plan",
        summary="computes what a fleet needs: bandwidth, memory, time, staleness",
        example="--params 5B --sites 8 --step-time 1 --codec int4 --bandwidth 10",
        everyday={
            "the model and the fleet": ("--params", "--sites", "--step-time", "--bandwidth", "--fleet"),
            "how to train": ("--codec", "--sync-interval", "--utilisation"),
            "answers": ("--json",),
        },
    ),
    "explain": Command(
        module="ops.inspect.explain",
        summary="lists the contributions of a version, with weight and staleness, and why other islands are missing",
        example="3:41 runs/20260131-120304",
    ),
    "replay": Command(
        module="ops.inspect.replay",
        summary="checks a recorded run: the same events must give the same decisions and the same bytes",
        example="runs/20260131-120304",
    ),
    "export": Command(
        module="ops.models.export",
        summary="writes the newest global model as safetensors, also while the run goes on",
        example="runs/20260131-120304 --out model.safetensors",
    ),
    "snapshots": Command(
        module="ops.models.snapshots",
        summary="lists, makes, exports and removes named snapshots of the whole model, and rolls a run back to one",
        example="save runs/20260131-120304 before-anneal",
    ),
    "restore": Command(
        module="ops.restore",
        summary="makes a run directory out of the copies that --copy-to has made in an object store",
        example="s3://bucket/run runs/again",
    ),
    "links": Command(
        module="ops.link_proxy.proxy",
        summary="carries the links of a run, with delays, rates and faults; up --link starts it",
        example="--plan runs/20260131-120304/links.json --control runs/20260131-120304/links.sock",
        hidden=True,
    ),
    "evaluate": Command(
        module="ops.evaluation.command",
        summary="follows a run and evaluates its global model while it trains, or evaluates one safetensors model",
        example="--follow runs/20260131-120304 --every 500K --benchmark mymodel:accuracy",
    ),
}


def main(argv: Sequence[str] | None = None, *, prog: str = "atoll") -> int:
    """Runs one command and returns its exit code.

    Args:
        argv: The arguments without the program's name; those of this process if not given.
        prog: How the program was called, for help.
    """
    if argv is None:
        _speak_utf8()
        find_modules_here()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name of a file that no locale can write ends nothing
        sys.stdout.reconfigure(errors="backslashreplace")
    status = 128 + signal.SIGPIPE
    try:
        status = _run(arguments, prog)
        if sys.stdout is not None:  # closed by whoever called
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `atoll status | head`: what was found stands
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status
    except Exception as err:
        installation.say_fault()
        if not isinstance(err, ConfigError | Unavailable | OSError):  # the last: a path that is none, or unreadable
            raise
        print(f"atoll: {as_called(str(err), prog)}", file=sys.stderr)
        return 2 if isinstance(err, ConfigError) else 1


def _speak_utf8() -> None:
    """Starts this process again in Python's UTF-8 mode where names of files are read as ASCII.

    There, a name that is not ASCII cannot be written into a file that another process reads, such as ``config.toml``.
    """
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONUTF8": "1"})


def as_called(text: str, prog: str) -> str:
    """Returns a text that names commands as ``atoll COMMAND``, with the program as it is called here.

    Args:
        text: Help, or what is said with a cure.
        prog: How the program was called; a checkout has no ``atoll``.
    """
    return re.sub(rf"\batoll (?=(?:{'|'.join(COMMANDS)})\b)", lambda _: f"{prog} ", text)


def _run(arguments: Sequence[str], prog: str) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview(prog))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(installed())
        installation.say_fault()
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        visible = [each for each, command in COMMANDS.items() if not command.hidden]
        raise ConfigError("command", name, f"is none; {nearest(name, visible)}")
    module = importlib.import_module(COMMANDS[name].module)
    parser = parser_of(name, prog=prog)
    module.add_arguments(parser)
    called = functools.partial(as_called, prog=prog)
    parser.reword(called)
    args, rest = parser.parse_known_args(arguments[1:])
    if rest and not COMMANDS[name].passes_on:
        raise ConfigError("argument", rest[0], _cure_of_flag(rest[0], COMMANDS[name], getattr(args, "parser", parser)))
    args.rest, args.as_called = rest, called
    return int(module.run(args))


def _cure_of_flag(given: str, command: Command, parser: CommandParser) -> str:
    """Says which flag was probably meant, or where they are listed."""
    flag = given.partition("=")[0]
    if flag in command.elsewhere:
        return command.elsewhere[flag]
    if flag in parser.file_only:
        return f"is a setting of the file: {parser.file_only[flag]}"
    known = [known.lstrip("-") for known in parser.flags() if known.startswith("--")]
    shorter = [each for each in known if flag.endswith("-" + each)]  # --total-tokens, as the file's setting is called
    close = shorter or difflib.get_close_matches(flag.strip("-"), known, n=1) if flag.startswith("-") else []
    return f"is no flag; did you mean --{close[0]}?" if close else f"is not understood; see {parser.prog} --help"


def parser_of(name: str, *, prog: str = "atoll") -> CommandParser:
    """Returns a command's parser with help and example, before the command's module adds its flags."""
    command = COMMANDS[name]
    return CommandParser(
        everyday=command.everyday,
        prog=f"{prog} {name}",
        description=command.summary[0].upper() + command.summary[1:] + ".",
        epilog=f"example:\n  {prog} {name} {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def overview(prog: str) -> str:
    """Returns the help of the program as a whole."""
    visible = {name: command for name, command in COMMANDS.items() if not command.hidden}
    width = max(map(len, visible))
    lines = [f"usage: {prog} COMMAND ...", "", DESCRIPTION, "", "commands:"]
    lines += [f"  {name:{width}}  {command.summary}" for name, command in visible.items()]
    lines += ["", f"{prog} COMMAND --help has the everyday flags, --help-all has all. To see it work: {prog} up"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
