"""Brings the code of a build to whatever node a process of it starts on: by Ray's own way for modules of actors.

A wheel of pure Python is a ZIP file of packages. When an actor asks for one, Ray has its node fetch it from the control
store, unpack it once, and put it in front of what is installed. The control store drops it when no actor needs it any
more; so the wheel is kept there under a name of ours too, as long as the cluster lives.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ray._private.runtime_env.packaging import package_exists, upload_package_to_gcs
from ray.experimental import internal_kv

from tandem.cluster.spec import NAMESPACE
from tandem.cluster.supervisor.events import INSTALLED, Build
from tandem.core.errors import InternalError

_WHEELS = b"wheel:"


def keep_wheel(build: Build, content: bytes) -> None:
    """For all processes of this build, also those that later supervisors start. Blocks."""
    internal_kv._internal_kv_put(_key(build), content, overwrite=True, namespace=NAMESPACE)


def forget_wheels(*, but: Collection[Build] = ()) -> None:
    """All others; the processes that run keep what they have. Blocks."""
    kept = {_key(build) for build in but}
    for key in internal_kv._internal_kv_list(_WHEELS, namespace=NAMESPACE):
        if key not in kept:
            internal_kv._internal_kv_del(key, namespace=NAMESPACE)


def environment_for(build: Build, variables: dict[str, str]) -> dict[str, Any]:
    """Ray's `runtime_env` of an actor that runs this build. Blocks.

    Raises:
        InternalError: the wheel is not kept any more.
    """
    if build == INSTALLED:
        return {"env_vars": variables} if variables else {}
    uri = f"gcs://_ray_pkg_tandem_{build.digest}.zip"
    if not package_exists(uri):
        content = internal_kv._internal_kv_get(_key(build), namespace=NAMESPACE)
        if content is None:
            raise InternalError(f"the wheel of {build.version} is not in Ray's control store; upgrade again")
        upload_package_to_gcs(uri, content)
    return {"env_vars": variables, "py_modules": [uri]}


def _key(build: Build) -> bytes:
    return _WHEELS + build.digest.encode()
