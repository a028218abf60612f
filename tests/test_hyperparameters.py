from math import log

import pytest
import torch
from training_helpers import net, x, y

import dissensus as ds


def test_values_lie_between_their_bounds_evenly_on_a_logarithmic_scale():
    drawn = ds.diverse_hyperparameters(4000, lr=(1e-4, 1e-2), weight_decay=(1e-3, 1e-1), dropout=(0.0, 0.4))
    assert set(drawn) == {"lr", "weight_decay", "dropout"}
    places = torch.tensor([log(rate / 1e-4) / log(100) for rate in drawn["lr"]])
    assert 0 <= places.min() < 0.01
    assert 0.99 < places.max() <= 1
    assert places.mean().item() == pytest.approx(0.5, abs=0.02)
    assert torch.tensor(drawn["dropout"]).mean().item() == pytest.approx(0.2, abs=0.01)
    # Different names are drawn apart.
    pair = torch.stack([places, torch.tensor(drawn["weight_decay"]).log()])
    assert torch.corrcoef(pair)[0, 1].abs() < 0.05


def test_more_members_leave_the_earlier_ones_as_they_were():
    few, many = ds.diverse_hyperparameters(3, seed=1), ds.diverse_hyperparameters(8, seed=1)
    assert {name: values[:3] for name, values in many.items()} == few
    assert ds.diverse_hyperparameters(3, seed=2) != few


def test_each_member_trains_with_its_own():
    drawn = ds.diverse_hyperparameters(3, lr=(1e-3, 1e-1))
    ens, alone = ds.DeepEnsemble(net, 3), ds.DeepEnsemble(net, 3)
    ds.fit(ens, (x, y), epochs=3, batch_size=50, **drawn)
    ds.fit(alone, (x, y), epochs=3, batch_size=50, lr=drawn["lr"][1], weight_decay=drawn["weight_decay"][1])
    outputs, others = ds.predict(ens, x), ds.predict(alone, x)
    torch.testing.assert_close(outputs[1], others[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs[0], others[0], atol=1e-3)


def test_bad_bounds_get_one_clear_sentence():
    with pytest.raises(ValueError, match="lr"):
        ds.diverse_hyperparameters(3, lr=(1e-2, 1e-3))
    assert ds.diverse_hyperparameters(2, lr=None, weight_decay=None) == {}
