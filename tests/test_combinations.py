"""What is left of a product of options still has every choice of three of them."""

import itertools

from combinations import choices, of_three


def test_every_choice_of_three_is_left() -> None:
    cases = list(itertools.product(range(5), "abcd", (None, True), range(7), (1.5, 2.5)))
    cases = [case for case in cases if case[0] != 3 or case[1] != "b"]
    some = of_three(cases)
    assert {c for case in some for c in choices(case, 3)} == {
        c for case in cases for c in choices(case, 3)
    }
    assert len(some) < len(cases) // 2
    assert some == sorted(some, key=cases.index)
    assert of_three(cases) == some


def test_of_few_options_every_case_is_left() -> None:
    for cases in (list(itertools.product("abc", "de", "fg")), []):
        assert of_three(cases) == cases
