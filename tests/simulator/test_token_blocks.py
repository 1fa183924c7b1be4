"""Blocks of 64 tokens against walking from token to token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.jit import njit
from eldr_sim.simulator.plane.steps.token_blocks import _halve, _share, _take_turns, transpose

ENDS = np.array([0, 2**64 - 1], np.uint64)


@njit()
def transposed(block):
    """Transpose in place."""
    transpose(block)


@njit()
def in_turn(tokens, n, split):
    """Share out among n."""
    _take_turns(tokens, n, split)


@njit()
def shared(words, numbers, n_two, n_of, ranks, hashed, by_turn, taken, met, copied, at_home, split):
    """Share the tokens of experts out, of one layer, for copies to ranks and to experts."""
    for i in range(2):
        sends = i == 0
        _halve(words, numbers, n_two, 2, 0, ranks, hashed[2, 0], by_turn, taken[i], sends, met, 0,
               at_home, copied)  # fmt: skip
        _share(words, numbers, n_two, 2, 0, n_of, ranks, hashed, by_turn, taken[i], sends, met, 0,
               at_home, copied, split)  # fmt: skip


def bits(words):
    """uint64 ``[...]`` as 0 and 1, ``[..., 64]``."""
    return np.unpackbits(words[..., None].view(np.uint8), axis=-1, bitorder="little")


def packed(ones):
    """``[..., 64]`` of 0 and 1 as uint64 ``[...]``."""
    return np.packbits(ones, axis=-1, bitorder="little").view(np.uint64)[..., 0]


def some_words(rng, *shape):
    """Words of which some are empty, some full and some sparse."""
    words = rng.integers(0, 2**64, shape, np.uint64)
    words &= rng.integers(0, 2**64, shape, np.uint64) | rng.choice(ENDS, shape)
    return np.where(rng.random(shape) < 0.1, rng.choice(ENDS, shape), words)


@given(seed=st.integers(0, 2**32), words=st.integers(1, 9))
def test_transposed_blocks_have_a_word_of_tokens_for_each_expert(seed, words):
    block = some_words(np.random.default_rng(seed), 64, words)
    before = bits(block)  # [tokens, words, experts]
    transposed(block)
    np.testing.assert_array_equal(bits(block), before.transpose(2, 1, 0))


@given(seed=st.integers(0, 2**32), n=st.integers(2, 7))
def test_instances_take_turns(seed, n):
    tokens, split = some_words(np.random.default_rng(seed), 1)[0], np.ones(8, np.uint64)
    in_turn(tokens, n, split)
    taking = np.flatnonzero(bits(tokens[None])[0])
    for j in range(n):
        assert np.flatnonzero(bits(split[j, None])[0]).tolist() == taking[j::n].tolist()


@given(seed=st.integers(0, 2**32), by_turn=st.booleans())
def test_instances_share_their_tokens(seed, by_turn):
    rng, experts, most = np.random.default_rng(seed), 100, 5
    block, home = some_words(rng, 64, 2), rng.integers(4, size=64)
    ranks = rng.integers(4, size=(experts, most)).astype(np.int16)
    n_of = np.sort(rng.integers(2, most + 1, experts)).astype(np.int16)
    numbers = rng.permutation(experts)
    numbers = numbers[np.argsort(n_of[numbers], kind="stable")].astype(np.uint32)
    by_hash = rng.integers(60, size=64)
    hashed = np.zeros((most + 1, most, 64), np.uint8)
    for n in range(2, most + 1):
        hashed[n, by_hash % n, np.arange(64)] = 1
    at_home = packed(home == np.arange(4)[:, None])
    taken = np.zeros((2, most, 1, experts), np.int64)
    taken[:, 0] = before = rng.integers(9 if by_turn else 1, size=experts)
    met, copied = np.zeros((4, 1), np.uint64), np.zeros(4, np.int64)
    shared(block.reshape(-1), numbers, int((n_of == 2).sum()), n_of, ranks, packed(hashed),
           by_turn, taken, met, copied, at_home, np.zeros(most, np.uint64))  # fmt: skip
    reached, own = np.zeros((4, 64), bool), np.zeros(4, int)
    count = np.zeros((most, experts), int)
    for i, expert in enumerate(numbers.tolist()):
        turn, n = before[i], n_of[expert]
        for token in np.flatnonzero(bits(block[expert % 64, expert // 64, None])[0]):
            instance = turn % n if by_turn else by_hash[token] % n
            rank, turn = ranks[expert, instance], turn + 1
            count[0 if by_turn else instance, i] += 1
            reached[rank, token] = True
            own[rank] += home[token] == rank
    np.testing.assert_array_equal(bits(met[:, 0]), reached)
    np.testing.assert_array_equal(copied, own)
    count[0] += before
    np.testing.assert_array_equal(taken[0, :, 0], count)
    np.testing.assert_array_equal(taken[1, :, 0], count)
