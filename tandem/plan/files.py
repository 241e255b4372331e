"""The files of a cluster as it was planned: a `tandem.yaml`, and the pools of a `cluster.yaml`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from tandem.core.errors import ConfigError
from tandem.core.worker_types import TypeSpec
from tandem.core.writable import check_writable
from tandem.plan.plan_file import Plan
from tandem.plan.size import Found, num_nodes

_ROLES = ("prefill", "decode")
_TANDEM, _CLUSTER = "tandem.yaml", "cluster.yaml"


def check_before(directory: Path, base: dict[str, Any], plan: Plan, types: dict[str, TypeSpec]) -> None:
    """Make the directory; asked before a search. `base`: as of `write_files`.

    Raises:
        ConfigError: no files could be written there, or none of what the plan has, or `base` is no cluster.yaml.
    """
    _check_plan_served(plan)
    for role in _ROLES:
        of_role = {name: spec for name, spec in types.items() if spec.roles in ("both", role)}
        if of_role and all(spec.cards > 1 or spec.machine.card.is_cpu for spec in of_role.values()):
            _check_type_served(*next(iter(of_role.items())))
    nodes = _section(base, "available_node_types", "available_node_types")
    for role in _ROLES:
        _section(_section(nodes, role, f"available_node_types.{role}"), "node_config", f"{role}.node_config")
    _check_directory(directory)


def _section(tree: dict[str, Any], name: str, shown: str) -> dict[str, Any]:
    found = tree.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{shown} of the cluster.yaml must hold keys and values, not {found!r}", key="--cluster")
    return found


def _check_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}", key="--out") from error
    for name in (_TANDEM, _CLUSTER):
        check_writable(directory / name, "--out")


def write_files(
    directory: Path, base: dict[str, Any], plan: Plan, types: dict[str, TypeSpec], found: Found
) -> list[Path]:
    """`base`: a cluster.yaml whose other keys stay; empty: nothing but the pools is written.

    Raises:
        ConfigError: a file cannot be written.
    """
    _check_served(plan, types, found)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files = {
            directory / _TANDEM: tandem_yaml(plan, types, found),
            directory / _CLUSTER: cluster_yaml(base, types, found),
        }
        for file, (comment, tree) in files.items():
            file.write_text(comment + yaml.safe_dump(tree, sort_keys=False, width=120))
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}", key="--out") from error
    return list(files)


def _check_served(plan: Plan, types: dict[str, TypeSpec], found: Found) -> None:
    """What arithmetic can do and a cluster on GPUs cannot, yet."""
    for name in {found.best.prefill_type, found.best.decode_type}:
        _check_type_served(name, types[name])
    _check_plan_served(plan)


def _check_type_served(name: str, spec: TypeSpec) -> None:
    if spec.machine.card.is_cpu:
        raise ConfigError(
            f"types.{name} is a CPU ({spec.card}), and files are for GPUs alone: none are written; omit --out",
            key="--out",
        )
    if spec.cards > 1:
        raise ConfigError(
            f"types.{name}.cards is {spec.cards}, and a worker serves on one GPU: no files are written; omit --out",
            key="--out",
        )


def _check_plan_served(plan: Plan) -> None:
    if plan.model.weight_bits != 16 or plan.model.kv_dtype not in ("bfloat16", "float16"):
        raise ConfigError(
            f"the plan has weights of {plan.model.weight_bits:g} bits and K and V in {plan.model.kv_dtype}, and GPUs "
            "serve 16 bits of both: no files are written; omit --out",
            key="--out",
        )


def tandem_yaml(plan: Plan, types: dict[str, TypeSpec], found: Found) -> tuple[str, dict[str, Any]]:
    """A comment, and the keys: pools, targets, and what the plan set of `tandem`."""
    best = found.best
    pools = {
        role: {"workers": getattr(best, f"num_{role}"), "gpus": types[getattr(best, f"{role}_type")].cards}
        for role in _ROLES
    }
    slo = {"ttft_ms": plan.slo.ttft_ms, "tpot_ms": plan.slo.tpot_ms}
    comment = f"# By `tandem plan size`: {found.best}. Name the model's own path; the plan was made for its shape.\n"
    return comment, _merged(
        _changed_keys(plan.tandem), {"model": {"path": plan.model.name}, "pools": pools, "slo": slo}
    )


def cluster_yaml(base: dict[str, Any], types: dict[str, TypeSpec], found: Found) -> tuple[str, dict[str, Any]]:
    """A comment, and `base` with the node types of both pools as they were planned."""
    best, nodes = found.best, {}
    for role in _ROLES:
        spec = types[getattr(best, f"{role}_type")]
        num = num_nodes(best, types, role)
        of_base = (base.get("available_node_types") or {}).get(role) or {}
        config = {**(of_base.get("node_config") or {}), **({"InstanceType": spec.instance} if spec.instance else {})}
        nodes[role] = {
            **of_base, "min_workers": num, "max_workers": num, "resources": {role: spec.workers_of_node},
            "node_config": config,
        }  # fmt: skip
    total = sum(node["max_workers"] for node in nodes.values())
    comment = "# By `tandem plan size`: the two pools are sized, all else is as it was given.\n"
    if not base:
        comment = "# By `tandem plan size`: the pools alone; lay them into a cluster.yaml as docs/deploy.md has it.\n"
    return comment, _merged(base, {"max_workers": total, "available_node_types": nodes})


def _changed_keys(section: Any) -> dict[str, Any]:
    """What is not as it is by default, as a tree."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            if inner := _changed_keys(value):
                changed[field.name] = inner
        elif value != field.default:
            changed[field.name] = list(value) if isinstance(value, tuple) else value
    return changed


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = _merged(result[name], value) if both else value
    return result
