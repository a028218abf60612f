"""AUROCs of `diversification` by input, their standard errors, and those of differences."""

import numpy as np
import pytest
import torch
from dissensus_studies.diversification.ranks import Ranks

from dissensus import metrics


def test_an_auroc_is_that_of_the_metric():
    known, unknown = torch.randn(3, 200).round(decimals=1), (torch.randn(3, 120) + 0.5).round(decimals=1)
    wanted = [metrics.auroc(u, k) for u, k in zip(unknown, known, strict=True)]
    np.testing.assert_allclose(Ranks.of(known, unknown).auroc, wanted, atol=1e-12)


def test_standard_errors_are_the_spread_over_samples():
    generator = torch.Generator().manual_seed(1)
    draws = [
        Ranks.of(torch.randn(1, 80, generator=generator), 1 + torch.randn(1, 60, generator=generator))
        for _ in range(400)
    ]
    spread = torch.cat([draw.auroc for draw in draws]).std()
    typical = torch.cat([draw.error for draw in draws]).mean()
    assert typical == pytest.approx(float(spread), rel=0.12)


def test_standard_errors_of_corrupted_images_allow_for_their_being_the_same_images():
    generator = torch.Generator().manual_seed(2)
    values, errors, loose = [], [], []
    for _ in range(400):
        clean = torch.randn(1, 100, generator=generator)
        parts = [clean + 0.5 + 0.5 * torch.randn(1, 100, generator=generator) for _ in range(3)]
        paired = Ranks.mean([Ranks.of(clean, part, paired=True) for part in parts])
        values.append(paired.auroc)
        errors.append(paired.error)
        loose.append(Ranks.mean([Ranks.of(clean, part) for part in parts]).error)
    spread = float(torch.cat(values).std())
    assert float(torch.cat(errors).mean()) == pytest.approx(spread, rel=0.15)
    assert float(torch.cat(loose).mean()) > 1.5 * spread


def test_the_error_of_a_difference_is_that_of_paired_inputs():
    generator = torch.Generator().manual_seed(3)
    differences, errors, separate = [], [], []
    for _ in range(400):
        known, unknown = (torch.randn(1, 80, generator=generator), 1 + torch.randn(1, 60, generator=generator))
        first = Ranks.of(known, unknown)
        noise = [0.3 * torch.randn(1, n, generator=generator) for n in (80, 60)]
        second = Ranks.of(known + noise[0], unknown + noise[1])
        differences.append(second.minus(first).auroc)
        errors.append(second.minus(first).error)
        separate.append((first.error**2 + second.error**2).sqrt())
    assert float(torch.cat(errors).mean()) == pytest.approx(float(torch.cat(differences).std()), rel=0.15)
    assert float(torch.cat(separate).mean()) > 1.5 * float(torch.cat(errors).mean())


def test_the_mean_over_sets_is_the_mean_of_their_aurocs():
    parts = [Ranks.of(torch.zeros(1, 5), torch.full((1, count), value)) for count, value in ((3, 1.0), (9, 0.0))]
    assert Ranks.mean(parts).auroc.item() == pytest.approx(0.75)
