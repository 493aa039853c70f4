"""Which ranks count as slow."""

from __future__ import annotations

from phalanx.engines.slow_ranks import RankClock, slow_ranks, slow_text

HOSTS = ["a", "a", "b", "b"]


def test_slow_is_a_fifth_above_the_median():
    found = slow_ranks([1.0, 1.19, 1.21, 2.0], HOSTS, factor=1.2)
    assert [(each.rank, each.host, each.factor) for each in found] == [
        (3, "b", 2.0 / 1.19),
    ]
    found = slow_ranks([1.0, 1.0, 1.21, 1.0], HOSTS)
    assert [each.rank for each in found] == [2]


def test_of_two_ranks_the_slower_can_be_slow():
    assert [each.rank for each in slow_ranks([1.0, 1.3], ["a", "b"])] == [1]
    assert slow_ranks([1.0, 1.1], ["a", "b"]) == []


def test_one_rank_or_unknown_times_are_never_slow():
    assert slow_ranks([3.0], ["a"]) == []
    assert slow_ranks([0.0, 5.0, 0.0], ["a"] * 3) == []


def test_slowest_comes_first():
    assert [each.rank for each in slow_ranks([1.0, 2.0, 1.0, 3.0, 1.0], ["a"] * 5)] == [3, 1]


def test_text_names_a_host_whose_ranks_are_all_slow():
    found = slow_ranks([1.0, 1.0, 1.0, 1.5, 1.4], ["a", "a", "a", "b", "b"])
    assert slow_text(found, ["a", "a", "a", "b", "b"]) == (
        "slow: host b (ranks 3, 4) up to 1.50 times the median"
    )


def test_text_names_the_ranks_of_a_host_of_which_others_are_not_slow():
    found = slow_ranks([1.0, 2.0, 1.0], ["a"] * 3)
    assert slow_text(found, ["a"] * 3) == "slow: rank 1 (host a) up to 2.00 times the median"
    assert slow_text([], ["a"]) == ""


def test_clock_is_per_token_and_starts_anew():
    clock = RankClock()
    assert clock.take() == 0.0
    clock.add(1.0, 30)
    clock.add(2.0, 20)
    assert clock.take() == 3.0 / 50
    assert clock.take() == 0.0
