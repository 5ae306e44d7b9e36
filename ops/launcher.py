"""Builds ``.venv`` from requirements.lock at first use and after a change. Standard library only.

``.venv-torch``, which has PyTorch as well, is built in the same way when it is asked for (``test --torch``), from
requirements-torch.lock; where a folder of PIP_FIND_LINKS has a torch for CPUs that suits, which is a tenth as large,
from requirements-torch-cpu.lock. ``.venv-lm-eval`` has lm-evaluation-harness and nothing of ours, for ``evaluate
--benchmark lm_eval:TASKS``: from requirements-lm-eval.lock, with torch as those two have it.

The environment carries a stamp, ``.venv/atoll.stamp``: ``building`` from before its first file exists, and the lock's
SHA-256 once everything is installed. So a build that was interrupted is seen and begun again. A changed lock is
installed over the old one, and so is a ``.venv`` without a stamp, which somebody else made: that one is never
deleted (``updating``). Concurrent starts wait for each other on ``.venv.lock``.

Packages are installed by uv where it is on PATH; else pip installs uv first, and then uv the rest (measured: 11 s
instead of 27 s by pip alone); else by pip. All three verify the hashes of the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ops.asked_task import needs_torch, wrong_option

ROOT = Path(__file__).resolve().parent.parent
#: With PyTorch beside all that ``.venv`` has.
TORCH_ENVIRONMENT = ".venv-torch"
TORCH_LOCK, TORCH_CPU_LOCK = "requirements-torch.lock", "requirements-torch-cpu.lock"
#: With lm-evaluation-harness, which is started in it as a process of its own.
LM_EVAL_ENVIRONMENT, LM_EVAL_LOCK = ".venv-lm-eval", "requirements-lm-eval.lock"
#: Of an installed environment, about.
_SIZES = {
    "requirements.lock": "300 MB",
    TORCH_CPU_LOCK: "3 GB",
    TORCH_LOCK: "9 GB",
    f"{LM_EVAL_ENVIRONMENT}.requirements": "2 GB for CPUs, 8 GB with CUDA",
}
BUILDING = "building"
UPDATING = "updating"
#: What uv and pip print when there is no way to the package index.
_OFFLINE_SIGNS = (
    "Name or service not known",
    "name resolution",
    "dns error",
    "error sending request",
    "Connection",
    "connection error",
    "timed out",
    "Network is unreachable",
    "Failed to fetch",
)


class LauncherError(Exception):
    """The environment cannot be built; the message says what to do."""


def enter_environment() -> None:
    """Returns if this interpreter may run Atoll; otherwise replaces this process by one in ``.venv``.

    No environment is built where none is wanted: with ATOLL_NO_VENV=1 (containers), where ``ops`` is installed rather
    than checked out (no requirements.lock beside it), and inside a current ``.venv`` or ``.venv-torch``.
    """
    lock = ROOT / "requirements.lock"
    if os.environ.get("ATOLL_NO_VENV") == "1" or not lock.is_file():
        return
    if Path(sys.prefix) == ROOT / TORCH_ENVIRONMENT and is_ready(Path(sys.prefix), lock_digest(torch_lock())):
        return
    environment, links = ROOT / ".venv", list[Path]()
    if needs_torch(sys.argv[1:]):
        environment, lock, links = ROOT / TORCH_ENVIRONMENT, torch_lock(), find_links()
    wanted = lock_digest(lock)
    if not is_ready(environment, wanted):
        if said := wrong_option(sys.argv[1:]):
            print(f"atoll: {said}", file=sys.stderr)
            sys.exit(2)
        try:
            build_once(environment, lock, links)
        except LauncherError as err:
            sys.exit(f"atoll: {err}")
        except KeyboardInterrupt:
            print(f"\natoll: interrupted; the next start builds {environment.name} again", file=sys.stderr)
            sys.exit(130)
    elif os.path.samefile(sys.prefix, environment):
        return
    python = os.fspath(environment / "bin" / "python")
    # The checkout comes before site-packages, where an unrelated package named ops may be.
    search = os.pathsep.join([os.fspath(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Named by its folder, since -m looks into the current directory first, which may be any.
    os.execve(python, [python, os.fspath(ROOT / "ops"), *sys.argv[1:]], os.environ | {"PYTHONPATH": search})


def program(directory: str | os.PathLike[str] = ".") -> str:
    """Returns the command that starts Atoll in a directory: ``atoll`` if installed, else the checkout's."""
    if not (ROOT / "requirements.lock").is_file():
        return "atoll"
    with contextlib.suppress(OSError):  # a folder that is not there, or not any more
        if os.path.samefile(directory, ROOT):
            return "python3 -m ops"
    return f"python3 {shlex.quote(os.fspath(ROOT / 'ops'))}"


def python_path() -> str:
    """Returns the PYTHONPATH for children: this program, and the user's own path.

    Not the current directory: there a user's file may have the name of a package of ours, or of one that we need. A
    child is started with -P, and calls :func:`find_modules_here`.
    """
    places = [os.fspath(ROOT)] if (ROOT / "pyproject.toml").is_file() else []  # installed, it is found anyway
    return os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])


def find_modules_here() -> None:
    """Lets a task be in the folder where a command is started, behind all that is installed."""
    with contextlib.suppress(OSError):  # the folder was removed
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())


def torch_environment() -> Path:
    """Returns the folder of programs of an environment with PyTorch; builds a missing or outdated one.

    Raises:
        LauncherError: It cannot be built; with the cure.
    """
    environment = ROOT / TORCH_ENVIRONMENT
    build_once(environment, torch_lock(), find_links())
    return environment / "bin"


def lm_eval_environment() -> Path:
    """Returns the folder of programs of the environment with lm-evaluation-harness, built if need be.

    With ATOLL_NO_VENV=1 one that is not there is not built.

    Raises:
        LauncherError: It cannot be built, or is not to be; with the cure.
    """
    environment = ROOT / LM_EVAL_ENVIRONMENT
    if not (ROOT / LM_EVAL_LOCK).is_file():
        raise LauncherError("lm-evaluation-harness is not installed here: pip install 'lm-eval[hf]'")
    try:
        lock = lm_eval_lock()
    except OSError as err:
        raise LauncherError(f"cannot write {err.filename} ({err.strerror}); {_cure_of(err)}") from err
    if os.environ.get("ATOLL_NO_VENV") == "1" and not is_ready(environment, lock_digest(lock)):
        cure = "pip install 'lm-eval[hf]' into this one, or start once without ATOLL_NO_VENV=1"
        raise LauncherError(f"ATOLL_NO_VENV=1 builds no environment, and {environment} is not built: {cure}")
    build_once(environment, lock, find_links())
    return environment / "bin"


def lm_eval_lock() -> Path:
    """Returns the whole lock of the environment with lm-evaluation-harness, torch among it.

    requirements-lm-eval.lock leaves torch out, as the one for CPUs needs nothing more and the other one libraries for
    GPUs: all that the lock for CPUs does not have.
    """
    cpu = {name for name, _ in _requirements(ROOT / TORCH_CPU_LOCK)} - {"torch"}
    torch = "".join(text for name, text in _requirements(torch_lock()) if name not in cpu)
    whole = ROOT / f"{LM_EVAL_ENVIRONMENT}.requirements"
    text = (ROOT / LM_EVAL_LOCK).read_text(encoding="utf-8") + torch
    if not whole.is_file() or whole.read_text(encoding="utf-8") != text:
        part = whole.with_name(f"{whole.name}.{os.getpid()}")  # another start may read it
        part.write_text(text, encoding="utf-8")
        part.replace(whole)
    return whole


def torch_lock() -> Path:
    """Returns the lock of the environment with PyTorch: for CPUs if a find-links folder has its wheel."""
    cpu = ROOT / TORCH_CPU_LOCK
    version = next((text for name, text in _requirements(cpu) if name == "torch"), "").partition("==")[2].split(" ")[0]
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    machine = sysconfig.get_platform().rpartition("-")[2]
    wheel = f"torch-{version}-{python}-{python}-*{machine}.whl"
    return cpu if any(any(folder.glob(wheel)) for folder in find_links()) else ROOT / TORCH_LOCK


def find_links() -> list[Path]:
    """Returns the folders of PIP_FIND_LINKS, which pip reads by itself and uv does not."""
    return [Path(each) for each in os.environ.get("PIP_FIND_LINKS", "").split() if os.path.isdir(each)]


def build_once(environment: Path, lock: Path, links: Sequence[Path] = ()) -> None:
    """Builds an environment unless it is there and current; waits where another process builds it.

    Raises:
        LauncherError: See :func:`build`.
    """
    wanted = lock_digest(lock)
    if is_ready(environment, wanted):
        return
    with _one_builder(environment.with_name(f"{environment.name}.lock")):
        if not is_ready(environment, wanted):
            build(environment, lock, links)


def lock_digest(lock: Path) -> str:
    """Returns the stamp of a finished environment: the lock's SHA-256."""
    return hashlib.sha256(lock.read_bytes()).hexdigest()


def is_ready(environment: Path, wanted: str) -> bool:
    """Says whether the environment is whole and current (``wanted``: from :func:`lock_digest`)."""
    return read_stamp(environment) == wanted and (environment / "bin" / "python").exists()


def read_stamp(environment: Path) -> str | None:
    """Returns the stamp's text, or None if there is none."""
    try:
        return (environment / "atoll.stamp").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def write_stamp(environment: Path, text: str) -> None:
    """Replaces the stamp in one step."""
    temporary = environment / "atoll.stamp.new"
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(environment / "atoll.stamp")


def build(environment: Path, lock: Path, links: Sequence[Path] = ()) -> None:
    """Makes ``environment`` match ``lock``; on return its stamp says so.

    Args:
        environment: Its folder.
        lock: What to install.
        links: Folders that have some of it.

    Raises:
        LauncherError: With the cure: nothing to make environments with, no network, no space, no permission.
    """
    started_s = time.monotonic()
    python = environment / "bin" / "python"
    try:
        stamp = read_stamp(environment)
        if stamp == BUILDING or (environment.exists() and not python.exists()):
            _discard(environment)
        fresh = not environment.exists()
        reason = "the last build was interrupted" if stamp == BUILDING else "first use" if fresh else "the lock changed"
        _say(f"{reason}: installing into {environment} (about {_SIZES.get(lock.name, '1 GB')})")
        environment.mkdir(exist_ok=True)
        write_stamp(environment, BUILDING if fresh else UPDATING)
        uv = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))
        if fresh:
            _create(environment, with_pip=uv is None)
        _install(environment, lock, uv, links)
        write_stamp(environment, lock_digest(lock))
        if any(name == "numba" for name, _ in _requirements(lock)):
            _compile(python, lock.parent)
    except OSError as err:
        raise LauncherError(f"cannot write {err.filename or environment} ({err.strerror}); {_cure_of(err)}") from err
    _say(f"ready after {time.monotonic() - started_s:.0f} s")


def _cure_of(err: OSError) -> str:
    if err.errno in (28, 122):  # ENOSPC, EDQUOT
        return "free about 1 GB"
    return "make the checkout writable, or install the packages elsewhere and set ATOLL_NO_VENV=1"


def _discard(environment: Path) -> None:
    """Removes an environment, renamed first: an interruption leaves no half of it under its name."""
    for old in [*environment.parent.glob(environment.name + ".old-*")]:
        shutil.rmtree(old, ignore_errors=True)
    if environment.is_symlink():
        environment.unlink()
    elif environment.exists():
        aside = environment.with_name(f"{environment.name}.old-{os.getpid()}")
        environment.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _create(environment: Path, *, with_pip: bool) -> None:
    options = [] if with_pip else ["--without-pip"]
    failed = _run("creating it", [sys.executable, "-m", "venv", *options, os.fspath(environment)])
    if failed is not None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise LauncherError(
            f"python3 -m venv failed; install what it needs (Debian, Ubuntu: apt install python{version}-venv) "
            f"and start again. It said: {_last_line(failed)}"
        )


def _install(environment: Path, lock: Path, uv: str | None, links: Sequence[Path]) -> None:
    python = os.fspath(environment / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--require-hashes", "--disable-pip-version-check"]
    pinned = ["--require-hashes", "-r", os.fspath(lock)]
    num_packages = sum(1 for _ in _requirements(lock))
    if uv is None and not os.access(environment / "bin" / "uv", os.X_OK):
        only_uv = environment / "uv.lock"
        only_uv.write_text("".join(text for name, text in _requirements(lock) if name == "uv"), encoding="utf-8")
        # Without a wheel for this platform pip would try to compile it: then pip does the whole work instead.
        _run("fetching the installer", [*pip, "--only-binary", ":all:", "-r", os.fspath(only_uv)])
    installer = uv or os.fspath(environment / "bin" / "uv")
    title = f"installing {num_packages} packages"
    failed: str | None = "there is no uv"
    if os.access(installer, os.X_OK):
        folders = [part for folder in links for part in ("--find-links", os.fspath(folder))]
        # Where Python writes no bytecode (PYTHONDONTWRITEBYTECODE), each process would compile its packages again.
        compiled = ["--compile-bytecode"] if sys.dont_write_bytecode else []
        failed = _run(title, [installer, "pip", "install", "--python", python, *compiled, *folders, *pinned])
    if failed is not None and (environment / "bin" / "pip").exists():  # pip has its own configuration: mirrors, proxies
        failed = _run(f"{title} with pip", [*pip, "-r", os.fspath(lock)])
    if failed is None:
        return
    if any(sign in failed for sign in _OFFLINE_SIGNS):
        raise LauncherError(
            "the package index cannot be reached; go online for the first start, or point pip at a mirror "
            f"(PIP_INDEX_URL) and start again. It said: {_last_line(failed)}"
        )
    raise LauncherError(f"installing failed; correct it and start again. It said:\n{failed}")


def _compile(python: Path, checkout: Path) -> None:
    """Compiles what merges, which the first run would else wait for: it is kept beside the source.

    Where that fails each aggregator compiles for itself.
    """
    if (checkout / "aggregator" / "merge" / "compiled.py").exists():
        code = f"import sys; sys.path.insert(0, {os.fspath(checkout)!r}); from aggregator.merge import compiled"
        _run("compiling the kernels of the merge", [os.fspath(python), "-c", code])


def _requirements(lock: Path) -> Iterator[tuple[str, str]]:
    """Yields each requirement's name and whole text, hashes included."""
    name, text = "", ""
    for line in [*lock.read_text(encoding="utf-8").splitlines(keepends=True), "end"]:
        begins = not line.startswith((" ", "#"))
        if begins and name:
            yield name, text
        if begins:
            name, text = line.partition("==")[0], ""
        text += line


def _run(title: str, command: Sequence[str]) -> str | None:
    """Prints a command's purpose and runs it; returns None, or its last lines if it failed."""
    _say(title)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    if os.path.expanduser("~") == "~":  # nobody's home: pip would make a folder of that name here, uv another one
        environment |= {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        environment["TMPDIR"] = os.fspath(ROOT / ".venv")
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=environment,
    )  # fmt: skip
    tail = "\n".join(done.stdout.splitlines()[-12:]).strip()
    return None if done.returncode == 0 else tail or f"exit status {done.returncode}"


@contextlib.contextmanager
def _one_builder(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on ``path``; the kernel gives it back however this process ends."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as err:
        raise LauncherError(f"cannot write {path} ({err.strerror}); {_cure_of(err)}") from err
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another start is building {path.stem}; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as err:
            cure = "put the checkout on a file system with locks, or set ATOLL_NO_VENV=1"
            raise LauncherError(f"cannot lock {path} ({err.strerror}); {cure}") from err
        yield
    finally:
        os.close(descriptor)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _say(text: str) -> None:
    print(f"atoll: {text}", file=sys.stderr, flush=True)
