import threading
import time
from collections.abc import Iterator

import pytest

from utils.parallel import map_in_order


def test_results_come_in_order_though_work_ends_in_another():
    def slow(number: int) -> int:
        time.sleep(0.002 * (number % 3))
        return number * number

    assert list(map_in_order(slow, range(200), 4)) == [number * number for number in range(200)]


def test_only_so_many_items_are_taken_ahead_of_the_results():
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(10_000):
            taken += 1
            yield number

    results = map_in_order(lambda number: number, items(), 2, ahead=8)
    for count in range(5):  # two threads of eight each, and one more for each result that went
        assert next(results) == count and taken == 16 + count
    results.close()
    assert taken == 20


def test_an_exception_comes_where_its_result_would_have():
    def work(number: int) -> int:
        if number == 7:
            raise ValueError("seven")
        return number

    results = map_in_order(work, range(100), 3)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(results)


def test_a_generator_that_is_given_up_does_not_wait_for_its_threads():
    begun, ends = threading.Event(), threading.Event()

    def work(number: int) -> bool:
        return number == 0 or (begun.set() or ends.wait(60))

    results = map_in_order(work, [0, 1], 1)
    assert next(results) and begun.wait(20)
    closing = threading.Thread(target=results.close, daemon=True)  # as the garbage collector closes it
    closing.start()
    closing.join(20)
    stuck = closing.is_alive()
    ends.set()
    assert not stuck


def test_no_items_give_no_results():
    assert list(map_in_order(str, [], 2)) == []
