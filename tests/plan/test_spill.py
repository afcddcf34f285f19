"""Only what does not fit goes to NVMe, evenly over the model."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from slideformer_backend.plan.spill import spill_share, spill_states, spread

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=24)


def test_nothing_goes_while_all_fits():
    assert spill_states([10] * 8, 80, 0).units == ()
    assert spill_states([10] * 8, 80, 0).fits


def test_the_fewest_go_and_they_are_spread():
    found = spill_states([10] * 8, 79, 1000)
    # 4 away leave 40 at home and need 30 on their way; 3 away would need 80
    assert found.units == (1, 3, 5, 7)
    assert (found.host, found.staging, found.nvme) == (40, 30, 40)
    assert found.fits


def test_less_is_on_its_way_where_memory_is_shortest():
    found = spill_states([10] * 8, 10, 1000)
    assert (found.staged, found.staging, found.host, len(found.units)) == (1, 10, 0, 8)


def test_edges_go_last():
    assert set(spill_states([10] * 4, 40, 1000, edges=[5, 5]).units) <= set(range(4))
    found = spill_states([10] * 4, 15, 1000, edges=[5, 5])
    assert found.units == (0, 1, 2, 3, 4)
    assert found.host == 5


def test_what_lacks_is_said():
    found = spill_states([10] * 4, 5, 30)
    assert (found.host_missing, found.nvme_missing) == (5, 10)
    assert not found.fits


def test_a_share():
    assert spill_share([10] * 8, 0.5, 1000, 1000).units == (1, 3, 5, 7)
    assert spill_share([10] * 8, 0.0, 1000, 1000).units == ()
    assert spill_share([10] * 8, 1.0, 1000, 1000, edges=[3]).units == tuple(range(9))
    assert spill_share([10] * 10, 0.3, 1000, 1000).units == spread(3, 10)


@given(SIZES, st.integers(0, 1500))
def test_one_unit_fewer_would_not_fit(sizes, host):
    found = spill_states(sizes, host, 10**6)
    if not found.fits or found.staged < 3:
        return
    assert found.host + found.staging <= host
    fewer = spread(len(found.units) - 1, len(sizes)) if found.units else ()
    if found.units:
        away = [sizes[number] for number in fewer]
        assert sum(sizes) - sum(away) + max(away, default=0) * min(3, len(away)) > host


@given(st.integers(0, 60), st.integers(1, 60))
def test_spread_positions_differ_and_are_even(count, total):
    count = min(count, total)
    places = spread(count, total)
    assert len(set(places)) == count
    assert all(0 <= place < total for place in places)
    gaps = [second - first for first, second in itertools.pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1
