import threading
import time

import pytest

from utils.parallel import map_in_order


def test_results_come_in_order_though_work_ends_in_another():
    def slow(number: int) -> int:
        time.sleep(0.002 * (number % 3))
        return number * number

    assert list(map_in_order(slow, range(200), 4)) == [number * number for number in range(200)]


def test_only_so_many_are_under_way():
    begun = 0
    lock = threading.Lock()

    def count(number: int) -> int:
        nonlocal begun
        with lock:
            begun += 1
        return number

    results = map_in_order(count, iter(range(10_000)), 2, ahead=8)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    time.sleep(0.05)
    assert begun <= 5 + 2 * 8
    results.close()


def test_an_exception_comes_where_its_result_would_have():
    def work(number: int) -> int:
        if number == 7:
            raise ValueError("seven")
        return number

    results = map_in_order(work, range(100), 3)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(results)


def test_nothing_to_do():
    assert list(map_in_order(str, [], 2)) == []
