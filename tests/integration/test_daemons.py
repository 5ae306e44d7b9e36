"""Each daemon alone, with flags: a wrong setting ends it with status 2 and a cure."""

import pytest

from ops import cli


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(
            ([name], "run_id = None: is needed: give --run NAME, or --config")
            for name in ("broker", "aggregator", "island")
        ),
        (
            ["broker", "--run", "demo", "--host", "no.such.host.invalid", "--insecure"],
            "host = 'no.such.host.invalid': is no address",
        ),
        (
            ["broker", "--run", "demo", "--port", "70000"],
            "port = 70000: must be from 1 to 65534 (the bulk port is the next one), or 0",
        ),
        (
            ["broker", "--run", "demo", "--port", "0", "--redis-url", "redis://127.0.0.1?password_file=/nowhere"],
            "password_file",
        ),
        (["aggregator", "--run", "demo", "--quorum", "9"], "quorum = 9: must not exceed islands = 4"),
        (
            ["island", "--run", "demo", "--state-dir", "/dev/null/x", "--task", "examples.numpy_task:task"],
            "state_dir = '/dev/null/x': no checkpoint can be written there",
        ),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else "",
)
def test_a_daemon_with_a_wrong_setting_ends_with_status_2_and_a_cure(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err
