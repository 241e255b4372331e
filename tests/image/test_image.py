"""Each step of the Dockerfile, carried out without an engine, makes a root in which Tandem answers.

So do the Pods of deploy/kubernetes: their containers' own commands, with KubeRay's parts made as it makes them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cluster.certs import make_certificates
from tests.image.build import Build, Image
from tests.image.dockerfile import stages_of
from tests.image.fresh_root import ADDRESS, Container, missing, stop

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-of-this-test"

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

_ASK = """
import json, sys, urllib.request
url, key = sys.argv[1:]
body = json.dumps({"model": "tandem-tiny", "prompt": "Once upon a time", "max_tokens": 8}).encode()
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
    print(answer.read().decode())
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    arguments = {name: os.environ[name] for name in ("TORCH",) if name in os.environ}
    build = Build(ROOT, tmp_path_factory.mktemp("image"), arguments)
    image = build.run()
    written = [each for stage in stages_of((ROOT / "Dockerfile").read_text()) for each in stage.instructions]
    assert build.executed == written
    return image


@pytest.fixture
def container(image: Image) -> Iterator[Container]:
    """As `docker run --shm-size=1g` makes it, with a network of its own."""
    with Container(image.root, own_network=True, shared_memory="1g") as container:
        yield container


def answer_of(container: Container, image: Image, url: str) -> dict[str, object]:
    said = container.run(["python", "-c", _ASK, url, KEY], user=image.user)
    answer: dict[str, object] = json.loads(said)
    return answer


def test_image_serves_is_healthy_and_stops(image: Image, container: Container) -> None:
    variables = {**image.environment, "TANDEM_API_KEYS": KEY}
    serving = container.popen(
        image.entrypoint + image.command, user=image.user, workdir=image.workdir, environment=variables
    )
    assert serving.stdout is not None
    heard: list[str] = []
    for line in serving.stdout:
        heard.append(line)
        if line.startswith("Ready: "):
            break
    else:
        pytest.fail("".join(heard))
    (port,) = image.ports
    answer = answer_of(container, image, f"http://127.0.0.1:{port}/v1/completions")
    assert answer["usage"]["completion_tokens"] == 8  # type: ignore[index]
    container.run(image.healthcheck, user=image.user)
    assert image.user != "root"
    said = stop(serving, timeout_s=60)
    assert said.rstrip().endswith("Stopped."), said
    assert serving.returncode == 0


def test_unhealthy_where_nothing_serves(image: Image, container: Container) -> None:
    with pytest.raises(RuntimeError, match="Connection refused"):
        container.run(image.healthcheck, user=image.user)


# What the kubelet does with a container that has ended: `ray start` gives itself 30 s, which a busy machine may exceed.
_START_AGAIN = """for try in 1 2 3; do "$@" && exit; echo "ended (try $try of 3)"; done; exit 1"""

# --- deploy/kubernetes -----------------------------------------------------------------------------------------------

CONFIGURATION = """
model: {path: embedded}
http: {host: 0.0.0.0, api_keys_file: /etc/tandem/keys/api-keys}
security: {certificates: /etc/tandem/certs}
"""


def test_pods_of_the_kubernetes_files_serve(image: Image, container: Container, tmp_path: Path) -> None:
    """Each container's own command and mounts. Pods that share an address stand for those that KubeRay makes."""
    make_certificates(tmp_path / "certs", days=1)
    (tmp_path / "tandem.yaml").write_text(CONFIGURATION)
    (tmp_path / "api-keys").write_text(KEY + "\n")
    cluster = yaml.safe_load((ROOT / "deploy/kubernetes/raycluster.yaml").read_text())["spec"]
    pods = [start_pod(cluster["headGroupSpec"], "--head --port=6379", image, container, tmp_path)]
    pods += [
        start_pod(group, f"--address={ADDRESS}:6379", image, container, tmp_path)
        for group in cluster["workerGroupSpecs"]
    ]
    heard: list[str] = []
    assert pods[0].stdout is not None
    for line in pods[0].stdout:
        heard.append(line)
        if line.startswith("Ready: "):
            break
    else:
        pytest.fail("".join(heard))
    answer = answer_of(container, image, f"http://{ADDRESS}:8000/v1/completions")
    assert answer["usage"]["completion_tokens"] == 8  # type: ignore[index]
    said = stop(pods[0], timeout_s=90)
    assert said.rstrip().endswith("Stopped."), said


def start_pod(
    group: dict[str, Any], start: str, image: Image, container: Container, made: Path
) -> subprocess.Popen[str]:
    """The first container of a Pod of this group, with the Secrets and ConfigMaps that it mounts."""
    (pod,), volumes = group["template"]["spec"]["containers"], group["template"]["spec"]["volumes"]
    folders = {volume["name"]: folder_of(volume, made) for volume in volumes}
    shared = {str(folders[each["name"]] / each.get("subPath", "")): each["mountPath"] for each in pod["volumeMounts"]}
    parameters = "".join(f" --{name}={value} " for name, value in sorted(group["rayStartParams"].items()))
    by_kuberay = {
        "KUBERAY_GEN_RAY_START_CMD": f"ray start {start} --block {parameters} --num-gpus=0",
        "RAY_ADDRESS": ("127.0.0.1" if "--head" in start else ADDRESS) + ":6379",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "ab" * 16,
    }
    variables = {each["name"]: each["value"] for each in pod["env"]}
    kubelet = [] if "--head" in start else ["bash", "-c", _START_AGAIN, "kubelet"]  # the head is stopped by a signal
    return container.popen(
        [*kubelet, *pod["command"], *pod["args"]],
        user=image.user, workdir=image.workdir, environment=image.environment | variables | by_kuberay, shared=shared,
    )  # fmt: skip


def folder_of(volume: dict[str, Any], made: Path) -> Path:
    """A folder that holds what Kubernetes would mount, as kustomization.yaml puts it together."""
    kustomization = yaml.safe_load((ROOT / "deploy/kubernetes/kustomization.yaml").read_text())
    name = volume["secret"]["secretName"] if "secret" in volume else volume["configMap"]["name"]
    generators = kustomization["configMapGenerator"] + kustomization["secretGenerator"]
    (files,) = (each["files"] for each in generators if each["name"] == name)
    folder = made / "mounted" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(made / file, folder)
    # Files are root's. By `defaultMode` 0400 and `fsGroup` a Secret's can be read by that group and by nobody else.
    for path in folder.iterdir():
        os.chown(path, 0, 1000)
        path.chmod(0o440 if "secret" in volume else 0o644)
    folder.chmod(0o755)
    return folder
