"""Block bootstrap: weights, percentiles of draws, block length, effective blocks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.replay import bootstrap
from headway.replay.contrast import contrast
from headway.replay.stats import percentile


def _naive_weights(n, length, draws, seed):
    starts = np.random.default_rng(seed).integers(0, n, size=(draws, -(-n // length)))
    weights = np.zeros((draws, n))
    for draw in range(draws):
        for start in starts[draw]:
            for offset in range(length):
                weights[draw, (start + offset) % n] += 1
    return weights


@given(st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_weights_are_those_of_the_naive_loop(n, data):
    """Cumulative sums give what adding up block after block gives, wrap-around included."""
    length = data.draw(st.integers(1, n))
    fast = bootstrap.block_weights(n, length, 5, np.random.default_rng(3))
    assert np.array_equal(_naive_weights(n, length, 5, 3), fast)


@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.5, float("inf"), float("nan")]), min_size=1, max_size=30),
    st.sampled_from([0.1, 0.5, 0.9, 0.99]),
    st.integers(0, 99),
)
@settings(deadline=None)
def test_weighted_percentile_is_that_of_the_repeated_values(values, quantile, seed):
    """A draw's percentile equals the nearest rank over each value written out as often as its weight says."""
    values = np.array(values)
    weights = np.random.default_rng(seed).integers(0, 4, size=(3, len(values))).astype(np.float32)
    found = bootstrap.weighted_percentiles(weights, values, [quantile])[:, 0]
    for row, one in zip(weights, found, strict=True):
        written = np.repeat(values, row.astype(int))
        expected = percentile(written[~np.isnan(written)], quantile)
        assert np.isnan(one) if expected is None else one == expected


def test_classes_keep_their_share_in_every_draw():
    """After post-stratification 3 of 10 rows stay 30 % of the weight, whatever was drawn."""
    strata = np.array([0] * 3 + [1] * 7)
    weights = bootstrap.keep_shares(bootstrap.block_weights(10, 2, 50, np.random.default_rng(0)), strata)
    lost = (weights[:, :3].sum(axis=1) == 0) | (weights[:, 3:].sum(axis=1) == 0)
    assert np.allclose(3.0, weights[~lost, :3].sum(axis=1))
    assert np.allclose(7.0, weights[~lost, 3:].sum(axis=1))


def test_block_length_grows_with_memory():
    """White noise needs blocks of a few requests, a first-order process with 0.9 needs tens."""
    rng = np.random.default_rng(1)
    white = rng.normal(size=2000)
    slow = np.empty(2000)
    level = 0.0
    for i in range(2000):
        level = 0.9 * level + white[i]
        slow[i] = level
    assert bootstrap.block_length(white) <= 5
    assert 20 <= bootstrap.block_length(slow) <= 250
    assert bootstrap.block_length(np.zeros(2000)) == 1


def test_one_burst_is_one_block():
    """A statistic that 20 neighbouring requests decide rests on one block; spread out, on as many as they touch."""
    burst, spread = np.zeros(1000), np.zeros(1000)
    burst[100:120] = 1.0
    spread[::50] = 1.0
    assert bootstrap.effective_blocks([burst], 50) == 1.0
    assert bootstrap.effective_blocks([spread], 50) == 20.0


def test_interval_of_a_mean_has_its_textbook_width():
    """Draws of a normal mean: the interval is +- t x SE within the bootstrap's own error, MDE (t + 0.84) x SE."""
    draws = np.random.default_rng(0).normal(0.0, 0.1, 4000)
    found = contrast(0.0, draws, scale="plain", blocks=1e6)
    low, high = found.interval(0.95)
    assert abs(low + 0.196) < 0.01
    assert abs(high - 0.196) < 0.01
    assert abs(found.detectable(0.95) - 0.28) < 0.01


def test_few_blocks_widen_the_interval():
    """Five effective blocks: t of 4 degrees and the lost fifth of the variance make it 1.58 times as wide."""
    draws = np.random.default_rng(0).normal(0.0, 0.1, 4000)
    wide = contrast(0.0, draws, scale="plain", blocks=5).interval(0.95)
    plain = contrast(0.0, draws, scale="plain", blocks=1e6).interval(0.95)
    assert 1.5 < wide[1] / plain[1] < 1.66


def test_spread_between_repeats_enters_the_interval():
    """Clustered draws far wider than those inside repeats must widen the interval beyond them, with few degrees."""
    rng = np.random.default_rng(2)
    inside = rng.normal(0.0, 0.01, 4000)
    over = rng.normal(0.0, 0.10, 4000)
    found = contrast(0.0, inside, scale="plain", blocks=100, clustered=over, repeats=4)
    assert 3.0 < found.degrees < 3.3
    assert found.interval(0.95)[1] > 0.3
