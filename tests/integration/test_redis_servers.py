"""Redis as people run it: TLS, users with narrow rights, passwords in files, Sentinel. Real servers, on loopback."""

import asyncio
import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis import Redis

from aggregator.process.lease import LeaseKey
from broker.base.errors import ConfigError, Unavailable
from broker.registry.registry import Registry
from broker.wire.records import FragmentRecord, MemberRecord
from ops.chaos.injector import Injector
from ops.doctor import redis_probe
from ops.findings.finding import Verdict
from ops.processes import redis_server
from ops.processes.cluster import free_ports, wait_until_listening
from tests.integration.test_registry import BROKER, TOTALS, with_registry
from tests.local_run import ROOT, Up, check_report, descendants, ops, wait_for

pytestmark = pytest.mark.timeout(180)

WAIT_S = 30.0
DOCUMENT = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
ACL_LINES = {words[1]: words for words in map(str.split, re.findall(r"^user .*$", DOCUMENT, re.MULTILINE))}
#: For connections, people and other databases: a run does without.
OPTIONAL = {"+select", "+info"}


@contextlib.contextmanager
def started(directory, *options, port):
    """A server, or a sentinel; killed at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    program = redis_server.find_server()
    with (
        open(directory / "log", "wb") as log,
        subprocess.Popen([*program, *options], stdout=log, stderr=log) as process,
    ):
        try:
            if not wait_until_listening(port, alive=lambda: process.poll() is None, within_s=WAIT_S):
                raise Unavailable((directory / "log").read_text(errors="replace")[-2000:], definite=True)
            yield process
        finally:
            process.kill()


def data_server(directory, *options, port):
    return started(directory, "--dir", str(directory), "--save", "", *options, port=port)


def ask(url, use):
    return with_registry(url, "demo", use)


def are_fine(findings):
    assert [each.verdict for each in findings] == [Verdict.OK, Verdict.OK], findings


async def write_all(registry):
    """All that the processes of a run write: broker, aggregator, evaluation, lease, and `up`."""
    await registry.claim()
    await registry.write_broker("hub", BROKER)
    await registry.write_refusals("broker:hub", {"a": {"stale": 1}})
    await registry.write_members("hub", [MemberRecord(island_id="a", incarnation=1, inner_step=4, tokens=400)] * 2)
    record = FragmentRecord(fragment_id=0, epoch=1, version=1, digest="0" * 32, contributors=("a",), merged_tokens=400)
    await registry.write_fragments([record])
    await registry.write_fragments([record])
    await registry.write_totals(TOTALS)
    await registry.append_events([{"event": "x"}])
    await registry.write_versions([{"fragment": 0, "version": number} for number in range(50)])
    await registry.write_evaluation({"loss": 1.0})
    lease = LeaseKey(registry, 0)
    await lease.take(holder="a", expected_epoch=0, epoch=1, lease_s=1.0)
    await lease.renew(holder="a", epoch=1, in_sync=())
    await lease.give_up(holder="a", epoch=1, to="b")
    await lease.end(holder="b", epoch=1)


async def read_all(registry):
    """All that status, dashboard and doctor read."""
    await registry.known_runs()
    await registry.read_events_after((0, 0), 10)
    await registry.read_version(0, None)
    await LeaseKey(registry, 0).read()
    return await registry.read()


# --- users ------------------------------------------------------------------------------------------------------------


class Acl:
    """A server with an administrator, and the users of docs/operate.md."""

    def __init__(self, port, folder):
        self.port, self.folder = port, folder
        self.admin = f"redis://127.0.0.1:{port}"

    def command(self, *words):
        return ask(self.admin, lambda r: r.attempt(lambda redis: redis.execute_command(*words)))

    def set_user(self, line, password="s3cret-pw", without=()):
        words = [word.replace(">PASSWORD", f">{password}") for word in line[1:] if word not in without]
        self.command("ACL", "SETUSER", words[0], "reset", *words[1:])

    def forget(self):
        self.command("FLUSHALL")
        self.command("SCRIPT", "FLUSH")

    def url(self, user, password="s3cret-pw"):
        file = self.folder / f"{user}.password"
        file.write_text(f"{password}\n")
        return f"redis://{user}@127.0.0.1:{self.port}/0?password_file={file}"


@pytest.fixture(scope="module")
def acl(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("acl"), free_ports(1)
    with data_server(folder, "--port", str(port), port=port):
        yield Acl(port, folder)


def test_the_documented_users_may_do_all_that_a_run_does_and_nothing_else(acl):
    acl.forget()
    acl.set_user(ACL_LINES["atoll"])
    acl.set_user(ACL_LINES["watcher"])
    url = acl.url("atoll")
    ask(url, write_all)
    assert ask(url, read_all).fragments[0]["version"] == 1
    are_fine(redis_probe.look_at_redis(url, given=True, run="demo"))
    for command in (("SET", "other", "1"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("DEL", "atoll:runs")):
        with pytest.raises(Unavailable, match="docs/operate"):
            ask(url, lambda r, words=command: r.attempt(lambda redis: redis.execute_command(*words)))

    watcher = acl.url("watcher")
    assert ask(watcher, read_all).fragments[0]["version"] == 1
    assert ops("status", "--run", "demo", REDIS_URL=watcher).returncode == 0
    with pytest.raises(Unavailable, match="docs/operate"):
        ask(watcher, write_all)


@pytest.mark.parametrize("user", ["atoll", "watcher"])
def test_each_documented_right_is_needed(acl, user):
    line = ACL_LINES[user]
    rights = [word for word in line if word.startswith("+") and word not in OPTIONAL]
    unneeded = []
    for right in rights:
        acl.forget()
        acl.set_user(line, without={right})
        with contextlib.suppress(Unavailable):
            ask(acl.url(user) if user == "atoll" else acl.admin, write_all)
            ask(acl.url(user), read_all)
            unneeded.append(right)
    assert unneeded == []


def test_the_doctor_names_the_commands_that_a_user_lacks(acl):
    acl.set_user(ACL_LINES["atoll"], without={"+xadd", "+evalsha"})
    found, _ = redis_probe.look_at_redis(acl.url("atoll"), given=True, run="demo")
    assert found.verdict is Verdict.FAILURE
    assert "may not use XADD, EVALSHA" in found.seen


# --- passwords in files -----------------------------------------------------------------------------------------------


def test_a_password_that_changes_in_its_file_is_used_from_the_next_connection_on(acl):
    acl.set_user(ACL_LINES["atoll"], password="first-pw")
    url = acl.url("atoll", "first-pw")

    async def use(registry):
        await registry.known_runs()
        await asyncio.to_thread(acl.set_user, ACL_LINES["atoll"], "second-pw")
        acl.url("atoll", "second-pw")
        with contextlib.suppress(Unavailable):  # the connection that stood was ended with its password
            await registry.known_runs()
        await registry.known_runs()
        acl.url("atoll", "third-pw")
        await asyncio.to_thread(acl.command, "CLIENT", "KILL", "USER", "atoll")
        with contextlib.suppress(Unavailable):
            await registry.known_runs()
        with pytest.raises(Unavailable, match="WRONGPASS") as caught:
            await registry.known_runs()
        assert "third-pw" not in str(caught.value)
        (acl.folder / "atoll.password").unlink()
        with pytest.raises(Unavailable, match=r"atoll\.password cannot be read"):
            await registry.known_runs()

    ask(url, use)


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_a_password_file_without_a_password_is_refused_at_the_start(tmp_path, content):
    file = tmp_path / "password"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="password_file"):
        Registry(f"redis://127.0.0.1?password_file={file}", "demo")


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """The address of a server that speaks TLS only, without the name of the authority; and the authority's file."""
    folder, port = tmp_path_factory.mktemp("tls"), free_ports(1)
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    made = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {key} -out {certificate} -days 2"
    words = [openssl, *made.split(), "-subj", "/CN=atoll", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(words, check=True, capture_output=True, timeout=WAIT_S)
    options = f"--port 0 --tls-port {port} --tls-cert-file {certificate} --tls-key-file {key}"
    options = f"{options} --tls-ca-cert-file {certificate} --tls-auth-clients no --requirepass tls-pw".split()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(data_server(folder / "data", *options, port=port))
        except Unavailable as err:
            if "TLS" not in str(err) and "tls" not in str(err):
                raise
            pytest.skip("the server found here was built without TLS: install redis-server or valkey-server")
        yield f"rediss://:tls-pw@127.0.0.1:{port}", certificate


def test_a_server_with_tls_and_an_authority_of_ones_own_serves_a_run(tls):
    url = "{}?ssl_ca_certs={}".format(*tls)
    ask(url, write_all)
    assert ask(url, read_all).fragments
    status = ops("status", "--run", "demo", REDIS_URL=url)
    assert status.returncode == 0, status.stderr
    are_fine(redis_probe.look_at_redis(url, given=True, run="demo"))


def test_what_is_wrong_with_tls_is_told_with_its_cure(tls):
    url, authority = tls
    with pytest.raises(Unavailable, match="ssl_ca_certs=FILE"):
        ask(url, read_all)
    with pytest.raises(Unavailable, match="rediss://"):
        ask(url.replace("rediss://", "redis://"), read_all)
    elsewhere = f"{url.replace('127.0.0.1', 'localhost')}?ssl_ca_certs={authority}"  # no name of the certificate
    with pytest.raises(Unavailable, match=r"certificate|hostname|mismatch"):
        ask(elsewhere, read_all)


# --- Sentinel ---------------------------------------------------------------------------------------------------------


class Watched:
    """A master, its replica, and a sentinel that wants a password; nobody is at the first address of a sentinel."""

    def __init__(self, folder, stack):
        self.ports = [free_ports(1), free_ports(1)]
        self.servers = {}
        for number, port in enumerate(self.ports):
            options = ["--port", str(port), "--requirepass", "data-pw", "--masterauth", "data-pw"]
            options += ["--repl-diskless-sync-delay", "0", "--bind", "127.0.0.1"]
            options += ["--replicaof", f"127.0.0.1 {self.ports[0]}"] if number else []
            self.servers[port] = stack.enter_context(data_server(folder / f"data-{number}", *options, port=port))
        wait_for(self._replicated, "replica")  # sentinels look again after 10 s
        self.sentinel_port, dead = free_ports(1), free_ports(1)
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {self.sentinel_port}\nbind 127.0.0.1\nrequirepass sentinel-pw\ndir {folder}\n"
            f"sentinel monitor mymaster 127.0.0.1 {self.ports[0]} 1\nsentinel auth-pass mymaster data-pw\n"
            "sentinel down-after-milliseconds mymaster 500\nsentinel failover-timeout mymaster 2000\n"
        )
        stack.enter_context(started(folder / "sentinel", str(config), "--sentinel", port=self.sentinel_port))
        for name in ("data", "sentinel"):
            (folder / name).with_suffix(".password").write_text(f"{name}-pw\n")
        files = f"password_file={folder}/data.password&sentinel_password_file={folder}/sentinel.password"
        self.url = f"redis+sentinel://127.0.0.1:{dead},127.0.0.1:{self.sentinel_port}/mymaster/0?{files}"
        wait_for(lambda: self._replicas() == 1, "replica that the sentinel knows")

    def _replicated(self):
        url = f"redis://:data-pw@127.0.0.1:{self.ports[1]}"
        told = ask(url, lambda r: r.attempt(lambda redis: redis.info("replication")))
        return told.get("master_link_status") == "up"

    def _sentinel(self, *words):
        url = f"redis://:sentinel-pw@127.0.0.1:{self.sentinel_port}"
        try:
            return ask(url, lambda r: r.attempt(lambda redis: redis.execute_command(*words)))
        except Unavailable:
            return None

    def _replicas(self):
        known = self._sentinel("SENTINEL REPLICAS", "mymaster") or []
        return sum(each.get("master-link-status") == "ok" for each in known)

    def master(self):
        """The port of the present master, as the sentinel has it."""
        found = self._sentinel("SENTINEL GET-MASTER-ADDR-BY-NAME", "mymaster")
        return int(found[1]) if found else None


@pytest.fixture
def watched(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Watched(tmp_path / "sentinels", stack)


async def failed(writing):
    try:
        await writing
    except Unavailable:
        return True
    return False


def test_after_a_failover_the_same_connection_goes_on_at_the_new_master(watched):
    async def use(registry):
        await write_all(registry)
        before = (await read_all(registry)).fragments
        await asyncio.sleep(0.2)  # which replication takes at most, here
        old = watched.ports[0]
        watched.servers[old].kill()
        with pytest.raises(Unavailable) as caught:
            await registry.write_totals(TOTALS)
        assert "-pw" not in str(caught.value)
        async with asyncio.timeout(WAIT_S):
            while await failed(registry.write_totals(TOTALS)):
                await asyncio.sleep(0.1)
        assert await asyncio.to_thread(watched.master) != old
        assert (await read_all(registry)).fragments == before

    ask(watched.url, use)


def test_a_master_is_found_and_one_that_nobody_knows_is_told_with_its_cure(watched):
    are_fine(redis_probe.look_at_redis(watched.url, given=True, run="demo"))
    with pytest.raises(Unavailable, match="name of the master"):
        ask(watched.url.replace("/mymaster", "/other"), read_all)
    wrong = watched.url.replace("sentinel_password_file=", "sentinel_username=nobody&sentinel_password_file=")
    with pytest.raises(Unavailable):
        ask(wrong, read_all)


@pytest.mark.full("a whole run beside a failover of ten seconds")
def test_a_failover_in_the_middle_of_a_run_disturbs_no_training_and_status_comes_back(watched, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--islands", 2, "--tokens", 0, "--run", "watched", "--pace", 0.01)

    def newest():
        """The newest version that status knows, by the run's directory alone; None without a status."""
        done = ops("status", run_dir, "--json")
        found = json.loads(done.stdout)["fragments"].values() if done.returncode == 0 else ()
        return max((each["version"] for each in found), default=None)

    with Up(run_dir, *flags, REDIS_URL=watched.url) as up:
        up.wait_for_progress()
        wait_for(newest, "status", evidence=lambda: up.err)
        for pid in (up.pid, *descendants(up.pid)):
            for what in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    assert b"-pw" not in Path(f"/proc/{pid}/{what}").read_bytes()
        watched.servers[watched.master()].kill()
        last = max(up.versions().values())
        up.wait_for_progress(2)  # while there is no master, and after
        wait_for(lambda: (newest() or 0) > last, "status of later versions", evidence=lambda: up.err)
        up.signal(signal.SIGINT)
        assert up.wait() == 128 + signal.SIGINT
    report = up.report()
    check_report(report, ended=False)
    assert report["tokens"]["wasted"].get("island_lost", 0) == 0
    files = [up.out_file, up.err_file, *(each for each in run_dir.rglob("*") if each.is_file())]
    assert {"config.toml", "broker.log", "events.jsonl"} <= {each.name for each in files}
    assert [each for each in files if b"-pw" in each.read_bytes()] == []
    said = b"".join(each.read_bytes() for each in files if each.name == "broker.log")
    assert b"redis.lost" in said
    assert b"redis.back" in said


def test_chaos_keeps_a_copy_of_a_server_that_saves_by_itself_just_then(server):
    port = int(server.url.rpartition(":")[2])
    with contextlib.closing(Redis(port=port)) as client:
        client.mset({f"key {i}": "x" for i in range(5)})
        client.config_set("rdb-key-save-delay", 100_000)  # microseconds
        client.bgsave()
        client.config_set("rdb-key-save-delay", 0)
        assert client.info("persistence")["rdb_bgsave_in_progress"]
        folder = Path(client.config_get("dir")["dir"])
    plan = SimpleNamespace(run_dir=folder, redis_port=port)
    injector = Injector(None, plan, rng=random.Random(0), leader=lambda: None)
    injector._stale_file.parent.mkdir()
    injector.prepare()
    assert injector._stale_file.read_bytes().startswith((b"REDIS", b"VALKEY"))
