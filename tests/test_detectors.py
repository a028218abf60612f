"""Feature-space detectors: closed forms, scikit-learn, and the contract of the DETECTORS table."""

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance, ShrunkCovariance
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

import dissensus as ds
from dissensus import detectors
from dissensus.detectors import DETECTORS, KNearestNeighbours, Mahalanobis, RowDistance


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes_in_a_plane(num: int = 300) -> tuple[Tensor, Tensor]:
    """Three classes with one skewed covariance in five dimensions."""
    labels = torch.arange(num) % 3
    centres = torch.tensor([[4.0, 0, 0, 0, 0], [0, 4, 0, 0, 0], [0, 0, 4, 0, 0]], dtype=torch.float64)
    return centres[labels] + normal(num, 5) @ normal(5, 5, seed=1), labels


def test_mahalanobis_of_a_known_gaussian_is_its_quadratic_form():
    # Eight corners of a box about each class mean: the covariance is diag(1, 4, 9), exactly.
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3).double() * torch.tensor([1.0, 2.0, 3.0])
    means = torch.tensor([[0.0, 0.0, 0.0], [100.0, 0.0, 0.0]], dtype=torch.float64)
    features, labels = torch.cat([corners + mean for mean in means]), torch.arange(2).repeat_interleave(8)
    detector = Mahalanobis.fit(features, labels, shrinkage=0.0)
    inputs = torch.tensor([[0.0, 0, 0], [1, 2, 3], [0, 0, 6], [103, 4, 0]], dtype=torch.float64)
    assert_close(detector.score(inputs), torch.tensor([0.0, 3, 4, 13], dtype=torch.float64))


@pytest.mark.parametrize("shrinkage", [0.0, 0.1, 1.0])
def test_mahalanobis_equals_scikit_learn(shrinkage):
    features, labels = classes_in_a_plane()
    means = torch.stack([features[labels == label].mean(0) for label in range(3)])
    residuals = (features - means[labels]).numpy()
    tied = ShrunkCovariance(shrinkage=shrinkage, assume_centered=True).fit(residuals)
    inputs = 3 * normal(50, 5, seed=2)
    distances = torch.stack([torch.from_numpy(tied.mahalanobis((inputs - mean).numpy())) for mean in means])
    nearest = distances.amin(0)
    assert_close(Mahalanobis.fit(features, labels, shrinkage=shrinkage).score(inputs), nearest)

    everything = ShrunkCovariance(shrinkage=shrinkage).fit(features.numpy())
    relative = Mahalanobis.fit(features, labels, shrinkage=shrinkage, relative=True).score(inputs)
    assert_close(relative, nearest - torch.from_numpy(everything.mahalanobis(inputs.numpy())))


def test_one_class_is_the_plain_distance_from_scikit_learn_and_relative_to_itself_zero():
    features = normal(200, 4) @ normal(4, 4, seed=1)
    labels = torch.zeros(200, dtype=torch.long)
    expected = EmpiricalCovariance().fit(features.numpy()).mahalanobis(features.numpy())
    score = Mahalanobis.fit(features, labels, shrinkage=0.0).score(features)
    assert_close(score, torch.from_numpy(expected))
    assert_close(score.mean(), torch.tensor(4.0, dtype=torch.float64))
    relative = Mahalanobis.fit(features, labels, relative=True).score(features)
    assert_close(relative, torch.zeros(200, dtype=torch.float64))


def test_unshrunk_mahalanobis_does_not_depend_on_the_coordinates():
    features, labels = classes_in_a_plane()
    inputs, mix = normal(20, 5, seed=3), normal(5, 5, seed=4)
    plain = Mahalanobis.fit(features, labels, shrinkage=0.0).score(inputs)
    moved = Mahalanobis.fit(features @ mix + 7, labels, shrinkage=0.0).score(inputs @ mix + 7)
    assert_close(moved, plain, rtol=1e-6, atol=1e-8)


def test_mahalanobis_keeps_its_digits_in_float32_far_from_the_origin():
    features, labels = classes_in_a_plane()
    expected = Mahalanobis.fit(features, labels).score(features)
    shifted = (features + 1000).float()
    assert_close(Mahalanobis.fit(shifted, labels).score(shifted), expected.float(), rtol=2e-3, atol=2e-3)


def test_classes_without_rows_and_any_label_numbers_are_fine():
    features, labels = classes_in_a_plane()
    renumbered = torch.tensor([40, 2, -7])[labels]
    expected = Mahalanobis.fit(features, labels).score(features)
    assert_close(Mahalanobis.fit(features, renumbered).score(features), expected)


def test_a_singular_covariance_is_refused_and_shrinkage_mends_it():
    features, labels = normal(4, 10), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="shrinkage"):
        Mahalanobis.fit(features, labels, shrinkage=0.0)
    assert Mahalanobis.fit(features, labels).score(features).isfinite().all()
    with pytest.raises(ValueError, match="shrinkage"):
        Mahalanobis.fit(torch.ones(6, 3), torch.zeros(6, dtype=torch.long))


@pytest.mark.parametrize("shrinkage", [-0.1, 1.5, float("nan")])
def test_shrinkage_outside_its_range_is_refused(shrinkage):
    with pytest.raises(ValueError, match="shrinkage"):
        Mahalanobis.fit(*classes_in_a_plane(), shrinkage=shrinkage)


@pytest.mark.parametrize("k", [1, 3, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearest_neighbours_equal_scikit_learn(k, dtype):
    bank, inputs = normal(200, 8).to(dtype), normal(50, 8, seed=1).to(dtype)
    reference = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(normalize(bank.double()).numpy())
    expected = reference.kneighbors(normalize(inputs.double()).numpy())[0][:, -1]
    score = KNearestNeighbours.fit(bank, k=k).score(inputs)
    assert score.dtype == dtype
    assert_close(score.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


def test_angles_of_known_vectors_give_known_distances():
    bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    east = torch.tensor([[7.0, 0.0]])
    distances = [KNearestNeighbours.fit(bank, k=k).score(east).item() for k in (1, 2, 3)]
    assert distances == pytest.approx([0.0, 2**0.5, 2.0])


def test_close_neighbours_keep_their_digits_in_float32():
    # sqrt(2 - 2 cos) would give 0 or 3.5e-4 here.
    score = KNearestNeighbours.fit(torch.tensor([[1.0, 0.0]]), k=1).score(torch.tensor([[1.0, 1e-5]]))
    assert score.item() == pytest.approx(1e-5, rel=1e-3)


def test_length_of_features_does_not_matter_to_nearest_neighbours():
    bank, inputs = normal(30, 4), normal(9, 4, seed=1)
    detector = KNearestNeighbours.fit(bank * normal(30, 1, seed=2).exp(), k=5)
    assert_close(detector.score(9 * inputs), KNearestNeighbours.fit(bank, k=5).score(inputs))


@pytest.mark.parametrize("k", [0, 31])
def test_k_must_be_a_row_of_the_training_set(k):
    with pytest.raises(ValueError, match=r"1\.\.30"):
        KNearestNeighbours.fit(normal(30, 4), k=k)


@pytest.mark.parametrize("fit", DETECTORS.values(), ids=DETECTORS)
class TestDetectorContract:
    def test_chunks_change_nothing(self, fit, monkeypatch):
        features, labels = classes_in_a_plane()
        whole = fit(features, labels).score(features)
        monkeypatch.setattr(detectors, "_ROWS", 7)
        monkeypatch.setattr(detectors, "_BANK_ROWS", 11)
        assert_close(fit(features, labels).score(features), whole)

    def test_inputs_far_from_the_data_score_higher(self, fit):
        features, labels = classes_in_a_plane()
        detector = fit(features, labels)
        far = torch.tensor([[-30.0, -30.0, -30.0, 30.0, -30.0]], dtype=torch.float64)
        assert detector.score(far) > detector.score(features).quantile(0.9)

    def test_the_order_of_the_training_set_does_not_matter(self, fit):
        features, labels = classes_in_a_plane()
        order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
        expected = fit(features, labels).score(features)
        assert_close(fit(features[order], labels[order]).score(features), expected)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_scores_are_float32_for_short_floats(self, fit, dtype):
        features, labels = classes_in_a_plane()
        features = features.to(dtype)
        score = fit(features, labels).score(features)
        expected = fit(features.double(), labels).score(features.double())
        assert score.dtype == torch.float32
        assert_close(score, expected.float(), rtol=1e-4, atol=1e-4)

    def test_no_gradient_flows(self, fit):
        features, labels = classes_in_a_plane()
        features.requires_grad_()
        assert not fit(features, labels).score(features).requires_grad

    def test_features_of_another_width_are_refused(self, fit):
        detector = fit(*classes_in_a_plane())
        with pytest.raises(ValueError, match="5 columns"):
            detector.score(torch.zeros(3, 4))

    def test_features_that_are_not_finite_are_named_by_row(self, fit):
        features, labels = classes_in_a_plane()
        detector = fit(features, labels)
        features[8, 2] = float("nan")
        with pytest.raises(ValueError, match="row 8 holds nan"):
            fit(features, labels)
        with pytest.raises(ValueError, match="row 8 holds nan"):
            detector.score(features)


def test_row_distance_is_the_root_of_the_mean_squared_distance_to_the_nearest_five():
    bank, rows = normal(40, 6).float(), 3 * normal(7, 6, seed=1).float()
    wanted = [
        np.sqrt(np.mean(sorted(((row - other) ** 2).sum() for other in bank.double().numpy())[:5]))
        for row in rows.double().numpy()
    ]
    np.testing.assert_allclose(RowDistance(bank)(rows).numpy(), wanted, rtol=1e-6)
    # Few rows: all of them. A row of the bank many times over is at no distance, and its rounding is no NaN.
    assert RowDistance(torch.zeros(2, 1))(torch.full((1, 1), 400.0)).item() == 400.0
    assert RowDistance(bank[:1].repeat(9, 1))(bank[:1]).item() < 1e-6


def test_an_alarm_by_row_distance_rings_far_outside_where_members_are_sure():
    ens = ds.DeepEnsemble(lambda: torch.nn.Linear(2, 3), num_members=3)
    train, held_out = normal(300, 2).float(), normal(199, 2, seed=1).float()
    alarm = ds.Alarm.calibrate(ens, held_out, score=RowDistance(train), false_alarms=0.05)
    assert alarm.scorer.name == "distance"
    assert alarm(torch.tensor([[40.0, -30.0], [400.0, 0.0]])).all()
    assert not alarm(torch.zeros(1, 2)).any()
    assert alarm(np.full((3, 2), 40.0)).all()
    assert alarm(torch.utils.data.TensorDataset(torch.full((3, 2), 40.0))).all()


def test_row_distance_of_half_precision_and_of_what_is_no_row():
    distance = RowDistance(torch.zeros(9, 2))
    far = distance(torch.full((1, 2), 6e4, dtype=torch.float16))  # the distance is beyond half precision
    assert (far.dtype, far.item()) == (torch.float32, pytest.approx(6e4 * 2**0.5))
    for rows, words in [(torch.ones(3, 5), "2 columns.*got 5"), (torch.full((1, 2), torch.nan), "row 0 holds nan")]:
        with pytest.raises(ValueError, match=words):
            distance(rows)
