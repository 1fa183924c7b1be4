"""vLLM's own scheduler and KV manager on a virtual clock: no engine, no model, no kernel.

Run by a Python that has vLLM (docs/capture.md, "vLLM on a CPU"). Standard input holds cases, JSON:
``settings``, ``requests`` and ``costs``; what happened to each is written as JSON. Scheduling, KV
blocks, prefix caching and preemption are vLLM's; the clock, the tokens and their times are not.
"""

import importlib.util
import json
import math
import os
import sys
import tempfile
from collections import deque
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

#: The connector of ``--backend vllm``, which moves nothing; vLLM imports it by its name.
_CONNECTOR = Path(__file__).parents[2] / "simulator" / "engine_code" / "vllm_connector.py"
#: A model that is never loaded.
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 1000, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1 << 20, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
_OWN = 1 << 40  # token ids of outputs, no two alike
_HASH = get_hash_fn_by_name("sha256")


def make_scheduler(folder, settings):
    """Return vLLM's scheduler with ``settings``."""
    get = settings.get
    size, seats, budget = settings["block_size"], settings["seats"], settings["budget"]
    longest, drafts = settings["max_model_len"], get("drafts", 0)
    model = ModelConfig(
        model=folder, skip_tokenizer_init=True, max_model_len=longest, dtype="float32"
    )
    scheduling = SchedulerConfig(
        max_num_seqs=seats, max_num_batched_tokens=budget, max_model_len=longest,
        is_encoder_decoder=False, async_scheduling=bool(get("async")), enable_chunked_prefill=True,
        long_prefill_token_threshold=get("threshold") or 0,
        policy="priority" if get("priority") else "fcfs",
    )  # fmt: skip
    cache = CacheConfig(block_size=size, enable_prefix_caching=bool(get("prefix_caching", True)))
    cache.num_gpu_blocks = settings["blocks"] + 1  # one of them is the null block
    config = VllmConfig(
        model_config=model, scheduler_config=scheduling, cache_config=cache,
        parallel_config=ParallelConfig(), device_config=DeviceConfig("cpu"),
    )  # fmt: skip
    if "remote" not in settings:  # vLLM turns it off on a CPU
        config.scheduler_config.async_scheduling = bool(get("async"))
    if "remote" in settings:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="SimulatedConnector", kv_role="kv_consumer",
            kv_connector_module_path=connector_module(),
        )  # fmt: skip
    if drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2,
            target_model_config=model, target_parallel_config=ParallelConfig(),
        )  # fmt: skip
        if "remote" in settings:  # a head, which computes the last cached block again
            config.speculative_config.method = "mtp"
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs(settings))]
    kv = KVCacheConfig(
        num_blocks=settings["blocks"] + 1, kv_cache_tensors=[], kv_cache_groups=groups
    )
    if not get("dense") and hasattr(cache, "prefix_cache_retention_interval"):
        kv.prefix_cache_retention_interval = cache.prefix_cache_retention_interval
    kind = AsyncScheduler if get("async") else Scheduler
    made = kind(
        vllm_config=config, kv_cache_config=kv, log_stats=False, hash_block_size=size,
        block_size=math.lcm(*(group.kv_cache_spec.block_size for group in groups)),
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip
    made.num_lookahead_tokens = get("lookahead", 0)
    return made


def connector_module():
    """Import the connector under a name of its own, and return that."""
    spec = importlib.util.spec_from_file_location("vllm_connector", _CONNECTOR)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return spec.name


def specs(settings):
    """Return the KV cache groups: full attention, and those of sliding windows and of states."""
    size = settings["block_size"]
    about = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [FullAttentionSpec(**about)]
    for window in settings.get("windows", ()):
        groups.append(SlidingWindowSpec(**about, sliding_window=window))
    page = groups[0].page_size_bytes
    for _ in range(settings.get("states", 0)):
        groups.append(
            MambaSpec(
                shapes=((page,),), dtypes=(torch.uint8,), block_size=settings["max_model_len"]
            )
        )
    return groups


class Oracle:
    """One engine: two steps are in flight where it schedules ahead, else one."""

    def __init__(self, case, folder):
        self.settings, self.costs = case["settings"], case["costs"]
        self.scheduler = make_scheduler(folder, self.settings)
        self.given = case["requests"]
        self.coming = deque(sorted(range(len(self.given)), key=lambda i: self.given[i]["at"]))
        self.ahead = 2 if self.settings.get("async") else 1
        self.flying, self.steps, self.now = deque(), [], 0.0
        self.preempts = False  # in the last plan
        self.seen = [{"token_s": []} for _ in self.given]
        self.live, self.hasher = {}, None
        #: Requests whose KV cache comes from another engine: to be loaded, loading until, begun.
        self.to_load, self.loading, self.loaded = [], {}, set()
        if self.scheduler.connector is not None:
            self.scheduler.connector.fetches = self.fetches
        if self.settings.get("prefix_caching", True):
            init_none_hash(_HASH)
            self.hasher = get_request_block_hasher(self.settings["block_size"], _HASH)

    def add(self, i):
        r = self.given[i]
        prompt = r.get("tokens") or [_OWN + (i << 20) + k for k in range(r["prompt"])]
        request = Request(
            request_id=str(i), prompt_token_ids=prompt, pooling_params=None, arrival_time=r["at"],
            sampling_params=SamplingParams(
                max_tokens=r["output"], min_tokens=r["output"], ignore_eos=True
            ),
            priority=r.get("priority", 0), block_hasher=self.hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)
        self.live[str(i)] = request

    def fetches(self, rid, cached):
        """Whether the KV cache of a request is loaded, where ``cached`` of its tokens are here."""
        if rid not in self.loaded:
            self.seen[int(rid)]["cached"] = cached
        return rid not in self.loaded

    def start_loads(self, requests):
        """Let KV caches come."""
        self.loaded.update(requests)
        self.loading |= dict.fromkeys(requests, self.now + self.settings.get("remote", 0.0))

    def events(self):
        """Return which KV caches have come since a step said so."""
        here = {rid for rid, at in self.loading.items() if at <= self.now}
        self.loading = {rid: at for rid, at in self.loading.items() if rid not in here}
        return KVConnectorOutput(finished_recving=here) if here else None

    def receive(self):
        """Let an engine that computes nothing see which KV caches are here."""
        self.now = max(self.now, min(self.loading.values()))
        planned = self.scheduler.schedule()
        assert not planned.num_scheduled_tokens
        self.scheduler.update_from_output(
            planned, ModelRunnerOutput([], {}, kv_connector_output=self.events())
        )

    def schedule(self):
        """Plan a step, and note what each request computes in it; False if there is none."""
        while self.coming and self.given[self.coming[0]]["at"] <= self.now:
            self.add(self.coming.popleft())
        self.preempts = False
        if not self.scheduler.has_unfinished_requests():
            return False
        planned = self.scheduler.schedule()
        self.preempts = bool(planned.preempted_req_ids)
        loads = []
        if self.scheduler.connector is not None:
            loads, self.scheduler.connector.loading = self.scheduler.connector.loading, []
        for new in planned.scheduled_new_reqs:
            self.seen[int(new.req_id)].setdefault("cached", new.num_computed_tokens)
        if not planned.num_scheduled_tokens:
            if self.flying:
                self.to_load += loads
            else:
                self.start_loads(loads)
            return False
        gets = {rid: not self.live[rid].is_prefill_chunk for rid in planned.num_scheduled_tokens}
        self.flying.append((planned, gets, loads))
        return True

    def end_step(self):
        """Let the first step in flight take its time, and hand its tokens over."""
        planned, gets, loads = self.flying.popleft()
        self.start_loads(loads)
        tokens = planned.num_scheduled_tokens
        start, ids = self.now, list(tokens)
        self.now += self.costs["step"] + self.costs["token"] * sum(tokens.values())
        # A request that ended in the step before may be computed once more; it gets nothing.
        n = sum(gets[rid] and not self.live[rid].is_finished() for rid in ids)
        self.steps.append([start, self.now, n, sum(tokens.values())])
        sampled = [self.outputs(planned, rid) if gets[rid] else [] for rid in ids]
        before = {rid: self.live[rid].num_output_tokens for rid in ids}
        self.scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=ids, req_id_to_index={rid: k for k, rid in enumerate(ids)},
                sampled_token_ids=sampled, kv_connector_output=self.events(),
            ),
        )  # fmt: skip
        self.start_loads(self.to_load)  # of a step without tokens
        self.to_load = []
        drafting = []
        for rid in ids:
            got = self.live[rid].num_output_tokens - before[rid]
            self.seen[int(rid)]["token_s"] += [self.now] * got
            if gets[rid] and not self.live[rid].is_finished():
                drafting.append(rid)
        k = self.settings.get("drafts", 0)
        if k and self.ahead == 1 and drafting:
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(drafting, [[7] * k] * len(drafting))
            )

    def outputs(self, planned, rid):
        """Return the tokens that a request gets: one, and the drafts that are accepted in turn."""
        i, request = int(rid), self.live[rid]
        drafts = len(planned.scheduled_spec_decode_tokens.get(rid, ()))
        begins = {new.req_id for new in planned.scheduled_new_reqs}
        begins |= set(planned.scheduled_cached_reqs.resumed_req_ids)
        real = drafts and rid not in begins  # else they are placeholders
        accepted, at = 0, request.num_output_tokens
        if real:
            share = share_of(self.settings.get("key", 0), i, at)
            accepted = sum(share < rate for rate in self.settings["rates"][:drafts])
        return [_OWN + (i << 20) + (1 << 19) + at + k for k in range(accepted + 1)]

    def run(self):
        while self.coming or self.flying or self.scheduler.has_unfinished_requests():
            while len(self.flying) < self.ahead and self.schedule():
                pass
            if self.flying:
                self.end_step()
                continue
            coming = self.given[self.coming[0]]["at"] if self.coming else math.inf
            if self.preempts:
                continue  # it has planned nothing but preemptions, and plans again at once
            if self.loading and min(self.loading.values()) <= coming:
                self.receive()
            elif self.now < coming < math.inf:
                self.now = coming
            elif not self.schedule():
                return {"stalls": self.now}  # requests wait, and it plans nothing
        for i, seen in enumerate(self.seen):
            seen["preemptions"] = self.live[str(i)].num_preemptions
        return {"steps": self.steps, "requests": self.seen}


def share_of(key, number, position):
    """SplitMix64 of a key, a request and a position, as the simulator's verification draws it."""
    x = key + number * 0x9E3779B97F4A7C15
    x = (x + position * 0xD1B54A32D192ED03) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return ((x ^ x >> 31) >> 11) / 2**53


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr  # vLLM prints
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        json.dump([Oracle(case, folder).run() for case in json.load(sys.stdin)], out)
