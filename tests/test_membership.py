"""The state machine of a membership; time is a number here."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import JobError, WorldError
from phalanx.membership import NO_STATE, Ballot, Change, Member, Membership, Roster, Timeouts

TIMEOUTS = Timeouts(
    heartbeat_s=1.0, detect_s=3.0, exchange_s=4.0, island_s=5.0, init_s=6.0, quorum_s=7.0
)
A, B, C = Member(0, 1), Member(1, 1), Member(2, 1)


def formed(*members: Member) -> Roster:
    """A roster whose epoch 1 binds these members, alive and with state at time 0."""
    roster = Roster([m.id for m in members], TIMEOUTS)
    for member in members:
        roster.beat(member, 0, 0.0)
    roster.propose([m.id for m in members], 0.0)
    for member in members:
        roster.ballot.vote(member, True)
    roster.commit(0.0)
    return roster


def test_first_epoch_needs_everyone_expected():
    roster = Roster((0, 1, 2), TIMEOUTS)
    for member in (A, B):
        roster.beat(member, NO_STATE, 0.0)
    with pytest.raises(WorldError, match="nobody has the state"):
        roster.propose((0, 1), 3.0)
    roster.beat(C, NO_STATE, 1.0)
    assert roster.propose((0, 1, 2), 1.0) == Membership(1, (A, B, C))


def test_membership_of_one_after_a_restart_is_impossible_without_a_durable_state():
    before = Membership(4, (A, B, C))
    again = Member(1, 2)
    roster = Roster((0, 1, 2), TIMEOUTS, current=before)
    roster.beat(again, NO_STATE, 50.0)
    with pytest.raises(WorldError, match="nobody has the state"):
        roster.propose((1,), 50.0)
    durable = Roster((0, 1, 2), TIMEOUTS, current=before, durable=True)
    durable.beat(again, NO_STATE, 50.0)
    assert durable.propose((1,), 50.0) == Membership(5, (again,))


def test_a_member_that_is_still_catching_up_is_no_donor():
    roster = formed(A, B)
    again = Member(1, 2)
    roster.beat(A, 3, 1.0)
    roster.beat(again, NO_STATE, 1.0)
    roster.adopt(Membership(2, (A, again)))
    roster.beat(again, NO_STATE, 9.0)
    with pytest.raises(WorldError, match="nobody has the state"):
        roster.propose((1,), 9.0)


def test_silence_longer_than_detection_is_a_leave_told_once():
    roster = formed(A, B, C)
    for now_s in (1.0, 2.0, 3.0, 4.0):
        roster.beat(A, 1, now_s)
        roster.beat(C, 1, now_s)
        expected = [Change("leave", B)] if now_s > 3.0 else []
        assert roster.changes(now_s) == expected
    assert roster.changes(4.0) == []


def test_a_restart_within_detection_is_a_leave_and_a_join():
    roster = formed(A, B, C)
    again = Member(1, 2)
    for member in (A, again, C):
        roster.beat(member, 2, 1.0)
    assert roster.changes(1.0) == [Change("leave", B), Change("join", again)]
    roster.beat(B, 2, 1.5)  # a late message of the old process changes nothing
    assert roster.alive(1.5) == (A, again, C)


def test_behind_are_those_with_fewer_steps():
    roster = formed(A, B, C)
    roster.beat(A, 7, 1.0)
    roster.beat(B, 7, 1.0)
    roster.beat(C, NO_STATE, 1.0)
    assert roster.behind((A, B, C)) == (C,)


def test_the_heir_is_the_lowest_member_alive_that_has_the_state():
    roster = formed(A, B, C)
    assert roster.heir(1.0) == A
    again = Member(0, 2)
    roster.beat(again, NO_STATE, 4.0)
    roster.beat(C, 1, 4.0)
    roster.adopt(Membership(2, (again, B, C)))
    assert roster.heir(4.0) == C


def test_a_joiner_that_vanishes_during_its_vote_is_a_leave():
    roster = formed(A, B)
    again = Member(1, 2)
    roster.beat(A, 1, 5.0)
    roster.beat(again, NO_STATE, 5.0)
    assert roster.changes(5.0) == [Change("leave", B), Change("join", again)]
    roster.propose((0, 1), 5.0)
    roster.beat(A, 1, 9.0)
    assert roster.changes(9.0) == [Change("leave", again)]


def test_a_join_that_a_proposal_does_not_take_up_is_told_again():
    roster = formed(A, B)
    for member in (A, C):
        roster.beat(member, 1, 4.0)
    assert roster.changes(4.0) == [Change("leave", B), Change("join", C)]
    roster.propose((0,), 4.0)
    assert roster.changes(4.0) == [Change("join", C)]


def test_an_epoch_binds_only_when_all_agree_in_time():
    roster = formed(A, B, C)
    roster.propose((0, 2), 1.0)
    roster.ballot.vote(A, True)
    with pytest.raises(WorldError, match=r"no vote of \[2\]"):
        roster.commit(2.0)
    assert roster.ballot.verdict(7.0) is False, "the deadline is init_s after the proposal"
    roster.propose((0, 2), 1.0)
    roster.ballot.vote(A, True)
    roster.ballot.vote(C, False)
    with pytest.raises(WorldError, match=r"against \[2\]"):
        roster.commit(2.0)
    assert roster.current.epoch == 1


def test_votes_of_others_and_second_votes_do_not_count():
    ballot = Ballot((A, B), deadline_s=5.0)
    assert not ballot.vote(Member(1, 2), False)
    assert ballot.vote(B, True)
    assert not ballot.vote(B, False)
    assert ballot.verdict(1.0) is None
    assert ballot.vote(A, True)
    assert ballot.verdict(9.0) is True


def test_an_older_membership_never_replaces_a_newer_one():
    roster = formed(A, B, C)
    roster.adopt(Membership(5, (A,)))
    assert roster.adopt(Membership(4, (A, B))) == Membership(5, (A,))


def test_too_few_members_are_refused():
    roster = Roster((0, 1), TIMEOUTS, min_members=2, current=Membership(1, (A, B)))
    roster.beat(A, 3, 1.0)
    with pytest.raises(WorldError, match="at least 2"):
        roster.propose((0,), 1.0)
    with pytest.raises(WorldError, match=r"nobody ever came to the places \[1\]"):
        roster.propose((0, 1), 1.0)


def test_someone_who_just_fell_silent_makes_a_ballot_that_is_not_won():
    roster = formed(A, B, C)
    roster.beat(A, 1, 5.0)
    roster.beat(B, 1, 5.0)
    roster.propose((0, 2), 5.0)
    assert roster.changes(5.0) == [Change("leave", C), Change("join", B)]
    assert roster.ballot.verdict(5.0) is None


def test_timeouts_nest():
    with pytest.raises(JobError, match=r"timeouts.exchange_s = 5.0: must be longer than detect_s"):
        Timeouts(heartbeat_s=1.0, detect_s=5.0, exchange_s=5.0)


def test_who_acted_before_its_first_heartbeat_is_gone_only_when_that_was_long_ago():
    roster = Roster((0, 1), TIMEOUTS)
    assert not roster.has_left(A, 13.0, since_s=10.0)
    assert roster.has_left(A, 13.1, since_s=10.0)


def test_after_its_first_heartbeat_only_heartbeats_count():
    roster = Roster((0, 1), TIMEOUTS)
    roster.beat(A, 0, 10.0)
    assert not roster.has_left(A, 13.0, since_s=0.0)
    assert roster.has_left(A, 13.1, since_s=13.0)


def test_a_place_that_another_process_took_has_lost_its_member_at_once():
    roster = Roster((0, 1), TIMEOUTS)
    roster.beat(Member(0, 2), NO_STATE, 10.0)
    assert roster.has_left(A, 10.0, since_s=10.0)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["beat", "restart", "silence", "vote"]), st.integers(0, 2)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_every_epoch_has_a_donor_whatever_happens(events):
    """No history of restarts, silences and votes lets an epoch bind that nobody could serve."""
    roster = formed(A, B, C)
    incarnation, has_state, told, now_s = [1, 1, 1], [True] * 3, [True] * 3, 0.0
    for kind, place in events:
        now_s += 1.0
        if kind == "silence":
            now_s += TIMEOUTS.detect_s
        elif kind == "restart":
            incarnation[place] += 1
            has_state[place] = False
        if kind != "vote":
            told[place] = has_state[place]
            step = 5 if has_state[place] else NO_STATE
            roster.beat(Member(place, incarnation[place]), step, now_s)
            continue
        alive, before = roster.alive(now_s), roster.current
        donors = [m for m in alive if m in before.members and told[m.id]]
        try:
            proposed = roster.propose([m.id for m in alive], now_s)
        except WorldError:
            assert not donors
            continue
        assert donors and proposed.epoch == before.epoch + 1
        for member in alive:
            roster.ballot.vote(member, True)
        roster.commit(now_s)
        has_state = [has_state[i] or i in proposed.ids for i in range(3)]
