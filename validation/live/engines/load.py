"""Loads for a live engine: arrivals, lengths, prompts; and a random model with domains in its text.

Each domain of the model has a slice of the vocabulary: its tokens' embeddings and rows of
``lm_head`` share a direction, so a prompt of one domain continues in it, and the random gates
choose experts by domain as well as by token. Nothing is trained: it has the compute of a MoE model.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Array, Floats, Int32s, Ints
from eldr_sim.errors import InputError, needed
from eldr_sim.outputs import whole_folder
from eldr_sim.traces.requests.arrivals import draw_arrivals
from eldr_sim.traces.requests.logs.request_logs import read_request_log
from eldr_sim.traces.streams import stream
from eldr_sim.validation.live.live_run import LoadInfo

#: Dimensions of the model that the report was made with: 411 M parameters.
SHAPE = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 8,
    "vocab_size": 2048,
}  # fmt: skip
DOMAINS = ("code", "math", "medical", "legal")
_FIRST_TOKEN = 4  # the special tokens come before
_SCALE = 0.05
_DOMAIN_LOGIT = 14.0  # lead of tokens of the prompt's domain
_EMBEDDING = 8.0  # more than the layers add to the residual stream, so that a domain lasts


def domain_slices(vocab_size: int) -> dict[str, tuple[int, int]]:
    """Return the token ids ``[first, stop)`` of each domain."""
    width = (vocab_size - _FIRST_TOKEN) // len(DOMAINS)
    starts = (_FIRST_TOKEN + width * i for i in range(len(DOMAINS)))
    return {name: (start, start + width) for name, start in zip(DOMAINS, starts, strict=True)}


def write_model(folder: str | os.PathLike[str], seed: int = 0, **shape: int) -> dict[str, Any]:
    """Write the model in Hugging Face format, bfloat16, into a new folder; return its
    configuration, :data:`SHAPE` or ``shape``. InputError without torch and transformers."""
    torch, transformers = _libraries()
    sizes = SHAPE | shape
    config = transformers.Qwen3MoeConfig(
        **sizes,
        intermediate_size=2 * sizes["moe_intermediate_size"],
        max_position_embeddings=8192,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=_SCALE,
    )
    torch.manual_seed(seed)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    with torch.no_grad():
        embedding = torch.randn(vocab, hidden)
        head = torch.randn(vocab, hidden) / hidden**0.5
        for first, stop in domain_slices(vocab).values():
            direction = torch.randn(hidden)
            embedding[first:stop] += direction
            # The last norm leaves a hidden state of length sqrt(hidden), about half of it along
            # the direction of its domain.
            head[first:stop] += _DOMAIN_LOGIT * direction / (0.7 * hidden)
        model.model.embed_tokens.weight.copy_(_EMBEDDING * embedding)
        model.lm_head.weight.copy_(head)
    with whole_folder(Path(folder)) as whole:
        model.save_pretrained(whole)
    return dict(config.to_dict())


def write_draft(folder: str | os.PathLike[str], vocab_size: int, seed: int = 0) -> None:
    """Write a dense random model of one layer into a new folder, to draft for this vocabulary."""
    torch, transformers = _libraries()
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    with whole_folder(Path(folder)) as whole:
        model.save_pretrained(whole)


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise InputError(
            str(error.name), "making a model needs torch and transformers", "vLLM's environment"
        ) from None
    return torch, transformers


#: Lengths of the 19,366 requests of the Azure LLM inference trace 2023, conversation
#: (``AzureLLMInferenceTrace_conv.csv`` of Azure/AzurePublicDataset, CC BY 4.0; Patel et al.,
#: Splitwise, ISCA 2024): prompt and output tokens at some percentiles, computed from that file.
#: Prompt and output lengths are almost independent there (rank correlation 0.07).
_PERCENT = (*range(0, 100, 5), 99, 99.9, 100)
_PROMPT: tuple[int, ...] = (2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071)
_PROMPT += (1097, 1130, 1189, 1315, 1876, 2734, 4083, 4142, 6212, 14050)
_OUTPUT: tuple[int, ...] = (7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395)
_OUTPUT += (400, 411, 424, 451, 601, 954, 1000)
_PROMPT_MEAN, _OUTPUT_MEAN = 1154.7, 211.1

Domain = tuple[int, int] | Int32s
"""What a domain's prompts are: equally likely tokens of a slice ``[low, high)`` of the vocabulary,
or a stretch of a text, given by its tokens."""


@dataclass(frozen=True)
class LoadRequest:
    """One request."""

    request_id: str  #: value of the client's ``X-Request-Id``
    domain: str  #: name of its domain
    prompt: list[int]  #: token ids
    output_len: int  #: tokens to generate
    send_s: float  #: send time, seconds since the start of the run
    #: Location of the prompt's KV cache on a prefill engine; None if it is not computed yet.
    kv_transfer_params: dict[str, Any] | None = None
    priority: int | None = None  #: its priority, the lowest first; None gives none
    #: ``parent``, ``gap_s``: the request before it that it goes on with, -1 for none: it is sent so
    #: long after that one's end, s, and its prompt follows that one's prompt and answer.
    parent: int = -1
    gap_s: float = 0.0


@dataclass(frozen=True)
class Load:
    """Requests in sending order."""

    info: LoadInfo
    requests: tuple[LoadRequest, ...]


def make_load(
    info: LoadInfo,
    domains: Mapping[str, Domain],
    *,
    prompt_len: int,
    output_len: int,
    prompt_range: tuple[int, int],
    output_range: tuple[int, int],
    workload: str | os.PathLike[str] | None = None,
    domain_mix: Mapping[str, float] | None = None,
    prefix: str = "request",
) -> Load:
    """Make a load, the same on every machine; raises InputError if an argument is not valid.

    Each decision draws from its own random stream: a longer load starts with a shorter one's
    requests, and the rate changes no length or prompt. ``prompt_len``, ``output_len``: of all
    requests if ``info.lengths`` is ``fixed``; else means to which recorded lengths are scaled
    before they are clipped to the ranges; ``workload``: request log of pairs of lengths, else both
    are drawn from percentiles of Azure's conversations (means to 2%); ``domain_mix``: weights,
    empty: all alike; ``prefix``: request ``i`` is ``<prefix>-<i>``, another for each run of a
    capture log."""
    _check(info, domains, workload, domain_mix or {})
    for name, length, (low, high) in (
        ("prompt", prompt_len, prompt_range),
        ("output", output_len, output_range),
    ):
        if not 1 <= low <= high:
            raise InputError(f"{name}_range", f"got {low} to {high}", "1 <= fewest <= most")
        if not low <= length <= high:
            raise InputError(f"{name}_len", f"got {length}", f"{low} to {high}")
    n, seed = info.num_requests, info.seed
    arrival = draw_arrivals(info.request_rate, info.burstiness, None, n, seed)
    if info.lengths == "fixed":
        prompt, output = np.full(n, prompt_len), np.full(n, output_len)
    else:
        prompt, output = _recorded(n, seed, prompt_len, output_len, workload)
        prompt = np.clip(prompt, *prompt_range)
        output = np.clip(output, *output_range)
    names = list(domains)
    domain = _draw_domains(names, domain_mix or {}, n, seed)
    requests = []
    for i in range(n):
        name = names[int(domain[i])]
        tokens = _draw_prompt(name, domains[name], stream(seed, f"live prompt:{i}"), int(prompt[i]))
        own = f"{prefix}-{i}", name, tokens, int(output[i]), float(arrival[i])
        priority = int(prompt[i]) if info.queue_order == "sjf" else None
        requests.append(LoadRequest(*own, priority=priority))
    return Load(info, tuple(requests))


def _draw_prompt(name: str, domain: Domain, random: np.random.Generator, n: int) -> list[int]:
    """Return ``n`` tokens of a domain."""
    if isinstance(domain, tuple):
        drawn: list[int] = random.integers(*domain, size=n).tolist()
        return drawn
    if len(domain) < n:
        raise InputError("texts", f"{name} has {len(domain)} tokens", f"{n} or more, for a prompt")
    begin = int(random.integers(len(domain) - n + 1))
    text: list[int] = domain[begin : begin + n].tolist()
    return text


def _draw_domains(names: list[str], mix: Mapping[str, float], n: int, seed: int) -> Array:
    """Return the number of each request's domain."""
    draws = stream(seed, "live domains")
    if not mix:
        return draws.integers(len(names), size=n)
    weights = np.array([float(mix.get(name, 0.0)) for name in names])
    return draws.choice(len(names), size=n, p=weights / weights.sum())


def _check(
    info: LoadInfo,
    domains: Mapping[str, Domain],
    workload: str | os.PathLike[str] | None,
    mix: Mapping[str, float],
) -> None:
    for name in ("request_rate", "burstiness"):
        value = getattr(info, name)
        if not 0 < value < np.inf:
            raise InputError(name, f"got {value}", "a finite number > 0")
    if info.num_requests < 1:
        raise InputError("num_requests", f"got {info.num_requests}", "1 or more")
    if workload is not None and info.lengths == "fixed":
        raise InputError("workload", "a request log, but lengths are fixed", "recorded lengths")
    if not domains:
        raise InputError("domains", "got none", "1 or more")
    for name, domain in domains.items():
        if isinstance(domain, tuple) and not 0 <= domain[0] < domain[1]:
            tokens = f"{name}: token ids {domain[0]} to {domain[1]}"
            raise InputError("domains", tokens, "0 <= low < high")
    for name, weight in mix.items():
        if name not in domains:
            raise InputError("domain_mix", f"unknown domain {name!r}", ", ".join(domains))
        if not 0 <= weight < np.inf:
            raise InputError("domain_mix", f"{name}: {weight}", "0 or more")
    if mix and not sum(mix.values()):
        raise InputError("domain_mix", "all weights are 0", "one above 0")


def _recorded(
    n: int, seed: int, prompt_len: int, output_len: int, workload: str | os.PathLike[str] | None
) -> tuple[Ints, Ints]:
    """Draw ``n`` recorded lengths, scaled to the given means."""
    random = stream(seed, "live lengths").random((n, 2))
    prompt: NDArray[np.floating]
    output: NDArray[np.floating]
    if workload is None:
        prompt = _at_percentile(_PROMPT, random[:, 0]) * (prompt_len / _PROMPT_MEAN)
        output = _at_percentile(_OUTPUT, random[:, 1]) * (output_len / _OUTPUT_MEAN)
    else:
        log = read_request_log(workload)
        row = (random[:, 0] * len(log.prompt_len)).astype(np.int64)
        prompt = log.prompt_len[row] * (prompt_len / float(log.prompt_len.mean()))
        output = log.output_len[row] * (output_len / float(log.output_len.mean()))
    return np.rint(prompt).astype(np.int64), np.rint(output).astype(np.int64)


def _at_percentile(values: tuple[int, ...], share: Floats) -> Floats:
    """Return lengths at shares of the requests, interpolated geometrically between percentiles."""
    return np.asarray(np.exp(np.interp(100 * share, _PERCENT, np.log(values))))


#: Letters of a file that prompts come from: far more than a campaign's loads have.
_LETTERS = 2_000_000


def domains_of(folder: Path) -> list[str]:
    """Return the domains of a folder of texts, a file ``DOMAIN.txt`` each; InputError if none."""
    domains = sorted(path.stem for path in folder.glob("*.txt"))
    if not domains:
        raise InputError("texts", f"{folder} has no text", "files DOMAIN.txt")
    return domains


@lru_cache(maxsize=1)
def read_texts(folder: Path, model: str) -> dict[str, Int32s]:
    """Return the first tokens of each text by domain, by the ``tokenizer.json`` of ``model``.
    Raises InputError if a file cannot be read, or tokenizers is missing."""
    tokenizers = needed("tokenizers", "texts", "pip install tokenizers")
    path = Path(model) / "tokenizer.json"
    if not path.exists():
        raise InputError("model", f"{path} is not there", "a model with its tokenizer, for --texts")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    texts = {}
    for name in domains_of(folder):
        try:
            text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError("texts", f"{name}.txt: {error}", "a text in UTF-8") from None
        ids = tokenizer.encode(text[:_LETTERS], add_special_tokens=False).ids
        texts[name] = np.array(ids, np.int32)
    return texts
