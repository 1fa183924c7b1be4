"""Blocks of 64 tokens against walking from token to token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.jit import njit
from eldr_sim.simulator.plane.steps.token_blocks import _halve, _take_turns, transpose

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
def halved(words, ranks, even, by_turn, taken, met, copied, at_home):
    """Share the tokens of experts of two instances out, of one layer."""
    numbers = np.arange(len(ranks)).astype(np.uint32)
    _halve(words, numbers, np.int64(2), np.int64(0), ranks, even, by_turn, taken[0], taken[1], True,
           met, np.int64(0), at_home, copied)  # fmt: skip
    _halve(words, numbers, np.int64(2), np.int64(0), ranks, even, by_turn, taken[2], taken[3],
           False, met, np.int64(0), at_home, copied)  # fmt: skip


def bits(words):
    """uint64 ``[...]`` as 0 and 1, ``[..., 64]``."""
    return np.unpackbits(words[..., None].view(np.uint8), axis=-1, bitorder="little")


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


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), by_turn=st.booleans())
def test_two_instances_share_their_tokens(seed, by_turn):
    rng, experts = np.random.default_rng(seed), 100
    block = some_words(rng, 64, 2)
    ranks = rng.integers(4, size=(experts, 2)).astype(np.int16)
    even, home = some_words(rng, 1)[0], rng.integers(4, size=64)
    at_home = np.packbits(home == np.arange(4)[:, None], axis=1, bitorder="little").view(np.uint64)
    before = rng.integers(9, size=experts)
    taken = np.zeros((4, experts), np.int64)
    taken[0] = taken[2] = before if by_turn else 0
    met, copied = np.zeros((4, 1), np.uint64), np.zeros(4, np.int64)
    halved(block.reshape(-1), ranks, even, by_turn, taken, met, copied, at_home[:, 0])
    reached, own = np.zeros((4, 64), bool), np.zeros(4, int)
    count = np.zeros((2, experts), int)
    for expert, (one, other) in enumerate(ranks.tolist()):
        turn = before[expert]
        for token in np.flatnonzero(bits(block[expert % 64, expert // 64, None])[0]):
            second = turn % 2 if by_turn else 1 - bits(even[None])[0, token]
            rank, turn = (other if second else one), turn + 1
            count[second, expert] += 1
            reached[rank, token] = True
            own[rank] += home[token] == rank
    np.testing.assert_array_equal(bits(met[:, 0]), reached)
    np.testing.assert_array_equal(copied, own)
    expected = [before + count.sum(axis=0), np.zeros(experts)] if by_turn else count
    np.testing.assert_array_equal(taken[:2], expected)
    np.testing.assert_array_equal(taken[2:], expected)
