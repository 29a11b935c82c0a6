from typing import Any

DEFAULT_MAX_FRAME_BYTES: int

def schema() -> dict[str, dict[str, tuple[str, bool, Any]]]: ...
def encode(type: str, fields: dict[str, Any]) -> bytes: ...
def decode(body: bytes | bytearray | memoryview) -> tuple[str, dict[str, Any]]: ...

class Session:
    """One authenticated conversation: handshake, then frames.

    Bytes in, messages out; it owns no socket. After an error from ``feed`` it is dead. ``side``:
    "initiator" (who connects) or "responder"; ``key``: 0 or 32 bytes; ``role``: told to the peer,
    at most 64 bytes of UTF-8. Raises InvalidArgument.
    """

    def __init__(
        self, side: str, key: bytes = b"", role: str = "", max_frame_bytes: int = ...
    ) -> None: ...
    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[str, dict[str, Any]]]:
        """Takes what was received; the messages that are complete, (type, fields) each.

        What the handshake answers is in :meth:`take_output`. Raises Unauthenticated, Corrupt,
        Unsupported: close the connection then; TransportError after one of those.
        """
    def take_output(self) -> bytes:
        """Bytes of the handshake that must be sent now; empty when there are none."""
    def encode(self, type: str, fields: dict[str, Any]) -> bytes:
        """One message as a frame, to be sent after all that was encoded before it.

        Raises InvalidArgument for an unknown type, or a field that is missing, unknown or does not
        fit; TransportError before the handshake has ended.
        """
    @property
    def established(self) -> bool:
        """Whether the peer has proved the key."""
    @property
    def peer_role(self) -> str:
        """What the peer told of itself; "" before it is established."""
    @property
    def mid_frame(self) -> bool:
        """Whether a frame is incomplete: the end of the stream now would cut it."""
