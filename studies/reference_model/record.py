"""Routing of the reference model: prompts, sampled continuations and the experts chosen."""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from eldr_sim.arrays import Array, Bools, Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.gate_scores import GateScores
from eldr_sim.traces.routing.writer import write_trace
from studies.reference_model.data import Documents, encode
from studies.reference_model.export import load_checkpoint
from studies.reference_model.model import KVCache, Qwen3Moe, SparseMLP


@dataclass(frozen=True)
class RecordConfig:
    """Requests to generate, and how."""

    calibration: int = 1050  #: calibration requests, over the domains equally
    serving: int = 1250  #: serving requests, over the domains equally
    prompt_lengths: tuple[int, ...] = (64, 80, 96)  #: tokens; the requests take them in turn
    output_len: int = 192  #: tokens to generate
    temperature: float = 0.8  #: temperature of the sampling; the end of a document is never sampled
    batch: int = 256  #: requests that are generated together, all with equally long prompts
    seed: int = 0
    exact: bool = False  #: compute in float32 rather than bfloat16
    device: str = "cpu"


@dataclass(frozen=True)
class Prompts:
    """Prompts cut from held-out documents, the calibration requests before the serving ones."""

    tokens: list[NDArray[np.uint16]]  #: token ids of each prompt
    domain: Ints  #: index of the domain, ``[n]``
    is_calibration: Bools  #: ``[n]``
    per_document: int  #: most prompts that were cut from one document; they do not overlap


@dataclass(frozen=True)
class RecordedRouting:
    """Routing of requests; the rows of one follow those of the one before."""

    prompts: Prompts  #: the prompts
    output_len: int  #: tokens that each request generated
    #: uint8 or uint16 ``[tokens, layers, top_k]``, highest gate weight first: a row for each prompt
    #: token, then one for the forward pass of each generated token.
    experts: Array
    token_ids: NDArray[np.uint16]  #: uint16 ``[tokens]``
    #: float32 ``[n, layers, experts]``: the gate's softmax and raw logits, summed over prompts.
    gate_prob: NDArray[np.float32]
    gate_logit: NDArray[np.float32]

    @property
    def prompt_len(self) -> Ints:
        """Prompt tokens of each request, ``[n]``."""
        return np.array([len(ids) for ids in self.prompts.tokens], dtype=np.int64)


def choose_prompts(documents: Documents, tokenizer: Tokenizer, config: RecordConfig) -> Prompts:
    """Cut prompts from the calibration's and serving's own held-out documents: one from each, then
    a second, and so on. Raises InputError if a setting makes no sense, or a domain's documents are
    too few."""
    for name in ("calibration", "serving", "output_len", "batch", "temperature"):
        if getattr(config, name) <= 0:
            raise InputError(name, f"got {getattr(config, name)}", "more than 0")
    if not config.prompt_lengths or min(config.prompt_lengths) < 1:
        raise InputError("prompt_lengths", f"got {list(config.prompt_lengths)}", "at least 1 each")
    rng = np.random.default_rng([config.seed, 0])
    tokens: list[NDArray[np.uint16]] = []
    domain: list[int] = []
    most = 0
    for part, count in (("calibration", config.calibration), ("serving", config.serving)):
        n = len(documents.domains)
        need = [count // n + (d < count % n) for d in range(n)]
        texts: dict[str, list[str]] = getattr(documents, part)
        cut = []
        for d, name in enumerate(documents.domains):
            longest = max(config.prompt_lengths)
            rounds = _windows(encode(tokenizer, texts[name]), longest, rng)
            windows = [(window, turn) for turn, row in enumerate(rounds) for window in row]
            if len(windows) < need[d]:
                raise InputError(
                    f"{name}.txt",
                    f"its {len(texts[name])} {part} documents hold {len(windows)} prompts of "
                    f"{longest} tokens, {need[d]} are asked for",
                    "fewer requests, or more held-out documents",
                )
            most = max(most, *(turn + 1 for _, turn in windows[: need[d]]))
            cut.append([window for window, _ in windows[: need[d]]])
        for i in range(max(need)):
            for d in range(n):
                if i < need[d]:
                    # The turn of lengths is the domain's own: every domain has all of them.
                    length = config.prompt_lengths[i % len(config.prompt_lengths)]
                    tokens.append(cut[d][i][:length])
                    domain.append(d)
    return Prompts(
        tokens=tokens,
        domain=np.array(domain, dtype=np.int64),
        is_calibration=np.arange(len(tokens)) < config.calibration,
        per_document=most,
    )


def _windows(
    documents: list[NDArray[np.uint16]], length: int, rng: np.random.Generator
) -> Iterator[list[NDArray[np.uint16]]]:
    """Yield one window of each document that has one, then a second of each, and so on."""
    cuts = []
    for i in rng.permutation(len(documents)):
        ids = documents[i]
        slack = len(ids) % length
        first = int(rng.integers(slack + 1))
        starts = first + length * rng.permutation(len(ids) // length)
        cuts.append([ids[start : start + length] for start in starts])
    for turn in range(max((len(c) for c in cuts), default=0)):
        yield [c[turn] for c in cuts if turn < len(c)]


def record(
    checkpoint: Path,
    prompts: Prompts,
    config: RecordConfig,
    *,
    processes: int = 1,
    progress: Callable[[float], None] = lambda share: None,
) -> RecordedRouting:
    """Generate a continuation of each prompt and record the routing of every token; the number of
    ``processes`` does not change the result. Raises InputError if the checkpoint cannot be used, or
    the sequences are too long for its model."""
    if processes < 1:
        raise InputError("processes", f"got {processes}", "at least 1")
    model, _ = load_checkpoint(checkpoint)
    longest = max(config.prompt_lengths) + config.output_len
    if longest > model.config.context:
        raise InputError(
            "output_len",
            f"prompts and outputs span {longest} tokens",
            f"{model.config.context}, the context that the model was trained on",
        )
    chunks: list[Ints] = []
    lengths = np.array([len(ids) for ids in prompts.tokens])
    for length in np.unique(lengths):
        same = np.flatnonzero(lengths == length)
        chunks += [same[i : i + config.batch] for i in range(0, len(same), config.batch)]
    work = [(chunk, np.stack([prompts.tokens[q] for q in chunk])) for chunk in chunks]
    rows = lengths + config.output_len
    first = np.cumsum(rows) - rows
    layers, n_experts = model.config.n_layers, model.config.n_experts
    id_type = np.uint8 if n_experts <= 256 else np.uint16
    experts = np.empty((rows.sum(), layers, model.config.top_k), dtype=id_type)
    token_ids = np.empty(rows.sum(), dtype=np.uint16)
    prob = np.empty((len(rows), layers, n_experts), dtype=np.float32)
    logit = np.empty_like(prob)
    done = 0
    with contextlib.ExitStack() as stack:
        results: Iterator[Any]
        if processes == 1:
            _prepare(model, config)
            results = (_record_chunk(model, config, *item) for item in work)
        else:
            # Leaving the pool, Ctrl-C too, ends its processes.
            pool = stack.enter_context(
                multiprocessing.get_context("spawn").Pool(
                    processes, _start_worker, (checkpoint, config, torch.get_num_threads())
                )
            )
            results = pool.imap_unordered(_work, work)
        for chunk, chosen, ids, p, z in results:
            for i, q in enumerate(chunk):
                experts[first[q] : first[q] + rows[q]] = chosen[i]
                token_ids[first[q] : first[q] + rows[q]] = ids[i]
            prob[chunk], logit[chunk] = p, z
            done += len(chunk)
            progress(done / len(rows))
    return RecordedRouting(prompts, config.output_len, experts, token_ids, prob, logit)


_worker: tuple[Qwen3Moe, RecordConfig] | None = None


def _start_worker(checkpoint: Path, config: RecordConfig, threads: int) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    model, _ = load_checkpoint(checkpoint)
    _prepare(model, config)
    _worker = model, config


def _work(item: tuple[Ints, NDArray[np.uint16]]) -> Any:
    assert _worker is not None  # set when the process started
    return _record_chunk(*_worker, *item)


def _prepare(model: Qwen3Moe, config: RecordConfig) -> None:
    model.to(config.device)
    if not config.exact:
        # Converted once rather than at every step; the other weights are small.
        for module in model.modules():
            if isinstance(module, SparseMLP):
                module.gate_up.data = module.gate_up.data.bfloat16()
                module.down.data = module.down.data.bfloat16()


def _record_chunk(
    model: Qwen3Moe, config: RecordConfig, chunk: Ints, ids: NDArray[np.uint16]
) -> Any:
    # Each request draws from a stream of its own: its output does not depend on its batch.
    draws = [np.random.default_rng([config.seed, 1, q]).random(config.output_len) for q in chunk]
    return (chunk, *record_batch(model, ids, np.stack(draws), config))


@torch.no_grad()
def record_batch(
    model: Qwen3Moe, prompts: Array, draws: Floats, config: RecordConfig
) -> tuple[Array, NDArray[np.uint16], NDArray[np.float32], NDArray[np.float32]]:
    """Record requests with equally long prompts, token ids ``[batch, prompt_len]``.

    ``draws``: uniform numbers in [0, 1), ``[batch, output_len]``: generated token j is where draw j
    falls in the cumulated distribution. Returns ``experts`` ``[batch, prompt_len + output_len,
    layers, top_k]``, the rows' token ids, and gate scores summed over prompts, ``[batch, layers,
    n_experts]``."""
    batch, prompt_len = prompts.shape
    output_len = draws.shape[1]
    device = torch.device(config.device)
    dtype = torch.float32 if config.exact else torch.bfloat16
    total = prompt_len + output_len
    cache = KVCache(model.config, batch, total, dtype, device)
    id_type = torch.uint8 if model.config.n_experts <= 256 else torch.int32
    shape = (batch, total, model.config.n_layers, model.config.top_k)
    experts = torch.empty(shape, dtype=id_type, device=device)
    token_ids = np.concatenate([prompts, np.zeros((batch, output_len), prompts.dtype)], axis=1)
    ids = torch.from_numpy(prompts.astype(np.int64)).to(device)
    scores: list[NDArray[np.float32]] = []
    start = 0
    while start < total:
        with torch.autocast(device.type, torch.bfloat16, enabled=not config.exact):
            hidden, routing = model(ids, cache)
            logits = model.logits(hidden[:, -1]).double()
        end = start + ids.shape[1]
        for i, layer in enumerate(routing):
            experts[:, start:end, i] = layer.experts.view(batch, -1, shape[-1]).to(id_type)
        if start == 0:
            scores = [
                torch.stack([s.view(batch, prompt_len, -1).sum(1) for s in of], 1).cpu().numpy()
                for of in (
                    [layer.probabilities for layer in routing],
                    [layer.logits for layer in routing],
                )
            ]
        start = end
        if start < total:
            logits[:, 0] = -torch.inf
            mass = torch.softmax(logits / config.temperature, -1).cumsum(-1)
            u = torch.from_numpy(draws[:, start - prompt_len]).to(device)
            ids = torch.searchsorted(mass, (u * mass[:, -1])[:, None], right=True)
            token_ids[:, start] = ids[:, 0].cpu().numpy()
    chosen = experts.cpu().numpy()
    if model.config.n_experts > 256:
        chosen = chosen.astype(np.uint16)
    return chosen, token_ids.astype(np.uint16), scores[0], scores[1]


def write_npz(routing: RecordedRouting, path: Path, domains: list[str]) -> None:
    """Write recorded routing as the archive that `importers.import_trace` reads. It holds two
    arrays more: ``split`` (one entry a request: 0 calibration, 1 serving) and ``token_ids``
    (uint16, one a token). Gate scores are those of all requests."""
    prompt_len = routing.prompt_len
    n = len(prompt_len)
    output_len = np.full(n, routing.output_len, dtype=np.int64)
    rows = np.repeat(np.arange(2 * n), np.stack([prompt_len, output_len], 1).ravel())
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(
                file,
                topk=routing.experts,
                request_id=(rows // 2).astype(np.uint16 if n < 65536 else np.int64),
                is_decode=rows % 2 == 1,
                domain=routing.prompts.domain.astype(np.uint8),
                domain_names=np.array(domains),
                prompt_len=prompt_len,
                output_len=output_len,
                E=routing.gate_prob.shape[2],
                gate_requests=np.arange(n),
                gate_prob=routing.gate_prob,
                gate_logit=routing.gate_logit,
                split=(~routing.prompts.is_calibration).astype(np.uint8),
                token_ids=routing.token_ids,
            )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_routing_trace(
    routing: RecordedRouting, out: Path, *, domains: list[str], gate_scores: int, **about: Any
) -> RoutingTrace:
    """Write recorded routing as a routing trace, compressed. Of the gate's order it keeps which
    half of a token's experts came first: half the top-k can be served (`traces.routing.manifest`).
    ``gate_scores``: requests of each split that carry them; ``about``: as of `write_trace`."""
    prompts = routing.prompts
    n = len(prompts.tokens)
    splits = (np.flatnonzero(prompts.is_calibration), np.flatnonzero(~prompts.is_calibration))
    covered = np.concatenate([split[:gate_scores] for split in splits])
    scores = GateScores(
        requests=covered, prob=routing.gate_prob[covered], logit=routing.gate_logit[covered]
    )
    names = [domains[d] for d in prompts.domain]
    ranked = routing.experts
    halves = [np.sort(half) for half in np.array_split(ranked, min(2, ranked.shape[-1]), axis=-1)]
    return write_trace(
        out,
        experts=np.concatenate(halves, axis=-1),
        request_id=[f"{name}-{i:04d}" for i, name in enumerate(names)],
        domain=names,
        prompt_len=routing.prompt_len,
        output_len=np.full(n, routing.output_len),
        is_calibration=prompts.is_calibration,
        n_experts=routing.gate_prob.shape[2],
        domains=domains,
        provenance="recorded",
        gate_scores=scores if len(covered) else None,
        rank_groups=[part.shape[-1] for part in halves],
        encoding="xz",
        **about,
    )
