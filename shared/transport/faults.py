"""Errors on the wire: an error of `shared.errors` becomes a code and a sentence, and the same class again."""

from __future__ import annotations

from shared.errors import (
    ClientError,
    ContextTooLong,
    EngineDied,
    EngineError,
    InvalidRequest,
    KvrouteError,
    ModelNotFound,
    NoWorker,
    Outpaced,
    Overloaded,
    TransientError,
    WorkerLeft,
    WorkerLost,
)
from shared.messages import Fault

_ERRORS: tuple[type[ClientError] | type[TransientError], ...] = (
    ClientError,
    InvalidRequest,
    ContextTooLong,
    ModelNotFound,
    NoWorker,
    Overloaded,
    Outpaced,
    WorkerLost,
    EngineDied,
    WorkerLeft,
    EngineError,
)
MAX_FAULT_CHARS = 2000
_ERROR_OF_CODE = {error_type.code: error_type for error_type in _ERRORS}


def fault_of(error: KvrouteError) -> Fault:
    """What is sent for `error`. An error without a code of its own on the wire arrives as an `EngineError`."""
    message, param = _sendable(str(error)), getattr(error, "param", None)
    if len(message) > MAX_FAULT_CHARS:
        # Engines quote what they refuse, of any size, and an oversized frame would cost the whole connection.
        message = message[:MAX_FAULT_CHARS] + "..."
    param = None if param is None else _sendable(param)[:MAX_FAULT_CHARS]
    return Fault(error.code, message, getattr(error, "retry_after_s", None), param)


def error_of(fault: Fault) -> KvrouteError:
    """The error that `fault` stands for."""
    error_type = _ERROR_OF_CODE.get(fault.code)
    if error_type is None:
        return EngineError(f"{fault.code}: {fault.message}")
    if issubclass(error_type, TransientError):
        return error_type(fault.message, retry_after_s=fault.retry_after_s)
    return error_type(fault.message, param=fault.param)


def _sendable(text: str) -> str:
    """Text may quote names of files, which need not be UTF-8 and could not be sent."""
    return text.encode(errors="backslashreplace").decode()
