"""Bad bytes for gRPC services: messages made from their descriptors, valid ones bent, and bytes that are none.

Everything is sent as bytes over a real channel, so what a service sees is what a hostile or broken peer could send.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

ANSWER_S = 10.0

#: The same examples in every run; examples share the services, which is the point.
FUZZ = settings(
    derandomize=True,
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

_F = FieldDescriptor
_UNSIGNED_32 = st.one_of(st.integers(0, 5), st.sampled_from([31, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]))
_UNSIGNED_64 = st.one_of(st.integers(0, 5), st.sampled_from([1 << 32, 1 << 63, (1 << 64) - 1]))
_SIGNED_32 = st.one_of(st.integers(-3, 5), st.sampled_from([-(1 << 31), (1 << 31) - 1]))
_FLOAT = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e38, float("inf"), float("-inf"), float("nan")])
)
_TEXT = st.one_of(
    st.sampled_from(["", "r", "prefill-0", "decode-0", "ucx", "loopback", "float32", "xxh3_64", "ready", "draining",
                     "127.0.0.1:1", "[::1]:x", "nowhere.invalid:1", "dns:///", "unix:/nowhere", "\x00", "a" * 5000]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)  # fmt: skip
_SCALARS: dict[int, SearchStrategy[Any]] = {
    _F.TYPE_UINT32: _UNSIGNED_32,
    _F.TYPE_UINT64: _UNSIGNED_64,
    _F.TYPE_FIXED64: _UNSIGNED_64,
    _F.TYPE_INT32: _SIGNED_32,
    _F.TYPE_BOOL: st.booleans(),
    _F.TYPE_DOUBLE: _FLOAT,
    _F.TYPE_FLOAT: _FLOAT,
    _F.TYPE_STRING: _TEXT,
    _F.TYPE_BYTES: st.binary(max_size=80),
    _F.TYPE_ENUM: st.one_of(st.integers(0, 3), st.sampled_from([-1, 99, (1 << 31) - 1])),
}


def methods(service: ServiceDescriptor) -> dict[str, MethodDescriptor]:
    return {f"/{service.full_name}/{method.name}": method for method in service.methods}


# -- messages


def messages(descriptor: Descriptor, **fixed: SearchStrategy[Any]) -> SearchStrategy[Message]:
    """Any message of this type; fields named in `fixed` are taken from there, at the top and in nested messages.

    Of a repeated field of messages, each of them is.
    """
    values = {
        field.name: _fixed(field, fixed) if field.name in fixed else _values(field, fixed)
        for field in descriptor.fields
    }
    cls = GetMessageClass(descriptor)

    def build(chosen: dict[str, Any]) -> Message:
        message = cls()
        for name, value in chosen.items():
            _set(message, descriptor.fields_by_name[name], value)
        return message

    # Of a message that is one command out of several, exactly one; of others any fields.
    (*_, oneof) = (None, *(o for o in descriptor.oneofs if len(o.fields) > 1))
    if oneof is not None:
        return st.one_of([st.fixed_dictionaries({f.name: values[f.name]}).map(build) for f in oneof.fields])
    return st.fixed_dictionaries({}, optional=values).map(build)


def _fixed(field: FieldDescriptor, fixed: dict[str, SearchStrategy[Any]]) -> SearchStrategy[Any]:
    one = fixed[field.name]
    return st.lists(one, max_size=4) if field.is_repeated and field.message_type is not None else one


def _values(field: FieldDescriptor, fixed: dict[str, SearchStrategy[Any]]) -> SearchStrategy[Any]:
    if _is_map(field):
        entry = field.message_type.fields_by_name
        return st.dictionaries(_values(entry["key"], fixed), _values(entry["value"], fixed), max_size=3)
    one = messages(field.message_type, **fixed) if field.message_type is not None else _SCALARS[field.type]
    return st.lists(one, max_size=4) if field.is_repeated else one


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    if _is_map(field):
        getattr(message, field.name).update(value)
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


# -- bytes


def _bend(encoded: bytes, kind: str, at: float, noise: bytes) -> bytes:
    place = int(at * len(encoded))
    match kind:
        case "cut":
            return encoded[:place]
        case "flip" if encoded:
            return encoded[:place] + bytes([encoded[place] ^ 0x41]) + encoded[place + 1 :]
        case "insert":
            return encoded[:place] + noise + encoded[place:]
        case _:
            return encoded + encoded


def payloads(descriptor: Descriptor, **fixed: SearchStrategy[Any]) -> SearchStrategy[bytes]:
    """What may come in the place of a message: a valid one, a bent one, or anything at all."""
    valid = messages(descriptor, **fixed).map(lambda message: message.SerializeToString())
    kinds = st.sampled_from(["cut", "flip", "insert", "twice"])
    bent = st.builds(_bend, valid, kinds, st.floats(0, 0.999), st.binary(min_size=1, max_size=6))
    # A field's length that promises far more than there is.
    lies = st.integers(1, 15).map(lambda number: struct.pack("<B", number << 3 | 2) + b"\xff\xff\xff\xff\x07" + b"x")
    return st.one_of(valid, valid, bent, lies, st.binary(max_size=200))


def is_message(descriptor: Descriptor, payload: bytes) -> bool:
    try:
        GetMessageClass(descriptor).FromString(payload)
    except DecodeError:
        return False
    return True


# -- calls


@dataclass(frozen=True)
class Answer:
    code: grpc.StatusCode
    details: str
    replies: list[bytes]


async def send(
    channel: grpc.aio.Channel, name: str, method: MethodDescriptor, payload: Sequence[bytes], *, max_replies: int = 1
) -> Answer:
    """Call a method with these very bytes. Raises `TimeoutError` when nothing comes of it."""
    shape = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call: Any = getattr(channel, shape)(name)
    replies: list[bytes] = []
    try:
        async with asyncio.timeout(ANSWER_S):
            if not method.server_streaming:
                replies.append(await call(payload[0]))
                return Answer(grpc.StatusCode.OK, "", replies)
            # Requests from an iterator: a stream that the server has ended takes no further writes.
            stream = call(iter(payload) if method.client_streaming else payload[0])
            async for message in stream:
                replies.append(message)
                if len(replies) == max_replies:
                    break
            stream.cancel()
            return Answer(grpc.StatusCode.OK, "", replies)
    except grpc.aio.AioRpcError as error:
        return Answer(error.code(), error.details() or "", replies)


def check_answer(method: MethodDescriptor, payload: bytes, answer: Answer) -> None:
    """A message is answered by a message; what is none ends the call, and says that it is none."""
    if is_message(method.input_type, payload):
        assert answer.code is grpc.StatusCode.OK, (payload, answer)
        assert all(is_message(method.output_type, reply) for reply in answer.replies)
    else:
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT, (payload, answer)
