"""What deploy/ says agrees with what the commands, the settings and the topics are.

Nothing here starts a container: tests/system/containers does.
"""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from clawstream import cli
from clawstream.config import load
from clawstream.errors import ConfigError
from clawstream.stream.topics import all_topics, resources_of
from tests.parts.deploy.documents import document, documents

DEPLOY = Path(__file__).parents[3] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
MACHINES = DEPLOY / "kubernetes-machines"  # the trainer on several, in place of the one of train.yaml
STAGES = (
    "turns",
    "judging",
    "heuristics",
    "samples",
    "refresh",
    "groups",
    "weights",
    "project",
    "monitor",
    "train",
    "gateway",
)
# Written by operators of other projects, whose definitions no package carries.
FOREIGN = ("kafka.strimzi.io", "keda.sh", "kustomize.config.k8s.io")
GIVEN = {"SGLANG_API_KEY": "key", "HF_CKPT": "/models/base"}


def compose(**variables: str) -> dict[str, Any]:
    """The services as Compose reads them, its variables filled in or with their defaults, `$$` with `$`."""
    return dict(composed(**variables)["services"])


def composed(**variables: str) -> dict[str, Any]:
    known = GIVEN | variables

    def fill(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        return known.get(name) or (default or "")

    text = (DEPLOY / "compose.yaml").read_text()
    pattern = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(?::(?:-(?P<default>(?:[^{}]|\$\{[^}]*\})*)|\?[^}]*))?\}")
    found = document(pattern.sub(fill, text).replace("$$", "$"))
    assert isinstance(found, dict)
    return found


def manifests() -> list[dict[str, Any]]:
    return [found for path in KUBERNETES for found in documents(path.read_text())]


def pods() -> list[tuple[str, dict[str, Any]]]:
    return [
        (found["metadata"]["name"], found["spec"]["template"]["spec"])
        for found in manifests()
        if found["kind"] in ("Deployment", "StatefulSet", "Job")
    ]


def ours(pod: dict[str, Any]) -> bool:
    return bool(pod["containers"][0]["image"].startswith("clawstream-"))


def test_compose_runs_every_stage_by_a_command_that_there_is() -> None:
    services = compose()
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    for stage in STAGES:
        command = services[stage]["command"]
        name = command if isinstance(command, str) else command[-1].split()[-1]
        assert name == stage
        assert name in commands


@pytest.mark.parametrize("stage", ["heuristics", "refresh"])
def test_a_stage_that_the_defaults_do_not_need_is_started_by_who_asks_for_it(stage: str) -> None:
    assert compose()[stage]["profiles"] == [stage]
    [deployment] = [
        found for found in manifests() if found["kind"] == "Deployment" and found["metadata"]["name"] == stage
    ]
    assert deployment["spec"]["replicas"] == 0


def test_every_variable_of_compose_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in compose()["gateway"]["environment"].items():
        monkeypatch.setenv(name, str(value))
    settings = load(None)
    assert settings.engine.urls == ("http://engine:30010",)
    assert settings.gateway.api_key is not None
    assert settings.checkpoints_dir == Path("/checkpoints/policy")


@pytest.mark.parametrize("part", [*STAGES, "prepare"])
def test_each_part_of_compose_can_begin_with_the_settings_that_it_is_given(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in compose()[part]["environment"].items():
        monkeypatch.setenv(name, str(value))
    assert load(None).kafka.bootstrap == "kafka:9092"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A container's command as its shell ran it, what it would have executed replaced by a note of it."""

    code: int
    gpus: tuple[int, ...]
    argv: tuple[str, ...]
    said: str


def ran(service: str, tmp_path: Path, **variables: str) -> Run:
    """Run a service's command with `variables` in the file or shell that Compose reads, and gpus.sh where it is."""
    found = compose(**variables)[service]
    mounts = [volume.split(":") for volume in found["volumes"]]
    [host] = [mount[0] for mount in mounts if mount[1] == "/gpus.sh"]
    [script] = found["command"]
    for name in ("python3", "clawstream"):
        note = tmp_path / name
        note.write_text('#!/bin/bash\nexec echo "$CUDA_VISIBLE_DEVICES" "$@"\n')
        note.chmod(0o755)
    environment = {name: str(value) for name, value in found["environment"].items()}
    shown = subprocess.run(
        [*found["entrypoint"], script.replace("/gpus.sh", str(DEPLOY / host))],
        env=environment | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    gpus, *argv = shown.stdout.split() or [""]
    return Run(
        code=shown.returncode,
        gpus=tuple(map(int, gpus.split(","))) if gpus else (),
        argv=tuple(argv),
        said=shown.stderr,
    )


SHARES = [
    *({"NUM_GPUS": str(machine)} for machine in (1, 2, 3, 4, 5, 6, 7, 8, 16)),
    {},
    {"NUM_GPUS": "8", "ACTOR_GPUS": "4", "ROLLOUT_GPUS": "2", "PRM_GPUS": "2"},
    {"NUM_GPUS": "4", "ACTOR_GPUS": "1", "ROLLOUT_GPUS": "2"},
    {"NUM_GPUS": "4", "ROLLOUT_GPUS": "2"},
    {"NUM_GPUS": "8", "ACTOR_GPUS": "4", "ROLLOUT_GPUS": "3"},
    {"NUM_GPUS": "8", "PRM_GPUS": "0"},
    {"NUM_GPUS": "8", "PRM_GPUS": "2", "PRM_TP": "2"},
    {"NUM_GPUS": "8", "PRM_GPUS": "2", "PRM_TP": "4"},
    {"NUM_GPUS": "4", "PRM_GPUS": "2"},
    {"ACTOR_GPUS": "9"},
]


@pytest.mark.slow
@pytest.mark.parametrize("variables", SHARES, ids=lambda found: " ".join(f"{k}={v}" for k, v in found.items()) or "{}")
def test_compose_shares_gpus_out_as_launch_does(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    launched = CliRunner().invoke(cli.app, ["launch", "--dry-run", "--hf-ckpt", str(tmp_path)], env=variables)
    runs = {name: ran(name, tmp_path, **variables) for name in ("train", "engine", "judge")}
    if launched.exception is not None:
        assert isinstance(launched.exception, ConfigError)
        assert runs["judge"].code == 2
        assert "PRM_GPUS" in runs["judge"].said
        if "NUM_GPUS is" in str(launched.exception):
            assert (runs["train"].code, runs["engine"].code) == (2, 2)
        return
    told = json.loads(launched.stdout)
    assert runs["train"].gpus == tuple(told["actor"])
    assert runs["train"].argv == ("train",)
    # All engines of `launch` are one here.
    assert runs["engine"].gpus == tuple(gpu for gpus in told["rollout"] for gpu in gpus)
    assert runs["engine"].argv[runs["engine"].argv.index("--tp-size") + 1] == str(len(runs["engine"].gpus))
    assert runs["judge"].gpus == tuple(told["judge"])
    if not told["judge"]:
        assert runs["judge"].code == 2
        return
    for flag in ("--tp-size", "--dp-size"):
        theirs = told["commands"]["judge"].split()
        assert runs["judge"].argv[runs["judge"].argv.index(flag) + 1] == theirs[theirs.index(flag) + 1]


def test_compose_names_what_users_of_openclaw_rl_set() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    for name in (
        "NUM_GPUS", "ACTOR_GPUS", "ROLLOUT_GPUS", "PRM_GPUS", "HF_CKPT", "PRM_MODEL_PATH", "SAVE_CKPT",
        "SGLANG_API_KEY", "PORT",
    ):  # fmt: skip
        assert f"${{{name}" in text


def test_every_service_that_is_waited_for_is_there() -> None:
    services = compose()
    assert {needed for service in services.values() for needed in service.get("depends_on", {})} <= services.keys()


@pytest.mark.parametrize("manifest", manifests(), ids=lambda found: f"{found['kind']}-{found['metadata']['name']}"
                         if "metadata" in found else found["kind"])  # fmt: skip
def test_a_manifest_is_what_kubernetes_accepts(manifest: dict[str, Any]) -> None:
    if not manifest["apiVersion"].startswith(FOREIGN):
        kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_a_manifest_with_a_misspelt_field_would_be_noticed() -> None:
    job = next(found for found in manifests() if found["kind"] == "Job")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job | {"specs": {}}, "1.33", strict=True)


def test_the_kustomization_holds_every_file_but_the_secrets_example() -> None:
    listed = document((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(
        path.name for path in KUBERNETES if path.name not in ("kustomization.yaml", "secret.example.yaml")
    )


def test_the_topics_are_those_of_the_topic_files_with_three_replicas() -> None:
    found = (DEPLOY / "kubernetes" / "topics.yaml").read_text()
    assert found == resources_of(all_topics(), cluster="clawstream", replicas=3), (
        "run `clawstream topics export --replicas 3 > deploy/kubernetes/topics.yaml`"
    )


def test_our_pods_run_commands_that_there_are_and_see_no_variables_of_kubernetes_own() -> None:
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    seen = {name: pod for name, pod in pods() if ours(pod)}
    assert set(STAGES) <= seen.keys()
    for name, pod in seen.items():
        assert pod["enableServiceLinks"] is False, name
        assert pod["containers"][0]["args"][2] in commands


def test_the_settings_of_kubernetes_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"CLAWSTREAM_KAFKA__SASL_USERNAME": "turns", "CLAWSTREAM_KAFKA__SASL_PASSWORD": "password"}
    for secret in documents((DEPLOY / "kubernetes" / "secret.example.yaml").read_text()):
        if secret["metadata"]["name"] != "clawstream-postgres":  # Postgres's image has names of its own
            given |= {name: value for name, value in secret["stringData"].items() if name.startswith("CLAWSTREAM_")}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="change-me"):
        load(DEPLOY / "kubernetes" / "clawstream.toml")
    monkeypatch.setenv("CLAWSTREAM_GATEWAY__API_KEY", "own")
    settings = load(DEPLOY / "kubernetes" / "clawstream.toml")
    engine = next(
        found for found in manifests() if found["kind"] == "StatefulSet" and "engine" in str(found["metadata"])
    )
    assert len(settings.engine.urls) == engine["spec"]["replicas"]
    assert settings.postgres.url is not None
    assert (settings.kafka.security_protocol, settings.kafka.sasl_username) == ("SASL_SSL", "turns")


def test_workers_are_scaled_by_the_lag_of_their_own_group_on_a_topic_that_they_read() -> None:
    topics = {topic.name: topic for topic in all_topics()}
    for found in manifests():
        if found["kind"] == "ScaledObject":
            trigger = found["spec"]["triggers"][0]["metadata"]
            assert trigger["consumerGroup"] == found["metadata"]["name"] == found["spec"]["scaleTargetRef"]["name"]
            assert trigger["consumerGroup"] in topics[trigger["topic"]].consumers
            assert found["spec"]["maxReplicaCount"] == topics[trigger["topic"]].partitions


def test_one_gateway_serves_a_policy_and_the_old_one_is_gone_before_the_next_begins() -> None:
    [gateway] = [
        found["spec"]
        for found in manifests()
        if found["kind"] == "Deployment" and "gateway" in found["spec"]["template"]["spec"]["containers"][0]["args"]
    ]
    assert gateway["replicas"] == 1
    assert gateway["strategy"] == {"type": "Recreate"}
    assert not [
        found for found in manifests()
        if found["kind"] == "ScaledObject" and found["spec"]["scaleTargetRef"]["name"] == "gateway"
    ]  # fmt: skip
    assert "deploy" not in compose()["gateway"]


def test_the_keys_of_clients_outlive_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    [data] = re.findall(r"CLAWSTREAM_DATA_DIR=(\S+)", (DEPLOY / "Dockerfile").read_text())
    names = {mount.split(":")[1]: mount.split(":")[0] for mount in compose()["gateway"]["volumes"]}
    assert names[data] in composed()["volumes"]
    [pod] = [pod for name, pod in pods() if name == "gateway"]
    monkeypatch.setenv("CLAWSTREAM_GATEWAY__API_KEY", "key")
    folder = str(load(DEPLOY / "kubernetes" / "clawstream.toml").keys_file.parent)
    [mount] = [mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == folder]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == mount]
    claims = [found["metadata"]["name"] for found in manifests() if found["kind"] == "PersistentVolumeClaim"]
    assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_the_trainers_machines_are_the_one_trainer_started_by_torchrun_on_each() -> None:
    """But for the command, the GPUs and what they need between them, a machine's pod is that of train.yaml."""
    job_set, *_ = documents((MACHINES / "train.yaml").read_text())
    [machine] = job_set["spec"]["replicatedJobs"]
    job = machine["template"] | {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "machine"}}
    kubernetes_validate.validate(job, "1.33", strict=True)
    pod = job["spec"]["template"]["spec"]
    [one] = [spec for name, spec in pods() if name == "train"]
    [many_machines], [alone] = pod["containers"], one["containers"]
    assert {name for name in one if pod[name] != one[name]} == {"containers", "volumes"}
    assert pod.keys() - one.keys() == {"restartPolicy"}
    assert {name for name in alone if many_machines[name] != alone[name]} == {
        "env", "volumeMounts", "startupProbe", "livenessProbe", "resources",
    }  # fmt: skip
    script = many_machines["command"][2]
    assert f"--nnodes {job['spec']['completions']} --nproc-per-node" in script
    assert f"{job_set['metadata']['name']}-{machine['name']}-0-0.{job_set['metadata']['name']}:" in script
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    [probe] = many_machines["livenessProbe"]["exec"]["command"][2:]
    compile(probe, "probe", "exec")
    whole = document((MACHINES / "kustomization.yaml").read_text())
    named = sorted([*whole["resources"], *whole["configurations"], "kustomization.yaml"])
    assert named == sorted(["../kubernetes", *(path.name for path in MACHINES.glob("*.yaml"))])
    assert not MACHINES.is_relative_to((MACHINES / "../kubernetes").resolve()), "kustomize takes no base above it"
    [policy] = documents((MACHINES / "network.yaml").read_text())
    kubernetes_validate.validate(policy, "1.33", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here to build it")
def test_kustomize_builds_the_machines_in_place_of_the_one_trainer_and_gives_them_its_settings() -> None:
    built = subprocess.run(["kubectl", "kustomize", str(MACHINES)], capture_output=True, text=True, check=True)
    found = list(documents(built.stdout))
    assert [one["kind"] for one in found if one["metadata"]["name"] == "train"].count("Deployment") == 0
    [job_set] = [one for one in found if one["kind"] == "JobSet"]
    [settings] = [
        one["metadata"]["name"]
        for one in found
        if one["kind"] == "ConfigMap" and re.fullmatch(r"clawstream-\w+", one["metadata"]["name"])
    ]
    assert settings in json.dumps(job_set)


def test_a_trainer_on_several_machines_is_a_unit_as_all_parts_are() -> None:
    units = [
        (DEPLOY / "systemd" / name).read_text().splitlines()
        for name in ("clawstream@.service", "clawstream-machines.service")
    ]
    part, machines = (dict(line.split("=", 1) for line in unit if "=" in line and line[0] != "#") for unit in units)
    same = {name for name in part if machines.get(name) == part[name]}
    assert part.keys() - same == {"Description", "After", "Environment", "ExecStart", "RestartPreventExitStatus"}
    assert machines["ExecStart"].endswith("-m clawstream --config /etc/clawstream/clawstream.toml train")
