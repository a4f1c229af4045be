"""What threads compute ahead comes in order, and not much of it is computed before it is needed."""

import itertools
import time

import pytest

from visdet.engine.inference.read_ahead import computed_ahead


def test_results_come_in_order_and_values_are_taken_as_they_are_needed():
    taken = []

    def values():
        for number in itertools.count():
            taken.append(number)
            yield number

    def slow_square(number):
        time.sleep(0.01 * (number % 3 == 0))
        return number**2

    squares = computed_ahead(slow_square, values(), 4)
    assert list(itertools.islice(squares, 20)) == [number**2 for number in range(20)]
    squares.close()
    assert len(taken) <= 25


def test_errors_come_at_their_place():
    for function, values in (
        (lambda number: 1 // (3 - number), range(9)),
        (lambda number: number, (1 // (3 - number) for number in range(9))),
    ):
        results = computed_ahead(function, values, 16)
        assert len([next(results) for _ in range(3)]) == 3
        with pytest.raises(ZeroDivisionError):
            next(results)
