"""What deploy/ says agrees with what the commands, the settings and the topics are. Nothing here starts a container."""

import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from clawstream import cli
from clawstream.config import load
from clawstream.local.gpus import GpuCounts, assign
from clawstream.stream.topics import all_topics, resources_of

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
STAGES = ("turns", "judging", "samples", "weights", "project", "monitor", "train", "gateway")
# Written by operators of other projects, whose definitions no package carries.
FOREIGN = ("kafka.strimzi.io", "keda.sh", "kustomize.config.k8s.io")
GIVEN = {"SGLANG_API_KEY": "key", "HF_CKPT": "/models/base"}


def compose() -> dict[str, Any]:
    """The services as Compose reads them, its variables filled in with their defaults, `$$` with `$`."""

    def fill(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        return GIVEN.get(name) or (default or "")

    text = (DEPLOY / "compose.yaml").read_text()
    pattern = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(?::(?:-(?P<default>(?:[^{}]|\$\{[^}]*\})*)|\?[^}]*))?\}")
    services = yaml.safe_load(pattern.sub(fill, text).replace("$$", "$"))["services"]
    assert isinstance(services, dict)
    return services


def manifests() -> list[dict[str, Any]]:
    return [found for path in KUBERNETES for found in yaml.safe_load_all(path.read_text())]


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


def test_every_variable_of_compose_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in compose()["gateway"]["environment"].items():
        monkeypatch.setenv(name, str(value))
    settings = load(None)
    assert settings.engine.urls == ("http://engine:30010",)
    assert settings.gateway.api_key is not None
    assert settings.checkpoints_dir == Path("/checkpoints/policy")


@pytest.mark.parametrize("counts", [(8, 4, 2, 2), (4, 1, 2, 1), (3, 1, 1, 1)])
def test_compose_shares_gpus_out_as_launch_does(counts: tuple[int, int, int, int]) -> None:
    machine, actor, rollout, judge = counts
    wanted = assign(
        GpuCounts(machine=machine, actor=actor, rollout=rollout, judge=judge), rollout_tp=rollout, judge_tp=1
    )
    variables = {
        "ACTOR_GPUS": str(actor),
        "ROLLOUT_GPUS": str(rollout),
        "PRM_GPUS": str(judge),
        "PATH": "/usr/bin:/bin",
    }

    def seen(service: str) -> tuple[int, ...]:
        [script] = compose()[service]["command"]
        export = re.split(r"; *exec", script)[0]
        shown = subprocess.run(
            ["bash", "-ec", f'{export}; echo "$CUDA_VISIBLE_DEVICES"'],
            env=variables, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return tuple(map(int, shown.stdout.split(",")))

    assert (seen("train"), seen("engine"), seen("judge")) == (wanted.actor, wanted.rollout[0], wanted.judge)


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
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
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
    secret = yaml.safe_load((DEPLOY / "kubernetes" / "secret.example.yaml").read_text())["stringData"]
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    settings = load(DEPLOY / "kubernetes" / "clawstream.toml")
    engine = next(
        found for found in manifests() if found["kind"] == "StatefulSet" and "engine" in str(found["metadata"])
    )
    assert len(settings.engine.urls) == engine["spec"]["replicas"]
    assert settings.postgres.url is not None


def test_workers_are_scaled_by_the_lag_of_their_own_group_on_a_topic_that_they_read() -> None:
    topics = {topic.name: topic for topic in all_topics()}
    for found in manifests():
        if found["kind"] == "ScaledObject":
            trigger = found["spec"]["triggers"][0]["metadata"]
            assert trigger["consumerGroup"] == found["metadata"]["name"] == found["spec"]["scaleTargetRef"]["name"]
            assert trigger["consumerGroup"] in topics[trigger["topic"]].consumers
            assert found["spec"]["maxReplicaCount"] == topics[trigger["topic"]].partitions
