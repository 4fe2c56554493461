import itertools

import pytest

from utils.schedule import learning_rate


def test_warm_up_rises_to_the_peak_and_decay_falls_to_zero():
    rates = [learning_rate(step, 0.4, total_steps=20, warmup_steps=4, power=2.0) for step in range(21)]
    assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates[4] == pytest.approx(0.4)
    assert rates[12] == pytest.approx(0.4 * 0.5**2)
    assert rates[20] == 0.0
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))


def test_published_log_of_ms1mv2_r50_has_a_quarter_of_the_peak_half_way():
    assert learning_rate(56860, 0.1, total_steps=113720, warmup_steps=0, power=2.0) == pytest.approx(0.0250)


def test_without_warm_up_the_first_step_runs_at_the_peak():
    assert learning_rate(0, 0.1, total_steps=10, warmup_steps=0, power=1.0) == 0.1
