"""SWAG against its formulas, and against torch's own update of BatchNorm statistics."""

import pytest
import torch
from torch import nn
from training_helpers import norm_net, x, y

import dissensus as ds

path = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 9.0)


def collected(rank, members=2, scale=1.0):
    ens = ds.SWAG(lambda: nn.Linear(3, 2), members, rank=rank, scale=scale)
    for weights in path:
        torch.nn.utils.vector_to_parameters(weights, ens.net.parameters())
        ens.collect()
    ens.draw()
    return ens


def test_moments_are_those_of_the_path():
    ens = collected(rank=4)
    torch.testing.assert_close(ens.mean, path.mean(0))
    torch.testing.assert_close(ens.variance, path.var(0, correction=0))
    averages = torch.stack([path[: n + 1].mean(0) for n in range(6)])
    torch.testing.assert_close(ens.deviations, (path - averages)[-4:])


@pytest.mark.parametrize("rank", [0, 4])
def test_draws_have_the_covariance_of_the_paper(rank):
    ens = collected(rank, members=8000)
    kept = ens.kept.state_dict()
    draws = torch.cat([kept["net.weight"].flatten(1), kept["net.bias"]], 1)
    wanted = path.var(0, correction=0).diag() / 2
    if rank:
        wanted = wanted + ens.deviations.T @ ens.deviations / (2 * (rank - 1))
    spread = wanted.diag().sqrt()
    # 8000 draws: a correlation is known to about 0.011, so 0.06 is five deviations.
    assert ((draws.T.cov() - wanted) / spread[:, None] / spread).abs().max() < 0.06
    assert ((draws.mean(0) - ens.mean) / spread).abs().max() < 0.06


def test_scale_zero_is_the_average():
    ens = collected(rank=4, scale=0.0)
    torch.testing.assert_close(ens.member(1).weight.flatten(), path.mean(0)[:6])


def test_batch_norm_statistics_are_torchs():
    ens = ds.SWAG(norm_net, 3, start=0.0)
    ds.fit(ens, (x, y), epochs=3, lr=0.05)
    for index in range(3):
        net = ens.member(index)
        torch.optim.swa_utils.update_bn([x], net)
        found = ens.member(index)
        torch.testing.assert_close(found[1].running_mean, net[1].running_mean)
        torch.testing.assert_close(found[1].running_var, net[1].running_var)


def test_members_are_the_network_until_weights_are_collected():
    ens = ds.SWAG(norm_net, 2, start=0.9)
    seen = []
    ds.fit(ens, (x, y), epochs=4, callback=lambda run: seen.append(int(run.members.collected)))
    assert seen == [0, 0, 0, 1]


@pytest.mark.parametrize("options", [{"start": 1.0}, {"rank": -1}, {"scale": -0.1}])
def test_bad_settings(options):
    with pytest.raises(ValueError, match="`start` must be in"):
        ds.SWAG(norm_net, 2, **options)


def test_networks_that_convolve_are_collected_and_drawn():
    # Training lays the weights of convolutions out by channel: they are not contiguous then.
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(96, 3))

    images = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    ens = ds.SWAG(make, 3, start=0.0)
    ds.fit(ens, (images, torch.arange(40) % 3), epochs=2, batch_size=30)
    assert int(ens.collected) == 2
    assert ds.predict(ens, images).isfinite().all()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


@pytest.mark.parametrize("kind", [ds.SnapshotEnsemble, ds.SWAG])
def test_tied_weights_are_kept_in_all_their_places_after_a_change_of_precision(kind):
    ens = kind(Tied, 2).double().eval()
    inputs = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ens(inputs)  # settles that members run as one program
    with torch.no_grad():
        ens.net.first.weight.add_(1.0)
    ens.after_epoch(1, 2)
    assert torch.equal(ens.kept.net.second.weight, ens.kept.net.first.weight)
    for index in range(2):
        torch.testing.assert_close(ens(inputs)[index], ens.net(inputs))
        torch.testing.assert_close(ens.member(index)(inputs), ens.net(inputs))


def test_a_last_batch_of_one_row_does_not_end_the_run_after_the_training():
    rows = torch.randn(257, 4)  # batches of 100 end well, those of 256 that statistics are taken by with one row
    ens = ds.SWAG(norm_net, 2, start=0.0)
    ds.fit(ens, (rows, torch.zeros(257, dtype=torch.long)), epochs=2, batch_size=100)
    net = ens.member(0)
    torch.optim.swa_utils.update_bn([rows[:256]], net)
    torch.testing.assert_close(ens.member(0)[1].running_mean, net[1].running_mean)


class FrozenNorm(nn.Module):
    """Keeps the statistics that its BatchNorm layer came with, in the usual way."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.norm.running_mean.fill_(5.0)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.head(self.norm(self.first(x)))


def test_statistics_of_frozen_batch_norm_layers_stay():
    ens = ds.SWAG(FrozenNorm, 2, start=0.0)
    ds.fit(ens, (x, y), epochs=2)
    assert (ens.member(1).norm.running_mean == 5.0).all()
