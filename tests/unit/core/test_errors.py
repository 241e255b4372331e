"""The error tree: every class has its own wire code, and a code leads back to its class."""

from __future__ import annotations

import pytest

from tandem.core import errors
from tandem.core.errors import TandemError


def _tree(root: type[TandemError]) -> list[type[TandemError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in _tree(child))]


CLASSES = [cls for cls in _tree(TandemError) if cls.__module__ == errors.__name__]
LEAVES = [cls for cls in CLASSES if cls is not TandemError]
STATUSES = {
    "ConfigError": 500,
    "NotRunningError": 500,
    "InvalidRequestError": 400,
    "SlowGrammarError": 400,
    "ContextLengthError": 400,
    "UnsupportedEncodingError": 415,
    "ModelNotFoundError": 404,
    "RequestTimeoutError": 408,
    "RequestTooLargeError": 413,
    "ModelLoadError": 500,
    "UnsupportedModelError": 500,
    "OverloadedError": 429,
    "RateLimitError": 429,
    "UnmeetableDeadlineError": 429,
    "NoWorkerError": 503,
    "DrainingError": 503,
    "CancelledError": 499,
    "DeadlineError": 504,
    "AuthenticationError": 401,
    "ForbiddenError": 403,
    "WorkerLostError": 502,
    "WorkersDiedError": 500,
    "HandoffError": 502,
    "TransportError": 502,
    "IncompatibleError": 503,
    "IllegalTransitionError": 500,
    "InternalError": 500,
}
RETRYABLE = {
    "OverloadedError",
    "RateLimitError",
    "UnmeetableDeadlineError",
    "NoWorkerError",
    "DrainingError",
    "WorkerLostError",
    "HandoffError",
    "TransportError",
    "RequestTimeoutError",
}


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [cls.code for cls in LEAVES]
    assert len(set(codes)) == len(codes), sorted(codes)


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_code_leads_back_to_its_class(cls: type[TandemError]) -> None:
    assert errors.error_class(cls.code) is cls


def test_code_of_a_newer_version_is_an_internal_error() -> None:
    assert errors.error_class("invented_tomorrow") is errors.InternalError


def test_statuses_are_as_the_table_in_the_module_says() -> None:
    assert {cls.__name__: cls.http_status for cls in LEAVES} == STATUSES


def test_only_passing_troubles_invite_a_retry() -> None:
    assert {cls.__name__ for cls in LEAVES if cls.retryable} == RETRYABLE


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_is_drawn_in_the_tree(cls: type[TandemError]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_message_is_what_str_gives(cls: type[TandemError]) -> None:
    error = cls("the reason")
    assert str(error) == error.message == "the reason"
    assert error.request_id is None


def test_one_error_can_differ_from_its_class() -> None:
    lost = errors.WorkerLostError("decode-0 fell silent", request_id="r1", retryable=False)
    assert (lost.retryable, lost.request_id) == (False, "r1")
    assert errors.WorkerLostError.retryable


def test_errors_carry_what_a_client_can_act_on() -> None:
    assert errors.InvalidRequestError("no", field="top_p").field == "top_p"
    assert errors.ModelNotFoundError("no", field="model").field == "model"
    assert errors.OverloadedError("full", retry_after_s=2.5).retry_after_s == 2.5
    assert errors.HandoffError("refused", reason="digest").reason == "digest"
    assert errors.ConfigError("wrong", key="http.port").key == "http.port"
