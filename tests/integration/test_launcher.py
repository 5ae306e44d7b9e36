"""The launcher: a bare checkout becomes an environment, once, whole or not at all. Real venvs, one tiny package."""

import ast
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ops import launcher
from tests.local_run import ROOT, wait_for

UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))

CLI = """
import importlib.util, ops, os, probe, sys
def main(prog):
    print("prefix", sys.prefix)
    print("probe", probe.VERSION)
    print("ops", os.path.dirname(ops.__file__))
    print("arguments", *sys.argv[1:])
    print("own", importlib.util.find_spec("users_own") is not None)
    return 5
"""


def build_wheel(folder, version):
    """Writes a package ``probe``, which also brings an unrelated top-level package named ops; returns its hash."""
    info = f"probe-{version}.dist-info"
    path = folder / f"probe-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        # Of another size in each version: Python knows by that, and the second, whose bytecode it has.
        wheel.writestr("probe.py", f"VERSION = {version!r}\n" + "\n" * int(float(version)))
        wheel.writestr("ops/__init__.py", "raise ImportError('the other ops')\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: probe\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        names = ["probe.py", "ops/__init__.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Checkout:
    """A copy of the launcher with a command line that says where it runs, and a lock of one package."""

    def __init__(self, root):
        self.root = root / "atoll"
        self.wheels = root / "wheels"
        self.wheels.mkdir()
        (self.root / "ops").mkdir(parents=True)
        for name in ("__init__.py", "__main__.py", "launcher.py", "asked_task.py"):
            shutil.copy(ROOT / "ops" / name, self.root / "ops" / name)
        (self.root / "ops" / "cli.py").write_text(CLI)
        self.environment = self.root / ".venv"
        # Both installers are kept off the network and find the wheel in a folder.
        variables = {"PIP_NO_INDEX": "1", "UV_NO_INDEX": "1", "UV_OFFLINE": "1", "PIP_CONFIG_FILE": os.devnull}
        variables |= {"PIP_FIND_LINKS": str(self.wheels), "UV_FIND_LINKS": str(self.wheels), "UV_NO_CACHE": "1"}
        self.variables = {k: v for k, v in os.environ.items() if k not in ("ATOLL_NO_VENV", "PYTHONPATH")} | variables
        self.lock("1.0")

    def lock(self, version, digest=None):
        digest = build_wheel(self.wheels, version) if digest is None else digest
        text = f"# a comment\nprobe=={version} \\\n    --hash=sha256:{digest}\n    # via atoll\n"
        (self.root / "requirements.lock").write_text(text)

    def start(self, *arguments, uv=True, python=None, module=("-m", "ops"), cwd=None, **more):
        path = [os.path.dirname(UV)] if uv and UV else []
        # The system's own folders; nothing of the environment that runs this test.
        variables = self.variables | more | {"PATH": os.pathsep.join([*path, "/usr/bin", "/bin"])}
        return subprocess.Popen(
            [python or os.path.realpath(sys.executable), *module, *arguments],
            cwd=cwd or self.root,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments, **options):
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=50)
        return process.returncode, dict(line.split(" ", 1) for line in out.splitlines() if " " in line), err


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path.resolve())


needs_uv = pytest.mark.skipif(UV is None, reason="uv is not installed; the same is tested with pip, once")


@pytest.mark.parametrize(
    "uv",
    [
        pytest.param(False, id="pip", marks=pytest.mark.full("pip takes seconds for what uv does at once")),
        pytest.param(True, id="uv", marks=needs_uv),
    ],
)
def test_the_first_start_builds_an_environment_and_runs_in_it_and_the_next_just_runs(checkout, uv):
    status, said, err = checkout.run("up", "--json", uv=uv)
    assert status == 5, err
    assert said["prefix"] == str(checkout.environment)
    assert said["probe"] == "1.0"
    assert said["ops"] == str(checkout.root / "ops")  # not the package of that name in site-packages
    assert said["arguments"] == "up --json"
    assert "first use: installing into" in err
    assert "ready after" in err
    status, said, err = checkout.run("up", uv=uv)
    assert (status, err) == (5, "")


@needs_uv
def test_a_changed_lock_is_installed_over_the_old_one_unless_a_package_has_another_hash(checkout):
    checkout.run()
    checkout.lock("2.0")
    _, said, err = checkout.run()
    assert said["probe"] == "2.0"
    assert "the lock changed" in err
    checkout.lock("1.0", digest="0" * 64)
    status, said, err = checkout.run()
    assert (status, said) == (1, {})
    assert "installing failed" in err
    assert "hash" in err.lower()


@needs_uv
def test_an_interrupted_build_is_begun_again_from_nothing(checkout):
    checkout.environment.mkdir()
    (checkout.environment / "rubbish").touch()
    launcher.write_stamp(checkout.environment, launcher.BUILDING)
    status, _, err = checkout.run()
    assert status == 5, err
    assert "the last build was interrupted" in err
    assert not (checkout.environment / "rubbish").exists()
    assert not list(checkout.root.glob(".venv.old-*"))


def test_ctrl_c_in_the_middle_leaves_a_mark_that_it_is_half_built(checkout):
    process = checkout.start(uv=False)
    wait_for(lambda: launcher.read_stamp(checkout.environment) == launcher.BUILDING, "build")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=25)
    assert process.returncode == 130, err
    assert "interrupted; the next start builds .venv again" in err
    assert not launcher.is_ready(checkout.environment, launcher.lock_digest(checkout.root / "requirements.lock"))


@needs_uv
def test_an_environment_that_somebody_else_made_is_added_to_and_kept(checkout):
    subprocess.run([os.path.realpath(sys.executable), "-m", "venv", "--without-pip", checkout.environment], check=True)
    (checkout.environment / "mine").touch()
    status, said, err = checkout.run()
    assert status == 5, err
    assert said["probe"] == "1.0"
    assert (checkout.environment / "mine").exists()


@needs_uv
def test_concurrent_first_starts_build_once_and_all_run(checkout):
    starts = [checkout.start() for _ in range(3)]
    outcomes = [(process, *process.communicate(timeout=50)) for process in starts]
    assert [process.returncode for process, _, _ in outcomes] == [5, 5, 5]
    assert sum("ready after" in err for _, _, err in outcomes) == 1


@pytest.mark.parametrize(
    ("complaint", "words"),
    [
        ("Failed to establish a new connection: [Errno -2] Name or service not known", "go online for the first"),
        ("error: Failed to fetch: `https://example.org/simple/jax/`", "PIP_INDEX_URL"),
        ("ERROR: something else", "installing failed; correct it"),
    ],
)
def test_being_offline_is_told_from_other_failures(checkout, monkeypatch, complaint, words):
    monkeypatch.setattr(launcher, "_run", lambda title, command: None if "venv" in command else complaint)
    monkeypatch.setattr(launcher.shutil, "which", lambda name: "/bin/true")
    with pytest.raises(launcher.LauncherError, match=words):
        launcher.build(checkout.environment, checkout.root / "requirements.lock")
    assert launcher.read_stamp(checkout.environment) == launcher.BUILDING


def test_a_python_without_venv_says_which_package_to_install(checkout, monkeypatch):
    monkeypatch.setattr(launcher, "_run", lambda title, command: "ensurepip is not available")
    with pytest.raises(launcher.LauncherError, match=r"apt install python3\.\d+-venv.*ensurepip is not available"):
        launcher.build(checkout.environment, checkout.root / "requirements.lock")


@pytest.mark.parametrize("where", ["ops", "ops/__main__.py"])
def test_the_checkout_may_be_named_from_a_folder_with_modules_of_its_own(checkout, tmp_path, where):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "ops").mkdir(parents=True)  # of the same name as ours
    (elsewhere / "ops" / "__init__.py").write_text("")
    (elsewhere / "ops" / "__main__.py").write_text("raise SystemExit('a stranger')")
    (elsewhere / "users_own.py").write_text("")
    for variables in ({}, {}, {"ATOLL_NO_VENV": "1"}):  # builds .venv, enters it, and is not to
        inside = str(checkout.environment / "bin" / "python") if variables else None
        module = (str(checkout.root / where),)
        status, said, err = checkout.run("up", python=inside, module=module, cwd=elsewhere, **variables)
        assert status == 5, err
        assert (said["ops"], said["prefix"]) == (str(checkout.root / "ops"), str(checkout.environment))
        assert said["own"] == "True"


def test_an_older_python_is_told_what_to_install():
    source = (ROOT / "ops" / "__main__.py").read_text()
    ast.parse(source, feature_version=(3, 7))  # it can read the file at least
    old = "import sys; sys.version_info = (3, 8, 1, 'final', 0); import shutil; shutil.which = lambda name: None\n"
    done = subprocess.run([sys.executable, "-c", old + source], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer, this is 3.8; install it" in done.stderr


def test_the_lock_for_cpus_is_taken_where_a_folder_has_its_wheel_for_this_python(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "ROOT", tmp_path)
    (tmp_path / launcher.TORCH_CPU_LOCK).write_text("sympy==1.0 \\\n    --hash=x\ntorch==2.13.0+cpu \\\n    --hash=y\n")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", f"/nowhere {wheels} https://elsewhere")
    assert launcher.find_links() == [wheels]
    assert launcher.torch_lock().name == launcher.TORCH_LOCK
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    machine = os.uname().machine
    (wheels / f"torch-2.12.0+cpu-{python}-{python}-manylinux_2_28_{machine}.whl").touch()
    (wheels / f"torch-2.13.0+cpu-cp27-cp27-manylinux_2_28_{machine}.whl").touch()
    assert launcher.torch_lock().name == launcher.TORCH_LOCK, "of another version, or another Python"
    (wheels / f"torch-2.13.0+cpu-{python}-{python}-manylinux_2_28_{machine}.whl").touch()
    assert launcher.torch_lock().name == launcher.TORCH_CPU_LOCK
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert launcher.torch_lock().name == launcher.TORCH_LOCK


def test_the_lock_of_lm_eval_takes_torch_and_what_gpus_need_from_the_lock_with_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "ROOT", tmp_path)
    monkeypatch.setenv("ATOLL_NO_VENV", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(launcher.LauncherError, match="pip install 'lm-eval\\[hf\\]'"):
        launcher.lm_eval_environment()

    def lock(*pins):
        return "".join(f"{pin} \\\n    --hash=sha256:of-{pin}\n" for pin in pins)

    (tmp_path / launcher.LM_EVAL_LOCK).write_text(lock("lm-eval==0.4.13", "sympy==1.0"))
    (tmp_path / launcher.TORCH_CPU_LOCK).write_text(lock("jax==1", "sympy==1.0", "torch==2.13.0+cpu"))
    (tmp_path / launcher.TORCH_LOCK).write_text(lock("jax==1", "nvidia-cublas==13", "sympy==1.0", "torch==2.13.0"))
    with_gpus = lock("lm-eval==0.4.13", "sympy==1.0", "nvidia-cublas==13", "torch==2.13.0")
    assert launcher.lm_eval_lock().read_text() == with_gpus
    monkeypatch.setattr(launcher, "torch_lock", lambda: tmp_path / launcher.TORCH_CPU_LOCK)
    assert launcher.lm_eval_lock().read_text() == lock("lm-eval==0.4.13", "sympy==1.0", "torch==2.13.0+cpu")
    with pytest.raises(launcher.LauncherError, match="ATOLL_NO_VENV=1 builds no environment"):
        launcher.lm_eval_environment()
