"""Counting the streams that this process has open at each verifier."""

from __future__ import annotations

from cluster.ray.open_streams import OpenStreams


def test_a_stream_counts_where_it_was_placed_until_it_ends() -> None:
    streams = OpenStreams()
    with streams.opened() as first, streams.opened() as second:
        assert streams.at("a") == 0
        streams.placed(first, "a")
        streams.placed(second, "a")
        assert (streams.at("a"), streams.at("b")) == (2, 0)
        # Refused by one, it is placed at the next.
        streams.placed(second, "b")
        assert (streams.at("a"), streams.at("b")) == (1, 1)
        streams.ended(first)
        assert (streams.at("a"), streams.at("b")) == (0, 1)
    assert (streams.at("a"), streams.at("b")) == (0, 0)


def test_a_stream_that_ended_before_it_was_placed_does_not_count() -> None:
    streams = OpenStreams()
    with streams.opened() as gone:
        pass
    streams.placed(gone, "a")
    assert streams.at("a") == 0
