"""A small exported file made by hand, so that tests of the server need neither training nor tracing."""

import json

import numpy as np

MATRIX = np.array([[1.0, -1.0, 0.0], [0.5, 0.5, -1.0]], np.float32)
FACTS = {
    "dissensus": "0.1.0",
    "task": "classification",
    "loss": "cross_entropy",
    "kind": "DeepEnsemble",
    "num_members": 2,
    "score": "mutual_information",
    "false_alarms": 0.25,
    "calibration_inputs": 100,
    "classes": ["red", "green", "blue"],
}


def write_model(path, columns=None, dtype=np.float32, drift=True, image=False):
    """Write a file whose score is the largest absolute value of a row, and whose p-value is exp(-score).

    Of an image, (3, 6, 6) bytes, a row is how red and how green it is on average, from 0 to 1.
    """
    from onnx import TensorProto, checker, helper, numpy_helper

    from dissensus.conformal import DriftMonitor

    kinds = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}
    nodes = [
        ("Where", ["missing", "zero", "x"], ["clean"]),
        ("IsNaN", ["x"], ["missing"]),
        ("Cast", ["clean"], ["small"], {"to": TensorProto.FLOAT}),
        ("MatMul", ["small", "matrix"], ["logits"]),
        ("Softmax", ["logits"], ["prediction"]),
        ("Abs", ["small"], ["sizes"]),
        ("ReduceMax", ["sizes", "last"], ["score"], {"keepdims": 0}),
        ("Neg", ["score"], ["minus"]),
        ("Exp", ["minus"], ["p_value"]),
        ("LessOrEqual", ["p_value", "limit"], ["flag"]),
        ("Mul", ["score", "half"], ["data"]),
        ("Identity", ["data"], ["knowledge"]),
        ("Identity", ["score"], ["total"]),
        ("Unsqueeze", ["prediction", "first"], ["one"]),
        ("Concat", ["one", "one"], ["members"], {"axis": 1}),
    ]
    nodes[0], nodes[1] = nodes[1], nodes[0]
    if image:
        nodes[:3] = [
            ("Cast", ["x"], ["bytes"], {"to": TensorProto.FLOAT}),
            ("ReduceMean", ["bytes", "sides"], ["channels"], {"keepdims": 0}),
            ("Slice", ["channels", "from", "to", "last"], ["two"]),
            ("Div", ["two", "white"], ["small"]),
        ]
    made = [helper.make_node(*node[:3], **(node[3] if len(node) > 3 else {})) for node in nodes]
    floats = ["total", "data", "knowledge", "score", "p_value"]
    graph = helper.make_graph(
        made,
        "tiny",
        [
            helper.make_tensor_value_info("x", TensorProto.UINT8, ["batch", 3, 6, 6])
            if image
            else helper.make_tensor_value_info("x", kinds[dtype], ["batch", 2]),
            helper.make_tensor_value_info("limit", TensorProto.FLOAT, []),
        ],
        [
            helper.make_tensor_value_info("prediction", TensorProto.FLOAT, ["batch", 3]),
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch"]) for name in floats),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, ["batch"]),
            helper.make_tensor_value_info("members", TensorProto.FLOAT, ["batch", 2, 3]),
        ],
        [
            numpy_helper.from_array(np.array(0.25, np.float32), "limit"),
            numpy_helper.from_array(MATRIX, "matrix"),
            numpy_helper.from_array(np.array(0, dtype), "zero"),
            numpy_helper.from_array(np.array(0.5, np.float32), "half"),
            numpy_helper.from_array(np.array([1], np.int64), "last"),
            numpy_helper.from_array(np.array([1], np.int64), "first"),
            numpy_helper.from_array(np.array([2, 3], np.int64), "sides"),
            numpy_helper.from_array(np.array([0], np.int64), "from"),
            numpy_helper.from_array(np.array([2], np.int64), "to"),
            numpy_helper.from_array(np.array(255, np.float32), "white"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    facts = {**FACTS, "columns": columns}
    if drift:
        held_out = np.random.default_rng(0).exponential(size=300)
        facts["drift"] = DriftMonitor.of_scores(held_out).state()
    for name, fact in facts.items():
        model.metadata_props.add(key=name, value=json.dumps(fact))
    checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
