"""Properties that cost seconds: a few examples by default, many with ``-m slow``."""

import inspect

import pytest
from hypothesis import example, given, settings


def examples(few, many, *known, **strategies):
    """Hold a property against so many examples of the strategies, and always the ``known`` ones."""

    def decorate(check):
        @pytest.mark.parametrize("n", [few, pytest.param(many, marks=pytest.mark.slow)])
        def test(n, **fixtures):
            held = given(**strategies)(check)
            for one in known:
                held = example(**one)(held)
            settings(max_examples=n)(held)(**fixtures)

        asked = inspect.signature(check).parameters
        fixtures = [
            asked[name]
            for name in asked.keys() - strategies.keys()
            if asked[name].kind != inspect.Parameter.VAR_KEYWORD
        ]
        n = inspect.Parameter("n", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__signature__ = inspect.Signature([n, *fixtures])
        return test

    return decorate
