"""Between `kvtransfer.layout` and the wire."""

from __future__ import annotations

from dataclasses import asdict, fields

from kvtransfer.layout import KvFormat, LayoutId
from tandem.rpc.v1 import common_pb2 as pb


def layout_to_proto(layout: LayoutId) -> pb.Layout:
    return pb.Layout(**asdict(layout))


def layout_from_proto(message: pb.Layout) -> LayoutId:
    return LayoutId(**{field.name: getattr(message, field.name) for field in fields(LayoutId)})


def kv_format(info: pb.WorkerInfo) -> KvFormat:
    """What a worker says of its pages; equal for two workers that may pair."""
    return KvFormat(layout_from_proto(info.layout), info.transport)
