"""Prompt lengths of the data sets that ELDR's authors served."""

import numpy as np
import pytest
from scipy.stats import truncnorm

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.prompt_lengths import FEWEST, MOST, SERVED, served_prompt_lengths
from eldr_sim.traces.requests.texts import DOMAIN_MIXES

from ..on_each import on_each


def mean_of(domain):
    """Mean of the truncated lognormals of a domain's sets, by quadrature."""
    total = 0.0
    for one in SERVED[domain]:
        low, high = (np.log(np.array([FEWEST, MOST]) / one.median)) / one.spread
        z = truncnorm.ppf((np.arange(20_000) + 0.5) / 20_000, low, high)
        total += one.prompts * np.exp(one.spread * z).mean() * one.median
    return total / sum(one.prompts for one in SERVED[domain])


@on_each("domain", [name for mix in DOMAIN_MIXES.values() for name in mix])
def test_lengths_are_those_of_the_domains_sets(domain):
    lengths = served_prompt_lengths([domain] * 4000, seed=3)
    assert lengths.min() >= FEWEST
    assert lengths.max() <= MOST
    assert lengths.mean() == pytest.approx(mean_of(domain), rel=0.06)
    assert (lengths == served_prompt_lengths([domain] * 4000, seed=3)).all()


def test_a_domain_without_a_data_set_is_refused():
    with pytest.raises(InputError, match="prompt_lengths: no data set of domain 'poetry'"):
        served_prompt_lengths(["poetry"], 0)
