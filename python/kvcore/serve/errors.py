"""Errors in the OpenAI shape, and the JSON that all answers are written in."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

from kvcore.router.state import Failure


def encode_json(value: Any) -> bytes:
    """JSON in UTF-8. A lone surrogate, which a client may send in a field's name and the command
    line in a model's, has no UTF-8: it is written as its escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class JsonAnswer(JSONResponse):
    """A JSON answer whose texts may be anything."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return encode_json(content)


class ApiError(Exception):
    """A refusal with its HTTP status; ``param`` names the field of the request at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON body, also sent as an event when an answer breaks while it streams."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JsonAnswer:
        """The HTTP answer."""
        headers = {}
        if self.retry_after_s > 0:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JsonAnswer(self.body(), status_code=self.status, headers=headers)


def internal_error() -> ApiError:
    """What a client hears of a fault of ours; the log has the rest."""
    text = "internal error of the server; its log has the details"
    return ApiError(500, text, kind="server_error")


_BY_CODE = {
    "no_capacity": (429, "rate_limit_error"),
    "no_workers": (503, "service_unavailable_error"),
    "shutting_down": (503, "service_unavailable_error"),
    "worker_lost": (503, "service_unavailable_error"),
    "timeout": (504, "timeout_error"),
    "invalid_argument": (400, "invalid_request_error"),
    "unsupported": (400, "invalid_request_error"),
    "out_of_pages": (400, "invalid_request_error"),
    "context_length_exceeded": (400, "invalid_request_error"),
}


def from_failure(failure: Failure) -> ApiError:
    """The HTTP form of the router's failure."""
    status, kind = _BY_CODE.get(failure.code, (500, "server_error"))
    return ApiError(
        status,
        failure.message,
        kind=kind,
        code=failure.code,
        retry_after_s=failure.retry_after_s,
    )
