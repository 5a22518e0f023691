"""How errors are told to OpenAI's clients: status, body, and whether it makes sense to try again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from shared.errors import (
    AttemptsExhausted,
    BodyTooLarge,
    ClientError,
    DeadlineExceeded,
    EngineError,
    Forbidden,
    KvrouteError,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    Overloaded,
    RequestTimeout,
    TransientError,
    Unauthorized,
)

RETRY_S = 1.0
"""When to come back after an error that names no time itself."""

# Status and type of each error; an error that is not here has those of its nearest ancestor that is.
_STATUS_OF: Mapping[type[BaseException], tuple[int, str]] = {
    ClientError: (400, "invalid_request_error"),
    Unauthorized: (401, "authentication_error"),
    Forbidden: (403, "permission_error"),
    ModelNotFound: (404, "invalid_request_error"),
    NotFound: (404, "invalid_request_error"),
    MethodNotAllowed: (405, "invalid_request_error"),
    RequestTimeout: (408, "invalid_request_error"),
    BodyTooLarge: (413, "invalid_request_error"),
    Overloaded: (429, "rate_limit_error"),
    DeadlineExceeded: (504, "server_error"),
    TransientError: (503, "server_error"),
    EngineError: (500, "server_error"),
    BaseException: (500, "server_error"),
}


def status_of(error: BaseException) -> int:
    """The HTTP status that tells of `error`."""
    return _status_and_type(error)[0]


def retry_headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    """Headers that tell clients whether to try again, and when."""
    if not _may_succeed_later(error):
        return [(b"x-should-retry", b"false")]
    wait_s = error.retry_after_s if isinstance(error, TransientError) else None
    wait_s = RETRY_S if wait_s is None else wait_s
    return [
        (b"x-should-retry", b"true"),
        (b"retry-after-ms", b"%d" % math.ceil(1e3 * wait_s)),
        (b"retry-after", b"%d" % math.ceil(wait_s)),
    ]


def error_body(error: BaseException) -> dict[str, Any]:
    """Body of an error response. Says nothing of errors that nobody raised on purpose."""
    is_ours = isinstance(error, KvrouteError)
    return {
        "error": {
            "message": str(error) if is_ours else "internal error",
            "type": _status_and_type(error)[1],
            "param": getattr(error, "param", None) if is_ours else None,
            "code": error.code if isinstance(error, KvrouteError) else KvrouteError.code,
        }
    }


def body_of(message: str, code: str) -> bytes:
    """Encoded body of an error that has no class, since it never gets as far as a request."""
    return json.dumps(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    ).encode()


def _may_succeed_later(error: BaseException) -> bool:
    """Whether repeating the same request makes sense. One that workers die of is not to be tried on more of them."""
    return isinstance(error, TransientError) and not isinstance(error, AttemptsExhausted)


def _status_and_type(error: BaseException) -> tuple[int, str]:
    return next(_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF)
