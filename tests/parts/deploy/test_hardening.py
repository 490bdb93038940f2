"""What deploy/ gives a part: its own secrets, its own peers, and nothing that it does not need. Static, as all here."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from clawstream.config import Settings
from tests.parts.deploy.documents import document, documents
from tests.parts.deploy.test_deploy import DEPLOY, STAGES, compose, composed, manifests, ours, pods

KUBERNETES = DEPLOY / "kubernetes"
SERVED = {"gateway", "engine", "judge", "postgres"}  # by a port of their own
KEPT_WRITABLE = {"kafka", "engine", "judge"}  # images of others that write beside their volumes under Compose
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def secrets_of(pod: dict[str, Any]) -> set[str]:
    """The secrets that a pod's variables are of."""
    [container] = pod["containers"]
    whole = {one["secretRef"]["name"] for one in container.get("envFrom", ())}
    single = {
        one["valueFrom"]["secretKeyRef"]["name"] for one in container.get("env", ()) if "secretKeyRef" in str(one)
    }
    return whole | single


def policies() -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found["spec"] for found in manifests() if found["kind"] == "NetworkPolicy"}


def selected(selector: dict[str, Any]) -> set[str]:
    """The apps of ours that a selector means."""
    apps = {pod for pod, _ in pods()}
    if "matchLabels" in selector:
        return apps & {selector["matchLabels"].get("app")}
    [expression] = selector["matchExpressions"]
    return apps if expression["operator"] == "Exists" else apps & set(expression["values"])


def allowed() -> Iterator[tuple[str, str, int, str]]:
    """Who may talk to whom by which port, as one side's policies say it: (from, to, port, side)."""
    for spec in policies().values():
        for rule in spec.get("egress", ()):
            for peer in rule["to"]:
                if "namespaceSelector" not in peer and "app" in str(peer["podSelector"]):
                    for one in selected(spec["podSelector"]):
                        for other in selected(peer["podSelector"]):
                            yield one, other, rule["ports"][0]["port"], "egress"
        for rule in spec.get("ingress", ()):
            for peer in rule.get("from", ()):
                for other in selected(spec["podSelector"]):
                    for one in selected(peer["podSelector"]):
                        yield one, other, rule["ports"][0]["port"], "ingress"


@pytest.mark.parametrize(("name", "pod"), pods(), ids=[name for name, _ in pods()])
def test_a_pod_is_no_root_and_can_neither_write_its_image_nor_gain_rights(name: str, pod: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostIPC", "hostPID"} & pod.keys()
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "/tmp" in mounted
    for kind in ("requests", "limits"):
        assert {"cpu", "memory"} <= container["resources"][kind].keys(), name


@pytest.mark.parametrize(("name", "pod"), [one for one in pods() if one[0] != "prepare"])
def test_a_part_is_started_again_when_it_hangs_and_asked_no_sooner_than_it_can_answer(
    name: str, pod: dict[str, Any]
) -> None:
    [container] = pod["containers"]
    assert {"startupProbe", "livenessProbe"} <= container.keys()
    assert ("readinessProbe" in container) is (name in SERVED)
    if ours(pod) and name not in ("gateway", "monitor"):
        [script] = container["livenessProbe"]["exec"]["command"][2:]
        compile(script, name, "exec")
        assert f"/var/lib/clawstream/alive/{container['args'][2]}" in script


def test_the_gateways_probe_shows_the_key_that_the_network_has_to() -> None:
    [pod] = [pod for name, pod in pods() if name == "gateway"]
    script = pod["containers"][0]["readinessProbe"]["exec"]["command"][2]
    compile(script, "probe", "exec")
    for told in (script, compose()["gateway"]["healthcheck"]["test"]):
        assert "/readyz" in told
        assert "os.environ['CLAWSTREAM_GATEWAY__API_KEY']" in told


def test_each_part_has_secrets_of_its_own_and_no_other_parts() -> None:
    found = {name: secrets_of(pod) for name, pod in pods()}
    for stage in STAGES:
        assert stage in found[stage], "its own Kafka user's"
        assert not found[stage] & (set(STAGES) - {stage})
    assert {name for name, secrets in found.items() if "clawstream-gateway" in secrets} == {"gateway"}
    assert {name for name, secrets in found.items() if "clawstream-database" in secrets} == {"project", "prepare"}
    assert {name for name, secrets in found.items() if "clawstream-judge-client" in secrets} == {"judging"}
    assert {name for name, secrets in found.items() if "clawstream-postgres" in secrets} == {"postgres"}
    users = {one["metadata"]["name"] for one in manifests() if one["kind"] == "KafkaUser"}
    example = {one["metadata"]["name"] for one in documents((KUBERNETES / "secret.example.yaml").read_text())}
    assert users == set(STAGES)
    assert set().union(*found.values()) <= users | example


def test_brokers_are_reached_by_tls_and_a_password_alone() -> None:
    [kafka] = [found for found in manifests() if found["kind"] == "Kafka"]
    [listener] = kafka["spec"]["kafka"]["listeners"]
    assert (listener["tls"], listener["authentication"]["type"]) == (True, "scram-sha-512")
    settings = (KUBERNETES / "clawstream.toml").read_text()
    assert f":{listener['port']}" in settings
    assert 'security_protocol = "SASL_SSL"' in settings
    assert kafka["spec"]["kafka"]["authorization"] == {"type": "simple"}
    for trigger in (found["spec"]["triggers"][0] for found in manifests() if found["kind"] == "ScaledObject"):
        assert (trigger["metadata"]["tls"], trigger["metadata"]["sasl"]) == ("enable", "scram_sha512")
        assert trigger["metadata"]["bootstrapServers"].endswith(f":{listener['port']}")
        assert trigger["authenticationRef"] == {"name": "kafka"}


def test_postgres_takes_no_connection_from_another_pod_without_tls() -> None:
    rules = [
        line.split() for line in (KUBERNETES / "pg_hba.conf").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    assert {rule[0] for rule in rules} == {"local", "hostssl"}
    [pod] = [pod for name, pod in pods() if name == "postgres"]
    assert {"ssl=on", "hba_file=/etc/postgres-hba/pg_hba.conf"} <= set(pod["containers"][0]["args"])
    assert "sslmode=verify-full" in (KUBERNETES / "secret.example.yaml").read_text()


@pytest.mark.slow
def test_nobody_is_talked_to_but_by_those_who_have_to_and_both_sides_say_so() -> None:
    denied = policies()["none-by-default"]
    assert denied["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & denied.keys()
    assert selected(denied["podSelector"]) == {name for name, _ in pods()}
    links = {
        *((one, "engine", 30010) for one in ("gateway", "weights", "refresh")),
        ("judging", "judge", 30001),
        *((one, "postgres", 5432) for one in ("project", "prepare")),
    }
    for side in ("egress", "ingress"):
        assert {link[:3] for link in allowed() if link[3] == side} == links
    assert selected(policies()["to-the-log"]["podSelector"]) == set(STAGES)


def test_the_gateways_volume_holds_its_spool_three_times() -> None:
    [claim] = [
        found for found in manifests()
        if found["kind"] == "PersistentVolumeClaim" and found["metadata"]["name"] == "gateway"
    ]  # fmt: skip
    size = claim["spec"]["resources"]["requests"]["storage"]
    assert int(size[:-2]) * UNITS[size[-2:]] > 3 * Settings().gateway.spool_bytes


def test_every_image_of_others_can_be_pinned_by_its_digest() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    for image in re.findall(r"^ +image: (.*)$", text, re.MULTILINE):
        assert re.fullmatch(r"clawstream-\w+|\$\{\w+_IMAGE:-[^}]+\}", image), image
    listed = {one["name"] for one in document((KUBERNETES / "kustomization.yaml").read_text())["images"]}
    assert {re.split("[:@]", pod["containers"][0]["image"])[0] for _, pod in pods()} == listed
    froms = re.findall(r"^FROM (\S+) AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    own = {"scratch", *(name for _, name in froms)}
    assert [one for one, _ in froms if one not in own] == ["${UV_IMAGE}", "${PYTHON_IMAGE}"]


def test_compose_confines_each_service_and_shares_nothing_with_the_machine() -> None:
    services = compose()
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not {"ipc", "pid", "privileged", "network_mode"} & service.keys(), name
        assert service.get("read_only", False) is (name not in KEPT_WRITABLE), name
        assert service["networks"], name
    assert composed()["networks"]["log"] == {"internal": True}
    assert {name for name, service in services.items() if "ports" in service} == {"gateway"}
    assert {name for name, found in services.items() if found["networks"] == ["log"]} >= {"kafka", "postgres"}


def test_compose_limits_each_service_and_asks_for_the_health_of_each_that_goes_on() -> None:
    for name, service in compose().items():
        assert service["pids_limit"], name
        assert ("mem_limit" in service) is (name not in ("engine", "judge")), name  # a GPU's server takes what it needs
        assert service["healthcheck"].get("test") or name == "prepare", name


def test_compose_has_no_default_password_and_gives_each_to_those_who_need_it() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    for name in ("SGLANG_API_KEY", "POSTGRES_PASSWORD"):
        assert f"${{{name}:?" in text
        assert f"${{{name}:-" not in text
        assert f"${{{name}}}" not in text
        assert f"\n{name}=" in "\n" + (DEPLOY / "example.env").read_text()
    holders = {
        variable: {name for name, found in compose().items() if variable in found.get("environment", {})}
        for variable in ("CLAWSTREAM_POSTGRES", "CLAWSTREAM_GATEWAY__API_KEY", "POSTGRES_PASSWORD")
    }
    assert list(holders.values()) == [{"prepare", "project"}, {"gateway"}, {"postgres"}]
