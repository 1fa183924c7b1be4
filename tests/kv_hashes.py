"""Hashes of a prompt's KV blocks in plain NumPy; the compiled prefix cache computes the same."""

import numpy as np


def block_hashes(workload, request, block_size):
    """Return hashes of a prompt's full KV blocks of ``block_size`` tokens.

    A KV block is identified by its number and by the prefix block of its last token, which stands
    for all tokens before it too. KV blocks beyond the last prefix block are shared with no other
    prompt and have no hash.
    """
    begin, end = workload.prefix_indptr[request : request + 2].tolist()
    if begin == end:
        return []
    size = workload.prefix_block_tokens
    covered = min(int(workload.prompt_len[request]), (end - begin) * size)
    number = np.arange(covered // block_size)
    last = ((number + 1) * block_size - 1) // size
    hashes = workload.prefix_hash[begin:end].astype(np.int64)[last] << 32 | number
    return hashes.tolist()
