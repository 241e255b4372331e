"""Scripted workers as a router's members: the supervisor's side of its control service."""

from __future__ import annotations

import grpc

from tandem.rpc.v1 import control_pb2
from tandem.rpc.v1.control_pb2_grpc import RouterControlStub
from tests.support.scripted_worker import WAIT_S, ScriptedWorker


class ScriptedPool:
    """Some scripted workers and the supervisor's side of the control service."""

    def __init__(self, control_address: str) -> None:
        self.workers: list[ScriptedWorker] = []
        self.states: dict[str, str] = {}
        self.ended: list[str] = []  # incarnations of which the supervisor has seen the end
        self.num_routers = 1
        self.cache_secret = b""
        self.colocated = False
        self.sizes: list[control_pb2.PoolSize] = []
        self.others: list[control_pb2.OtherRouter] = []
        self._version = 0
        self.control_address = control_address
        self._channel = grpc.insecure_channel(control_address)
        self.control = RouterControlStub(self._channel)

    def add(self, *workers: ScriptedWorker) -> None:
        self.workers.extend(workers)
        self.push()

    def remove(self, worker: ScriptedWorker) -> None:
        self.workers.remove(worker)
        self.push()

    def push(self) -> None:
        """Tell the router the membership as it is now."""
        self._version += 1
        members = [
            control_pb2.Member(
                worker_id=w.info.worker_id,
                incarnation=w.info.incarnation,
                role=w.role,
                address=w.info.address,
                state=self.states.get(w.info.worker_id, "ready"),
                node="testhost",
                pid=4242,
            )
            for w in self.workers
        ]
        membership = control_pb2.Membership(
            version=self._version,
            members=members,
            num_routers=self.num_routers,
            ended=self.ended,
            cache_secret=self.cache_secret,
            colocated=self.colocated,
            pools=self.sizes,
            other_routers=self.others,
        )
        self.control.SetMembership(membership, timeout=WAIT_S)

    def as_other(self, name: str, *, shares_port: bool = True) -> control_pb2.OtherRouter:
        """Its router, as others are told of it."""
        return control_pb2.OtherRouter(name=name, control_address=self.control_address, shares_port=shares_port)

    def close(self) -> None:
        self._channel.close()
        for worker in self.workers:
            worker.kill()
