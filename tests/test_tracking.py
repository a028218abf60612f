"""Callbacks for TensorBoard and MLflow: what they show is what the history holds."""

import json
import sys
import types

import numpy as np
import pytest
import torch

import dissensus as ds
from dissensus import tracking


def trained(callback=None, epochs=2):
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    ens = ds.DeepEnsemble(lambda: torch.nn.Linear(3, 2), 2)
    run = ds.fit(ens, (x, (x[:, 0] > 0).long()), epochs=epochs, device="cpu", engine="eager", callback=callback)
    return ens, run, x


def test_the_last_check_is_means_and_members():
    _, run, _ = trained()
    found = tracking.latest(run)
    assert found["loss"] == run.history.by_epoch("loss")[-1]
    assert [found[f"member_{member}/loss"] for member in (0, 1)] == run.history["loss"][-2:]
    assert not {"epoch", "step", "member"} & set(found)


@pytest.mark.slow
def test_tensorboard_shows_the_history(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, run, _ = trained(tracking.TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = [event.value for event in events.Scalars("loss")]
    np.testing.assert_allclose(shown, run.history.by_epoch("loss"), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_the_history_and_serves_the_file(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    with mlflow.start_run() as active:
        ens, run, x = trained(tracking.MLflow())
        alarm = ds.Alarm.calibrate(ens, x, false_alarms=0.1)
        logged = tracking.log_model(ens, x, alarm=alarm)
    shown = mlflow.MlflowClient().get_metric_history(active.info.run_id, "loss")
    np.testing.assert_allclose([point.value for point in shown], run.history.by_epoch("loss"))
    import onnxruntime

    file = mlflow.onnx.load_model(logged.model_uri)
    session = onnxruntime.InferenceSession(file.SerializeToString())
    (answer,) = session.run(["prediction"], {"x": x.numpy()})
    np.testing.assert_allclose(answer, ds.predict(ens, x).softmax(-1).mean(0).numpy(), atol=1e-5)


@pytest.mark.slow
def test_a_regression_is_logged_as_one(monkeypatch):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    hosted = types.ModuleType("mlflow.onnx")
    hosted.log_model = lambda model, name: (model, name)
    mlflow = types.ModuleType("mlflow")
    mlflow.onnx = hosted
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.onnx", hosted)
    ens = ds.DeepEnsemble(lambda: torch.nn.Linear(3, 2), 2)
    x = torch.randn(16, 3)
    logged, name = tracking.log_model(ens, x, name="price", loss="gaussian_nll")
    assert name == "price"
    assert isinstance(logged, onnx.ModelProto)
    facts = {each.key: json.loads(each.value) for each in logged.metadata_props}
    assert (facts["task"], facts["loss"]) == ("regression", "gaussian_nll")
