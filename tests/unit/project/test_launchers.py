"""Launchers of others: deploy/ is well-formed, agrees with compose, and its commands parse with our flags."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.project.test_compose import COMPOSE, parse, services, value

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "kubernetes"
TEMPLATES = {path.name: path.read_text() for path in sorted(CHART.glob("templates/**/*.yaml"))}
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


# --- the chart as text ----------------------------------------------------------------------------------------------


def keys_of(values, prefix=""):
    """Every setting by its path; what people fill in themselves is one."""
    for key, each in values.items():
        yield prefix + key
        if isinstance(each, dict) and key not in ("resources", "nodeSelector", "annotations", "env"):
            yield from keys_of(each, f"{prefix}{key}.")


def schema_keys(schema, prefix=""):
    for key, each in schema.get("properties", {}).items():
        yield prefix + key
        yield from schema_keys(each, f"{prefix}{key}.")


def test_every_setting_of_the_chart_is_in_its_schema_and_the_other_way_round():
    assert set(keys_of(VALUES)) == set(schema_keys(SCHEMA)) - {"global"}
    (group,) = VALUES["islands"]["groups"]
    assert set(group) == set(SCHEMA["properties"]["islands"]["properties"]["groups"]["items"]["properties"])


def test_every_setting_of_the_chart_is_used_and_no_other_is():
    text = "".join(path.read_text() for path in CHART.glob("templates/**/*") if path.is_file())
    used = set(re.findall(r"\.Values\.([\w.]+)", text)) | {
        f"islands.health.{name}" for name in re.findall(r"\$health\.(\w+)", text)
    }
    known = set(keys_of(VALUES))
    assert used <= known
    leaves = {key for key in known if not any(other.startswith(f"{key}.") for other in known)}
    assert leaves - used == set()


def commands_in(text):
    """The commands of ours in a manifest: lists of words behind ``args:`` or ``command:``, templates left out."""
    words = re.sub(r"\{\{-? .*? -?\}\}", "1", text)
    for block in re.findall(r"^ +args:\n((?: +- .*\n| +1\n)+)", words, re.M):
        yield [re.sub(r'^"(.*)"$', r"\1", word) for word in re.findall(r"^ +- (.*)$", block, re.M)]
    for line in re.findall(r"(?:args|command): (\[.*?\])(?: \}|$)", words, re.M):
        found = json.loads(re.sub(r"(?<=[\[ ])1(?=[\],])", '"1"', line))
        yield found[3:] if found[:3] == ["python3", "-m", "ops"] else found


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("broker.yaml", ["broker", "status"]),
        ("aggregator.yaml", ["aggregator", "status"]),
        ("islands.yaml", ["island"]),
        ("leader.yaml", ["status"]),
    ],
)
def test_commands_in_the_chart_are_commands_of_ours(name, commands):
    found = [words for words in commands_in(TEMPLATES[name]) if words[0] not in ("sh", "python3", "redis-server")]
    assert [words[0] for words in found] == commands
    for words in found:
        # A loop over more flags of the user's reads as one word without a flag.
        parse(words[:-1] if words[0] in ("broker", "aggregator", "island") else words)


def test_the_chart_agrees_with_compose():
    redis = services(COMPOSE)["redis"]
    assert json.dumps(value(redis, "command")) in TEMPLATES["redis.yaml"]
    assert VALUES["redis"]["image"] == re.search(r"REDIS_IMAGE:-([^}]*)", redis).group(1)
    user, group = re.search(r'user: "(\d+):(\d+)"', redis).groups()
    assert f"runAsUser: {user}\n        runAsGroup: {group}" in TEMPLATES["redis.yaml"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\d+):\1$", dockerfile, re.M)
    assert f"runAsUser: {user}\nrunAsGroup: {user}\nfsGroup: {user}\n" in (CHART / "templates/_helpers.tpl").read_text()
    for service in ("broker", "aggregator", "island"):
        words = value(services(COMPOSE)[service], "command")
        text = TEMPLATES["islands.yaml" if service == "island" else f"{service}.yaml"]
        text += (CHART / "templates" / "_helpers.tpl").read_text()
        flags = {word for word in words if word.startswith("--")}
        assert flags <= set(re.findall(r"- (--[\w-]+)", text))
    checked = value(services(COMPOSE)["island"], "test")[-1]
    assert checked.replace("60", "%d") in TEMPLATES["islands.yaml"]
    assert "containerPort: 7001" in TEMPLATES["broker.yaml"]
    assert "containerPort: 7002" in TEMPLATES["broker.yaml"]


def test_what_the_readme_of_the_chart_says_is_set_is_a_setting():
    known = set(keys_of(VALUES))
    assert set(re.findall(r"--set ([\w.]+)=", (CHART / "README.md").read_text())) <= known


# --- the chart by Helm's own code, where that is at hand ------------------------------------------------------------

#: Where Prometheus runs, as a NetworkPolicy names it.
SCRAPER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
CASES = {
    "default": {},
    "large": {
        "broker": {"replicas": 2, "service": {"type": "LoadBalancer"}},
        "aggregator": {"shards": 2, "extraArgs": ["--quorum", "2"]},
        "config": "[task]\nhidden = 8\n",
        "islands": {
            "stateClaim": "state",
            "groups": [
                {"name": "paris", "count": 2, "extraArgs": ["--join-timeout-s", "30"], "env": {"A": "1"}},
                {"name": "rome", "count": 1, "task": "examples.numpy_task:task"},
            ],
        },
    },
    "region": {"hub": {"enabled": False, "address": "tcp://hub.example.com:7001"}},
    "watched": {
        "metrics": {"enabled": True, "port": 9500, "from": [SCRAPER], "podMonitor": {"enabled": True}},
        "broker": {"replicas": 2},
    },
    "copied": {
        "aggregator": {
            "shards": 2,
            "copyTo": "s3://bucket/run?endpoint=http://minio:9000",
            "copySecret": "bucket",
            "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/atoll"}},
            "podLabels": {"azure.workload.identity/use": "true"},
        },
    },
    "fine-tuned": {
        "hub": {"enabled": False, "address": "tcp://hub.example.com:7001"},
        "keys": {"islandFile": "paris.join"},
        "config": '[task]\nmodel = "models/base"\n',
        "islands": {
            "filesClaim": "models",
            "groups": [{"name": "paris", "count": 1, "task": "islands.hf:task", "image": "atoll-torch:1"}],
        },
    },
    "own-redis": {"redis": {"enabled": False, "url": "redis://here:6379"}, "aggregator": {"standbys": 0}},
}


class Refusal(Exception):
    """Helm does not take a chart with these values."""


def rendered(values):
    """Returns the documents that Helm makes."""
    helm = pytest.importorskip("helm_python", reason="the package helm-python-sdk is not here")
    try:
        if errors := helm.lint(CHART, values, strict=True)["errors"]:
            raise Refusal(errors)
        with helm.Chart.load(CHART) as chart:
            chart.validate_schema(values)
            made = chart.render(values, name="demo", namespace="there")
    except helm.HelmError as err:
        raise Refusal(str(err)) from err
    texts = [text for name, text in made.items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


@pytest.mark.parametrize("case", CASES)
def test_what_helm_makes_of_the_chart_runs_commands_of_ours(case):
    documents = rendered(CASES[case])
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(names) == len(set(names))
    pods = [each["spec"]["template"]["spec"] for each in documents if "template" in each.get("spec", {})]
    commands = [c["args"] for pod in pods for c in pod["containers"] if c["name"] not in ("redis", "shell")]
    for words in commands:
        args = parse(words)
        assert not hasattr(args, "run_id") or args.run_id == "demo"
    shards = CASES[case].get("aggregator", {}).get("shards", 1)
    hub = CASES[case].get("hub", {}).get("enabled", True)
    assert sum(words[0] == "aggregator" for words in commands) == (shards if hub else 0)
    assert sum(words[0] == "broker" for words in commands) == hub
    try:
        import kubernetes_validate
    except ImportError:
        return
    for each in documents:
        if not each["apiVersion"].startswith("monitoring.coreos.com/"):  # of the Prometheus operator
            kubernetes_validate.validate(each, "1.37.0", strict=True)


def workloads(documents):
    """Component -> its pods' specifications."""
    found = {}
    for each in documents:
        if each["kind"] in ("Job", "StatefulSet"):
            component = each["metadata"]["labels"]["app.kubernetes.io/component"]
            found.setdefault(component, []).append(each["spec"]["template"]["spec"])
    return found


def policies(documents):
    """Component -> network policies that select it."""
    found = {}
    for each in documents:
        if each["kind"] == "NetworkPolicy":
            selector = each["spec"]["podSelector"]
            named = [selector.get("matchLabels", {}).get("app.kubernetes.io/component")]
            for rule in selector.get("matchExpressions", []):
                named += rule["values"] if rule["key"] == "app.kubernetes.io/component" else []
            for component in filter(None, named):
                found.setdefault(component, []).append(each["spec"])
    return found


def test_an_island_that_fine_tunes_has_its_files_and_its_join_file():
    (pod,) = workloads(rendered(CASES["fine-tuned"]))["island"]
    (island,) = pod["containers"]
    args = parse(island["args"])
    assert (args.task, args.key, str(args.config)) == (
        "islands.hf:task",
        "/etc/atoll/paris.join",
        "/etc/atoll-config/config.toml",
    )
    assert (island["image"], island["workingDir"]) == ("atoll-torch:1", "/srv/files")
    assert {"name": "files", "mountPath": "/srv/files", "readOnly": True} in island["volumeMounts"]
    volumes = {each.pop("name"): each for each in pod["volumes"]}
    assert volumes["files"] == {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    assert volumes["keys"]["secret"]["items"] == [{"key": "paris.join", "path": "paris.join"}]


def test_metrics_are_off_unless_they_are_asked_for():
    documents = rendered({})
    assert "PodMonitor" not in {each["kind"] for each in documents}
    assert "metrics" not in json.dumps(documents)


@pytest.mark.parametrize("component", ["broker", "aggregator", "island"])
def test_prometheus_reaches_the_metrics_of_every_process_and_nobody_else_does(component):
    documents = rendered(CASES["watched"])
    (pod,) = workloads(documents)[component]
    (process,) = [each for each in pod["containers"] if each["name"] == component]
    args = parse(process["args"])
    assert (args.metrics_host, args.metrics_port) == ("0.0.0.0", "9500")
    assert {"name": "metrics", "containerPort": 9500} in process["ports"]
    (policy,) = policies(documents)[component]
    rules = [rule for rule in policy["ingress"] if {"port": "metrics"} in rule["ports"]]
    assert rules == [{"ports": [{"port": "metrics"}], "from": [SCRAPER]}]
    assert len(policy["ingress"]) == 1 + (component == "broker")


def test_the_pod_monitor_finds_the_port_under_the_job_name_of_the_alerts():
    documents = rendered(CASES["watched"])
    (monitor,) = [each["spec"] for each in documents if each["kind"] == "PodMonitor"]
    assert [each["port"] for each in monitor["podMetricsEndpoints"]] == ["metrics"]
    for each in documents:
        if each["kind"] in ("Job", "StatefulSet"):
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert monitor["selector"]["matchLabels"].items() <= labels.items()
            (jobs,) = re.findall(r'up\{job=~"([^"]+)"\}', (ROOT / "deploy/prometheus/alerts.yml").read_text())
            assert re.fullmatch(jobs, labels[monitor["jobLabel"]])


def test_aggregators_get_what_copies_need():
    documents = rendered(CASES["copied"])
    (account,) = [each for each in documents if each["kind"] == "ServiceAccount"]
    assert account["metadata"]["annotations"] == CASES["copied"]["aggregator"]["serviceAccount"]["annotations"]
    for pod in workloads(documents)["aggregator"]:
        assert pod["serviceAccountName"] == account["metadata"]["name"] == "demo-aggregator"
        for container in pod["containers"]:
            assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
        args = parse(pod["containers"][0]["args"])
        assert args.copy_to == CASES["copied"]["aggregator"]["copyTo"]
        assert args.copy_every_s == "60"
    # Nothing keeps them from an object store, wherever it is.
    assert all(each["policyTypes"] == ["Ingress"] for each in policies(documents)["aggregator"])
    for component in ("broker", "island"):
        (pod,) = workloads(documents)[component]
        assert "serviceAccountName" not in pod
        assert "envFrom" not in json.dumps(pod)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hub": {"enabled": False}}, "hub.address"),
        ({"redis": {"enabled": False}}, "redis.url"),
        ({"broker": {"replicas": 0}}, "minimum"),
        ({"unknown": 1}, "unknown"),
        ({"metrics": {"enabled": True}}, "metrics.from"),
        ({"metrics": {"enabled": True, "port": 7001, "from": [SCRAPER]}}, "port"),
        ({"metrics": {"enabled": True, "from": ["monitoring"]}}, "from"),
        ({"metrics": {"podMonitor": {"interval": "often"}}}, "interval"),
        ({"aggregator": {"copyTo": "/mnt/copies"}}, "copyTo"),
        ({"aggregator": {"copyTo": "s3://key:secret@bucket/run"}}, "copyTo"),
        ({"aggregator": {"copyEveryS": 0}}, "copyEveryS"),
        ({"aggregator": {"podLabels": {"azure.workload.identity/use": True}}}, "podLabels"),
    ],
)
def test_settings_of_the_chart_that_cannot_work_are_refused(values, words):
    with pytest.raises(Refusal, match=re.escape(words)):
        rendered(values)


def test_the_example_of_a_scrape_configuration_finds_the_pods_of_the_chart():
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    block = text[text.index("  # - job_name: atoll-kubernetes") :]
    (job,) = yaml.safe_load(re.sub("^  # ", "", block, flags=re.M))
    (rule,) = [each for each in job["relabel_configs"] if each["action"] == "keep"]
    assert rule["source_labels"] == [
        "__meta_kubernetes_pod_label_app_kubernetes_io_name",
        "__meta_kubernetes_pod_container_port_name",
        "__meta_kubernetes_pod_phase",
    ]
    assert rule["regex"] == "atoll;metrics;Running"
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    assert "app.kubernetes.io/name: atoll" in helpers
    assert "- { name: metrics, containerPort: {{ .Values.metrics.port | int }} }" in helpers


# --- Slurm, SkyPilot and Ray ----------------------------------------------------------------------------------------

SLURM = {path.name: path.read_text() for path in sorted(ROOT.glob("deploy/slurm/*.sbatch"))}
SKY = {path.name: yaml.safe_load(path.read_text()) for path in sorted(ROOT.glob("deploy/skypilot/*.yaml"))}
#: Commands of the scripts, behind the program.
CALL = re.compile(r"^.*?(?:-m ops|\batoll) (?=(?:hub|broker|aggregator|island|keys|status) )(.*)$", re.M)


def script_commands(script):
    """The commands of ours in a shell script, their variables filled with what parses as a number and as a name."""
    text = re.sub(r"\\\n\s*", " ", script)
    for found in CALL.findall(text):
        if found.lstrip().startswith(("#", "}")):
            continue
        command = re.split(r"\)? *(?:&$|> |\|\||\) )", found)[0]
        command = re.sub(r" \$ATOLL_FLAGS\b", "", command)
        if ' "$@"' in command:  # one of the lines "set -- .." before it
            for words in re.findall(r"set -- (.*)", text):
                yield shlex.split(re.sub(r"\$\{?(\w+)\}?", "1", command.replace('"$@"', words)))
            continue
        yield shlex.split(re.sub(r"\$\{?(\w+)\}?", "1", command).rstrip(")"))


@pytest.mark.parametrize(
    ("script", "commands"),
    [
        (SLURM["hub.sbatch"], ["hub"]),
        (SLURM["islands.sbatch"], ["island", "island"]),
        (SKY["hub.yaml"]["run"], ["hub"]),
        (SKY["island.yaml"]["run"], ["island", "island"]),
    ],
    ids=["slurm hub", "slurm islands", "sky hub", "sky island"],
)
def test_commands_in_the_scripts_are_commands_of_ours(script, commands):
    lines = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    found = list(script_commands(lines))
    assert [words[0] for words in found] == commands
    for words in found:
        parse(words)


@pytest.mark.parametrize(
    "script",
    [*SLURM.values(), *(task[part] for task in SKY.values() for part in ("setup", "run"))],
    ids=[*SLURM, *(f"{name} {part}" for name in SKY for part in ("setup", "run"))],
)
def test_scripts_are_right_for_the_shell(script):
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=20).returncode == 0
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", "--shell=bash", "-"], input=script, text=True, capture_output=True)
        assert checked.stdout == ""


@pytest.mark.parametrize("name", SLURM)
def test_a_job_of_slurm_is_queued_again_and_warned_before_its_end(name):
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", SLURM[name], re.M))
    assert {"requeue", "signal", "time", "open-mode"} <= set(options)
    assert options["signal"] == "B:TERM@60"
    assert ("array" in options) == (name == "islands.sbatch")
    head = SLURM[name].partition("set -uo")[0]
    used = set(re.findall(r"\$\{?(ATOLL_\w+)", SLURM[name]))
    assert {each for each in used if each not in head} <= (
        {"ATOLL_NO_VENV"} if name == "islands.sbatch" else {"ATOLL_PYTHON", "ATOLL_NO_VENV"}
    )


@pytest.mark.parametrize("name", SKY)
def test_what_a_task_of_skypilot_uses_is_declared(name):
    task = SKY[name]
    assert set(task) == {"name", "workdir", "resources", "envs", "secrets", "setup", "run"}
    used = set(re.findall(r"\$\{?(ATOLL_\w+)", task["run"]))
    assert used == set(task["envs"]) | set(task["secrets"])
    assert task["resources"]["use_spot"] is (name == "island.yaml")
    if name == "hub.yaml":
        assert task["resources"]["ports"] == [7001, 7002]
        assert "--port 7001 " in task["run"]


def test_the_example_for_ray_starts_islands_by_flags_of_ours():
    text = (ROOT / "examples" / "ray_islands.py").read_text()
    flags = re.findall(r'"(--(?:key|run|broker|task|island-id))"', text.replace("add_argument(", "("))
    assert {"--key", "--run", "--broker", "--task", "--island-id"} <= set(flags)
    for flag in flags:
        parse(["island", flag, "tcp://127.0.0.1:7001" if flag == "--broker" else "x"])
