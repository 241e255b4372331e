"""Between `kvtransfer.layout` and the wire."""

from __future__ import annotations

from dataclasses import asdict, fields

from kvtransfer.layout import KvFormat, LayoutId, check_compatible
from tandem.core.protocols import Protocols, agree
from tandem.rpc.v1 import common_pb2 as pb


def layout_to_proto(layout: LayoutId) -> pb.Layout:
    return pb.Layout(**asdict(layout))


def layout_from_proto(message: pb.Layout) -> LayoutId:
    return LayoutId(**{field.name: getattr(message, field.name) for field in fields(LayoutId)})


def protocols_to_proto(protocols: Protocols) -> pb.Protocols:
    return pb.Protocols(oldest=protocols.oldest, newest=protocols.newest)


def protocols_of(info: pb.WorkerInfo) -> Protocols:
    return Protocols(info.protocols.oldest, info.protocols.newest)


def check_pair(prefill: pb.WorkerInfo, decode: pb.WorkerInfo) -> int:
    """The number of the protocol that two workers speak with each other about handoffs.

    Raises:
        IncompatibleError: they must not exchange pages; names both and what differs.
    """
    check_compatible(kv_format(prefill), prefill.worker_id, kv_format(decode), decode.worker_id)
    return agree(protocols_of(prefill), prefill.worker_id, protocols_of(decode), decode.worker_id)


def kv_format(info: pb.WorkerInfo) -> KvFormat:
    """What a worker says of its pages; equal for two workers that may pair."""
    return KvFormat(layout_from_proto(info.layout), info.transport)
