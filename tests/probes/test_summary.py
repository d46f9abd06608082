import numpy as np
import pytest
import torch

from qed.probes.summary import GROUPINGS, JOINT, QUANTILES, Bins, Quantity, Summary, log_bins

EDGES = (0, 5, 8, 20)


def summarised(samples, quantity, start=0, parts=1):
    """Samples ``[L, B, T, H]`` received in ``parts`` calls a layer."""
    summary = Summary(quantity, num_layers=len(samples), num_heads=samples.shape[3], edges=EDGES)
    for layer, x in enumerate(samples):
        offset = start
        for part in x.chunk(parts, 1):
            summary.update(layer, part, offset)
            offset += part.shape[1]
    return summary


@pytest.mark.parametrize("bins", [Bins(-2, 2, 400), log_bins(1e-4, 1e2)])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_grouping_agrees_with_numpy(bins, parts):
    samples = torch.randn(2, 3, 20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samples = samples.abs() if bins.scale == "log" else samples
    summary = summarised(samples, Quantity("x", bins, {"above 1": lambda x: x > 1}), parts=parts)
    num_rows = 0
    for grouping in (*GROUPINGS, JOINT):
        for row in summary.rows("x", grouping):
            part = samples if row["layer"] is None else samples[row["layer"]][None]
            part = part if row["start"] is None else part[:, :, row["start"] : row["end"]]
            part = part if row["head"] is None else part[..., row["head"]]
            x = part.flatten().numpy()
            assert (row["count"], row["min"], row["max"]) == (x.size, x.min(), x.max())
            np.testing.assert_allclose(row["mean"], x.mean(), rtol=1e-12)
            assert row["shares"]["above 1"] == np.mean(x > 1)
            for q in QUANTILES:
                found, exact = row["quantiles"][str(q)], np.quantile(x, q, method="inverted_cdf")
                if bins.scale == "linear":
                    inside = bins.low < exact < bins.high
                    assert not inside or abs(found - exact) <= 4 / 400 + 1e-12
                else:
                    assert abs(np.log(found / exact)) <= np.log(10) / 32 + 1e-9
            num_rows += 1
    assert num_rows == 1 + 2 + 8 + 3 + 24


def test_histogram_keeps_every_sample_and_the_ends():
    samples = torch.linspace(-7, 7, 2 * 3 * 20 * 4, dtype=torch.float64).reshape(2, 3, 20, 4)
    summary = summarised(samples, Quantity("x", Bins(-1, 1, 1000)))
    (row,) = summary.rows("x", ())
    histogram = row["histogram"]
    assert sum(histogram["counts"]) == row["count"] == samples.numel()
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1 <= 122
    assert (histogram["edges"][0], histogram["edges"][-1]) == (-7.0, 7.0)
    assert histogram["edges"] == sorted(histogram["edges"])


def test_what_is_not_finite_is_counted_apart():
    samples = torch.ones(1, 1, 4, 1, dtype=torch.float64)
    samples[0, 0, :2, 0] = torch.tensor([torch.nan, torch.inf])
    (row,) = summarised(samples, Quantity("x", Bins(0, 2, 10), {"above 0": lambda x: x > 0})).rows("x", ())
    assert (row["count"], row["num_not_finite"], row["mean"], row["max"]) == (2, 2, 1.0, 1.0)
    assert row["shares"] == {"above 0": 1.0}
    assert not list(summarised(samples * torch.nan, Quantity("x", Bins(0, 2, 10))).rows("x", ()))


def test_values_on_and_beyond_the_bins():
    bins = Bins(0, 1, 2)
    x = torch.tensor([-1, 0, 0.25, 0.5, 1, 9, torch.nan], dtype=torch.float64)
    assert bins.index(x).tolist() == [0, 1, 1, 2, 3, 3, 4]
    assert log_bins(1e-2, 1e2, 1).index(torch.tensor([0.0, 0.02, 2.0, 1e5])).tolist() == [0, 1, 3, 5]
    assert bins.resolution == {"scale": "linear", "step": 0.5, "from": 0, "to": 1}
    assert log_bins(1e-2, 1e2, 1).resolution["ratio"] == pytest.approx(10)
