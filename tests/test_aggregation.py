"""Many members into one answer: closed forms, votes by hand, and soups against all subsets."""

import copy
from math import log

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training_helpers import net, norm_net, x, y

import dissensus as ds
from dissensus import aggregation, metrics

LOGITS = torch.randn(5, 7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("combine", aggregation.AGGREGATIONS.values(), ids=aggregation.AGGREGATIONS.keys())
class TestAggregations:
    def test_the_answer_is_a_distribution(self, combine):
        probs = combine(LOGITS)
        assert probs.shape == (7, 4)
        torch.testing.assert_close(probs.sum(-1), torch.ones(7, dtype=torch.float64))

    def test_member_order_does_not_matter(self, combine):
        torch.testing.assert_close(combine(LOGITS), combine(LOGITS.flip(0)))

    def test_copies_answer_as_one_of_them(self, combine):
        assert torch.equal(combine(LOGITS[:1].expand(3, -1, -1)).argmax(-1), LOGITS[0].argmax(-1))

    def test_one_can_choose_among_some_classes(self, combine):
        assert combine(LOGITS, classes=[2, 0]).shape == (7, 2)
        for same in (torch.tensor([2, 0]), np.array([2, 0]), (2, 0), range(2, -1, -2)):
            assert torch.equal(combine(LOGITS, classes=same), combine(LOGITS, classes=[2, 0]))

    @pytest.mark.parametrize(
        "classes",
        [
            [4],
            [-1],
            [],
            torch.tensor([True, False, True, False]),
            [True, False],
            [0.0, 1.0],
            {0, 1},
            "01",
            1,
            np.eye(2),
        ],
    )
    def test_what_are_no_indices_of_classes_is_refused(self, combine, classes):
        with pytest.raises(ValueError, match="list of class indices from 0 to 3"):
            combine(LOGITS, classes=classes)

    def test_probabilities_are_told_from_logits_with_members(self, combine):
        with pytest.raises(ValueError, match="members"):
            combine(LOGITS[0])


def test_mean_logits_are_a_geometric_and_mean_probs_an_arithmetic_mean():
    probs = LOGITS.softmax(-1)
    product = probs.prod(0) ** (1 / 5)
    torch.testing.assert_close(aggregation.mean_logits(LOGITS), product / product.sum(-1, keepdim=True))
    torch.testing.assert_close(aggregation.mean_probs(LOGITS), probs.mean(0))


def test_choosing_among_classes_is_conditioning_on_them_for_a_single_member():
    probs = LOGITS[:1].softmax(-1)[0][:, [2, 0]]
    expected = probs / probs.sum(-1, keepdim=True)
    for combine in (aggregation.mean_logits, aggregation.mean_probs):
        torch.testing.assert_close(combine(LOGITS[:1], classes=[2, 0]), expected)


def test_votes_are_counted_and_those_outside_the_classes_abstain():
    votes = torch.tensor([[0, 3], [0, 3], [1, 3], [3, 3]])
    logits = 5.0 * torch.eye(4)[votes]
    expected = torch.tensor([[0.5, 0.25, 0.0, 0.25], [0.0, 0.0, 0.0, 1.0]])
    torch.testing.assert_close(aggregation.majority_vote(logits), expected)
    # Members 0 and 1 for the first class, one for the second; on the second input nobody votes for either.
    among = aggregation.majority_vote(logits, classes=[0, 1])
    torch.testing.assert_close(among, torch.tensor([[2 / 3, 1 / 3], [0.5, 0.5]]))


def test_the_oracle_takes_the_member_that_is_best_on_the_labels_themselves():
    labels = LOGITS[3].argmax(-1)
    found = aggregation.oracle_selection(LOGITS, labels)
    assert (found.member, found.accuracy) == (3, 1.0)
    assert found.accuracies == pytest.approx([float((each.argmax(-1) == labels).float().mean()) for each in LOGITS])


def accuracy_of(one):
    return (one.eval()(x).argmax(-1) == y).float().mean().item()


@pytest.mark.parametrize("make", [net, norm_net])
def test_a_greedy_soup_is_no_worse_than_its_best_member_on_the_data_it_was_made_by(make):
    ens = ds.DeepEnsemble(make, 4)
    ds.fit(ens, (x, y), epochs=5, batch_size=25, lr=0.02)
    before = copy.deepcopy(ens.state_dict())
    soup = ds.greedy_soup(ens, (x, y))
    members = [accuracy_of(ens.member(index)) for index in range(4)]
    assert soup.members[0] == members.index(max(members))
    assert soup.accuracy >= max(members) - 1e-6
    assert accuracy_of(soup.net) == pytest.approx(soup.accuracy, abs=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in ens.state_dict().items())


def test_a_greedy_soup_leaves_out_members_that_would_spoil_it():
    # Members on one line of weights: two that are right, and one that says the opposite with large weights.
    good, twin, bad = (nn.Linear(1, 2) for _ in range(3))
    with torch.no_grad():
        for linear, scale in ((good, 1.0), (twin, 2.0), (bad, -10.0)):
            linear.weight.copy_(scale * torch.tensor([[-1.0], [1.0]]))
            linear.bias.zero_()
    inputs = torch.linspace(-1, 1, 20)[:, None]
    soup = ds.greedy_soup(ds.DeepEnsemble.from_members([bad, good, twin]), (inputs, (inputs[:, 0] > 0).long()))
    assert sorted(soup.members) == [1, 2]
    torch.testing.assert_close(soup.net.weight, 1.5 * torch.tensor([[-1.0], [1.0]]))
    assert soup.accuracy == 1.0


def test_labels_of_another_shape_and_outputs_of_another_kind_choose_no_soup():
    ens, labels = ds.DeepEnsemble(lambda: nn.Linear(4, 3), 2), torch.arange(6) % 3
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for wrong, words in (
        (labels[:, None], r"shaped \(6,\); got \(6, 1\)"),
        (labels + 1, r"0\.\.2; got 3"),
        (labels.float(), "integers"),
    ):
        with pytest.raises(ValueError, match=words):
            ds.greedy_soup(ens, (inputs, wrong))
    with pytest.raises(ValueError, match=r"\(batch, classes\); got \(6, 5, 3\)"):
        ds.greedy_soup(ens, (torch.zeros(6, 5, 4), labels))


def test_members_of_different_architectures_make_no_soup():
    with pytest.raises(ValueError, match="one architecture"):
        ds.greedy_soup(ds.DeepEnsemble.from_members([net(), nn.Linear(4, 3)]), (x, y))


def acting(activation, **kept):
    one = nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 3))
    for name, value in kept.items():
        setattr(one, name, value)
    return one


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (acting(nn.ReLU()), acting(nn.Tanh()), "module '1' is a ReLU in one member and a Tanh in another"),
        (acting(nn.LeakyReLU(0.1)), acting(nn.LeakyReLU(0.2)), "attribute .negative_slope. of module .1."),
        (acting(nn.ReLU(), act=torch.sin), acting(nn.ReLU(), factor=2.0), "attribute .* of the module itself"),
        (nn.Sequential(nn.Linear(4, 3), nn.Identity()), nn.Sequential(nn.Linear(4, 3)), "they have other modules"),
    ],
)
def test_weights_of_one_shape_that_are_used_differently_make_no_soup(first, second, why):
    ens = ds.DeepEnsemble.from_members([first, second])
    for cook in (ens.soup, lambda: ds.greedy_soup(ens, (x, y))):
        with pytest.raises(ValueError, match=f"one architecture; these differ: {why}"):
            cook()


def test_rates_of_dropout_may_differ_in_a_soup():
    ens = ds.DeepEnsemble.from_members([acting(nn.Dropout(0.1)), acting(nn.Dropout(0.2))])
    mean = (ens.member(0)[0].weight + ens.member(1)[0].weight) / 2
    torch.testing.assert_close(ens.soup()[0].weight, mean)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_greedy_soup_of_heads_reads_cached_features(tmp_path, in_file):
    ens = ds.HeadEnsemble(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), (6, 3), 4)
    cached = ds.cache_features(ens, (x, y), tmp_path if in_file else None)
    ds.fit(ens, cached, epochs=5, batch_size=25, lr=0.02)
    by_features, by_inputs = ds.greedy_soup(ens, cached), ds.greedy_soup(ens, (x, y))
    assert by_features.members == by_inputs.members
    assert by_features.accuracy == by_inputs.accuracy == pytest.approx(accuracy_of(by_features.net))
    torch.testing.assert_close(by_features.net.eval()(x), by_inputs.net.eval()(x))
    with pytest.raises(ValueError, match="another backbone"):
        ds.greedy_soup(ens, ds.cache_features(nn.Linear(4, 6), (x, y)))


@st.composite
def member_logits(draw):
    members, classes = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    scale = draw(st.sampled_from([0.1, 1.0, 10.0]))
    return scale * torch.randn(members, 1, classes, generator=generator, dtype=torch.float64), seed % classes


@given(member_logits())
def test_lemma_1_members_that_disagree_have_a_summed_loss_of_log_2_at_least(case):
    # Where two answers differ one of them is wrong, and a wrong answer leaves the truth one half at most.
    logits, label = case
    disagree = metrics.existential_disagreement(logits.argmax(-1)) > 0
    summed = -logits.log_softmax(-1)[:, 0, label].sum().item()
    assert not disagree or summed >= log(2) - 1e-12


def test_lemma_1_is_tight():
    # Two classes, one member certain and right, the other a hair on the wrong side.
    logits = torch.tensor([[[50.0, 0.0]], [[0.0, 1e-9]]], dtype=torch.float64)
    assert metrics.existential_disagreement(logits.argmax(-1)) == 1.0
    assert -logits.log_softmax(-1)[:, 0, 0].sum().item() == pytest.approx(log(2), abs=1e-8)


@given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 10_000))
def test_lemma_2_pairs_disagree_no_more_often_than_some_two_do(members, batch, seed):
    votes = torch.randint(0, 3, (members, batch), generator=torch.Generator().manual_seed(seed))
    for column in (votes, *votes.T[:, :, None]):
        assert metrics.mean_disagreement(column) <= metrics.existential_disagreement(column) + 1e-12
    # Two members: some two disagree exactly where the pair does.
    assert metrics.existential_disagreement(votes[:2]) == metrics.disagreement(*votes[:2])


def test_the_bound_on_disagreement_elsewhere_is_theorem_4():
    assert metrics.ood_disagreement_bound(1.0, 1.0, 1.0) == 1.0
    assert metrics.ood_disagreement_bound(0.6, 0.5, 0.8, gap=0.1, instability=0.05) == pytest.approx(0.15)
    assert metrics.ood_disagreement_bound(0.0, 0.5, 0.8, instability=0.1) == pytest.approx(-0.1)
    for name in ("hard_disagreement", "cluster_mass", "purity", "instability"):
        constants = {"hard_disagreement": 0.5, "cluster_mass": 0.5, "purity": 0.5, name: 1.5}
        with pytest.raises(ValueError, match=name):
            metrics.ood_disagreement_bound(**constants)
    with pytest.raises(ValueError, match="gap"):
        metrics.ood_disagreement_bound(0.5, 0.5, 0.5, gap=-0.1)


def test_the_bound_holds_in_a_world_whose_constants_are_known():
    # Q is uniform over 5 clusters of 4 points each; members are constant on a cluster, so a ball around a point is its cluster.
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        answers = torch.randint(0, 2, (3, 5), generator=generator)
        elsewhere = answers.repeat_interleave(4, dim=1)
        # Hard training points: one from each cluster of Q, so disagreement there is all from Q (purity 1).
        bound = metrics.ood_disagreement_bound(metrics.mean_disagreement(answers), cluster_mass=1 / 5, purity=1.0)
        assert metrics.existential_disagreement(elsewhere) >= bound - 1e-12
