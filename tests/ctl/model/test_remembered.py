"""What follows from facts alone is worked out once for the model that is asked about again and again."""

from __future__ import annotations

import dataclasses

from splitctl.model.facts import ModelFacts
from splitctl.model.remembered import remembered
from tests.ctl.model_facts import model_facts


def test_an_answer_is_kept_for_the_facts_that_were_asked_about_last() -> None:
    """Other facts are asked anew, and equal ones too: only the same object is known to be the same."""
    asked: list[ModelFacts] = []

    @remembered
    def answer(facts: ModelFacts) -> int:
        asked.append(facts)
        return facts.n_layer

    one = model_facts(n_layer=3)
    other = dataclasses.replace(one, n_layer=5)
    assert [answer(one), answer(one), answer(other), answer(other), answer(one)] == [3, 3, 5, 5, 3]
    assert asked == [one, other, one]
    assert answer(dataclasses.replace(one)) == 3
    assert len(asked) == 4
