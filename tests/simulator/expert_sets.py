"""Experts of tokens as sets."""

from dataclasses import dataclass


def expert_set(row, n_layers):
    """Return the (layer, expert) pairs of a bit set, uint64 ``[n_layers * words]``."""
    words = len(row) // n_layers
    return frozenset(
        (k // words, 64 * (k % words) + bit)
        for k, word in enumerate(row.tolist())
        for bit in range(64)
        if word >> bit & 1
    )


def prompt_token_experts(prompts, trace_sets, source, token, n_layers):
    """Return the experts of one prompt token, over all layers of the model.

    Token ``p`` replays prompt row ``p`` of a trace request, around its end. Layers beyond those of
    the trace take them again, each time from another part of the prompt.
    """
    span, base = int(prompts.length[source]), int(prompts.first_row[source])
    trace_layers = trace_sets.n_layers
    tiles = -(-n_layers // trace_layers)
    chosen = set()
    for tile in range(tiles):
        row = base + (token + tile * span // tiles) % span
        chosen |= {
            (tile * trace_layers + layer, expert)
            for layer, expert in trace_sets.rows[row]
            if tile * trace_layers + layer < n_layers
        }
    return frozenset(chosen)


@dataclass
class TraceSets:
    """The rows of a trace as sets."""

    rows: list
    n_layers: int


def prompt_sources(workload, request):
    """Return (trace request, token) of each prompt token: what it replays."""
    blocks = workload.prefix_text[
        workload.prefix_indptr[request] : workload.prefix_indptr[request + 1]
    ].tolist()
    own, size = int(workload.text[request]), workload.prefix_block_tokens
    return [
        (blocks[token // size] if size and token // size < len(blocks) else own, token)
        for token in range(int(workload.prompt_len[request]))
    ]
