"""Errors that a client gets, in the form of OpenAI's protocol."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from lite_runner.errors import ConfigError, RunnerError
from lite_runner.serving.engine import Busy, Stopped
from lite_runner.serving.schemas import FieldFault

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class GrammarError(ConfigError):
    """An answer cannot go on: its grammar takes too much, or leaves no token."""

    def __init__(self, field: str, message: str) -> None:
        """`field`: of the request that has the grammar."""
        super().__init__(f"{field}: {message}")
        self.field = field


def of_exception(error: Exception) -> ApiError:
    """What a client is told of an error of the engine or of a runner's part."""
    if isinstance(error, Busy):
        return ApiError(429, "too many requests are waiting; try again", code="queue_full")
    if isinstance(error, Stopped):
        return ApiError(503, str(error), code="unavailable")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than serve.request_timeout", code="timeout")
    if isinstance(error, GrammarError):
        return ApiError(400, error.message, error.field, "invalid_value")
    if isinstance(error, ConfigError):
        return ApiError(400, error.message)
    if isinstance(error, RunnerError):
        return ApiError(500, error.message)
    return ApiError(500, "internal error; the server's log has it")


def of_validation(error: ValidationError) -> ApiError:
    """The first fault of a request's body; where a field may be of several types, that of the type
    which fits it furthest."""
    faults = error.errors(include_url=False)
    field = faults[0]["loc"][:1]
    found = max((one for one in faults if one["loc"][:1] == field), key=lambda one: len(one["loc"]))
    parts = [str(part) for part in found["loc"] if not _is_type(part)]
    kind, message = found["type"], found["msg"]
    if isinstance(fault := found.get("ctx", {}).get("error"), FieldFault):
        parts.append(fault.field)
        message = fault.message
    place = ".".join(parts) or None
    if kind == "extra_forbidden":
        return ApiError(400, f"{place}: not supported", place, "unsupported_parameter")
    if kind == "missing":
        return ApiError(400, f"{place}: missing", place, "missing_required_parameter")
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {message}")
    return ApiError(400, f"{place}: {message}" if place else message, place, "invalid_value")


def _is_type(part: str | int) -> bool:
    """Whether a part of pydantic's location names a branch of a union, not a field."""
    return (isinstance(part, str) and not part.isidentifier()) or part in _BRANCHES


_BRANCHES = ("str", "int", "float", "bool", "ContentPart", "NamedTool")
