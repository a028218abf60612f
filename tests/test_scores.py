"""Scores: closed forms, independent implementations, and the contract of the whole SCORES table."""

import inspect
import re
import warnings
from collections import Counter
from itertools import permutations
from math import log, tanh
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import logsumexp, softmax
from scipy.stats import entropy as scipy_entropy
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from dissensus import scores
from dissensus.scores import KNOWLEDGE_SCORES, REGRESSION_SCORES, SCORES, Beliefs, all_scores

SHIFTED_BY_A_CONSTANT = {"mean_energy", "energy_of_mean", "max_logit"}
OVER_PAIRS = {"mean_pairwise_kl", "jensen_shannon"}
WEIGHTED = {name for name, score in SCORES.items() if "weights" in inspect.signature(score).parameters}

properties = settings(deadline=None, max_examples=25)


def random_logits(*shape: int, seed: int = 0, spread: float = 2.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def sure_of_different_classes(num_members: int, num_classes: int) -> Tensor:
    """One input; member m is certain of class m (of m modulo C where members outnumber classes)."""
    classes = torch.arange(num_members) % num_classes
    return 1000.0 * torch.eye(num_classes, dtype=torch.float64)[classes][:, None]


@st.composite
def member_logits(draw: st.DrawFn) -> Tensor:
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 6)))
    return random_logits(*shape, seed=draw(st.integers(0, 2**31)), spread=draw(st.sampled_from([0.1, 1.0, 10.0])))


def random_weights(num_members: int) -> Tensor:
    return random_logits(num_members, seed=num_members, spread=1.0).softmax(0)


@given(member_logits())
@properties
def test_predictive_diversity_of_two_members_is_one_plus_their_total_variation(logits):
    first, second = logits[:1].softmax(-1)[0], logits[-1:].softmax(-1)[0]
    total_variation = (first - second).abs().sum(-1) / 2
    pair = torch.stack([logits[0], logits[-1]])
    assert_close(scores.predictive_diversity(pair) * logits.shape[-1], 1 + total_variation)


@pytest.mark.parametrize(("num_members", "num_classes"), [(1, 3), (2, 5), (4, 4), (7, 3)])
def test_predictive_diversity_reaches_both_ends_of_its_range(num_members, num_classes):
    disjoint = sure_of_different_classes(num_members, num_classes)
    highest = torch.tensor([min(num_members, num_classes) / num_classes], dtype=torch.float64)
    assert_close(scores.predictive_diversity(disjoint), highest)
    copies = random_logits(1, 6, num_classes).expand(num_members, -1, -1)
    assert_close(scores.predictive_diversity(copies), torch.full((6,), 1 / num_classes, dtype=torch.float64))


@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_predictive_diversity_of_copies_has_nothing_to_rank_inputs_by(copies, dtype):
    logits = random_logits(1, 200, 10).to(dtype).expand(copies, -1, -1)
    assert len(scores.predictive_diversity(logits).unique()) == 1


@given(member_logits())
@properties
def test_predictive_diversity_stays_in_its_range(logits):
    num_members, _, num_classes = logits.shape
    value = scores.predictive_diversity(logits) * num_classes
    assert (value >= 1 - 1e-12).all()
    assert (value <= min(num_members, num_classes) + 1e-12).all()


@pytest.mark.parametrize("num_members", [1, 2, 3, 8])
def test_mutual_information_of_disjoint_one_hot_members_is_log_m(num_members):
    value = scores.mutual_information(sure_of_different_classes(num_members, 8))
    assert_close(value, torch.tensor([log(num_members)], dtype=torch.float64))


@given(member_logits())
@properties
def test_mutual_information_is_the_mean_divergence_from_the_mixture(logits):
    mixture = Categorical(probs=logits.softmax(-1).mean(0))
    divergence = torch.stack([kl_divergence(Categorical(logits=member), mixture) for member in logits]).mean(0)
    assert_close(scores.mutual_information(logits), divergence, rtol=1e-6, atol=1e-7)


@given(member_logits())
@properties
def test_total_entropy_is_expected_entropy_plus_mutual_information(logits):
    parts = scores.expected_entropy(logits) + scores.mutual_information(logits)
    assert_close(scores.total_entropy(logits), parts, rtol=1e-9, atol=1e-9)


def test_entropies_equal_those_of_scipy():
    logits = random_logits(4, 9, 6)
    probs = softmax(logits.numpy(), axis=-1)
    assert_close(scores.total_entropy(logits).numpy(), scipy_entropy(probs.mean(0), axis=-1))
    assert_close(scores.expected_entropy(logits).numpy(), scipy_entropy(probs, axis=-1).mean(0))


@pytest.mark.parametrize("score", [scores.total_entropy, scores.expected_entropy])
def test_entropy_extremes_are_exact_in_float32(score):
    uniform, certain = torch.zeros(3, 1, 1000), torch.zeros(3, 1, 1000)
    certain[..., 7] = 1e4
    assert_close(score(uniform), torch.tensor([log(1000)]))
    assert score(certain).item() == 0.0


def test_bma_averages_probabilities_or_logits():
    # Member one gives class 0 the odds 3:1, member two 1:1. Mean probability 5/8; mean logit log(3)/2.
    logits = torch.tensor([[[log(3), 0.0]], [[0.0, 0.0]]])
    assert_close(scores.bma(logits), torch.tensor([3 / 8]))
    assert_close(scores.bma(logits, average="logits"), torch.tensor([1 / (1 + 3**0.5)]))


def test_bma_refuses_an_unknown_average():
    with pytest.raises(Exception, match="average"):
        scores.bma(torch.zeros(1, 1, 2), average="median")


def test_energies_equal_logsumexp_of_scipy():
    logits = random_logits(4, 9, 6, spread=20.0)
    assert_close(scores.mean_energy(logits).numpy(), -logsumexp(logits.numpy(), axis=-1).mean(0))
    assert_close(scores.energy_of_mean(logits).numpy(), -logsumexp(logits.numpy().mean(0), axis=-1))


@given(member_logits())
@properties
def test_averaging_before_the_maximum_or_the_energy_never_lowers_a_score(logits):
    # Jensen: the maximum and logsumexp are convex.
    assert (scores.energy_of_mean(logits) >= scores.mean_energy(logits) - 1e-9).all()
    assert (scores.bma(logits) >= scores.mean_max_probability(logits) - 1e-9).all()


def test_max_logit_and_max_probability_follow_their_definition():
    logits = random_logits(4, 9, 6)
    assert_close(scores.max_logit(logits), -logits.mean(0).max(-1).values)
    assert_close(scores.mean_max_probability(logits), 1 - logits.softmax(-1).max(-1).values.mean(0))


def test_votes_are_counted_as_a_plain_loop_counts_them():
    logits = random_logits(7, 20, 5)
    tallies = [Counter(column) for column in logits.argmax(-1).T.tolist()]
    assert scores.num_unique(logits).tolist() == [len(tally) for tally in tallies]
    largest = torch.tensor([max(tally.values()) for tally in tallies], dtype=torch.float64)
    assert_close(scores.variation_ratio(logits), 1 - largest / 7)


def test_predicted_class_variance_is_the_variance_of_one_column():
    logits = random_logits(5, 12, 4)
    probs = logits.softmax(-1).numpy()
    expected = [probs[:, row, probs.mean(0)[row].argmax()].var() for row in range(12)]
    assert_close(scores.predicted_class_variance(logits), torch.tensor(expected))


def test_pairwise_kl_of_two_mirrored_binary_members_has_a_closed_form():
    # p = sigmoid(a), q = 1 - p: KL = (2p - 1) a = a tanh(a / 2).
    logits = torch.tensor([[[1.5, 0.0]], [[0.0, 1.5]]])
    assert_close(scores.mean_pairwise_kl(logits), torch.tensor([1.5 * tanh(0.75)]))


def pair_weights(weights: Tensor | None, num_members: int) -> dict[tuple[int, int], float]:
    given_weights = [1 / num_members] * num_members if weights is None else weights.tolist()
    raw = {(m, k): given_weights[m] * given_weights[k] for m, k in permutations(range(num_members), 2)}
    return {pair: weight / sum(raw.values()) for pair, weight in raw.items()}


class UnwaitedCopies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and bool((kwargs or {}).get("non_blocking"))
        return func(*args, **(kwargs or {}))


def test_nothing_is_brought_to_the_cpu_without_waiting_for_it():
    logits, weights = random_logits(4, 9, 3).float(), random_weights(4).double()
    with UnwaitedCopies() as copies:
        all_scores(logits, weights=weights)
        for score in REGRESSION_SCORES.values():
            score(logits, torch.ones(4, 9, 3), weights=weights)
    assert copies.count == 0


@pytest.mark.gpu
def test_weights_that_a_gpu_is_still_computing_are_waited_for():
    """Logits on the CPU, weights on the GPU behind work of a second: scores are those of the weights."""
    weights, logits, scale = random_weights(4).float(), random_logits(4, 9, 3).float(), torch.ones(4, 9, 3)

    def late() -> Tensor:
        ours = weights.cuda()
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        return ours + torch.zeros_like(ours)

    beliefs = Beliefs.unchecked(logits, late())
    assert beliefs.weights is not None
    assert_close(beliefs.weights.clone(), weights, rtol=0, atol=0)
    for name, score in REGRESSION_SCORES.items():
        assert_close(score(logits, scale, weights=late()), score(logits, scale, weights=weights), msg=name)
    with pytest.raises(ValueError, match="must sum to 1; got sum 2"):
        all_scores(logits, weights=2 * late())
    all_scores(logits, weights=late())


@pytest.mark.parametrize("weights", [None, torch.tensor([0.1, 0.2, 0.3, 0.4])], ids=["equal", "weighted"])
def test_pairwise_scores_equal_the_loop_over_pairs(weights):
    logits = random_logits(4, 6, 5)
    members = [Categorical(logits=member) for member in logits]
    pairs = pair_weights(weights, 4)
    kl = sum(weight * kl_divergence(members[m], members[k]) for (m, k), weight in pairs.items())
    assert_close(scores.mean_pairwise_kl(logits, weights=weights), kl, rtol=1e-6, atol=1e-7)
    probs = logits.softmax(-1).numpy()
    js = sum(weight * jensenshannon(probs[m], probs[k], axis=-1) ** 2 for (m, k), weight in pairs.items())
    assert_close(scores.jensen_shannon(logits, weights=weights), torch.from_numpy(js), rtol=1e-6, atol=1e-7)


def test_jensen_shannon_is_the_mutual_information_of_two_and_at_most_log_two():
    logits = random_logits(2, 30, 5)
    assert_close(scores.jensen_shannon(logits), scores.mutual_information(logits))
    disjoint = scores.jensen_shannon(sure_of_different_classes(6, 6))
    assert_close(disjoint, torch.tensor([log(2)], dtype=torch.float64))


@pytest.mark.parametrize("name", SCORES)
class TestScoreContract:
    @given(logits=member_logits(), seed=st.integers(0, 999))
    @properties
    def test_member_order_does_not_matter(self, name, logits, seed):
        order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
        assert_close(SCORES[name](logits[order]), SCORES[name](logits), rtol=1e-9, atol=1e-12)

    def test_rows_do_not_influence_each_other(self, name):
        logits = random_logits(3, 8, 4)
        rows = [SCORES[name](logits[:, row : row + 1]) for row in range(8)]
        assert_close(torch.cat(rows), SCORES[name](logits))

    def test_a_constant_added_to_all_logits_changes_only_energies_and_the_largest_logit(self, name):
        logits = random_logits(3, 8, 4)
        moved_by = SCORES[name](logits + 5.0) - SCORES[name](logits)
        expected = -5.0 if name in SHIFTED_BY_A_CONSTANT else 0.0
        assert_close(moved_by, torch.full_like(moved_by, expected), rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("num_members", [1, 2, 3, 10])
    def test_exactly_the_knowledge_scores_vanish_for_copies_of_one_member(self, name, num_members):
        copies = random_logits(1, 50, 6, dtype=torch.float32).expand(num_members, -1, -1)
        assert bool((SCORES[name](copies) == 0).all()) == (name in KNOWLEDGE_SCORES)

    def test_higher_means_less_certain(self, name):
        certain = torch.zeros(4, 1, 5)
        certain[..., 2] = 20.0
        divided_and_unsure = 2.0 * torch.eye(5)[:4, None]
        assert SCORES[name](divided_and_unsure) > SCORES[name](certain)

    @pytest.mark.parametrize("size", [1e4, 1e18])
    def test_saturated_float32_logits_stay_finite(self, name, size):
        logits = size * random_logits(4, 200, 6, dtype=torch.float32).sign()
        one_hot = size * (2 * torch.eye(6)[:4, None] - 1)
        assert SCORES[name](logits).isfinite().all()
        assert SCORES[name](one_hot).isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_computed_in_float32(self, name, dtype):
        logits = random_logits(3, 8, 4).to(dtype)
        assert_close(SCORES[name](logits), SCORES[name](logits.float()), rtol=0, atol=0)

    def test_float32_agrees_with_float64_and_both_keep_their_dtype(self, name):
        logits = random_logits(3, 50, 10)
        single, double = SCORES[name](logits.float()), SCORES[name](logits)
        assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
        assert_close(single, double.float(), rtol=1e-5, atol=2e-6)

    def test_no_gradient_flows_and_the_logits_are_left_alone(self, name):
        logits = random_logits(3, 8, 4).requires_grad_()
        before = logits.detach().clone()
        assert not SCORES[name](logits).requires_grad
        assert torch.equal(logits, before)

    def test_all_scores_gives_the_same_numbers(self, name):
        logits = random_logits(3, 8, 4)
        assert torch.equal(all_scores(logits)[name], SCORES[name](logits))
        weights = random_weights(3)
        alone = SCORES[name](logits, weights=weights) if name in WEIGHTED else SCORES[name](logits)
        assert torch.equal(all_scores(logits, weights=weights)[name], alone)

    def test_the_docstring_gives_a_reading(self, name):
        assert "Reading: " in inspect.getdoc(SCORES[name])


@pytest.mark.parametrize("name", sorted(WEIGHTED))
class TestWeightContract:
    @pytest.mark.parametrize("num_members", [1, 3, 7])
    def test_equal_weights_are_no_weights(self, name, num_members):
        logits = random_logits(num_members, 8, 4)
        weights = torch.full((num_members,), 1 / num_members)
        assert_close(SCORES[name](logits, weights=weights), SCORES[name](logits), rtol=1e-6, atol=1e-6)

    def test_all_weight_on_one_member_leaves_that_member(self, name):
        logits = random_logits(3, 8, 4)
        alone = SCORES[name](logits[1:2])
        assert_close(SCORES[name](logits, weights=torch.tensor([0.0, 1.0, 0.0])), alone, rtol=1e-9, atol=1e-9)

    def test_weights_change_the_score(self, name):
        logits = random_logits(4, 50, 4)
        assert not torch.allclose(SCORES[name](logits, weights=random_weights(4)), SCORES[name](logits))

    def test_two_thirds_of_the_weight_count_as_two_of_three_members(self, name):
        first, second = random_logits(2, 8, 4)
        weights = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
        weighted = SCORES[name](torch.stack([first, second]), weights=weights)
        repeated = SCORES[name](torch.stack([first, first, second]))
        # A pair of copies counts as a pair of distance zero: of three pairs, two are left.
        expected = repeated * 3 / 2 if name in OVER_PAIRS else repeated
        assert_close(weighted, expected, rtol=1e-9, atol=1e-12)


class CountSoftmaxes(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "softmax" in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"how": "share", "limit": 0.5}, {"how": "max"}])
def test_positions_of_half_precision_are_counted_in_single(options):
    found = scores.over_positions(torch.ones(1, 300, 300).half(), **options)
    assert (found.item(), found.dtype) == (1.0, torch.float32)


def test_all_scores_share_one_softmax():
    with CountSoftmaxes() as softmaxes:
        all_scores(random_logits(3, 8, 20))
    assert softmaxes.count == 1


@pytest.mark.parametrize("num_classes", [2, 10, 15, 16])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_softmax_of_few_classes_is_as_exact_as_torchs(num_classes, offset):
    logits = random_logits(3, 50, num_classes).float() * 20 + offset
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(Beliefs.of(logits).log_probs.double(), exact, rtol=1e-6, atol=1e-6)


def test_of_equal_logits_the_first_class_gets_the_vote():
    logits = torch.zeros(2, 3, 5)
    logits[1, :, 2:4] = 1.0
    assert Beliefs.of(logits).votes.tolist() == [[0, 0, 0], [2, 2, 2]]


def test_all_scores_keeps_the_order_of_names_and_refuses_unknown_ones():
    logits = random_logits(3, 8, 4)
    assert list(all_scores(logits)) == list(SCORES)
    assert list(all_scores(logits, ["bma", "num_unique"])) == ["bma", "num_unique"]
    with pytest.raises(ValueError, match="bmw"):
        all_scores(logits, ["bmw"])


def test_beliefs_refuse_a_second_set_of_weights():
    beliefs = Beliefs.of(random_logits(2, 3, 4))
    with pytest.raises(ValueError, match="own weights"):
        scores.bma(beliefs, weights=torch.tensor([0.5, 0.5]))


def test_tables_cannot_be_changed():
    with pytest.raises(TypeError, match="assignment"):
        SCORES["mine"] = scores.bma
    assert set(SCORES) > KNOWLEDGE_SCORES


def test_the_docs_page_lists_every_score_and_its_examples_run():
    page = (Path(__file__).parents[1] / "docs" / "scores.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE))
    assert listed >= {*SCORES, *REGRESSION_SCORES}
    namespace: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(example, namespace)
    assert "least_confident_member" in namespace


@pytest.mark.skipif(hasattr(all_scores, "__wrapped__"), reason="the shape checkers cannot be compiled")
@pytest.mark.parametrize("weights", [None, torch.tensor([0.2, 0.3, 0.5])], ids=["equal", "weighted"])
def test_unchecked_scores_compile_into_one_graph(weights):
    def unchecked(logits: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        return all_scores(Beliefs.unchecked(logits, weights))

    logits = random_logits(3, 8, 4, dtype=torch.float32)
    compiled = torch.compile(unchecked, fullgraph=True, backend="eager")
    assert_close(compiled(logits, weights), unchecked(logits, weights))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_unchecked_scores_can_be_captured_in_a_cuda_graph():
    logits = random_logits(3, 8, 4, dtype=torch.float32).cuda()
    all_scores(Beliefs.unchecked(logits))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_scores(Beliefs.unchecked(logits))
    logits.copy_(random_logits(3, 8, 4, seed=1, dtype=torch.float32))
    graph.replay()
    assert_close(captured, all_scores(logits))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_checked_call_waits_for_the_device_once(device):
    logits, weights = random_logits(3, 8, 4).cuda(), random_weights(3).to(device)
    all_scores(logits, weights=weights)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            all_scores(logits, weights=weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing CUDA operation" in str(warning.message) for warning in caught) == 1


class TestDense:
    """Outputs with positions: every position is an input of its own."""

    @pytest.mark.parametrize("name", SCORES)
    def test_a_position_has_the_score_of_its_logits(self, name):
        logits = torch.randn(3, 2, 4, 5, 6)
        scored = SCORES[name](logits, class_axis=2)
        assert scored.shape == (2, 5, 6)
        torch.testing.assert_close(scored[1, 3, 2], SCORES[name](logits[:, 1:2, :, 3, 2])[0])
        torch.testing.assert_close(SCORES[name](logits.movedim(2, -1), class_axis=-1), scored)
        torch.testing.assert_close(scores.all_scores(logits, [name], class_axis=2)[name], scored)

    def test_positions_are_brought_to_one_number_an_input(self):
        values = torch.tensor([[[0.1, 0.9], [0.5, 0.3]], [[0.0, 0.0], [0.0, 0.0]]])
        counts = torch.tensor([[[True, False], [True, True]], [[False, False], [False, False]]])
        assert scores.over_positions(values).tolist() == pytest.approx([0.45, 0.0])
        assert scores.over_positions(values, "max").tolist() == pytest.approx([0.9, 0.0])
        assert scores.over_positions(values, "share", limit=0.4).tolist() == [0.5, 0.0]
        assert scores.over_positions(values, counts=counts).tolist() == pytest.approx([0.3, 0.0])
        assert scores.over_positions(values, "max", counts=counts).tolist() == [0.5, 0.0]

    @pytest.mark.parametrize("axis", [0, 1, 5, -5])
    def test_an_axis_that_is_none_is_refused(self, axis):
        with pytest.raises(ValueError, match="`class_axis` must be an axis after members and batch"):
            scores.mutual_information(
                torch.zeros(2, 3, 4, 5, 6)[..., 0] if axis == 5 else torch.zeros(2, 3, 4, 5, 6), class_axis=axis
            )
        with pytest.raises(ValueError, match="give it there and nowhere else"):
            scores.over_positions(torch.zeros(1, 2), limit=0.5)
