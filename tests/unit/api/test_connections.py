"""Who gets a place for a connection, and who gives one up."""

from __future__ import annotations

from services.api.http.connections import ConnectionPlace, ConnectionPlaces


def waits(place: ConnectionPlace | None, ended: list[ConnectionPlace]) -> ConnectionPlace:
    assert place is not None
    place.give_way = lambda: ended.append(place)
    return place


def test_one_address_may_have_all_places_and_gives_them_up_to_others() -> None:
    places, ended = ConnectionPlaces(4), []
    crowd = [waits(places.take("1.1.1.1"), ended) for _ in range(4)]
    assert places.take("1.1.1.1") is None
    other = [waits(places.take("2.2.2.2"), ended) for _ in range(2)]
    # The oldest go, until both have the same.
    assert ended == crowd[:2]
    assert places.take("2.2.2.2") is None
    other[0].release()
    other[0].release()
    assert places.take("1.1.1.1") is not None
    assert places.take("1.1.1.1") is None


def test_a_connection_with_a_request_under_way_stays() -> None:
    places, ended = ConnectionPlaces(2), []
    crowd = [waits(places.take("1.1.1.1"), ended) for _ in range(2)]
    crowd[0].give_way = None
    assert places.take("2.2.2.2") is not None
    assert ended == [crowd[1]]


def test_a_network_of_version_6_is_one_caller() -> None:
    places, ended = ConnectionPlaces(3), []
    for host in ("2001:db8::1", "2001:db8::2", "::ffff:1.1.1.1"):
        waits(places.take(host), ended)
    assert places.take("2001:db8::3") is None
    assert places.take("1.1.1.1") is None
    assert not ended
    assert places.take("2001:db8:0:1::1") is not None
    assert len(ended) == 1
    assert ConnectionPlaces(1).take("") is not None
