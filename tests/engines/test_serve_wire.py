"""Lines between front end and engine: whatever comes ends as a message or an error, never waits."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engines.serve.wire import (
    MESSAGES,
    LineSocket,
    encode,
    next_message,
    read_message,
)
from phalanx.errors import PhalanxError, WorldError

pytestmark = pytest.mark.timeout(60)
LINES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([encode({"kind": kind}) for kind in MESSAGES]),
    st.sampled_from([b"[" * 20_000, b"null\n", b"\n", b'{"kind":["add"]}\n', b"\r\n", b"1e999\n"]),
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=9), st.lists).map(
        lambda value: encode({"kind": "add", "request": value, "tokens": value, "sampling": {}})
    ),
)


@given(st.lists(LINES, max_size=4).map(b"".join), st.booleans())
def test_nonsense_ends_the_core_with_an_error_and_never_hangs(data, is_open):
    ours, theirs = socket.socketpair()
    lines = LineSocket(theirs)
    ours.sendall(encode({"first": "settings"}) + encode({"kind": "wake", "number": 1}) + data)
    if not is_open:
        ours.close()
    try:
        lines.receive(wait=True)
        while messages := lines.receive(wait=False):
            assert all(message["kind"] in MESSAGES for message in messages)
    except WorldError as error:
        assert error.code == "serve/engine"
    finally:
        theirs.close()
        ours.close()


@given(st.lists(LINES, max_size=4).map(b"".join))
def test_nonsense_ends_the_front_ends_reading_and_never_hangs(data):
    async def read() -> None:
        reader = asyncio.StreamReader(limit=1000)
        reader.feed_data(data)
        reader.feed_eof()
        try:
            while message := await asyncio.wait_for(next_message(reader), 5):
                assert message["kind"] in MESSAGES
        except WorldError as error:
            assert error.code == "serve/engine" and len(str(error)) < 1000

    asyncio.run(read())


def test_a_line_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr("phalanx.engines.serve.wire.MAX_LINE_BYTES", 5000)
    ours, theirs = socket.socketpair()
    ours.sendall(encode({}) + b"x" * 6000)
    lines = LineSocket(theirs)
    with pytest.raises(PhalanxError, match="is longer than 5000 bytes"):
        while lines.receive(wait=True):
            pass
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"kind": "sing"}, "no kind that is known: 'sing'"),
        ({"kind": "wake"}, "of kind 'wake' needs number, of type int"),
        ({"kind": "wake", "number": True}, "needs number, of type int"),
        ({"kind": "cancel", "request": "1"}, "needs request, of type int"),
        ([], "must be a JSON object"),
    ],
)
def test_a_message_of_another_form_is_named(message, words):
    with pytest.raises(WorldError, match=words) as caught:
        read_message(encode(message))
    assert caught.value.code == "serve/engine"


def test_half_a_message_waits_for_the_other_half_and_keeps_no_whole_one_back():
    ours, theirs = socket.socketpair()
    lines = LineSocket(theirs)
    one, two = encode({"kind": "wake", "number": 1}), encode({"kind": "wake", "number": 2})
    ours.sendall(encode({"first": 0}) + one + two[:9])
    assert lines.receive(wait=True) == [{"first": 0}, {"kind": "wake", "number": 1}]
    assert lines.receive(wait=False) == []
    ours.sendall(two[9:])
    assert lines.receive(wait=True) == [{"kind": "wake", "number": 2}]
    ours.close()
    assert lines.receive(wait=True) is None and lines.receive(wait=False) is None
    theirs.close()


def test_whether_the_receiving_thread_works_is_known():
    ours, theirs = socket.socketpair()
    lines = LineSocket(theirs)
    ours.sendall(encode({}))
    lines.receive(wait=True)
    assert 0 <= lines.busy_s < 5
    with lines.long_work():
        assert lines.busy_s is None and lines.send({"kind": "beat"})
        assert lines.busy_s is None, "a send within it changes nothing"
    assert lines.busy_s is not None
    ours.close()
    assert not lines.send({"kind": "beat"})
    theirs.close()
