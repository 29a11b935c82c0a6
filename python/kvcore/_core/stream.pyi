from collections.abc import Sequence
from typing import Any

from .kernels import AttentionPlan
from .pages import PageSpec, Pool

_Share = tuple[int, int, int, int]
_Side = tuple[PageSpec, int, int]

class LoopbackHub:
    """Joins endpoints of one process without sockets, for tests and simulations."""

    def __init__(self) -> None: ...

class Endpoint:
    def __init__(
        self,
        pool: Pool,
        listen: Sequence[str],
        key: bytes,
        identity: str,
        checksums: int,
        pacing_bytes_per_s: int,
        max_inflight_bytes: int,
        max_write_bytes: int,
        allow_fallback: bool,
        keepalive_s: float,
        hub: LoopbackHub | None,
        flip_slice: int,
        layer_begin: int,
        head_begin: int,
        staging_bytes: int,
    ) -> None: ...
    def grant(
        self,
        request_id: bytes,
        pages: Sequence[int],
        num_tokens: int,
        first_token: int = 0,
        deadline_s: float = 60.0,
        shares: Sequence[_Share] = (),
        tell_layers: bool = False,
    ) -> bytes: ...
    def open(self, grant: bytes, pages: Sequence[int], share: int = 0) -> Sender: ...
    def release(self, request_id: bytes) -> bool: ...
    def _poll(self) -> list[tuple[str, bytes, Any, str, Any]]: ...
    def _stats(self) -> dict[str, Any]: ...
    def close(self) -> None:
        """Ends every hand-over, with the fence and the refs back, and joins the I/O thread.

        Grants are released without an event; senders fail with Cancelled, and ``poll`` still gives
        those events. Idempotent. Afterwards ``grant`` and ``open`` raise Cancelled.
        """
    @property
    def event_fd(self) -> int:
        """A descriptor that is readable while events wait; the endpoint's own."""
    @property
    def addresses(self) -> list[str]:
        """Where it listens, with the ports filled in."""

class Sender:
    """The prefill worker's side of one hand-over, made by :meth:`Endpoint.open`.

    Every method may be called from any thread and waits for no peer. What was published must stay
    as it is until the hand-over has ended; the endpoint holds the pages by io refs, so they may be
    given back at any time. Dropping a Sender aborts nothing: a hand-over that was not committed
    ends with the grant's deadline (Timeout), by ``abort`` or with ``Endpoint.close``. Once it has
    ended, also with a closed endpoint, calls are checked as before and have no effect.
    """

    def publish(
        self, layer: int, first_page: int, num_pages: int, valid_tokens_in_last: int
    ) -> None:
        """KV of ``layer`` is in place for pages [first_page, first_page + num_pages).

        They are sent from here on. To publish what has become whole is :meth:`publish_upto`.

        Args:
            layer: of this side's pool.
            first_page, num_pages: positions in the hand-over, counted in the receiver's pages; 0 is
                the one with the grant's first token. Not page ids.
            valid_tokens_in_last: of the last of them: the receiver's page_size, or for the last
                page of the hand-over what the grant says. A page is published once, when it is
                whole.

        Raises:
            InvalidArgument: outside the hand-over or this share, published before, or another
                number of tokens than the page must have.
        """
    def publish_upto(self, layer: int, end_token: int) -> None:
        """KV of ``layer`` is in place for all tokens before ``end_token``: publishes what is whole.

        Pages that were published are passed over, so it can be called after each chunk. A partly
        filled last page is whole when ``end_token`` reaches the end of the hand-over.

        Args:
            layer: of this side's pool; one that this share does not send does nothing.
            end_token: counted from the beginning of the sequence, as ``first_token`` is. Before the
                hand-over's first token, and past its last: nothing more than there is.

        Raises:
            InvalidArgument: no such layer.
        """
    def push_cached(self, first_page: int, num_pages: int) -> None:
        """:meth:`publish` of all layers at once, for pages found in a prefix cache.

        Raises InvalidArgument: outside the hand-over, or some of it was published before; nothing
        is sent then.
        """
    def push_cached_upto(self, end_token: int) -> None:
        """:meth:`publish_upto` of all layers at once, for a prefix found in a cache."""
    def mark(self) -> None:
        """The last attention of the prefill has ended now, for :class:`StreamStats`.

        The first call counts. :class:`LayerStep` does it.
        """
    def commit(self, payload: bytes = b"") -> None:
        """Nothing more comes. The receiver's "complete" follows when all has arrived.

        Args:
            payload: at most 256 KiB, given to the receiver with "complete": the first token, say.

        Raises:
            InvalidArgument: a slice is not published (:attr:`all_published`), the payload is too
                long, or it was committed before.
        """
    def abort(self, reason: str = "cancelled", code: str = "Cancelled") -> None:
        """Gives the hand-over up: both sides get "failed" with this code and reason.

        Args:
            reason: told to the receiver, at most 1,024 bytes of it.
            code: name of a class of ``kvcore.errors``.

        Nothing happens where it has ended. Raises InvalidArgument for another code.
        """
    @property
    def request_id(self) -> bytes:
        """The 16 bytes that name the hand-over."""
    @property
    def state(self) -> str:
        """ "connecting", "streaming", "committed" (the receiver was told), "done" or "failed"."""
    @property
    def error(self) -> tuple[str, str] | None:
        """(code, message) of a hand-over that failed, else None."""
    @property
    def bytes_sent(self) -> int:
        """Bytes that the receiver has acknowledged."""
    @property
    def transport(self) -> str:
        """ "shm", "tcp", "rdma" or "loopback"; "" until connected."""
    @property
    def all_published(self) -> bool:
        """Whether every slice has been published, so that :meth:`commit` is allowed."""
    @property
    def first_token(self) -> int:
        """Where the hand-over begins in the sequence."""
    @property
    def num_tokens(self) -> int:
        """Tokens of the hand-over."""
    @property
    def num_pages(self) -> int:
        """Pages of the hand-over, counted in the receiver's."""
    @property
    def kv_bytes(self) -> int:
        """Bytes that this share sends in all, headers included."""

class LayerStep:
    def __init__(self, plan: AttentionPlan, senders: Sequence[tuple[Sender, int]]) -> None: ...
    def run_ptr(
        self,
        layer: int,
        q_ptr: int,
        q_stride: int,
        k_ptr: int,
        k_stride: int,
        v_ptr: int,
        v_stride: int,
        out_ptr: int,
        lse_ptr: int,
        dtype: int,
    ) -> None:
        """Append, publish and attend of one layer by address; arguments as
        :meth:`AttentionPlan.run_ptr`.
        """
    @property
    def num_seqs(self) -> int:
        """Sequences of the prepared batch."""
    @property
    def num_tokens(self) -> int:
        """New tokens of the prepared batch."""
    @property
    def num_q_heads(self) -> int:
        """Query heads of the plan."""

def describe_grant(grant: bytes) -> dict[str, Any]: ...
def heads_of_rank(num_kv_heads: int, tp_degree: int, tp_rank: int) -> tuple[int, int]: ...
def plan_shares(
    senders: Sequence[_Side], receiver: _Side, spread: int = 0
) -> list[tuple[int, _Share]]: ...
