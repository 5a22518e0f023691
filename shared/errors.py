"""Every error that kvroute raises on purpose.

KvrouteError
+-- ClientError                 the caller's request is at fault; repeating it changes nothing
|   +-- InvalidRequest          a field is missing, of the wrong type or out of range
|   +-- ContextTooLong          prompt and answer do not fit into the model's context
|   +-- ModelNotFound           the request names a model that is not served
|   +-- Unauthorized            the caller has shown no valid key
|   +-- Forbidden               the caller's key is valid, and not for this
|   +-- NotFound                there is nothing at that address
|   |   +-- MethodNotAllowed    there is, but not for this method
|   +-- BodyTooLarge            the body is over a limit
|   +-- PinRefused              pinned blocks would exceed their budget
|   +-- UnknownPin              nothing is pinned under that name
+-- ConfigError                 a flag, variable or file of ours is wrong
+-- TransientError              the same request may well succeed later
|   +-- Overloaded              queues are full
|   |   +-- QueueFull           the router's own, and nothing has been tried
|   +-- OutOfBlocks             the block pool has no room
|   +-- NoWorker                there is no worker
|   +-- WorkerLost              the worker or the way to it died under the request
|   |   +-- WorkerLeft          it ended on purpose, having been told to
|   |   +-- WorkerSilent        it says nothing any more, though the connection stands
|   +-- Outpaced                others' requests reached the worker first
|   +-- EngineError             the engine failed on this request
|   +-- StreamBroken            an answer broke off and cannot go on elsewhere
|   +-- AttemptsExhausted       every worker that the request was tried on failed under it
|   +-- DeadlineExceeded        the request's own deadline passed
|   +-- RequestTimeout          the body did not arrive in time
|   +-- DirectoryUnavailable    the store did not answer in time
+-- ProtocolError               a peer sent bytes that are not of this protocol
|   +-- AuthenticationFailed    a peer does not know the shared secret
+-- OutputError                 a result could not be written to its file
+-- WorkerIdTaken               a live lease already holds this worker id
"""

from __future__ import annotations


class KvrouteError(Exception):
    """Root of all errors raised on purpose."""

    code = "internal_error"


class ClientError(KvrouteError):
    """The caller's request is at fault. `param` names the offending field, where there is one."""

    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(ClientError):
    """A field is missing, of the wrong type or out of range."""

    code = "invalid_value"


class ContextTooLong(ClientError):
    """Prompt and answer together do not fit into the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(ClientError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class Unauthorized(ClientError):
    """The caller has shown no valid key."""

    code = "invalid_api_key"


class Forbidden(ClientError):
    """The caller's key is a valid one, and not for this."""

    code = "permission_denied"


class NotFound(ClientError):
    """There is nothing at the address that the request names."""

    code = "not_found"


class MethodNotAllowed(NotFound):
    """There is something at that address, but not for this method."""

    code = "method_not_allowed"


class BodyTooLarge(ClientError):
    """The request's body is over a limit; says which."""

    code = "request_too_large"


class ConfigError(KvrouteError):
    """A flag, an environment variable or a configuration file of ours is wrong."""

    code = "invalid_configuration"


class PinRefused(ClientError):
    """The pinned blocks would exceed their budget; says the figures."""

    code = "pin_refused"


class UnknownPin(ClientError):
    """Nothing is pinned under the name."""

    code = "unknown_pin"


class TransientError(KvrouteError):
    """The same request may well succeed later. `retry_after_s` says when, where that is known."""

    code = "service_unavailable"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(TransientError):
    """The queues that the request would wait in are full."""

    code = "rate_limit_exceeded"


class QueueFull(Overloaded):
    """The router's queue has no place for the request, or had to give its place to a more urgent one.

    No worker was asked, so nothing speaks against the request.
    """


class OutOfBlocks(TransientError):
    """The block pool has no room for a sequence now; says the figures."""

    code = "out_of_blocks"


class NoWorker(TransientError):
    """There is no worker: neither this request nor any other can be answered until one comes."""


class WorkerLost(TransientError):
    """The worker, or the connection to it, died while the request was under way."""

    code = "worker_lost"


class EngineDied(WorkerLost):
    """The worker says that its engine has died: it will answer nothing more."""

    code = "engine_died"


class WorkerLeft(WorkerLost):
    """The worker ended on purpose, with the request under way: nothing speaks against the request."""

    code = "worker_left"


class WorkerSilent(WorkerLost):
    """The worker has told nothing for so long that the request goes elsewhere: it may be stuck, or come back."""

    code = "worker_silent"


class Outpaced(TransientError):
    """The worker has more to prefill than the submit allowed: others came first. Speaks against nobody."""

    code = "outpaced"


class EngineError(TransientError):
    """The engine failed on this request."""

    code = "engine_error"


class StreamBroken(TransientError):
    """An answer broke off after its first tokens, and cannot go on elsewhere; says why."""

    code = "stream_broken"


class AttemptsExhausted(TransientError):
    """Every worker that the request was tried on failed under it, so that it may be what they die of; names them."""

    code = "attempts_exhausted"


class DeadlineExceeded(TransientError):
    """The request's deadline has passed, or cannot be met."""

    code = "deadline_exceeded"


class RequestTimeout(TransientError):
    """The request's body did not arrive in time."""

    code = "request_timeout"


class DirectoryUnavailable(TransientError):
    """The directory's store did not answer within its deadline, or refused."""

    code = "directory_unavailable"


class ProtocolError(KvrouteError):
    """A peer sent bytes that are not of this protocol or break its limits."""

    code = "protocol_error"


class AuthenticationFailed(ProtocolError):
    """A peer could not prove that it knows the shared secret."""

    code = "authentication_failed"


class OutputError(KvrouteError):
    """A result could not be written to its file; what is there already is whole."""

    code = "output_failed"


class WorkerIdTaken(KvrouteError):
    """A live lease of another process already holds this worker id."""

    code = "worker_id_taken"
