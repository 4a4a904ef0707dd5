"""Random plans of everything that an epoch may draw by, all at once, against what docs/sampling.md declares."""

from __future__ import annotations

import pytest
from draw_plans import Composition, check, compositions, stream
from hypothesis import given, settings
from hypothesis import strategies as st

# What is declared


@given(compositions())
@settings(max_examples=15)
def test_any_composition_draws_what_it_declares_for_any_ranks_and_step(
    made: Composition,
) -> None:
    check(made)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@given(compositions())
@settings(max_examples=2000)
def test_many_compositions_draw_what_they_declare(made: Composition) -> None:
    check(made)


@given(compositions(), st.data())
@settings(max_examples=10)
def test_substitutes_keep_to_a_samples_source_and_bucket(
    made: Composition, data: st.DataObject
) -> None:
    plan = made.plan
    places = [
        (at, drawn)
        for at, drawn in stream(plan)
        if (at.split, at.epoch) == ("train", 1)
    ]
    kept = {
        index: number
        for number, samples in enumerate(made.kept)
        for index in samples.tolist()
    }
    for at, drawn in data.draw(st.lists(st.sampled_from(places), max_size=3)):
        for attempt in range(2):
            found = plan.substitute(at, drawn[0][0], attempt)
            assert kept[found] == kept[drawn[0][0]]
            assert (
                not plan.config.train_buckets
                or made.buckets[found] == made.buckets[drawn[0][0]]
            )
            assert made.weights is None or made.weights[found] > 0
