"""One file for every kind and task that says what the ensemble says, and refusals where it would not."""

import json
import platform
import runpy

import numpy as np
import pytest
import torch
from kind_cases import KINDS
from markdown_blocks import ROOT, python_blocks, run_blocks
from torch import nn
from training_helpers import net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.conformal import Alarm
from dissensus.exporting import _rank_correlation, _Ranks

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TASKS = {"cross_entropy": 3, "mse": 2, "gaussian_nll": 4, "laplace_nll": 2}
MI = ds.scores.mutual_information


def session(path):
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(path, rows=None, **further):
    file = session(path)
    feed = {name: np.asarray(value) for name, value in {"x": rows, **further}.items() if value is not None}
    outputs = file.run(None, feed)
    return dict(zip([output.name for output in file.get_outputs()], outputs, strict=True))


def says_what_the_ensemble_says(found, ens, inputs, alarm, loss="cross_entropy"):
    """Outputs of a file against `ds.predict` and the alarm: to 1e-5, and the flag on every row but ties."""
    outputs = ds.predict(ens, inputs)
    if loss == "cross_entropy":
        wanted = {
            "prediction": outputs.softmax(-1).mean(0),
            "total": ds.scores.total_entropy(outputs),
            "data": ds.scores.expected_entropy(outputs),
            "knowledge": MI(outputs),
            "score": MI(outputs),
        }
    else:
        mean, scale = (outputs, torch.zeros_like(outputs)) if loss == "mse" else obj.mean_and_scale(outputs)
        centre, std = ds.mixture(mean, scale, "laplace" if loss == "laplace_nll" else "gaussian")
        knowledge = mean.var(0, correction=0).mean(-1)
        wanted = {"prediction": centre, "total": std.square().mean(-1), "score": knowledge}
        wanted |= {"knowledge": knowledge, "data": wanted["total"] - knowledge}
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value.numpy(), atol=1e-5, err_msg=name)
    gaps = np.abs(alarm.calibration[None] - found["score"].astype(float)[:, None]).min(1)
    apart = gaps > 1e-6 * np.maximum(1, found["score"])  # no tie
    assert apart.mean() > 0.8 or len(apart) < 10
    np.testing.assert_allclose(found["p_value"][apart], alarm.p_values(inputs)[apart], atol=1e-7)
    np.testing.assert_array_equal(found["flag"][apart], alarm(inputs)[apart])
    assert found["flag"].dtype == bool


@pytest.fixture(scope="module")
def trained():
    ens = ds.DeepEnsemble(net, 3)
    ds.fit(ens, (x, y), epochs=3, batch_size=25, lr=0.02)
    return ens


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    alarm = Alarm.calibrate(trained, x, false_alarms=0.05)
    done = ds.export(trained, path, example=x, alarm=alarm, facts={"classes": ["a", "b", "c"]})
    return done, alarm


class TestOneFile:
    def test_has_the_outputs_of_the_contract_in_their_order(self, exported):
        file = session(exported[0].path)
        names = ["prediction", "total", "data", "knowledge", "score", "p_value", "flag"]
        assert [output.name for output in file.get_outputs()] == names
        assert [(each.name, each.type, each.shape[1:]) for each in file.get_inputs()] == [
            ("x", "tensor(float)", [4])
        ]  # `limit` has a default, so the runtime lists it among what may be overridden
        (limit,) = file.get_overridable_initializers()
        assert (limit.name, limit.type, limit.shape) == ("limit", "tensor(float)", [])

    @pytest.mark.parametrize("rows", [1, 7, 4096])
    def test_says_what_the_ensemble_says(self, exported, trained, rows):
        done, alarm = exported
        new = 2 * torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        says_what_the_ensemble_says(run(done.path, new), trained, new, alarm)

    def test_takes_another_limit(self, exported):
        found = run(exported[0].path, x, limit=np.array(0.5, np.float32))
        np.testing.assert_array_equal(found["flag"], found["p_value"] <= 0.5)
        assert found["flag"].sum() > run(exported[0].path, x)["flag"].sum()

    def test_says_what_it_is_and_not_where_it_was_made(self, exported):
        facts = {
            name: json.loads(v) for name, v in session(exported[0].path).get_modelmeta().custom_metadata_map.items()
        }
        assert facts["classes"] == ["a", "b", "c"]
        assert facts["false_alarms"] == 0.05
        assert facts["score"] == "mutual_information"
        assert (facts["task"], facts["num_members"], facts["dissensus"]) == ("classification", 3, ds.__version__)
        assert b"site-packages" not in exported[0].path.read_bytes()

    def test_is_compared_before_it_is_done(self, exported):
        assert exported[0].largest_error < 1e-5
        assert exported[0].rank_correlation > 0.999
        assert exported[0].size == exported[0].path.stat().st_size
        assert not list(exported[0].path.parent.glob(".*"))

    def test_leaves_the_ensemble_as_it_was(self, exported, trained):
        assert all(parameter.dtype == torch.float32 for parameter in trained.parameters())


class TestRanks:
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 31, 32, 1000])
    def test_are_the_p_values_of_the_definition_with_ties(self, count):
        held_out = torch.randint(0, 20, (count,)).double()
        scores = torch.randint(-1, 22, (500,)).float()
        wanted = (1 + (held_out[None] >= scores[:, None]).sum(1)) / (count + 1)
        torch.testing.assert_close(_Ranks(held_out)(scores), wanted.float())

    def test_correlation_is_that_of_scipy_with_ties(self):
        stats = pytest.importorskip("scipy.stats")
        rng = np.random.default_rng(0)
        a, b = rng.integers(0, 30, 200), rng.integers(0, 30, 200)
        assert _rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
        assert _rank_correlation(np.zeros(5), np.ones(5)) == 1.0
        assert _rank_correlation(np.zeros(5), np.arange(5)) == 0.0


class TestRefusals:
    def test_of_what_cannot_be_written(self, trained, tmp_path):
        with pytest.raises(ValueError, match=r"\.onnx or \.pt2"):
            ds.export(trained, tmp_path / "model.bin", example=x)
        with pytest.raises(ValueError, match="at least one input"):
            ds.export(trained, tmp_path / "m.onnx", example=x[:0])
        with pytest.raises(ValueError, match="must be an ensemble"):
            ds.export(net(), tmp_path / "m.onnx", example=x)
        with pytest.raises(ValueError, match="at least 64 inputs"):
            ds.export(trained, tmp_path / "m.onnx", example=x[:9], precision="int8")
        with pytest.raises(ValueError, match="'fp32', 'fp16' or 'int8'"):
            ds.export(trained, tmp_path / "m.onnx", example=x, precision="int4")
        with pytest.raises(ValueError, match="masks='member'"):
            ds.export(ds.MCDropout(net(0.2), 2, masks="input"), tmp_path / "m.onnx", example=x)
        others = Alarm.calibrate(ds.DeepEnsemble(net, 2, seed=9), x, false_alarms=0.05)
        with pytest.raises(ValueError, match="calibrated with another ensemble"):
            ds.export(trained, tmp_path / "m.onnx", example=x, alarm=others)
        with pytest.raises(ValueError, match="the loss is 'binary_cross_entropy'"):
            ds.export(trained, tmp_path / "m.onnx", example=x, loss="binary_cross_entropy")
        assert not list(tmp_path.iterdir())

    def test_of_a_network_that_reads_values(self, tmp_path):
        class Reads(nn.Linear):
            def forward(self, x):
                return super().forward(x) if x.sum() > 0 else x[:, :3]

        with pytest.raises(ValueError, match="cannot follow this network"):
            ds.export(ds.DeepEnsemble(lambda: Reads(4, 3), 2), tmp_path / "m.onnx", example=x)


def net_with(outputs):
    return lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, outputs))


CASES = [pytest.param(case, id=f"{name}, {what}") for name, cases in KINDS.items() for what, case in cases.items()]


class TestEveryKindAndTask:
    @pytest.mark.parametrize("case", CASES)
    def test_classes(self, case, tmp_path):
        ens = case(net_with(3), x)
        ds.fit(ens, (x, y), objective=obj.Independent(), epochs=4, batch_size=25, lr=0.1)
        alarm = Alarm.calibrate(ens, x, false_alarms=0.05)
        done = ds.export(ens, tmp_path / "m.onnx", example=x, alarm=alarm)
        assert done.largest_error < 1e-5
        for rows in (1, 7, 4096):
            new = 2 * torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
            says_what_the_ensemble_says(run(done.path, new), ens, new, alarm)

    @pytest.mark.parametrize("loss", ["mse", "gaussian_nll", "laplace_nll"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_values(self, kind, loss, tmp_path):
        ens = next(iter(KINDS[kind].values()))(net_with(TASKS[loss]), x)
        targets = x[:, : TASKS[loss] // (1 if loss == "mse" else 2)]
        ds.fit(ens, (x, targets), objective=obj.Independent(loss=loss), epochs=4, batch_size=25, lr=0.1)
        alarm = Alarm.calibrate(ens, (x, targets), loss=loss, false_alarms=0.05)
        done = ds.export(ens, tmp_path / "m.onnx", example=x, alarm=alarm)
        says_what_the_ensemble_says(run(done.path, 2 * x), ens, 2 * x, alarm, loss)
        with pytest.raises(Exception, match="ONNXRuntimeError"):  # an empty batch
            run(done.path, x[:0])

    # Anchored networks and MIMO change the one layer that takes the one input.
    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("anchored", "mimo")])
    def test_several_inputs(self, kind, tmp_path):
        class Joined(nn.Module):
            def __init__(self, outputs=3):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
                self.drop, self.last = nn.Dropout(0.2), nn.Linear(16, outputs)

            def forward(self, left, right):
                return self.last(self.drop(self.net(torch.cat([left, right], 1))))

        inputs = {"left": x, "right": x[:, :2] + 1}
        case = next(iter(KINDS[kind].values()))
        ens = ds.HeadEnsemble(Joined(8), (8, 3), 3) if kind == "heads" else case(Joined, x)
        ds.fit(ens, (inputs, y), epochs=4, batch_size=25, lr=0.1)
        alarm = Alarm.calibrate(ens, inputs, false_alarms=0.05)
        done = ds.export(ens, tmp_path / "m.onnx", example=inputs, alarm=alarm)
        new = {"left": 2 * x, "right": x[:, :2]}
        says_what_the_ensemble_says(run(done.path, **new), ens, new, alarm)

    def test_a_backbone_that_gives_several_tensors(self, tmp_path):
        class Backbone(nn.Linear):
            def forward(self, x):
                return {"pooled": super().forward(x), "all": x}

        ens = ds.HeadEnsemble(Backbone(4, 8), (8, 3), 3, features="pooled")
        alarm = Alarm.calibrate(ens, x, false_alarms=0.05)
        done = ds.export(ens, tmp_path / "m.onnx", example=x, alarm=alarm)
        says_what_the_ensemble_says(run(done.path, 2 * x), ens, 2 * x, alarm)

    def test_a_temperature_of_anchored_networks(self, tmp_path):
        ens = ds.Anchored(net(), x, 3, temperature="exponential")
        done = ds.export(ens, tmp_path / "m.onnx", example=x)
        np.testing.assert_allclose(run(done.path, x)["prediction"], ds.predict(ens, x).softmax(-1).mean(0), atol=1e-5)

    def test_an_alarm_by_classes_and_by_a_function(self, tmp_path):
        ens = ds.DeepEnsemble(net, 3)
        by_class = Alarm.calibrate(ens, x, labels=y, false_alarms=0.2)
        found = run(ds.export(ens, tmp_path / "a.onnx", example=x, alarm=by_class).path, 2 * x)
        np.testing.assert_allclose(found["p_value"], by_class.p_values(2 * x), atol=0.07)

        def spread(outputs):
            return outputs.std(0).sum(-1)

        own = Alarm.calibrate(ens, x, score=spread, false_alarms=0.2)
        found = run(ds.export(ens, tmp_path / "b.onnx", example=x, alarm=own).path, x)
        np.testing.assert_allclose(found["score"], spread(ds.predict(ens, x)), atol=1e-5)

    def test_several_inputs_and_outputs_by_name(self, tmp_path):
        class TwoInputs(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.last = nn.Embedding(10, 4), nn.Linear(8, 3)

            def forward(self, ids, values):
                return {"logits": self.last(torch.cat([self.words(ids).mean(1), values], 1)), "ids": ids}

        ens = ds.DeepEnsemble(TwoInputs, 3, output="logits")
        inputs = {"ids": torch.randint(0, 10, (100, 6)), "values": x}
        alarm = Alarm.calibrate(ens, inputs, false_alarms=0.1)
        done = ds.export(ens, tmp_path / "m.onnx", example=inputs, alarm=alarm)
        file = session(done.path)
        assert [each.name for each in file.get_inputs()] == ["ids", "values"]
        (score,) = file.run(["score"], {name: value.numpy() for name, value in inputs.items()})
        np.testing.assert_allclose(score, MI(ds.predict(ens, inputs)), atol=1e-5)

        class Sum(nn.Linear):
            def forward(self, a, b):
                return super().forward(a + b)

        pair = ds.DeepEnsemble(lambda: Sum(4, 3), 2)
        done = ds.export(pair, tmp_path / "pair.onnx", example=(x, 2 * x))
        assert [each.name for each in session(done.path).get_inputs()] == ["x0", "x1"]

    def test_pt2(self, trained, tmp_path):
        alarm = Alarm.calibrate(trained, x)
        done = ds.export(trained, tmp_path / "m.pt2", example=x, alarm=alarm, member_outputs=True)
        module = torch.export.load(done.path).module()
        found = module(x=2 * x, limit=torch.tensor(0.1))
        logits = ds.predict(trained, 2 * x)
        torch.testing.assert_close(found["members"], logits.softmax(-1).transpose(0, 1))
        torch.testing.assert_close(found["flag"], found["p_value"] <= 0.1)
        assert b"site-packages" not in done.path.read_bytes()

    @pytest.mark.parametrize("ending", ["onnx", "pt2"])
    def test_a_link_beside_the_file_is_not_followed(self, trained, tmp_path, ending):
        (tmp_path / "mine.txt").write_text("mine")
        (tmp_path / f".m.tmp.{ending}").symlink_to(tmp_path / "mine.txt")
        done = ds.export(trained, tmp_path / f"m.{ending}", example=x)
        assert (tmp_path / "mine.txt").read_text() == "mine"
        assert (tmp_path / f".m.tmp.{ending}").is_symlink()
        assert platform.node().encode() not in done.path.read_bytes()

    def test_half_precision_and_eight_bits(self, tmp_path):
        def make():
            return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

        ens = ds.DeepEnsemble(make, 3)
        ds.fit(ens, (x, y), epochs=5, batch_size=25)
        sizes = {}
        for precision in ("fp32", "fp16", "int8"):
            done = ds.export(ens, tmp_path / f"{precision}.onnx", example=x, precision=precision)
            sizes[precision] = done.size
            assert done.rank_correlation > 0.999
            assert run(done.path, x)["score"].dtype == np.float32
        assert sizes["fp32"] > 1.5 * sizes["fp16"] > sizes["int8"]
        assert next(ens.parameters()).dtype == torch.float32

    def test_precision_that_changes_the_order_is_refused(self, tmp_path):
        ens = ds.DeepEnsemble(net, 2)
        with torch.no_grad():
            for parameter in ens.parameters():
                parameter[1] = parameter[0] * (1 + 1e-5)  # members that half precision cannot tell apart
        with pytest.raises(ValueError, match="rank correlation"):
            ds.export(ens, tmp_path / "m.onnx", example=x, precision="fp16")
        assert not list(tmp_path.iterdir())

    def test_shared_weights_are_stored_once(self, tmp_path):
        wide = nn.Sequential(
            nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
        )
        sizes = [ds.export(ds.MCDropout(wide, count), tmp_path / "m.onnx", example=x).size for count in (1, 5)]
        assert sizes[1] < 1.6 * sizes[0]


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks("docs/deployment.md", python_blocks("docs/deployment.md"))


def test_the_figure_of_the_page_is_that_of_its_record():
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "serving.py"))
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "docs" / "serving.json").read_text(encoding="utf-8"))
    assert benchmark["with_sentence"](page, record) == page
    assert record["errors"] == 0
