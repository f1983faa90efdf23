"""The catalogue itself: large, complete, and without doubles."""

from __future__ import annotations

from collections import Counter

import pytest

from forge_env.sandbox_audit.attacks import ATTACKS, EXPECTED, GROUPS, Attack


def test_at_least_eighty_programs() -> None:
    assert len({(attack.code, attack.plant, attack.tests) for attack in ATTACKS}) == len(ATTACKS) >= 80


def test_every_group_is_there() -> None:
    count = Counter(attack.group for attack in ATTACKS)
    assert set(count) == set(GROUPS)
    assert min(count.values()) >= 10


def test_names_and_intentions_are_unique() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert len({attack.tries for attack in ATTACKS}) == len(ATTACKS)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_program(attack: Attack) -> None:
    assert attack.tries.endswith(".")
    assert attack.tries.count(". ") == 0, "one sentence"
    for source in (attack.code, attack.plant, attack.tests):
        compile(source, attack.name, "exec")
    cheating = attack.group == "cheating"
    assert (attack.unguarded == "judge") <= cheating
    assert attack.earns == 0 or cheating
    assert not (attack.plant and not cheating)


def test_no_cheating_program_simply_knows_the_answers() -> None:
    for attack in ATTACKS:
        if attack.group == "cheating":
            assert str(EXPECTED[1]) not in attack.code.split("def f", 1)[-1].split("\n")[0], attack.name
