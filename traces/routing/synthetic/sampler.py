"""Sampler of the experts of requests from a `RoutingModel`.

Every request draws from a separate stream, so the first requests of a trace are the same
however many follow, and requests are drawn in threads beside each other. The kernel adds and
multiplies only, in a fixed order, with its own exponential and generator: the same
bytes on any machine."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.arrays import Int32s, Ints, Words
from eldr_sim.jit import njit
from eldr_sim.kinds import Progress, no_progress
from eldr_sim.traces.routing.synthetic.model import DRIFT_BLOCK, RoutingModel
from eldr_sim.traces.streams import stream

_LIMIT = 20.0  #: bound on the terms of a log weight, at both sides
_COLUMNS = 16  #: experts are searched in this many columns first
_CHUNK = 16  #: requests that a thread draws before it reports
_TIMES, _DRAWS = 4096, 5  #: exponential times of gate scores, and those drawn by one number

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Narrow = Int32s


def sample_experts(
    model: RoutingModel,
    domain: ArrayLike,
    prompt_len: ArrayLike,
    output_len: ArrayLike,
    seed: int,
    progress: Progress = no_progress,
    gate: Floats | None = None,
    first: int = 0,
) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Draw the experts of every token of requests, ``[tokens, layers, top_k]``, as they were
    chosen; requests one after the other, prompt first.

    ``domain``, ``prompt_len``, ``output_len``: ``[n]``; ``gate``: ``[n, L, E]``: takes the gate's
    probabilities, summed over prompts; the experts are the same; ``first``: requests before these,
    which are not drawn."""
    lengths = np.asarray(prompt_len, np.int64), np.asarray(output_len, np.int64)
    choice = []
    for i, (d, tokens) in enumerate(
        zip(np.asarray(domain).tolist(), (lengths[0] + lengths[1]).tolist(), strict=True), first
    ):
        chance = _of_like_length(model, model.domain_topics[int(d)], tokens)
        choice.append(int(stream(seed, f"synthetic-topic-{i}").choice(len(chance), p=chance)))
    return sample_kinds_and_experts(model, choice, *lengths, seed, progress, gate, first)[1]


def _of_like_length(model: RoutingModel, chance: Floats, tokens: int) -> Floats:
    """Return a domain's chances of topics, of requests between half and twice as long if any."""
    longest = int(model.topic_tokens[chance > 0].max())
    size = model.topic_tokens / min(tokens, longest)
    alike = np.where((size >= 0.5) & (size <= 2), chance, 0.0)
    total = alike.sum()
    return np.asarray(alike / total if total > 0 else chance)


def sample_kinds_and_experts(
    model: RoutingModel,
    topic: ArrayLike,
    prompt_len: ArrayLike,
    output_len: ArrayLike,
    seed: int,
    progress: Progress = no_progress,
    gate: Floats | None = None,
    first: int = 0,
) -> tuple[Ints, NDArray[np.uint8] | NDArray[np.uint16]]:
    """Draw requests of given topics: the kind of every token, and its experts."""
    prompt = np.asarray(prompt_len, dtype=np.int64)
    length = prompt + np.asarray(output_len, dtype=np.int64)
    end = np.cumsum(length)
    total, n, topics = int(length.sum()), len(length), np.asarray(topic).tolist()
    dtype = np.uint8 if model.n_experts <= 256 else np.uint16
    experts = np.empty((total, model.n_layers, model.top_k), dtype=dtype)
    kinds = np.empty(total, np.int64)
    terms = model.phase, model.kinds.transpose(1, 0, 2)
    phases, kind_weights = (_transposed(np.exp(_clipped(part))) for part in terms)
    reuse = np.exp(_clipped(model.reuse)).astype(np.float32)
    topic_terms = _transposed(model.topics)
    parts, cells = topic_terms.shape[1], topic_terms.shape[2:]
    decay = np.exp(-DRIFT_BLOCK / model.drift_tokens)
    drift = np.stack([model.drift_sd, decay, np.sqrt(1 - decay**2)]).astype(np.float32)
    loadings = _transposed(model.loadings).reshape(len(model.loadings), -1)
    later = np.array([-math.log((i + 0.5) / _TIMES) for i in range(_TIMES)], np.float32)
    laws = _Laws(phases, kind_weights, reuse, model.succession, later)
    busiest, share = model.busiest, float(model.prompt_only)

    def draw(begin: int) -> int:
        last = min(begin + _CHUNK, n)
        room = _room(*cells)
        for request in range(begin, last):
            rng = stream(seed, f"synthetic-request-{first + request}")
            c, rows = topics[request], slice(end[request] - length[request], end[request])
            # One type for the compiler; ids become narrow afterwards.
            chosen = np.empty((int(length[request]), model.n_layers, model.top_k), np.uint16)
            summed = None if gate is None else np.zeros(cells)
            first_bits = rng.integers(1 << 64, dtype=np.uint64)
            drifted = _walk(rng, int(length[request]), len(loadings), drift)
            turns = topic_terms[c].reshape(parts, -1)
            own = np.float32(model.own) * rng.standard_normal(turns.shape[1], dtype=np.float32)
            common = stream(seed, f"synthetic-prompt-only-{first + request}")
            only = common.random(int(prompt[request])) < share
            drawn = _Request(
                turns[0] + own * (turns[0] != 0),
                np.concatenate([loadings, np.diff(turns, axis=0)]),
                np.concatenate([drifted, _turned(len(drifted), parts)], axis=1),
                model.topic_kinds[c],
                only,
            )
            _sample_request(first_bits, drawn, laws, room, kinds[rows], chosen, summed)
            # Afterwards, so that all other tokens stay as they are without tokens of this kind.
            chosen[: len(only)][only] = busiest
            experts[rows] = chosen
            if gate is not None and summed is not None:
                summed[busiest, np.arange(model.n_layers)[:, None]] += only.sum() / model.top_k
                gate[request] = summed[: model.n_experts].T
        return last

    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as threads:
        for last in threads.map(draw, range(0, n, _CHUNK)):
            progress(float(end[last - 1]) / total)
    return kinds, experts


def _walk(rng: np.random.Generator, tokens: int, factors: int, drift: Floats) -> Floats:
    """Return the drift's scores in every block, ``[blocks, factors]``."""
    blocks = -(-tokens // DRIFT_BLOCK)
    noise = rng.standard_normal((blocks, 2, factors), dtype=np.float32)
    path = np.empty((blocks, factors), np.float32)
    _autoregress(noise, drift, path)
    return path


def _turned(blocks: int, parts: int) -> Floats:
    """Return how far a topic has turned to each of its later parts, ``[blocks, parts - 1]``."""
    place = (np.arange(blocks) + 0.5) / blocks * parts - 0.5
    return np.clip(place[:, None] - np.arange(parts - 1), 0, 1).astype(np.float32)


@njit(nogil=True)
def _autoregress(noise: Floats, drift: Floats, path: Floats) -> None:
    """Set ``path`` to the sums of processes that ``noise [blocks, 2, factors]`` moves on.

    ``drift`` has a column a process: standard deviation, decay over a block, and the share of the
    noise that keeps the variance. The first values are the noise itself."""
    for block in range(len(path)):
        for r in range(path.shape[1]):
            total = np.float32(0.0)
            for process in range(2):
                if block > 0:
                    noise[block, process, r] = (
                        drift[1, process] * noise[block - 1, process, r]
                        + drift[2, process] * noise[block, process, r]
                    )
                total += drift[0, process] * noise[block, process, r]
            path[block, r] = total


class _Request(NamedTuple):
    """What one request is drawn by; tables ``[E, L]`` lie flat."""

    base: Floats  #: the topic at the beginning
    loadings: Floats  #: ``[scores, E L]``: of the drift, and of where the topic turns
    path: Floats  #: ``[blocks, scores]``
    shares: Doubles  #: of the kinds of tokens
    prompt_only: NDArray[np.bool_]  #: by prompt token: of the kind that only prompts have


class _Laws(NamedTuple):
    """What all requests of a model are drawn by."""

    phases: Floats  #: ``[2, E, L]``
    kinds: Floats  #: ``[kinds, E, L]``
    reuse: Floats  #: ``[L]``
    succession: Doubles  #: ``[kinds, kinds]``
    later: Floats  #: see `_add_gate`


class _Room(NamedTuple):
    """What `_sample_request` works in."""

    bits: Narrow
    power: Floats  #: the same numbers as ``bits``
    flat: Floats
    topic: Floats  #: the same numbers as ``flat``
    weight: Floats
    before: Doubles
    target: Doubles
    column: Ints
    state: Words


def _room(width: int, layers: int) -> _Room:
    bits, topic = np.empty(width * layers, np.int32), np.empty((width, layers), np.float32)
    weight, before = np.empty_like(topic), np.empty((_COLUMNS, layers))
    work = np.empty(layers), np.empty(layers, np.int64), np.empty(1, np.uint64)
    return _Room(bits, bits.view(np.float32), topic.ravel(), topic, weight, before, *work)


def _clipped(log_weight: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(log_weight, -_LIMIT, _LIMIT)


def _transposed(part: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return ``[..., L, E]`` as ``[..., E, L]``, with experts of 0 up to a multiple of `_COLUMNS`.

    Layers are drawn beside each other, in the lanes of the processor's vectors."""
    *above, layers, n_experts = part.shape
    out = np.zeros((*above, -(-n_experts // _COLUMNS) * _COLUMNS, layers), np.float32)
    out[..., :n_experts, :] = part.swapaxes(-1, -2)
    return out


@njit(nogil=True)
def _sample_request(
    seed: np.uint64,
    request: _Request,
    laws: _Laws,
    room: _Room,
    kind_of: Ints,
    out: NDArray[np.uint16],
    gate: Doubles | None,
) -> None:
    """Fill ``out [tokens, layers, top_k]`` with the experts of one request, ``kind_of`` with kinds.

    ``gate [E, L]`` takes the probabilities of prompt tokens, if given."""
    tokens, layers, top_k = out.shape
    topic, weight, state = room.topic, room.weight, room.state
    state[0] = seed
    if gate is not None:
        noise, before_choice = np.array([~seed]), np.empty_like(weight)
    for t in range(tokens):
        if t % DRIFT_BLOCK == 0:
            scores = request.path[t // DRIFT_BLOCK]
            _exponential(request.base, request.loadings, scores, room.bits, room.power, room.flat)
        kind = _next_kind(_uniform(state), request.shares, laws.succession, kind_of, t)
        kind_of[t] = kind
        phase = 0 if t < len(request.prompt_only) else 1
        for e in range(len(topic)):
            for layer in range(layers):
                popular = laws.kinds[kind, e, layer] * laws.phases[phase, e, layer]
                weight[e, layer] = topic[e, layer] * popular
        if t > 0:
            for layer in range(layers):
                for slot in range(top_k):
                    weight[out[t - 1, layer, slot], layer] *= laws.reuse[layer]
        _sum_up(weight, room.before)
        if gate is not None:
            before_choice[:] = weight
        for slot in range(top_k):
            _choose(state, weight, room.before, room.target, room.column, out, t, slot)
        if gate is not None and phase == 0 and not request.prompt_only[t]:
            _add_gate(noise, before_choice, out, t, gate, laws.later)


@njit(inlined=True)
def _random(state: Words) -> np.uint64:
    """Return the next 64 random bits: SplitMix64 (Steele, Lea and Flood 2014, OOPSLA)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(z ^ (z >> np.uint64(31)))


@njit(inlined=True)
def _uniform(state: Words) -> float:
    return float(np.int64(_random(state) >> np.uint64(11))) * 2.0**-53


@njit(inlined=True)
def _next_kind(random: float, shares: Doubles, succession: Doubles, kind_of: Ints, t: int) -> int:
    total = 0.0
    for kind in range(len(shares)):
        total += shares[kind] * (succession[kind_of[t - 1], kind] if t > 0 else 1.0)
    target = random * total
    total = 0.0
    for kind in range(len(shares)):
        total += shares[kind] * (succession[kind_of[t - 1], kind] if t > 0 else 1.0)
        if total > target:
            return kind
    return 0


@njit()
def _exponential(
    base: Floats, loadings: Floats, scores: Floats, bits: Narrow, power: Floats, out: Floats
) -> None:
    """Set ``out`` to the exponential of topic and drift, within float32's rounding.

    ``power`` is ``bits`` read as floating-point numbers, as long as ``base`` and ``out``."""
    for i in range(len(base)):
        out[i] = base[i]
    for r in range(len(scores)):
        score = scores[r]
        for i in range(len(base)):
            out[i] += score * loadings[r, i]
    for i in range(len(base)):
        x = out[i]
        x = min(max(x, np.float32(-_LIMIT)), np.float32(_LIMIT)) * np.float32(1.4426950408889634)
        whole = np.int32(x + np.float32(64.5)) - np.int32(64)
        x -= np.float32(np.int32(whole))
        bits[i] = np.int32(np.int32(whole + np.int32(127)) << np.int32(23))
        # Taylor's series of 2^x for x in [-1/2, 1/2].
        y = np.float32(1.5403530e-4)
        y = y * x + np.float32(1.3333558e-3)
        y = y * x + np.float32(9.6181291e-3)
        y = y * x + np.float32(5.5504109e-2)
        y = y * x + np.float32(2.4022651e-1)
        y = y * x + np.float32(6.9314718e-1)
        out[i] = y * x + np.float32(1.0)
    for i in range(len(base)):
        out[i] *= power[i]


@njit(inlined=True)
def _sum_up(weight: Floats, before: Doubles) -> None:
    """Set ``before [_COLUMNS, layers]`` to the weights of all columns up to and with one."""
    width, layers = weight.shape
    for c in range(_COLUMNS):
        for layer in range(layers):
            before[c, layer] = weight[c, layer]
    for e in range(_COLUMNS, width):
        c = e % _COLUMNS
        for layer in range(layers):
            before[c, layer] += weight[e, layer]
    for c in range(1, _COLUMNS):
        for layer in range(layers):
            before[c, layer] += before[c - 1, layer]


@njit(inlined=True)
def _choose(
    state: Words,
    weight: Floats,
    before: Doubles,
    target: Doubles,
    column: Ints,
    out: NDArray[np.uint16],
    t: int,
    slot: int,
) -> None:
    """Draw an expert in each layer, in proportion to its weight among those left; take it away.

    By sums of columns, then within one; where only rounding is left, by the weights alone."""
    width, layers = weight.shape
    for layer in range(layers):
        target[layer] = _uniform(state) * before[_COLUMNS - 1, layer]
        column[layer] = 0
    for c in range(_COLUMNS - 1):
        for layer in range(layers):
            column[layer] += np.int64(before[c, layer] <= target[layer])
    for layer in range(layers):
        c = column[layer]
        rest = target[layer] - (before[c - 1, layer] if c > 0 else 0.0)
        found, total = c, 0.0
        for e in range(c, width - _COLUMNS, _COLUMNS):
            total += weight[e, layer]
            found += _COLUMNS * np.int64(total <= rest)
        if weight[found, layer] == 0:
            found = _search(_uniform(state), weight, layer)
            column[layer] = found % _COLUMNS
        out[t, layer, slot] = found
        target[layer] = weight[found, layer]
        weight[found, layer] = 0.0
    for c in range(_COLUMNS):
        for layer in range(layers):
            before[c, layer] -= target[layer] if column[layer] <= c else 0.0


@njit(inlined=True)
def _add_gate(
    noise: Words, weight: Floats, out: NDArray[np.uint16], t: int, gate: Doubles, later: Floats
) -> None:
    """Add a token's softmax over all experts, of scores that rank the chosen ones as they are.

    A choice by weights is a race of exponential times: given the order, those between the chosen
    are exponential in the weight of all that are left, the others arrive by ``later``. A score is
    minus the time's logarithm; scores take the place of ``weight``."""
    width, layers = weight.shape
    slots, bits = out.shape[2], np.uint64(0)
    left, last, time = np.zeros(layers), np.zeros(layers), np.empty((slots, layers))
    for e in range(width):
        for layer in range(layers):
            left[layer] += weight[e, layer]
    for slot in range(slots):
        for layer in range(layers):
            last[layer] -= math.log(1.0 - _uniform(noise)) / max(left[layer], 1e-30)
            left[layer] -= weight[out[t, layer, slot], layer]
            time[slot, layer] = last[layer]
    left[:] = 0.0
    for e in range(width):
        for layer in range(layers):
            if layer % _DRAWS == 0:
                bits = _random(noise)
            one = weight[e, layer]
            wait = later[np.int64(bits & np.uint64(_TIMES - 1))]
            weight[e, layer] = one / (np.float32(last[layer]) * one + wait)
            bits >>= np.uint64(64 // _DRAWS)
    for slot in range(slots):
        for layer in range(layers):
            weight[out[t, layer, slot], layer] = np.float32(1.0 / time[slot, layer])
    for e in range(width):
        for layer in range(layers):
            left[layer] += weight[e, layer]
    for e in range(width):
        for layer in range(layers):
            gate[e, layer] += weight[e, layer] / left[layer]


@njit(inlined=True)
def _search(random: float, weight: Floats, layer: int) -> int:
    """Draw an expert of a layer by the weights alone."""
    total = 0.0
    for e in range(len(weight)):
        total += weight[e, layer]
    rest = random * total
    found = 0
    for e in range(len(weight)):
        if weight[e, layer] > 0:
            found = e
            if rest < weight[e, layer]:
                break
            rest -= weight[e, layer]
    return found
