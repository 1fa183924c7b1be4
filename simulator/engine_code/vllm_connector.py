"""A KV connector of vLLM that moves nothing: the simulator's links move KV caches.

vLLM loads it by its path (``kv_connector_module_path``); it needs vLLM. The rules are those of
vLLM's ``NixlConnector``: a decode engine loads all of a prompt that it has not cached, once; a
prefill engine keeps the blocks of a computed prompt until they have been read."""

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus


class SimulatedConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side of a connector; there is no worker's side."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loading: list[str] = []  #: requests whose KV cache is to be loaded, not yet begun
        self.held: set[str] = set()  #: finished requests whose blocks have not been read
        self.fetches: Callable[[str, int], bool] = lambda request, cached: False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens of a prompt to load, and whether the engine goes on meanwhile."""
        left = request.num_prompt_tokens - num_computed_tokens
        if left > 0 and self.fetches(request.request_id, num_computed_tokens):
            return left, True
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int, **_: Any
    ) -> None:
        """Note that a request has the blocks to load its KV cache into."""
        if num_external_tokens > 0:
            self.loading.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return nothing to tell a worker."""
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks of a finished request stay until they have been read."""
        hands_over = self._kv_transfer_config.kv_role == "kv_producer"
        stays = hands_over and request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        if stays:
            self.held.add(request.request_id)
        return stays, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""
