"""Where routers run in a Ray of several nodes."""

from __future__ import annotations

from typing import Any

from tandem.cluster.ray.router_nodes import choose_node, nodes_for_routers


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


def test_nodes_with_the_resource_come_that_of_tandem_serve_first() -> None:
    nodes = [node("c", router=1), node("a", router=1), node("b", router=1), node("d", decode=1), node("e", router=0)]
    assert nodes_for_routers(nodes, "b") == ["b", "a", "c"]


def test_a_dead_node_gets_none() -> None:
    assert nodes_for_routers([node("a", router=1, alive=False), node("b", router=1)], "a") == ["b"]


def test_where_none_is_for_routers_they_run_beside_tandem_serve() -> None:
    assert nodes_for_routers([node("a", prefill=1), node("b", decode=1)], "a") == ["a"]


def test_each_node_gets_one_before_any_gets_two() -> None:
    nodes, placed = ["a", "b", "c"], list[str]()
    for _ in range(7):
        placed.append(choose_node(nodes, placed, None))
    assert placed == ["a", "b", "c", "a", "b", "c", "a"]


def test_a_router_that_is_started_again_stays_on_its_node() -> None:
    assert choose_node(["a", "b"], ["a", "b"], "b") == "b"
    assert choose_node(["a", "b"], ["b"], "b") == "a", "that node has nobody"
    assert choose_node(["a"], [], "gone") == "a"
