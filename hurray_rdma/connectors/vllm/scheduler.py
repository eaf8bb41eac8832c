"""The scheduler's side: which requests' pages are handed over, and what the workers are to do about it.

Knows requests, block IDs and parameters, and that is all: no memory, no engine. vLLM calls it between steps, so nothing
here waits. (*Block* is vLLM's word for page.)
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from hurray_rdma.connectors.vllm.handoff import (
    Layout,
    PushedPrefill,
    PushTarget,
    RemotePrefill,
    push_params,
    wants_remote_decode,
    wants_remote_prefill,
)
from hurray_rdma.connectors.vllm.steps import Load, Publish, Step
from hurray_rdma.control import parse_address
from hurray_rdma.errors import ConfigError

__all__ = ["Request", "SchedulerSide"]

_log = logging.getLogger(__name__)


class Request(Protocol):
    """Of vLLM's request what is used here."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int


class SchedulerSide:
    """One for each vLLM instance.

    Args:
        block_size: tokens of a block.
        layout: what is inside one, as of `Layout`.
        model: what the cache is of; the other instance must have the same.
        tp_size: tensor-parallel workers of this instance.
        lease_s, pushes: as of `ConnectorConfig`.
        push_to: as of `ConnectorConfig`; others are refused.
        token: of all instances; None is none.
        block_ids_of: the blocks that a running request has.
    """

    def __init__(
        self,
        *,
        block_size: int,
        layout: str,
        model: str,
        tp_size: int,
        lease_s: float,
        token: str | None,
        pushes: bool = False,
        push_to: Sequence[str] = (),
        block_ids_of: Callable[[str], list[int]],
    ) -> None:
        self._block_size = block_size
        self._layout = layout
        self._model = model
        self._tp_size = tp_size
        self._lease_s = lease_s
        self._token = token
        self._pushes = pushes
        self._push_to = {parse_address(address) for address in push_to}
        self._block_ids_of = block_ids_of
        self._instance = uuid.uuid4().hex
        self._addresses: tuple[str, ...] = ()
        self._prefilling: dict[str, Request] = {}
        self._published: set[str] = set()
        self._just_finished: set[str] = set()
        """Of those that were published: since the last step was put together."""
        self._loading: set[str] = set()
        self._held: set[str] = set()
        self._step = Step()

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Where the workers' engines listen, by rank."""
        self._addresses = tuple(addresses)

    def new_request(self, request: Request) -> None:
        """A request has come."""
        if wants_remote_decode(request.kv_transfer_params):
            # Its pages go over as soon as the prompt is computed; what came after it would be computed twice.
            request.max_tokens = 1
        remote, _ = self._remote(request)
        if isinstance(remote, RemotePrefill):
            self._held.add(request.request_id)
            self._step.hold[request.request_id] = remote

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the other side has beyond those computed here, and whether they come between steps.

        What is refused counts, too: its load fails at once, and vLLM's failure policy decides what becomes of it.
        """
        if not wants_remote_prefill(request.kv_transfer_params):
            return 0, False
        remote, _ = self._remote(request)
        count = (remote.num_tokens if remote is not None else request.num_prompt_tokens) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """A request has blocks, for tokens of the other side among them."""
        request_id, params = request.request_id, request.kv_transfer_params
        if wants_remote_decode(params):
            self._prefilling[request_id] = request
        if not wants_remote_prefill(params):
            return
        assert params is not None
        remote, refusal = self._remote(request)
        unwanted = self._unread(request) if remote is None or not num_external_tokens else None
        params["do_remote_prefill"] = False  # once: when it is preempted later, it is computed here
        self._release_hold(request_id)
        if unwanted is not None:
            self._step.decline.append(unwanted)
        if num_external_tokens:
            num_tokens = remote.num_tokens if remote is not None else request.num_prompt_tokens
            num_present = (num_tokens - num_external_tokens) // self._block_size
            blocks = block_ids[: -(-num_tokens // self._block_size)]
            self._step.load.append(Load(request_id, remote, refusal, blocks, num_present))
            self._loading.add(request_id)

    def take_step(self, num_scheduled_tokens: Mapping[str, int], *, preempted: Iterable[str] = ()) -> Step:
        """What the workers are to do in the step that was just put together.

        Args:
            num_scheduled_tokens: by request.
            preempted: requests whose blocks were taken away since the step before, and may be written to in this one.
        """
        for request_id in preempted:  # after a step that publishes them was put together
            if request_id in self._published:
                self._published.remove(request_id)
                self._step.preempted[request_id] = False
            elif request_id in self._just_finished:
                self._step.preempted[request_id] = True
        self._just_finished.clear()
        for request_id, request in list(self._prefilling.items()):
            count = num_scheduled_tokens.get(request_id, 0)
            if count and request.num_computed_tokens + count >= request.num_prompt_tokens:
                num_tokens = request.num_prompt_tokens
                block_ids = self._block_ids_of(request_id)[: -(-num_tokens // self._block_size)]
                del self._prefilling[request_id]
                target, refusal = self._target(request)
                if refusal:
                    _log.warning("request %s is not pushed: %s", request_id, refusal)
                    self._step.num_refused += 1
                    continue
                key = self._key(request_id) if target is None else self._pushed_key(target.key)
                self._step.publish.append(Publish(request_id, key, block_ids, num_tokens, target))
                self._published.add(request_id)
        step, self._step = self._step, Step()
        return step

    def received(self, request_ids: Iterable[str]) -> None:
        """Loads have ended."""
        self._loading.difference_update(request_ids)

    def finished(self, request: Request, *, complete: bool) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended.

        Args:
            request: which.
            complete: it was not aborted, and has not failed.

        Returns:
            Whether its blocks are still needed, until the workers say that it was sent; and what to tell the client.
        """
        request_id = request.request_id
        self._prefilling.pop(request_id, None)
        self._release_hold(request_id)
        if request_id in self._loading:
            self._step.abort.append(request_id)
        unread = self._unread(request)
        if unread is not None:
            self._step.decline.append(unread)
        if request_id not in self._published:
            return False, None
        self._published.remove(request_id)
        self._just_finished.add(request_id)
        if not complete:
            self._step.retire.append(request_id)
            return True, None
        target, _ = self._target(request)
        if target is not None:
            return True, push_params(target.key, token=self._token, block_size=self._block_size)
        remote = RemotePrefill(
            key=self._key(request_id),
            addresses=self._addresses,
            num_tokens=request.num_prompt_tokens,
            model=self._model,
            lease_s=self._lease_s,
            block_size=self._block_size,
            layout=self._layout,
        )
        return True, remote.to_params(token=self._token)

    def _key(self, request_id: str) -> str:
        """Request IDs come again after a restart."""
        return f"{self._instance}/{request_id}"

    def _pushed_key(self, key: str) -> str:
        """The two sides make the same of a proxy's key only where they fit together: what another model's instance
        pushes is never expected."""
        return f"{key} of {self._model}, {self._layout}"

    def _target(self, request: Request) -> tuple[PushTarget | None, str]:
        """Where a prompt is pushed, None where it is read; and why it cannot be."""
        if not self._pushes:
            return None, ""
        try:
            params, size = request.kv_transfer_params or {}, self._block_size
            target = PushTarget.from_params(params, block_size=size, token=self._token)
            if len(target.addresses) != self._tp_size:
                raise ConfigError(
                    f"must be the {self._tp_size} workers of this side",
                    field="len(remote_addresses)",
                    value=len(target.addresses),
                )
            for address in target.addresses:
                if parse_address(address) not in self._push_to:
                    raise ConfigError("is not one of push_to", field="remote_addresses", value=address)
        except ConfigError as error:
            return None, str(error)
        return target, ""

    def _release_hold(self, request_id: str) -> None:
        if request_id in self._held:
            self._held.remove(request_id)
            self._step.hold.pop(request_id, None)
            self._step.unhold.append(request_id)

    def _remote(self, request: Request) -> tuple[RemotePrefill | PushedPrefill | None, str]:
        """Where the pages of its prompt are, or why they cannot be had."""
        if not wants_remote_prefill(request.kv_transfer_params):
            return None, ""
        try:
            remote = self._told(request)
            if isinstance(remote, RemotePrefill):
                self._check(remote, request)
        except ConfigError as error:
            return None, str(error)
        return remote, ""

    def _unread(self, request: Request) -> RemotePrefill | PushedPrefill | None:
        """What the other side keeps for a request that reads nothing of it, whether it could or not."""
        if not wants_remote_prefill(request.kv_transfer_params):
            return None
        try:
            return self._told(request)
        except ConfigError:
            return None

    def _told(self, request: Request) -> RemotePrefill | PushedPrefill:
        """What its parameters say.

        Raises:
            ConfigError: they cannot be believed.
        """
        params = request.kv_transfer_params or {}
        if not self._pushes:
            return RemotePrefill.from_params(params, token=self._token)
        pushed = PushedPrefill.from_params(
            params, num_tokens=request.num_prompt_tokens, block_size=self._block_size, token=self._token
        )
        return replace(pushed, key=self._pushed_key(pushed.key))

    def _check(self, remote: RemotePrefill, request: Request) -> None:
        for name, value, here in (
            ("model", remote.model, self._model),
            ("tensor_parallel_size", len(remote.addresses), self._tp_size),
            ("layout of the cache", remote.layout, self._layout),
            *([] if self._layout in tuple(Layout) else [("block_size", remote.block_size, self._block_size)]),
        ):
            if value != here:
                raise ConfigError(f"of the prefill side; this side has {here!r}", field=name, value=value)
        if remote.num_tokens > request.num_prompt_tokens:
            raise ConfigError(
                f"is above the {request.num_prompt_tokens} tokens of the prompt here",
                field="remote_num_tokens",
                value=remote.num_tokens,
            )
