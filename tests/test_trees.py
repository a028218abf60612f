"""Inputs and outputs of several tensors: the same numbers as one network of one tensor gives, through every seam."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dissensus as ds
from dissensus import objectives as obj
from dissensus.data.trees import Tree, call, pick


class Two(nn.Module):
    """Takes two tensors; returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 8), nn.Linear(5, 8)
        self.middle, self.drop, self.out = nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 3)

    def forward(self, image, table):
        hidden = torch.relu(self.middle(torch.relu(self.left(image)) + torch.relu(self.right(table))))
        return {"hidden": hidden, "logits": self.out(self.drop(hidden))}


class Joined(nn.Module):
    """The same network of one tensor."""

    def __init__(self):
        super().__init__()
        self.two = Two()

    def forward(self, x):
        return self.two(x[:, :3], x[:, 3:])["logits"]


class Tokens(nn.Module):
    """A tiny transformer in plain torch: ids and mask in, a dictionary out."""

    def __init__(self, classes=2):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, input_ids, attention_mask):
        hidden = self.layer(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return {"last_hidden_state": hidden, "logits": self.head(hidden[:, 0])}


@dataclass
class Scan:
    image: torch.Tensor
    table: torch.Tensor


def data(count=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    image, table = torch.randn(count, 3, generator=g), torch.randn(count, 5, generator=g)
    return (image, table), torch.randint(0, 3, (count,), generator=g)


def token_data(count=24):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (count, 6), generator=g)
    mask = (torch.arange(6) < torch.randint(2, 7, (count, 1), generator=g)).long()
    return {"input_ids": ids, "attention_mask": mask}, ids[:, 0] % 2


KINDS = {
    "vectorised": lambda: ds.DeepEnsemble(Two, 3),
    "loop": lambda: ds.DeepEnsemble(Two, 3, execution="loop"),
    "masksembles": lambda: ds.Masksembles(Two(), 3, layers=["middle"]),
    "mc_dropout": lambda: ds.MCDropout(Two(), 3),
    "mc_dropout by input": lambda: ds.MCDropout(Two(), 3, masks="input"),
    "packed": lambda: ds.PackedEnsemble(Two, 3),
    "batch_ensemble": lambda: ds.BatchEnsemble(Two, 3),
    "heads": lambda: ds.HeadEnsemble(Two(), (8, 3), 3, features="hidden"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_several_inputs_in_every_form(kind):
    x, _ = data()
    ens = KINDS[kind]().eval()
    outputs = ens(x)
    assert outputs.shape == (3, 40, 3)
    named = {"image": x[0], "table": x[1]}
    for same in (ens(*x), ens(named), ens(**named), ens(Scan(*x)), ds.predict(ens, x, batch_size=7)):
        torch.testing.assert_close(same, outputs)
    arrays = {name: part.numpy() for name, part in named.items()}
    torch.testing.assert_close(ds.predict(ens, arrays), outputs)
    member = ens.member(1).eval()
    torch.testing.assert_close(pick(call(member, x), None), outputs[1])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_on_several_inputs(kind):
    x, y = data()
    ens = KINDS[kind]()
    before = ds.predict(ens, x)
    run = ds.fit(ens, (x, y), epochs=8, lr=0.02, batch_size=20, device="cpu", validation=(x, y), engine="eager")
    after = ds.predict(ens, x)
    loss = torch.nn.functional.cross_entropy
    assert all(loss(b, y) < loss(a, y) for a, b in zip(before, after, strict=True))
    assert np.isfinite(run.history.rows[-1]["ensemble_loss"])


@pytest.mark.parametrize("engine", ["eager", pytest.param("captured", marks=pytest.mark.slow)])
@pytest.mark.parametrize("batches", ["own", "shared"])
def test_two_inputs_train_as_one_joined_input(engine, batches):
    x, y = data()
    several, one = ds.DeepEnsemble(Two, 3), ds.DeepEnsemble(Joined, 3)
    settings = {"epochs": 3, "batch_size": 16, "device": "cpu", "engine": engine, "batches": batches}
    ds.fit(several, (x, y), **settings)
    ds.fit(one, (torch.cat(x, 1), y), **settings)
    torch.testing.assert_close(ds.predict(several, x), ds.predict(one, torch.cat(x, 1)), atol=1e-5, rtol=1e-4)


class Items(Dataset):
    def __init__(self, x, y, weights=None):
        self.x, self.y, self.weights = x, y, weights

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        inputs = {name: part[index] for name, part in self.x.items()}
        return (inputs, self.y[index]) if self.weights is None else (inputs, self.y[index], self.weights[index])


@pytest.mark.parametrize("engine", ["eager", pytest.param("captured", marks=pytest.mark.slow)])
def test_datasets_and_loaders_give_trees(engine):
    x, y = token_data()
    items = Items(x, y)
    ends = []
    for given in (items, DataLoader(items, 8), DataLoader(items, 8, shuffle=True)):
        ens = ds.DeepEnsemble(Tokens, 3, output="logits")
        options = {} if isinstance(given, DataLoader) else {"batch_size": 8}
        ds.fit(ens, given, epochs=2, device="cpu", engine=engine, validation=items, **options)
        ends.append(ds.predict(ens, given if given is items else x))
        assert ends[-1].shape == (3, 24, 2)
    assert not torch.equal(ends[1], ends[2])


def test_a_loader_of_trees_and_arrays_of_the_same_batches_train_alike():
    x, y = token_data()
    arrays, loaded = (ds.DeepEnsemble(Tokens, 2) for _ in range(2))
    ds.fit(arrays, (x, y), epochs=2, batch_size=24, device="cpu", optimizer="sgd", batches="shared")
    ds.fit(loaded, DataLoader(Items(x, y), 24), epochs=2, device="cpu", optimizer="sgd")
    torch.testing.assert_close(ds.predict(arrays, x), ds.predict(loaded, x), atol=1e-5, rtol=1e-4)


class LabelledItems(Items):
    """One dictionary an item with the target under `labels`, as in Hugging Face's data sets."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return {**inputs, "labels": target}


def test_a_dictionary_with_labels_is_inputs_and_targets():
    x, y = token_data()
    found = []
    for items in (Items(x, y), LabelledItems(x, y)):
        ens = ds.DeepEnsemble(Tokens, 2, output="logits")
        ds.fit(ens, items, epochs=2, batch_size=8, device="cpu")
        loader = DataLoader(items, 8)
        nll = ds.evaluate(ens, loader, bootstrap=0).number("nll").value
        found.append((ds.predict(ens, items), ds.predict(ens, loader), torch.tensor(nll)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Sentences(Dataset):
    """Token ids of several lengths, sorted by length; `padded` collates them to the longest of a batch."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        ids = torch.randint(1, 20, (3 + index // 10,), generator=torch.Generator().manual_seed(index))
        return ids, int(ids[0]) % 2


def padded(items):
    longest = max(len(ids) for ids, _ in items)
    ids = torch.stack([nn.functional.pad(ids, (0, longest - len(ids))) for ids, _ in items])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}, torch.tensor([y for _, y in items])


def sentences():
    return DataLoader(Sentences(), 10, collate_fn=padded)


@pytest.mark.parametrize("engine", ["captured", "auto"])
@pytest.mark.parametrize("programs", [1, 16])
def test_padded_batches_of_differing_length_train_as_eagerly(engine, programs, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr("dissensus.training.trainer.PROGRAMS", programs)
    settings = {"epochs": 3, "device": "cpu", "optimizer": "sgd", "lr": 0.1, "validation": sentences()}
    plain, other, again = (ds.DeepEnsemble(Tokens, 2, output="logits") for _ in range(3))
    ds.fit(plain, sentences(), engine="eager", **settings)
    caplog.clear()
    with caplog.at_level("INFO", logger="dissensus"):
        ds.fit(other, sentences(), engine=engine, **settings)
    assert sum("batches come in several shapes" in line for line in caplog.messages) == 1
    ends = [ds.predict(ens, sentences()) for ens in (plain, other)]
    assert ends[0].shape == (2, 40, 2)
    torch.testing.assert_close(*ends, atol=1e-5, rtol=1e-4)

    class Stop(Exception):
        pass

    def stop(run):
        if run.epoch == 2:
            raise Stop

    with pytest.raises(Stop):
        ds.fit(again, sentences(), engine=engine, checkpoint_dir=tmp_path, callback=stop, **settings)
    again = ds.DeepEnsemble(Tokens, 2, output="logits")
    ds.fit(again, sentences(), engine=engine, checkpoint_dir=tmp_path, resume=True, **settings)
    assert torch.equal(ds.predict(again, sentences()), ends[1])


def test_rows_of_different_lengths_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"its rows have different shapes\. Pad them"):
        ds.predict(ds.DeepEnsemble(lambda: nn.Linear(3, 2), 2), [torch.randn(3), torch.randn(4)])


def test_token_outputs_of_differing_length_are_refused_in_one_sentence():
    class Each(Tokens):
        def forward(self, input_ids, attention_mask):
            return super().forward(input_ids, attention_mask)["last_hidden_state"]

    with pytest.raises(ValueError, match=r"differ in shape from batch to batch.*Pad all inputs to one length"):
        ds.predict(ds.DeepEnsemble(Each, 2), sentences())


def test_resuming_on_trees_ends_where_an_uninterrupted_run_does(tmp_path):
    x, y = data()
    settings = {"batch_size": 16, "device": "cpu", "engine": "eager"}
    whole = ds.DeepEnsemble(Two, 2)
    ds.fit(whole, (x, y), epochs=4, **settings)
    part = ds.DeepEnsemble(Two, 2)

    class Stop(Exception):
        pass

    def stop(run):
        if run.epoch == 3:
            raise Stop

    with pytest.raises(Stop):
        ds.fit(part, (x, y), epochs=4, checkpoint_dir=tmp_path, callback=stop, **settings)
    again = ds.DeepEnsemble(Two, 2)
    ds.fit(again, (x, y), epochs=4, checkpoint_dir=tmp_path, resume=True, **settings)
    assert torch.equal(ds.predict(again, x), ds.predict(whole, x))


def test_outputs_are_picked_by_key_index_and_function():
    x, _ = data()
    keys = [ds.DeepEnsemble(Two, 2, output=output).eval()(x) for output in ("logits", lambda o: o["logits"], None)]
    assert all(torch.equal(each, keys[0]) for each in keys)
    hidden = ds.DeepEnsemble(Two, 2, output="hidden").eval()
    assert hidden(x).shape == (2, 40, 8)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 2)

        def forward(self, x):
            return self.net(x), x

    ens = ds.DeepEnsemble(Pair, 2, output=0)
    assert ds.predict(ens, x[0]).shape == (2, 40, 2)
    everything = ds.predict(ens, x[0], outputs="all")
    assert [tuple(t.shape) for t in everything] == [(2, 40, 2), (2, 40, 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_all_outputs_are_a_tree_of_members(kind):
    x, _ = data()
    ens = KINDS[kind]()
    found = ds.predict(ens, x, outputs="all", batch_size=9)
    if kind == "heads":
        assert found.shape == (3, 40, 3)
        return
    assert {name: tuple(part.shape) for name, part in found.items()} == {"hidden": (3, 40, 8), "logits": (3, 40, 3)}
    torch.testing.assert_close(found["logits"], ds.predict(ens, x))


@pytest.mark.parametrize(
    ("make", "x", "words"),
    [
        (Two, torch.zeros(4, 3), "cannot be called as net"),
        (lambda: Several(), torch.zeros(4, 3), "Choose with `output=` one of 'a', 'b'"),
        (lambda: Complex(), torch.zeros(4, 3), "must return real numbers"),
        (lambda: nn.Linear(3, 2), {"x": torch.zeros(4, 3)}, "cannot be called as net"),
    ],
)
def test_what_cannot_be_taken_gets_a_sentence(make, x, words):
    for ens in (ds.DeepEnsemble(make, 2), ds.DeepEnsemble(make, 2, execution="loop")):
        with pytest.raises(ValueError, match=words):
            ens(x)
        with pytest.raises(ValueError, match=words):
            ds.fit(ens, (x, torch.zeros(4, dtype=torch.long)), epochs=1, device="cpu")


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x):
        return {"a": self.net(x), "b": self.net(x)}


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x):
        return torch.complex(self.net(x), self.net(x))


def test_parts_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one row for each input"):
        ds.predict(ds.DeepEnsemble(Two, 2), (torch.zeros(4, 3), torch.zeros(5, 5)))
    (image, table), y = data()
    table[3] = float("nan")
    with pytest.raises(ValueError, match=r"inputs \(1\) must be finite; 1 rows.*row 3"):
        ds.fit(ds.DeepEnsemble(Two, 2), ((image, table), y), epochs=1)


def test_scores_and_evaluation_read_trees():
    x, y = token_data()
    ens = ds.DeepEnsemble(Tokens, 3, output="logits")
    scores = ds.predict_scores(ens, x, ["mutual_information"])["mutual_information"]
    assert scores.shape == (24,)
    other = {"input_ids": x["input_ids"].flip(0) % 7, "attention_mask": torch.ones_like(x["attention_mask"])}
    result = ds.evaluate(
        ens, (x, y), ood={"plain": other, "pair": ({**other, "input_ids": x["input_ids"] % 5}, None)}, bootstrap=0
    )
    wanted = (ds.predict(ens, x).softmax(-1).mean(0).argmax(-1) == y).double().mean()
    assert result.number("accuracy").value == pytest.approx(float(wanted))
    with pytest.raises(ValueError, match="same inputs"):
        ds.evaluate(ens, (x, y), ood={"again": {name: part.clone() for name, part in x.items()}}, bootstrap=0)


def test_a_tuple_is_inputs_in_predict_and_a_pair_in_evaluate():
    x, y = data()
    ens = ds.DeepEnsemble(Two, 3)
    assert ds.predict(ens, x).shape == (3, 40, 3)
    result = ds.evaluate(ens, (x, y), ood={"far": ((10 * x[0], 10 * x[1]), None)}, bootstrap=0)
    assert {part.name for part in result.sets} == {"id", "far"}


def test_features_of_a_backbone_of_tokens_are_cached_and_train_heads(tmp_path):
    x, y = token_data()
    backbone = Tokens()
    ens = ds.HeadEnsemble(backbone, (8, 2), 3, features=lambda found: found["last_hidden_state"][:, 0])
    cached = ds.cache_features(ens, (x, y), tmp_path / "features")
    np.testing.assert_allclose(np.asarray(cached.features), ens.features(x).numpy(), rtol=1e-5, atol=1e-6)
    ds.fit(ens, cached, epochs=3, device="cpu", batch_size=8)
    torch.testing.assert_close(ds.predict(ens, x), ds.predict(ens, cached), atol=1e-5, rtol=1e-4)


def test_adversarial_training_moves_real_numbers_or_the_named_part():
    (image, table), y = data()
    seen = []

    class Watched(Two):
        def forward(self, image, table):
            seen.append((image.detach().clone(), table.detach().clone()))
            return super().forward(image, table)

    for part, moved in ((None, (True, True)), ("image", (True, False))):
        ens = ds.DeepEnsemble(Watched, 2, execution="loop")
        seen.clear()
        objective = obj.Adversarial(obj.Independent(), epsilon=0.1, part=part)
        ds.fit(
            ens,
            ({"image": image, "table": table}, y),
            objective=objective,
            epochs=1,
            batch_size=40,
            device="cpu",
            engine="eager",
            batches="shared",
        )
        clean, attacked = seen[-4], seen[-2]
        for before, after, moves in zip(clean, attacked, moved, strict=True):
            assert torch.equal(before, after) != moves
            assert not moves or torch.allclose((after - before).abs().amax(), torch.tensor(0.1), atol=1e-6)
    with pytest.raises(ValueError, match="no part 'sound'"):
        ds.fit(
            ens,
            ({"image": image, "table": table}, y),
            objective=obj.Adversarial(obj.Independent(), part="sound"),
            epochs=1,
        )
    x, y = token_data()
    with pytest.raises(ValueError, match="moves real numbers"):
        ds.fit(ds.DeepEnsemble(Tokens, 2), (x, y), objective=obj.Adversarial(obj.Independent()), epochs=1)


def test_a_tree_is_cut_moved_and_joined_as_its_tensors_are():
    tree = Tree.of({"a": torch.arange(6).reshape(3, 2), "b": (torch.ones(3),), "c": None})
    assert [name for name, _ in tree.named()] == ["a", "b.0"]
    assert [len(part) for part in tree.split(2)] == [2, 1]
    assert tree[torch.tensor([2])].value()["a"].tolist() == [[4, 5]]
    for wrong in ({}, (torch.ones(3), None)):
        with pytest.raises(ValueError, match="must hold a tensor in each part"):
            Tree.of(wrong)


class TestSampleWeights:
    """(inputs, targets, weights): sum(w · loss) / sum(w) over the batch."""

    def test_whole_weights_are_repeated_examples(self):
        (image, _), y = data(20)
        weights = torch.tensor([1.0, 2.0] * 10)
        rows = torch.repeat_interleave(torch.arange(20), weights.long())
        weighted, repeated = (ds.DeepEnsemble(lambda: nn.Linear(3, 3), 3) for _ in range(2))
        settings = {"epochs": 5, "optimizer": "sgd", "lr": 0.1, "device": "cpu", "batches": "shared"}
        ds.fit(weighted, (image, y, weights), batch_size=20, **settings)
        ds.fit(repeated, (image[rows], y[rows]), batch_size=30, **settings)
        torch.testing.assert_close(ds.predict(weighted, image), ds.predict(repeated, image), atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize(
        "objective",
        [
            obj.Independent(),
            obj.Joint(0.5),
            obj.Joint(0.5, member_dropout=0.3, dropout_per="example"),
            obj.LossGuided(active=None),
            obj.Adversarial(obj.Independent()),
        ],
        ids=lambda o: type(o).__name__,
    )
    def test_weight_zero_is_an_example_left_out(self, objective):
        if isinstance(objective, obj.LossGuided):
            objective = obj.LossGuided(strength=0.0, active=None)
        (image, _), y = data(20)
        weights = torch.tensor([0.0] * 5 + [1.0] * 15)
        y = y.clone()
        ends = []
        for labels in (y, torch.cat([(y[:5] + 1) % 3, y[5:]])):
            ens = ds.DeepEnsemble(lambda: nn.Linear(3, 3), 3)
            ds.fit(
                ens,
                (image, labels, weights),
                objective=objective,
                epochs=3,
                batch_size=20,
                lr=0.1,
                device="cpu",
                batches=None,
            )
            ends.append(ds.predict(ens, image))
        torch.testing.assert_close(*ends)

    @pytest.mark.parametrize("engine", ["eager", pytest.param("captured", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("form", ["arrays", "dataset", "loader"])
    def test_weights_come_with_every_form_of_data(self, form, engine):
        x, y = token_data()
        plain, weighted = ds.DeepEnsemble(Tokens, 2), ds.DeepEnsemble(Tokens, 2)
        settings = {"epochs": 2, "device": "cpu", "engine": engine}
        if form != "loader":
            settings["batch_size"] = 8
        for ens, weights in ((plain, torch.ones(24)), (weighted, torch.linspace(0.1, 3, 24))):
            items = Items(x, y, weights)
            given = {"arrays": (x, y, weights), "dataset": items, "loader": DataLoader(items, 8)}[form]
            ds.fit(ens, given, validation=given, **settings)
        same = ds.DeepEnsemble(Tokens, 2)
        items = Items(x, y)
        ds.fit(same, {"arrays": (x, y), "dataset": items, "loader": DataLoader(items, 8)}[form], **settings)
        torch.testing.assert_close(ds.predict(plain, x), ds.predict(same, x), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(ds.predict(weighted, x), ds.predict(same, x), atol=1e-4)

    @pytest.mark.parametrize(
        "weights", [torch.ones(19), -torch.ones(20), torch.zeros(20), torch.full((20,), float("nan"))]
    )
    def test_bad_weights_are_refused(self, weights):
        (image, _), y = data(20)
        with pytest.raises(ValueError, match="weights must be one number for each of 20 examples"):
            ds.fit(ds.DeepEnsemble(lambda: nn.Linear(3, 3), 2), (image, y, weights), epochs=1)

    def test_validation_losses_are_weighted(self):
        (image, _), y = data(20)
        weights = torch.linspace(0, 1, 20)
        ens = ds.DeepEnsemble(lambda: nn.Linear(3, 3), 2)
        run = ds.fit(ens, (image, y), validation=(image, y, weights), epochs=1, device="cpu", lr=0.0)
        losses = torch.nn.functional.cross_entropy(
            ds.predict(ens, image).flatten(0, 1), y.repeat(2), reduction="none"
        ).reshape(2, 20)
        wanted = (weights * losses).sum(1) / weights.sum()
        assert [row["validation_loss"] for row in run.history.rows] == pytest.approx(wanted.tolist(), rel=1e-5)
