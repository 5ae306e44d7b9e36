"""The command line: every command has help and an example, and errors are one line with a cure."""

import importlib
import os
import signal
import subprocess
import sys
import types

import pytest

from broker.base.errors import ConfigError, Unavailable
from ops import cli, launcher


@pytest.fixture
def command(monkeypatch):
    """Adds a command ``probe`` whose ``run`` the test supplies."""

    def add(run, *, passes_on=False):
        module = types.ModuleType("atoll_probe")
        module.add_arguments = lambda parser: parser.add_argument("--count", type=int, default=1)
        module.run = run
        monkeypatch.setitem(sys.modules, "atoll_probe", module)
        probe = cli.Command(module="atoll_probe", summary="probes", example="--count 2", passes_on=passes_on)
        monkeypatch.setitem(cli.COMMANDS, "probe", probe)

    return add


def test_a_command_gets_its_arguments_and_returns_its_code(command):
    command(lambda args: args.count)
    assert cli.main(["probe", "--count", "7"]) == 7


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("port", 70000, "must be below 65535"), 2, "atoll: port = 70000: must be below 65535\n"),
        (Unavailable("Redis is away; start it", definite=True), 1, "atoll: Redis is away; start it\n"),
        (OSError(36, "File name too long"), 1, "atoll: [Errno 36] File name too long\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_expected_errors_are_one_line_and_a_code(command, capsys, error, code, words):
    def run(args):
        raise error

    command(run)
    assert cli.main(["probe"]) == code
    assert capsys.readouterr().err == words


@pytest.mark.parametrize(
    ("found", "at_once", "status"),
    [
        pytest.param(0, False, 0, id="what was found stands though nobody reads it"),
        pytest.param(1, False, 1, id="and so does that something is wrong"),
        pytest.param(0, True, 128 + signal.SIGPIPE, id="an answer that was cut short is no success"),
    ],
)
def test_a_command_whose_reader_has_gone_away_has_a_status(command, monkeypatch, found, at_once, status):
    command(lambda args: print("an answer", flush=at_once) or found)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["probe"]) == status


def test_without_standard_output_a_command_still_has_a_status(command, monkeypatch):
    command(lambda args: 3)
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["probe"]) == 3


def test_a_bug_keeps_its_traceback(command):
    command(lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["statsu"], "command = 'statsu': is none; did you mean status?"),
        (["xyzzy"], "is none; there are up, hub, test"),
        (["probe", "--cuont", "2"], "argument = '--cuont': is no flag; did you mean --count?"),
        (["probe", "stray"], "argument = 'stray': is not understood; see atoll probe --help"),
        (["probe", "--host", "hub"], "argument = '--host': is not understood; see atoll probe --help"),
        (["up", "--total-tokens", "9"], "argument = '--total-tokens': is no flag; did you mean --tokens?"),
        (["up", "--quorrum", "2"], "is no flag; did you mean --quorum?"),  # though the short help lacks it
        (["up", "--tape-segments=3"], "'--tape-segments=3': is a setting of the file: [aggregator] tape_segments = N"),
        (["chaos", "--no-hold"], "argument = '--no-hold': is a setting of the file: [recipe] hold = false"),
        (["broker", "--suspect-after-s", "9"], "is a setting of the file: [run] suspect_after_s = X"),
    ],
)
def test_what_was_mistyped_is_suggested_where_it_is_like_another_word(command, capsys, argv, words):
    command(lambda args: 0)
    assert cli.main(argv) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--task-option", "--data=corpus.txt", "--model"])
def test_an_island_says_where_options_of_its_task_stand(capsys, flag):
    assert cli.main(["island", flag, "bpe=4096"]) == 2
    words = "options of the task, such as data, stand in the table [task] of the --config file"
    assert words in capsys.readouterr().err


def test_an_argument_with_a_password_is_refused_without_it(command, capsys):
    command(lambda args: 0)
    assert cli.main(["probe", "--redis-url=redis://:s3cret@hub"]) == 2
    with pytest.raises(SystemExit):
        cli.main(["probe", "--count", "redis://:s3cret@hub"])
    err = capsys.readouterr().err
    assert err.count("redis://***") == 2
    assert "s3cret" not in err


def test_a_path_in_utf8_is_read_and_told_under_an_ascii_locale(tmp_path):
    config = tmp_path / "fröhlich" / "config.toml"
    config.parent.mkdir()
    config.write_text('["brøker"]\n', encoding="utf-8")
    command = [sys.executable, "-m", "ops.cli", "broker", "--config", config]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"[brøker] = '{config}': is no table of this file; did you mean broker?" in done.stderr.decode()


def test_a_command_may_take_arguments_for_another_program(command):
    seen = []
    command(lambda args: seen.append(args.rest) or 0, passes_on=True)
    assert cli.main(["probe", "-k", "settings", "tests/unit"]) == 0
    assert seen == [["-k", "settings", "tests/unit"]]


def test_the_overview_lists_every_command_that_people_call(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert (f"  {name} " in text) is not command.hidden
    assert cli.main([]) == 2
    capsys.readouterr()
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("atoll ")


def test_help_and_cures_name_the_program_as_it_was_called(command, capsys):
    def run(args):
        print(args.as_called("see atoll status"))
        raise ConfigError("key", None, "make it with `atoll keys new`; this is no command of atoll at all")

    command(run)
    assert cli.main(["probe"], prog="python3 -m ops") == 2
    said = capsys.readouterr()
    assert said.out == "see python3 -m ops status\n"
    assert "make it with `python3 -m ops keys new`; this is no command of atoll at all" in said.err
    with pytest.raises(SystemExit):
        cli.main(["keys", "--help"], prog="python3 -m ops")
    text = capsys.readouterr().out
    assert "  python3 -m ops keys allow island-paris.public\n" in text
    assert "atoll keys" not in text


def test_the_program_is_named_as_it_is_started_in_a_folder(tmp_path, monkeypatch):
    assert launcher.program(launcher.ROOT) == "python3 -m ops"
    assert launcher.program(tmp_path) == f"python3 {launcher.ROOT / 'ops'}"
    assert launcher.program(tmp_path / "gone") == f"python3 {launcher.ROOT / 'ops'}"
    monkeypatch.setattr(launcher, "ROOT", tmp_path)  # as in an installed package
    assert launcher.program(tmp_path) == "atoll"


def test_a_module_of_the_folder_where_a_command_is_started_is_found(tmp_path):
    (tmp_path / "users_own.py").write_text("")
    code = "import sys; sys.argv = ['atoll', '--version']; from ops import cli; cli.main(); import users_own"
    environment = os.environ | {"PYTHONPATH": str(launcher.ROOT)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def help_of(capsys):
    """What ``atoll NAME --help`` prints, or with another flag."""

    def asked(name, flag="--help"):
        with pytest.raises(SystemExit) as caught:
            cli.main([name, flag])
        assert caught.value.code == 0
        return capsys.readouterr().out

    return asked


#: Flags that a screen of help may have; ``--help`` and ``--help-all`` come on top.
A_DOZEN = 12
#: What more settings there are, nearly nobody gives on a command line: they are of the file alone.
MOST_FLAGS = 75


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_has_an_example_and_a_dozen_flags_at_most_and_help_all_has_every_flag(name, help_of):
    command = cli.COMMANDS[name]
    example = f"example:\n  atoll {name} {command.example}"
    text = help_of(name)
    assert example in text
    words = (line.split()[0].strip(",") for line in text.splitlines() if line.startswith("  -"))
    short = [word for word in words if word not in ("-h", "--help-all")]
    assert len(short) <= A_DOZEN
    if everyday := [flag for flags in command.everyday.values() for flag in flags]:
        assert short == everyday
        text = help_of(name, "--help-all")
        assert example in text
        parser = cli.parser_of(name)
        importlib.import_module(command.module).add_arguments(parser)
        assert [flag for flag in parser.flags() if f" {flag}" not in text] == []
        assert len(parser.flags()) <= MOST_FLAGS


@pytest.mark.parametrize("name", ["up", "aggregator", "island", "broker"])
def test_no_help_text_has_a_formula(name, help_of):
    text = help_of(name, "--help-all")
    assert not [sign for sign in (" ** ", " * ", " = ", "(P)", "(H)", "(K)", "(tau)", "(gamma)") if sign in text]


def test_help_does_not_load_jax():
    script = """
import contextlib, sys
from ops.cli import main
for name in ("status", "broker", "up", "test", "island"):
    with contextlib.suppress(SystemExit):
        main([name, "--help"])
    assert "jax" not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, timeout=30)


def test_output_into_a_closed_pipe_makes_no_noise():
    script = "import sys; from ops.cli import main; sys.exit(main(['--help']))"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) in (0, 128 + signal.SIGPIPE)  # whether all of it was taken is a matter of buffers
    assert complaint == b""


def test_what_a_stream_cannot_write_ends_no_command():
    script = "import sys; from ops import cli; cli._run = lambda *_: print('\\u00b1 1 %') or 0; sys.exit(cli.main([]))"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=30, env=environment)
    assert done.stdout == b"\\xb1 1 %\n"
