"""deploy/kubernetes holds together: by Kubernetes' schemas, KubeRay's fields, Ray's autoscaler and its own names."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from router.http.auth import OPEN_PATHS
from tandem.cluster.certs import AUTHORITY_KEY_FILE, make_certificates
from tandem.cluster.checks.certificates import HEAD_ROLES, examine_certificates
from tandem.cluster.ray.home import RECONNECT_S
from tandem.core.config import Config, load
from tandem.rpc.permissions import PeerRole

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
MADE_AS_TOLD = ("certs/", "api-keys")
"""What docs/kubernetes.md has the reader make beside the files."""

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")

Document = dict[str, Any]


def read(name: str) -> Document:
    return cast(Document, yaml.safe_load((FOLDER / name).read_text()))


def generated(kustomization: Document, folder: Path) -> Iterator[Document]:
    """The ConfigMaps and Secrets that kustomize makes of files below `folder`."""
    for generator, kind, encode in (
        ("configMapGenerator", "ConfigMap", bytes.decode),
        ("secretGenerator", "Secret", lambda content: base64.b64encode(content).decode()),
    ):
        for each in kustomization[generator]:
            data = {Path(name).name: encode((folder / name).read_bytes()) for name in each["files"]}
            yield {"apiVersion": "v1", "kind": kind, "metadata": {"name": each["name"]}, "data": data}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of deploy/kubernetes in which the documented commands have been run."""
    folder = tmp_path_factory.mktemp("kubernetes")
    for path in FOLDER.glob("*.yaml"):
        (folder / path.name).write_bytes(path.read_bytes())
    make_certificates(folder / "certs", days=30)
    (folder / "api-keys").write_text("ab" * 32 + "\n")
    return folder


@pytest.fixture(scope="module")
def documents(folder: Path) -> list[Document]:
    """What `kubectl apply -k` would send."""
    kustomization = read("kustomization.yaml")
    return [*map(read, kustomization["resources"]), *generated(kustomization, folder)]


def the(documents: list[Document], kind: str) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


# --- what each document may hold -------------------------------------------------------------------------------------


@cache
def kuberay() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(
        yaml.safe_load((ROOT / "tests/packaging/raycluster.schema.yaml").read_text())
    )


def check_kubernetes(document: Document) -> None:
    """Strictly: a key that the newest Kubernetes does not know is an error."""
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def check_raycluster(cluster: Document) -> None:
    """By KubeRay's fields, and what is Kubernetes' own by its schemas."""
    kuberay().validate(cluster)
    for name, template in templates(cluster).items():
        check_kubernetes({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template})
    like_a_container = ("resources", "securityContext", "env", "envFrom", "volumeMounts", "imagePullPolicy")
    autoscaler = {k: v for k, v in cluster["spec"]["autoscalerOptions"].items() if k in like_a_container}
    pod = {"containers": [{"name": "autoscaler", "image": "as-the-head", **autoscaler}]}
    check_kubernetes({"apiVersion": "v1", "kind": "Pod", "metadata": cluster["metadata"], "spec": pod})


def templates(cluster: Document) -> dict[str, Document]:
    """The Pods of the head and of each group."""
    groups = {group["groupName"]: group["template"] for group in cluster["spec"]["workerGroupSpecs"]}
    return {"head": cluster["spec"]["headGroupSpec"]["template"], **groups}


def container_of(template: Document) -> Document:
    (container,) = template["spec"]["containers"]
    return cast(Document, container)


def test_every_document_is_what_kubernetes_and_kuberay_accept(documents: list[Document]) -> None:
    kinds = [each["kind"] for each in documents]
    assert sorted(set(kinds)) == ["ConfigMap", "NetworkPolicy", "RayCluster", "Secret", "Service"]
    for document in documents:
        (check_raycluster if document["kind"] == "RayCluster" else check_kubernetes)(document)


def misspell_a_field_of_kuberay(cluster: Document) -> None:
    cluster["spec"]["enableInTreeAutoscalling"] = cluster["spec"].pop("enableInTreeAutoscaling")


def leave_out_the_most_pods(cluster: Document) -> None:
    del cluster["spec"]["workerGroupSpecs"][0]["maxReplicas"]


def give_a_start_parameter_as_a_number(cluster: Document) -> None:
    cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def misspell_a_field_of_a_container(cluster: Document) -> None:
    container_of(templates(cluster)["head"])["readynessProbe"] = {}


def ask_for_an_unknown_autoscaler(cluster: Document) -> None:
    cluster["spec"]["autoscalerOptions"]["version"] = "v3"


def misspell_a_right_of_the_autoscaler(cluster: Document) -> None:
    cluster["spec"]["autoscalerOptions"]["securityContext"]["runAsNonroot"] = True


@pytest.mark.parametrize(
    "spoil",
    [
        misspell_a_field_of_kuberay,
        leave_out_the_most_pods,
        give_a_start_parameter_as_a_number,
        misspell_a_field_of_a_container,
        ask_for_an_unknown_autoscaler,
        misspell_a_right_of_the_autoscaler,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_a_slip_in_the_cluster_is_found(spoil: Callable[[Document], None]) -> None:
    cluster = copy.deepcopy(read("raycluster.yaml"))
    spoil(cluster)
    with pytest.raises(jsonschema.ValidationError):
        check_raycluster(cluster)


def test_kustomize_gets_fields_that_it_knows_and_files_that_are_there(folder: Path) -> None:
    kustomization = read("kustomization.yaml")
    known = {"apiVersion", "kind", "resources", "generatorOptions", "configMapGenerator", "secretGenerator"}
    assert set(kustomization) == known
    assert (kustomization["apiVersion"], kustomization["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
    generators = kustomization["configMapGenerator"] + kustomization["secretGenerator"]
    assert all(set(each) == {"name", "files"} for each in generators)
    for name in [*kustomization["resources"], *(name for each in generators for name in each["files"])]:
        assert (folder / name).is_file(), name
        assert name.startswith(MADE_AS_TOLD) or (FOLDER / name).is_file(), name


def test_what_is_secret_is_not_taken_into_the_repository() -> None:
    for name in ("certs/prefill.key", "api-keys"):
        done = subprocess.run(["git", "check-ignore", "--quiet", str(FOLDER / name)], cwd=ROOT, check=False)
        assert done.returncode == 0, name


# --- whether names lead somewhere ------------------------------------------------------------------------------------


def test_every_name_that_a_pod_refers_to_exists(documents: list[Document]) -> None:
    config_maps, secrets = the(documents, "ConfigMap"), the(documents, "Secret")
    (cluster,) = the(documents, "RayCluster").values()
    used = set()
    for template in templates(cluster).values():
        container, volumes = container_of(template), {each["name"]: each for each in template["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "secret" in volume:
                source = secrets[volume["secret"]["secretName"]]
            else:
                source = config_maps[volume["configMap"]["name"]]
            used.add(source["metadata"]["name"])
            assert mount.get("subPath", next(iter(source["data"]))) in source["data"]
        ports = {port["name"] for port in container.get("ports", [])}
        assert all(container[probe]["httpGet"]["port"] in ports for probe in PROBES if probe in container)
    assert used == {*config_maps, *secrets}, "each is used"


def test_service_and_policy_meet_the_pods_and_ports_that_there_are(documents: list[Document]) -> None:
    (cluster,), (service,) = the(documents, "RayCluster").values(), the(documents, "Service").values()
    (policy,) = the(documents, "NetworkPolicy").values()
    head = templates(cluster)["head"]
    by_kuberay = {"ray.io/cluster": cluster["metadata"]["name"]}  # which every Pod gets
    assert service["spec"]["selector"] == {**by_kuberay, **head["metadata"]["labels"]}
    assert all("metadata" not in template for name, template in templates(cluster).items() if name != "head")
    ports = {port["name"]: port["containerPort"] for port in container_of(head)["ports"]}
    http = served(FOLDER).http.port
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]
    assert [port["port"] for port in service["spec"]["ports"]] == [ports["http"]] == [http]
    among_themselves, for_clients = policy["spec"]["ingress"]
    assert policy["spec"]["podSelector"] == among_themselves["from"][0]["podSelector"] == {"matchLabels": by_kuberay}
    assert for_clients == {"ports": [{"protocol": "TCP", "port": http}]}
    assert head["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(http),
        "prometheus.io/path": "/metrics",
    }


def served(folder: Path) -> Config:
    return load(folder / "tandem.yaml")


def test_configuration_names_what_the_head_mounts_and_needs_no_change_to_start(documents: list[Document]) -> None:
    (cluster,) = the(documents, "RayCluster").values()
    config = served(FOLDER)
    mounts = {each["mountPath"]: each["name"] for each in container_of(templates(cluster)["head"])["volumeMounts"]}
    (keys,) = the(documents, "Secret")["tandem-api-keys"]["data"]
    assert config.http.api_keys_file == f"/etc/tandem/keys/{keys}"
    assert mounts["/etc/tandem/keys"] == "keys"
    assert config.http.host == "0.0.0.0"
    for template in templates(cluster).values():
        assert config.security.certificates in {each["mountPath"] for each in container_of(template)["volumeMounts"]}


@pytest.mark.parametrize(
    ("secret", "roles"),
    [
        ("tandem-head-certificates", HEAD_ROLES),
        ("tandem-prefill-certificates", {PeerRole.PREFILL}),
        ("tandem-decode-certificates", {PeerRole.DECODE}),
    ],
)
def test_each_group_gets_the_certificates_of_its_roles_and_no_others(
    secret: str, roles: set[PeerRole], documents: list[Document], tmp_path: Path
) -> None:
    data = the(documents, "Secret")[secret]["data"]
    assert AUTHORITY_KEY_FILE not in data
    assert {name for name in data if name.endswith(".key")} == {f"{role}.key" for role in roles}
    for name, content in data.items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
        (tmp_path / name).chmod(0o600)
    assert examine_certificates(tmp_path, roles).detail.startswith("for ")


# --- what Ray makes of it --------------------------------------------------------------------------------------------


def test_rays_autoscaler_derives_both_pools_with_room_for_a_worker_on_each_gpu() -> None:
    cluster = read("raycluster.yaml")
    cluster["metadata"]["namespace"] = "default"
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    assert types.pop("headgroup")["resources"].items() >= {"router": 1, "CPU": 0}.items()
    config = served(FOLDER)
    assert set(types) == {"prefill", "decode"}
    for role, pool in (("prefill", config.pools.prefill), ("decode", config.pools.decode)):
        resources = types[role]["resources"]
        assert resources[role] == resources["GPU"]
        assert set(resources) & {"prefill", "decode", "router"} == {role}
        fewest, most = (types[role][limit] * resources[role] for limit in ("min_workers", "max_workers"))
        assert fewest <= pool.workers <= most
        assert pool.gpus == 1


def test_the_version_of_ray_is_the_pinned_one() -> None:
    assert f"ray=={read('raycluster.yaml')['spec']['rayVersion']}" in (ROOT / "requirements/lock.txt").read_text()


def as_kuberay_would(template: Document, start: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the container's command with a `ray` and a `tandem` that only say how they were called."""
    for name in ("ray", "tandem"):
        (folder / name).write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@"\n[ -z "$FAILS" ] || exit 7\n')
        (folder / name).chmod(0o755)
    container = container_of(template)
    environment = {each["name"]: each["value"] for each in container["env"]}
    return subprocess.run(
        [*container["command"], *container["args"]],
        env={**os.environ, **environment, "PATH": f"{folder}:{os.environ['PATH']}", "KUBERAY_GEN_RAY_START_CMD": start},
        capture_output=True,
        text=True,
        check=False,
    )


def start_of(group: Document, node: str) -> str:
    """As KubeRay's operator puts it together: each parameter between blanks, and always `--block`."""
    parameters = "".join(f" --{name}={value} " for name, value in sorted(group["rayStartParams"].items()))
    return f"ray start {node} --block {parameters}"


def test_head_starts_ray_and_then_is_tandem(tmp_path: Path) -> None:
    cluster = read("raycluster.yaml")
    group = cluster["spec"]["headGroupSpec"]
    said = as_kuberay_would(group["template"], start_of(group, "--head "), tmp_path)
    ray, _, tandem = said.stdout.partition("tandem\n")
    assert "--block" not in ray.splitlines()
    assert {"start", "--head", "--num-cpus=0", '--resources={"router": 1}'} < set(ray.splitlines())
    mounted = {each["mountPath"] for each in container_of(group["template"])["volumeMounts"]}
    assert tandem.splitlines()[:3] == ["serve", "--address", "auto"]
    assert tandem.splitlines()[3:4] == ["--config"]
    assert tandem.splitlines()[4] in mounted


def test_head_whose_ray_does_not_start_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "yes")
    group = read("raycluster.yaml")["spec"]["headGroupSpec"]
    said = as_kuberay_would(group["template"], start_of(group, "--head "), tmp_path)
    assert said.returncode == 7
    assert "serve" not in said.stdout


@pytest.mark.parametrize("index", [0, 1])
def test_worker_pods_join_in_the_foreground_with_their_resource(index: int, tmp_path: Path) -> None:
    group = read("raycluster.yaml")["spec"]["workerGroupSpecs"][index]
    said = as_kuberay_would(group["template"], start_of(group, "--address=tandem-head-svc:6379 "), tmp_path)
    assert "--block" in said.stdout.splitlines()
    (resources,) = re.findall(r"--resources=(.*)", said.stdout)
    assert json.loads(resources) == {group["groupName"]: int(gpus_of(group))}


def gpus_of(group: Document) -> str:
    return cast(str, container_of(group["template"])["resources"]["limits"]["nvidia.com/gpu"])


# --- what every Pod promises -----------------------------------------------------------------------------------------


def test_no_container_has_rights_that_it_does_not_need() -> None:
    cluster = read("raycluster.yaml")
    (user,) = re.findall(r"^RUN useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    contexts = [container_of(template)["securityContext"] for template in templates(cluster).values()]
    for context in [*contexts, cluster["spec"]["autoscalerOptions"]["securityContext"]]:
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == int(user)
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
    for template in templates(cluster).values():
        assert template["spec"]["securityContext"] == {"fsGroup": int(user)}
        secrets = [volume["secret"] for volume in template["spec"]["volumes"] if "secret" in volume]
        assert secrets
        assert all(secret["defaultMode"] == 0o400 for secret in secrets)


def test_health_decides_whether_the_head_is_ready_and_whether_it_lives() -> None:
    container = container_of(templates(read("raycluster.yaml"))["head"])
    for probe in PROBES:
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert "/health" in OPEN_PATHS, "a probe has no key"
    patience = {probe: container[probe]["periodSeconds"] * container[probe]["failureThreshold"] for probe in PROBES}
    assert patience == {"startupProbe": 3600, "readinessProbe": 10, "livenessProbe": 1800}, "docs/kubernetes.md says so"


def test_every_pod_outlives_its_control_store_and_asks_for_the_token() -> None:
    cluster = read("raycluster.yaml")
    for template in templates(cluster).values():
        assert {each["name"]: each["value"] for each in container_of(template)["env"]} == {
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S)
        }
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
