"""What people touch first: ensembles that say what they are, wrong calls that are refused in a sentence, logs that can be read."""

import io
import os
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import metrics, objectives
from dissensus.data.files import load
from dissensus.recipes.choices import member_factory
from dissensus.training import schedules
from dissensus.training.history import Progress

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2


def linear(members=3):
    return ds.DeepEnsemble(lambda: nn.Linear(3, 2), num_members=members)


def kinds():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    return [
        linear(),
        ds.MCDropout(net, num_members=3),
        ds.Masksembles(net, num_members=3),
        ds.BatchEnsemble(lambda: nn.Linear(3, 2), num_members=3),
        ds.HeadEnsemble(nn.Linear(3, 4), lambda: nn.Linear(4, 2), num_members=3),
    ]


def test_an_ensemble_says_what_it_is():
    assert repr(linear(5)) == "DeepEnsemble(5 members, 40 parameters, cpu)"
    for ens in kinds():
        assert repr(ens).startswith(f"{type(ens).__name__}(3 members, ")


def test_members_are_counted_and_taken_as_from_a_list():
    for ens in kinds():
        ens.eval()
        outputs = ens(X)
        assert len(ens) == 3
        for place, member in enumerate(ens):
            torch.testing.assert_close(member.eval()(X), outputs[place])
        torch.testing.assert_close(ens[-1].eval()(X), outputs[2])
        with pytest.raises(IndexError, match="members 0 to 2; got 3"):
            ens[3]
    with pytest.raises(ValueError, match="whole number"):
        linear()["a"]


def test_the_package_lists_its_own_names_only():
    assert set(dir(ds)) == {*ds.__all__, "__version__"}


def test_whole_numbers_may_come_from_numpy():
    ens = ds.DeepEnsemble(lambda: nn.Linear(3, 2), num_members=np.int64(3), seed=np.int32(4))
    other = ds.DeepEnsemble(lambda: nn.Linear(3, 2), num_members=3, seed=4)
    torch.testing.assert_close(ens(X), other(X))
    for one in (ens, other):
        ds.fit(one, (X, Y), epochs=np.int64(1), lr=np.array(1e-2), seed=np.int64(1), device="cpu")
    torch.testing.assert_close(ens(X), other(X))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ds.predict(nn.Linear(3, 2), X), "`members` must be an ensemble.*got Linear"),
        (lambda: ds.predict_scores(nn.Linear(3, 2), X), "must be an ensemble"),
        (lambda: ds.fit(nn.Linear(3, 2), (X, Y)), "must be an ensemble"),
        (lambda: ds.DeepEnsemble.from_members(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), "got Sequential"),
        (lambda: ds.DeepEnsemble(lambda: nn.Linear(3, 2), num_members=3.0), "`num_members` must be a whole number"),
        (lambda: ds.MCDropout(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), 3), "have p = 0"),
        (lambda: ds.MCDropout(nn.LSTM(3, 3, num_layers=2, dropout=0.1), 3), "nn.LSTM and the like"),
        (lambda: ds.predict(linear(), torch.randn(3)), r"One input alone is `x\[None\]`"),
        (lambda: ds.fit(linear(), (X, Y), weight_decay=-1), "`weight_decay` must be a number of at least 0"),
        (lambda: ds.fit(linear(), (X, Y), lr=float("nan")), "`lr` must be a number"),
        (lambda: ds.fit(linear(), (X, Y), lr=[1e-3, -1, 1e-3]), r"`lr\[1\]` must be a number"),
        (lambda: ds.fit(linear(), (X, Y), epochs=1.0), "`epochs` must be a whole number; got 1.0"),
        (lambda: ds.fit(linear(), (X, Y), schedule=None), "`schedule` must be a string"),
        (lambda: ds.fit(linear(), (X, Y), schedule=lambda *_: None), "`schedule` must return a finite number"),
        (lambda: ds.fit(linear(), (X, Y), augment=lambda *_: None), r"`augment` must return .* \(x, y\); got NoneType"),
        (lambda: ds.fit(linear(), (X, Y), optimizer=lambda _: None), "must make a torch optimizer"),
        (lambda: ds.fit(linear(), (X, Y), lr=np.array([[1e-3]])), "`lr` must be a number or a list"),
        (lambda: ds.fit(linear(), (X, Y), checkpoint_dir=""), "must be a folder's path or None"),
        (lambda: ds.predict(linear(), X[:, :2]), r"cannot read inputs shaped \(12, 2\)"),
        (lambda: ds.predict(linear(), 1.5), "cannot read inputs shaped"),
        (lambda: ds.predict(linear(), X, device="gpu"), "`device` must be 'auto', 'cpu', 'cuda'"),
        (lambda: ds.fit(linear(), (X, Y), resume=True), "pass `checkpoint_dir` too"),
        (lambda: ds.fit(linear(), (X, Y), checkpoint_dir=3), "must be a string, a path or None; got 3"),
        (lambda: ds.fit(linear(), (X, Y), check_every="step"), "must be 'epoch' or a whole number; got 'step'"),
        (lambda: ds.fit(linear(), (X, Y), validation=(X[:, :2], Y)), "cannot run on validation inputs"),
        (lambda: ds.fit(ds.DeepEnsemble(nn.ReLU, 2), (X, Y)), "nothing to train"),
        (lambda: ds.fit(linear(), (X, Y.float())), r"objective=Independent\('mse'\)"),
        (lambda: ds.diagnose(torch.randn(3, 12, 2), Y + 1, loss="cross_entropy"), "must lie in 0..1; got 2 in row"),
        (lambda: schedules.StepDecay(every=0), "`every` must be a number above 0"),
        (lambda: schedules.MultiStep(milestones=3), "`milestones` must be a list or tuple, each a number"),
        (
            lambda: objectives.gaussian_nll(torch.zeros(8), torch.ones(8), torch.zeros(8, 1)),
            "must be shaped as `target`",
        ),
        (
            lambda: objectives.laplace_nll(torch.zeros(8, 1), torch.ones(8, 1), torch.zeros(8)),
            "must be shaped as `target`",
        ),
        (lambda: objectives.gaussian_nll(torch.zeros(8), -torch.ones(8), torch.zeros(8)), "must be positive; got -1"),
        (
            lambda: objectives.laplace_nll(torch.zeros(1), torch.full((1,), torch.nan), torch.zeros(1)),
            "positive; got nan",
        ),
    ],
)
def test_wrong_calls_are_refused_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_losses_with_members_before_the_batch_are_taken_also_while_programs_are_recorded():
    mean, scale, target = torch.randn(3, 8, 2), torch.rand(3, 8, 2) + 0.1, torch.randn(8, 2)
    whole = objectives.gaussian_nll(mean, scale, target)
    one_by_one = torch.vmap(objectives.gaussian_nll, in_dims=(0, 0, None))(mean, scale, target)
    torch.testing.assert_close(whole, one_by_one)
    gradient = torch.func.grad(lambda s: objectives.gaussian_nll(mean, s, target).sum())(scale)
    assert gradient.shape == scale.shape


def test_likelihoods_are_nats_an_example_wherever_they_are_measured():
    x, y = torch.randn(40, 3), torch.randn(40, 2)
    ens = ds.DeepEnsemble(lambda: nn.Linear(3, 4), num_members=1)
    result = ds.evaluate(ens, (x, y), loss="gaussian_nll", bootstrap=0)
    # Of one member the mixture is that member.
    assert result.number("gaussian_nll").value == pytest.approx(result.number("mixture_nll").value, rel=1e-5)
    mean, scale = objectives.mean_and_scale(ds.predict(ens, x))
    by_hand = objectives.gaussian_nll(mean[0], scale[0], y).sum(1).mean()
    assert result.number("gaussian_nll").value == pytest.approx(float(by_hand), rel=1e-5)
    assert metrics.gaussian_nll(mean[0], scale[0], y) == pytest.approx(float(by_hand), rel=1e-6)
    by_hand = objectives.laplace_nll(mean[0], scale[0], y).sum(1).mean()
    assert metrics.laplace_nll(mean[0], scale[0], y) == pytest.approx(float(by_hand), rel=1e-6)


def test_the_state_of_dropout_members_says_which_draws_they_are():
    net = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    first, second = ds.MCDropout(net, 3, seed=1).eval(), ds.MCDropout(net, 3, seed=2).eval()
    assert not torch.equal(first(X), second(X))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(X), second(X))


def test_a_loop_of_ones_own_trains_every_kind():
    x = torch.randn(256, 3, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    for ens in kinds():
        optimizer = torch.optim.Adam([p for p in ens.parameters() if p.requires_grad], lr=0.05)
        for _ in range(40):
            ens.train()
            outputs = ens(x)  # (members, batch, ...), or (1, batch, ...) where each example meets one member
            assert outputs.shape[0] in (1, 3)
            loss = nn.functional.cross_entropy(outputs.flatten(0, 1), y.repeat(len(outputs)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ens.eval()
        right = (ens(x).argmax(-1) == y).float().mean(1)
        assert right.shape == (3,)
        assert right.min() > 0.75, type(ens).__name__


def test_torchs_words_about_its_own_speed_do_not_reach_users():
    class Unusual(nn.Module):
        """Has an operation that vmap runs in a loop of its own."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x) + torch.histc(x[:, 0].detach(), 4)[:1] * 0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ds.DeepEnsemble(Unusual, 3)(X)


def test_progress_into_a_log_is_a_line_an_epoch():
    log = io.StringIO()
    shown = Progress(20, 2, stream=log, show=True)
    for step in range(1, 21):
        shown.values({"loss": 1 / step})
        shown.update(step, 1 + (step - 1) // 10)
    shown.close()
    lines = log.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert "\r" not in log.getvalue()
    assert "\x1b" not in log.getvalue()


def test_tables_go_from_a_file_into_fit_and_predict(tmp_path):
    pytest.importorskip("pandas")
    table = np.random.default_rng(0).normal(size=(60, 3))
    rows = ["a,b,c,y", *(",".join(map(str, [*row, 2 * row[0]])) for row in table)]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    loaded = load(tmp_path / "table.csv", target="y")
    ens = ds.DeepEnsemble(lambda: nn.Linear(3, 1), num_members=2)
    run = ds.fit(ens, loaded, validation=loaded, epochs=2, device="cpu")
    assert ds.predict(ens, loaded).shape == (2, 60, 1)
    with pytest.raises(ValueError, match=r"`data` must have targets.*load\(path, target=...\)"):
        ds.fit(ens, tmp_path / "table.csv")
    np.savez(tmp_path / "arrays.npz", x=table, y=2 * table[:, 0])
    other = ds.DeepEnsemble(lambda: nn.Linear(3, 1), num_members=2)
    again = ds.fit(other, tmp_path / "arrays.npz", validation=str(tmp_path / "arrays.npz"), epochs=2, device="cpu")
    assert again.history["loss"] == pytest.approx(run.history["loss"], rel=1e-5)
    torch.testing.assert_close(ds.predict(other, tmp_path / "arrays.npz"), ds.predict(ens, loaded))


def test_real_targets_mean_regression_where_they_cannot_mean_anything_else():
    x, y = torch.randn(40, 3), torch.randn(40)
    ens, told = (ds.DeepEnsemble(lambda: nn.Linear(3, 1), num_members=2) for _ in range(2))
    ds.fit(ens, (x, y), epochs=2, device="cpu")
    ds.fit(told, (x, y), epochs=2, objective=objectives.Independent("mse"), device="cpu")
    torch.testing.assert_close(ds.predict(ens, x), ds.predict(told, x), rtol=0, atol=0)
    assert ds.evaluate(ens, (x, y), bootstrap=0).loss == "mse"
    assert ds.evaluate(linear(), (X, Y), bootstrap=0).loss == "cross_entropy"
    # Shares of classes stay shares of classes.
    shares = torch.rand(40, 2).softmax(-1)
    soft, by_name = (ds.DeepEnsemble(lambda: nn.Linear(3, 2), num_members=2) for _ in range(2))
    ds.fit(soft, (x, shares), epochs=1, device="cpu")
    ds.fit(by_name, (x, shares), epochs=1, objective=objectives.Independent(), device="cpu")
    torch.testing.assert_close(ds.predict(soft, x), ds.predict(by_name, x), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"scores.REGRESSION_SCORES"):
        ds.predict_scores(ens, x)


def test_images_may_be_rectangles(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number, (wide, high) in enumerate([(40, 20), (30, 30)]):
        folder = tmp_path / "pictures" / f"class {number}"
        folder.mkdir(parents=True)
        image.new("RGB", (wide, high), (number, 200, 0)).save(folder / "a.png")
    assert load(tmp_path / "pictures", size=(16, 24)).x.shape == (2, 3, 16, 24)
    assert load(tmp_path / "pictures", size=16).x.shape == (2, 3, 16, 16)
    with pytest.raises(ValueError, match=r"or \[height, width\]; got \(16,\)"):
        load(tmp_path / "pictures", size=(16,))


def test_pipes_are_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(ValueError, match="is no file or folder but a pipe"):
        load(tmp_path / "pipe.csv", target="y")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def make(inputs, outputs):\n    return nn.Linear(inputs, outputs)", r"NameError.* \(line 2 of typo_\d+.py\)"),
        ("def make(inputs, outputs:", "cannot be imported: SyntaxError"),
    ],
)
def test_a_typo_in_a_network_of_ones_own_is_told_with_its_line(tmp_path, code, words):
    """The module lies beside the recipe, not in the working folder."""
    module = f"typo_{abs(hash(code)) % 10**6}"
    (tmp_path / f"{module}.py").write_text(code)
    model = {"name": f"{module}:make", "folder": str(tmp_path)}
    with pytest.raises(ValueError, match=words):
        member_factory(model, (3,), 2, allow_import=True)()


def test_what_exporting_needs_is_said_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("dissensus._signatures.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"model\.onnx needs onnx, .*pip install 'dissensus\[export\]'"):
        ds.export(linear(), tmp_path / "model.onnx", example=X)
