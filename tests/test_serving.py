"""The server's answers, refusals and counters, in one process."""

import asyncio
import json
import logging
import subprocess
import sys
import threading

import numpy as np
import pytest
from serving_cases import MATRIX, softmax, write_model

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("prometheus_client")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from dissensus.data.tables import TableEncoder
from dissensus.serving import Settings, make_app
from dissensus.serving.batching import Batcher, QueueFull
from dissensus.serving.model import BadInput, Model
from dissensus.serving.schema import score
from dissensus.serving.watching import JsonLines

pytestmark = pytest.mark.slow  # quick, but beyond what `make test` installs
ROWS = [[0.5, -1.0], [3.0, 0.0]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny.onnx")


@pytest.fixture(scope="module")
def client(path):
    with TestClient(make_app(Settings(str(path), name="tiny", most_rows=50, most_bytes=10_000))) as client:
        yield client


def infer(data=(0.5, -1.0), shape=(1, 2), datatype="FP32", name="x", **more):
    return {"inputs": [{"name": name, "shape": list(shape), "datatype": datatype, "data": list(data)}], **more}


class TestRows:
    def test_are_answered_with_prediction_uncertainty_and_alarm(self, client):
        answer = client.post("/score", json={"rows": ROWS}).json()["rows"]
        probabilities = softmax(np.array(ROWS) @ MATRIX)
        np.testing.assert_allclose([row["probabilities"] for row in answer], probabilities, rtol=1e-6)
        assert [row["prediction"] for row in answer] == ["red" if p[0] == max(p) else "blue" for p in probabilities]
        np.testing.assert_allclose([row["p_value"] for row in answer], np.exp([-1.0, -3.0]), rtol=1e-6)
        assert [row["flag"] for row in answer] == [False, True]
        assert "members" not in answer[0]

    def test_take_another_limit_and_give_members(self, client):
        answer = client.post("/score", json={"rows": ROWS, "limit": 0.5, "members": True}).json()["rows"]
        assert [row["flag"] for row in answer] == [True, True]
        assert np.array(answer[0]["members"]).shape == (2, 3)

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ({}, '"rows"'),
            ({"rows": []}, "at least one row"),
            ({"rows": 3}, "list"),
            ({"rows": [[1, 2], [3]]}, "one shape"),
            ({"rows": [[1, 2, 3]]}, "2 values"),
            ({"rows": [["a", "b"]]}, "numbers only"),
            ({"rows": [[None, 1]]}, "numbers only"),
            ({"rows": [[True, False]]}, "numbers only"),
            ({"rows": [[1, 2], [False, 0]]}, "numbers only"),
            ({"rows": [[1e300, 1]]}, "finite"),
            ({"rows": [[1e38, 1e38]]}, None),
            ({"rows": [[1, 2], [3e38, 3e38]]}, "Row 1 has no finite prediction: are its values far too large?"),
            ({"rows": [{"x": 1}]}, "2 values"),
            ({"rows": [[1, 2]], "limit": 2}, "0 to 1"),
            ({"rows": [[1, 2]], "limit": "x"}, "0 to 1"),
            ({"rows": [[1, 2]], "members": 1}, "true or false"),
            ({"rows": [[1, 2]], "colour": 1}, "'colour'"),
            ([1], "object"),
        ],
    )
    def test_that_are_wrong_are_refused_in_a_sentence(self, client, body, said):
        answer = client.post("/score", json=body)
        if said is not None:
            assert answer.status_code == 400
            assert said in answer.json()["error"]

    @pytest.mark.parametrize(
        "text", [b"", b"{", b'{"rows": [[NaN, 1]]}', b"\xff\xfe", b"[" * 5000, b'{"rows":[[1e999,1]]}']
    )
    def test_that_are_no_json_are_refused(self, client, text):
        answer = client.post("/score", content=text, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"].endswith(".")

    def test_that_are_too_many_or_too_large_are_refused(self, client):
        assert client.post("/score", json={"rows": [[1, 2]] * 51}).status_code == 413
        assert client.post("/score", json={"rows": [[1.123456789, 2]] * 2000}).status_code == 413
        plain = client.post("/score", content=b"{}", headers={"Content-Type": "text/plain"})
        assert plain.status_code == 415


class TestProtocol:
    def test_health_and_metadata(self, client):
        assert client.get("/v2/health/live").json() == {"live": True}
        assert client.get("/v2/health/ready").json() == {"ready": True}
        assert client.get("/v2/models/tiny/ready").json() == {"name": "tiny", "ready": True}
        about = client.get("/v2/models/tiny").json()
        assert about["inputs"] == [
            {"name": "x", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "limit", "datatype": "FP32", "shape": []},
        ]
        assert [output["name"] for output in about["outputs"]][:2] == ["prediction", "total"]
        assert about["parameters"]["classes"] == ["red", "green", "blue"]

    def test_infers_tensors(self, client):
        data = [value for row in ROWS for value in row]
        answer = client.post("/v2/models/tiny/infer", json=infer(data, (2, 2), id="seven")).json()
        assert (answer["id"], answer["model_name"]) == ("seven", "tiny")
        outputs = {output["name"]: output for output in answer["outputs"]}
        assert "members" not in outputs
        assert outputs["prediction"]["shape"] == [2, 3]
        assert outputs["flag"] == {"name": "flag", "datatype": "BOOL", "shape": [2], "data": [False, True]}
        np.testing.assert_allclose(
            np.reshape(outputs["prediction"]["data"], (2, 3)), softmax(np.array(ROWS) @ MATRIX), rtol=1e-6
        )

    def test_takes_nested_data_a_limit_and_a_choice_of_outputs(self, client):
        asked = infer(outputs=[{"name": "flag"}])
        asked["inputs"][0]["data"] = [[0.5, -1.0]]
        asked["inputs"].append({"name": "limit", "shape": [], "datatype": "FP32", "data": [0.9]})
        answer = client.post("/v2/models/tiny/infer", json=asked).json()
        assert answer["outputs"] == [{"name": "flag", "datatype": "BOOL", "shape": [1], "data": [True]}]

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"inputs": 1},
            {"inputs": []},
            infer(name="y"),
            infer(datatype="INT64"),
            infer(shape=(1, 3)),
            infer(shape=(0, 2), data=()),
            infer(shape=(-1, 2)),
            infer(data=("a", "b")),
            infer(data=(True, 1.5)),
            infer(data=([1], [2, 3])),
            infer(outputs=[{"name": "nothing"}]),
            infer(outputs="all"),
            infer(id=[1]),
            infer(data=(3e38, 3e38)),
            {"inputs": infer()["inputs"] * 2},
            {"inputs": [*infer()["inputs"], {"name": "limit", "data": []}]},
        ],
    )
    def test_refuses_what_is_wrong(self, client, body):
        answer = client.post("/v2/models/tiny/infer", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"].endswith((".", "?"))

    def test_refuses_an_id_that_json_cannot_say(self, client):
        text = json.dumps(infer(id=1)).replace('"id": 1', '"id": 1e999')
        answer = client.post("/v2/models/tiny/infer", content=text, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert '"id"' in answer.json()["error"]

    def test_knows_one_model_and_its_addresses(self, client):
        assert client.get("/v2/models/other").status_code == 404
        assert "one model" in client.post("/v2/models/other/infer", json=infer()).json()["error"]
        assert "openapi" in client.get("/nowhere").json()["error"]
        assert client.get("/score").status_code == 405

    def test_every_route_is_described(self, client):
        described = client.get("/openapi.json").json()
        assert len(described["paths"]) == 10
        for path, methods in described["paths"].items():
            for method in methods.values():
                content = method["responses"]["200"]["content"]
                assert all(kind.get("schema") for kind in content.values()), path
                assert method["summary"]


class TestKey:
    def test_is_asked_for_everywhere_but_at_health_and_page(self, path):
        with TestClient(make_app(Settings(str(path), name="tiny", api_key="sécret"))) as client:
            for address in ("/v2", "/v2/models/tiny", "/metrics", "/drift", "/openapi.json"):
                refused = client.get(address)
                assert refused.status_code == 401, address
                assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert client.post("/score", json={"rows": ROWS}).status_code == 401
            for wrong in ("Bearer x", "sécret2", "Basic ", ""):
                assert client.get("/v2", headers={"Authorization": wrong.encode()}).status_code == 401
            right = {"Authorization": "Bearer sécret".encode()}
            assert client.post("/score", json={"rows": ROWS}, headers=right).status_code == 200
            assert "/score" in client.get("/openapi.json", headers=right).json()["paths"]
            assert client.get("/v2/health/ready").status_code == client.get("/").status_code == 200


class TestWatching:
    def test_counts_requests_rows_flags_and_p_values(self, path):
        with TestClient(make_app(Settings(str(path), name="tiny"))) as client:
            client.post("/score", json={"rows": ROWS})
            client.post("/score", json={"rows": []})
            client.post("/score", json={"rows": [[3e38, 3e38]]})
            assert client.get("/drift").json()["seen"] == 2
            client.get("/secret-in-an-address")
            lines = client.get("/metrics").text.splitlines()
        assert 'dissensus_requests_total{route="/score",status="200"} 1.0' in lines
        assert 'dissensus_requests_total{route="/score",status="400"} 2.0' in lines
        assert "dissensus_rows_total 2.0" in lines
        assert "dissensus_flagged_rows_total 1.0" in lines
        assert 'dissensus_p_value_bucket{le="0.05"} 1.0' in lines
        assert any(line.startswith("dissensus_drift_log10 ") for line in lines)
        assert not any("secret" in line for line in lines)

    def test_notices_drift_and_not_its_absence(self, path):
        rng = np.random.default_rng(3)
        with TestClient(make_app(Settings(str(path), name="tiny"))) as client:
            for size in rng.exponential(size=(8, 25)):
                client.post("/score", json={"rows": [[s, 0.0] for s in size]})
            before = client.get("/drift").json()
            assert before["seen"] == 200
            assert not before["alarm"]
            for size in rng.exponential(size=(8, 25)) + 2:
                client.post("/score", json={"rows": [[s, 0.0] for s in size]})
            after = client.get("/drift").json()
        assert after["alarm"]
        assert after["log10"] > 2
        assert after["points"][-1][0] == 400

    def test_a_file_without_calibration_is_not_watched(self, tmp_path):
        path = write_model(tmp_path / "m.onnx", drift=False)
        with TestClient(make_app(Settings(str(path)))) as client:
            assert client.get("/drift").json() == {"watched": False}
            assert client.post("/score", json={"rows": ROWS}).status_code == 200

    def test_logs_are_json_without_inputs(self, client, caplog):
        with caplog.at_level(logging.INFO, "dissensus.server"):
            client.post("/score", json={"rows": [[0.123454321, 1.0]]})
            client.post("/score?name=alice", json={"rows": [["alice", 1.0]]})
        lines = [JsonLines().format(record) for record in caplog.records]
        found = [json.loads(line) for line in lines]
        assert [(line["route"], line["status"], line["rows"]) for line in found] == [
            ("/score", 200, 1),
            ("/score", 400, 0),
        ]
        assert not any("alice" in line or "0.12345" in line for line in lines)


class TestTables:
    @pytest.fixture
    def model(self, tmp_path):
        table = {"town": ["Ulm", "Bonn", None] * 10, "joined": [f"2020-01-{day:02}" for day in range(1, 31)]}
        columns = TableEncoder.fit(table).to_json()
        return Model(write_model(tmp_path / "t.onnx", columns, np.float64))

    def test_rows_become_codes(self, model):
        rows = [{"town": "Ulm", "joined": "2020-01-05"}, {"town": "Oslo", "joined": None}, ["Bonn", None]]
        found = model.read_rows(rows)["x"]
        np.testing.assert_allclose(found, [[1, 18266], [-1, np.nan], [0, np.nan]])

    def test_the_schema_asks_for_every_column(self, model):
        (row, _) = score(model)["properties"]["rows"]["items"]["anyOf"]
        assert row["required"] == ["town", "joined"]

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            ([{"twon": "Ulm"}], "'twon'"),
            ([{"town": "Ulm", "joined": "yesterday"}], "dates"),
            ([{"town": ["Ulm"], "joined": None}], "a text or null"),
            ([{"town": "Ulm", "joined": None}, {"town": "Ulm"}], "Row 1 lacks the column 'joined'; null says"),
            ([["Ulm"]], "2 values"),
            (["Ulm"], "object"),
        ],
    )
    def test_rows_that_cannot_be_read(self, model, rows, said):
        with pytest.raises(BadInput, match=said):
            model.read_rows(rows)


class TestBatcher:
    def run(self, work, **settings):
        async def main():
            ran = []

            def model(feed):
                ran.append(len(feed["x"]))
                if (feed["x"] < 0).any():
                    raise ValueError("negative")
                return {"y": 2 * feed["x"]}

            batcher = Batcher(model, **settings)
            try:
                return await work(batcher), ran
            finally:
                await batcher.stop()

        return asyncio.run(main())

    def test_everyone_gets_their_own_rows_back(self):
        async def work(batcher):
            feeds = [{"x": np.full((1 + i % 3, 2), i)} for i in range(40)]
            return await asyncio.gather(*(batcher.submit(feed) for feed in feeds))

        found, ran = self.run(work)
        for i, outputs in enumerate(found):
            np.testing.assert_array_equal(outputs["y"], np.full((1 + i % 3, 2), 2 * i))
        assert len(ran) < 40  # some ran together

    def test_a_full_queue_turns_away_and_loses_nothing(self):
        async def work(batcher):
            feeds = [{"x": np.full((1, 1), i)} for i in range(200)]
            return await asyncio.gather(*(batcher.submit(feed) for feed in feeds), return_exceptions=True)

        found, ran = self.run(work, queue_rows=10, batch_rows=4)
        accepted = {i: out for i, out in enumerate(found) if not isinstance(out, Exception)}
        assert 10 <= len(accepted) < 200
        assert all(isinstance(out, QueueFull) for out in found if isinstance(out, Exception))
        assert all(out["y"].item() == 2 * i for i, out in accepted.items())
        assert sum(ran) == len(accepted)

    def test_one_request_larger_than_the_queue_is_taken_alone(self):
        async def work(batcher):
            return await batcher.submit({"x": np.ones((50, 1))})

        assert len(self.run(work, queue_rows=10)[0]["y"]) == 50

    def test_an_error_is_of_the_request_that_made_it(self):
        async def work(batcher):
            feeds = [{"x": np.full((1, 1), i)} for i in (1, 2, -1, 3)]
            return await asyncio.gather(*(batcher.submit(feed) for feed in feeds), return_exceptions=True)

        found, _ = self.run(work)
        assert isinstance(found.pop(2), ValueError)
        assert [out["y"].item() for out in found] == [2, 4, 6]

    def test_other_shapes_run_apart(self):
        async def work(batcher):
            feeds = [{"x": np.ones((1, 1 + i % 2))} for i in range(10)]
            return await asyncio.gather(*(batcher.submit(feed) for feed in feeds))

        found, _ = self.run(work)
        assert [out["y"].shape for out in found] == [(1, 1 + i % 2) for i in range(10)]

    def test_stopping_answers_what_was_accepted(self):
        started = threading.Event()

        async def main():
            def slow(feed):
                started.set()
                threading.Event().wait(0.05)
                return feed

            batcher = Batcher(slow, batch_rows=1)
            jobs = [asyncio.create_task(batcher.submit({"x": np.ones((1, 1))})) for _ in range(5)]
            await asyncio.sleep(0.01)
            await batcher.stop()
            return await asyncio.wait_for(asyncio.gather(*jobs), 1)

        assert len(asyncio.run(main())) == 5


class TestFiles:
    def test_that_are_missing_or_no_exports_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="There is no file"):
            Model(tmp_path / "none.onnx")
        (tmp_path / "bad.onnx").write_bytes(b"not a model")
        with pytest.raises(ValueError, match="cannot be read as ONNX"):
            Model(tmp_path / "bad.onnx")


@pytest.mark.parametrize(
    "code",
    [
        "import dissensus.serving.server",
        "import dissensus.cli",
        "from dissensus.serving.model import Model; Model({path!r})",
    ],
)
def test_no_torch_in_the_serving_process(code, path):
    found = subprocess.run(
        [sys.executable, "-c", f"{code.format(path=str(path))}; import sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "False"
