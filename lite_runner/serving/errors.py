"""Errors that a client gets, in the form of OpenAI's protocol, or of Anthropic's."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from lite_runner.errors import ConfigError, EnvironmentFault, RunnerError
from lite_runner.serving.engine import Busy, Stopped
from lite_runner.serving.schemas import FieldError
from lite_runner.structured.grammars import GrammarError
from lite_runner.system.memory import shortage_error

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# The same kinds in Anthropic's protocol.
_ANTHROPICS = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
RETRY_AFTER_S = 1
MAX_MESSAGE = 1000  # characters; what a client sent may be as long as a body
MAX_PARAM = 200
# The folders of an absolute path.
_FOLDERS = re.compile(r"""(?<![^\s'"(=:,])/(?:[^/\n:'"]+/)+""")
_MOST_FAULTS = 100  # of a body; each takes some 10 us to tell


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self._retry_after = retry_after
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status == 408:
            return {"Connection": "close"}
        return {"Retry-After": str(self._retry_after)} if self.status in (429, 503) else {}

    @property
    def kind(self) -> str:
        return _TYPES.get(self.status, "server_error")

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON of the answer, in the protocol of the endpoint."""
        if is_anthropics(path):
            fields = {"type": _ANTHROPICS.get(self.kind, self.kind)}
            message = shortened(self.message, MAX_MESSAGE)
            return {"type": "error", "error": {**fields, "message": message}}
        return {
            "error": {
                "message": shortened(self.message, MAX_MESSAGE),
                "type": self.kind,
                "param": self.param and shortened(self.param, MAX_PARAM),
                "code": self.code,
            }
        }


def is_anthropics(path: str) -> bool:
    """True for an endpoint of Anthropic's protocol."""
    return path.startswith("/v1/messages")


OUT_OF_MEMORY = ApiError(503, "out of memory", code="unavailable")


def shortened(text: str, most: int) -> str:
    """`text` without its middle, where it has more characters than `most`."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end]} ... {text[-end:]}"


def client_message(error: RunnerError) -> str:
    """The message of an error for clients, without this machine's folders."""
    return _FOLDERS.sub("", error.message)


def of_exception(error: Exception) -> ApiError:
    """The error that a client gets for an exception of the engine or of another part of
    lite-runner."""
    if isinstance(error, Busy):
        return ApiError(429, "too many requests are waiting; try again", code="queue_full")
    if isinstance(error, Stopped):
        return ApiError(503, str(error), code="unavailable")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than serve.request_timeout", code="timeout")
    if shortage_error(error) is not None:
        return OUT_OF_MEMORY
    if isinstance(error, GrammarError):
        return ApiError(400, error.message, error.field, "invalid_value")  # of its own text
    if isinstance(error, ConfigError):
        return ApiError(400, client_message(error))
    if isinstance(error, EnvironmentFault):
        return ApiError(503, client_message(error), code="unavailable")
    if isinstance(error, RunnerError):
        return ApiError(500, client_message(error))
    return ApiError(500, "internal error; the server's log has it")


def of_validation(error: ValidationError) -> ApiError:
    """The first error of a request's body; where a field may be of several types, that of the type
    which fits it furthest."""
    if (count := error.error_count()) > _MOST_FAULTS:
        return ApiError(400, f"the body has {count} errors", code="invalid_value")
    errors = error.errors(include_url=False)
    field = errors[0]["loc"][:1]
    found = max((one for one in errors if one["loc"][:1] == field), key=lambda one: len(one["loc"]))
    parts = [str(part) for part in found["loc"] if not _is_type(part)]
    kind, message = found["type"], found["msg"]
    if isinstance(cause := found.get("ctx", {}).get("error"), FieldError):
        parts.append(cause.field)
        message = cause.message
    place = ".".join(parts) or None
    if kind == "extra_forbidden":
        return ApiError(400, f"{place}: not supported", place, "unsupported_parameter")
    if kind == "unsupported":
        return ApiError(400, f"{place}: {message}", place, "unsupported_parameter")
    if kind in ("literal_error", "union_tag_invalid"):
        given = found["ctx"].get("tag") or found["input"]
        wanted = found["ctx"].get("expected") or found["ctx"]["expected_tags"]
        shown = repr(shortened(given, 100)) if isinstance(given, str) else f"a {_kind(given)}"
        return ApiError(400, f"{place}: got {shown}, expected {wanted}", place, "invalid_value")
    if kind == "missing":
        return ApiError(400, f"{place}: missing", place, "missing_required_parameter")
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {message}")
    return ApiError(400, f"{place}: {message}" if place else message, place, "invalid_value")


def _kind(given: Any) -> str:
    """JSON's name of a value's type."""
    names = {dict: "object", list: "array", bool: "boolean", type(None): "null"}
    return names.get(type(given), "number")


def _is_type(part: str | int) -> bool:
    """True if a part of pydantic's location names a branch of a union, not a field."""
    return (isinstance(part, str) and not part.isidentifier()) or part in _BRANCHES


_BRANCHES = (
    *("str", "int", "float", "bool", "ContentPart", "Document"),
    *("NamedTool", "AllowedChoice", "ChosenTool", "AllowedTools"),
)
