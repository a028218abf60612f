"""ONNX files: what is changed in them after they were traced, and how they are run."""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Below so many numbers an 8-bit copy with its scales saves nothing.
_SMALLEST_QUANTISED = 256


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keep what torch's exporter says about itself from the user: missing operators of packages that are not used."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def finish(model: Any, defaults: Mapping[str, NDArray[Any]], facts: Mapping[str, Any], int8: bool) -> bytes:
    """Return a traced `onnx.ModelProto`, which is changed, as the bytes of a file, with weights in 8 bits where that is wanted.

    Inputs with defaults may be left out by callers. Facts are what the file says about itself, each a metadata entry in JSON.
    """
    from onnx import checker, numpy_helper

    for name, value in defaults.items():  # an initializer of the same name is an input's default
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    if int8:
        quantise_weights(model.graph)
    # Shapes of what is inside follow from the graph; those that were traced name axes that a changed graph no longer has.
    del model.graph.value_info[:]
    for name, fact in facts.items():
        model.metadata_props.add(key=name, value=json.dumps(fact))
    checker.check_model(model)
    return model.SerializeToString()


def quantise_weights(graph: Any) -> None:
    """Store the weights of linear layers and convolutions as int8, with one scale for each output; computing stays in float32."""
    from onnx import TensorProto, helper, numpy_helper

    weights = {each.name: each for each in graph.initializer if each.data_type == TensorProto.FLOAT}
    nodes = []
    for node in graph.node:
        axis = _output_axis(node)
        if axis is None or (name := node.input[1]) not in weights:
            continue
        weight = weights.pop(name)
        if len(weight.dims) > 1 and np.prod(weight.dims) >= _SMALLEST_QUANTISED:
            stored = [f"{name}.int8", f"{name}.scale"]
            graph.initializer.extend(
                map(numpy_helper.from_array, _to_int8(numpy_helper.to_array(weight), axis), stored)
            )
            graph.initializer.remove(weight)
            nodes.append(helper.make_node("DequantizeLinear", stored, [name], axis=axis))
    for place, node in enumerate(nodes):
        graph.node.insert(place, node)


def _output_axis(node: Any) -> int | None:
    """Return the axis of a layer's weights along which its outputs lie; None of what is no such layer."""
    transposed = any(each.name == "transB" and each.i for each in node.attribute)
    return {"Conv": 0, "MatMul": 1, "Gemm": 0 if transposed else 1}.get(node.op_type)


def _to_int8(weights: NDArray[Any], axis: int) -> tuple[NDArray[Any], NDArray[Any]]:
    others = tuple(each for each in range(weights.ndim) if each != axis)
    scales = np.abs(weights).max(axis=others, keepdims=True) / 127
    scales = np.where(scales > 0, scales, 1).astype(np.float32)
    return np.rint(weights / scales).astype(np.int8), scales.reshape(-1)


class Session:
    """A file that runs."""

    def __init__(self, path: str | Path, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {each.name: each for each in self._session.get_inputs()}
        self.outputs = {each.name: each for each in self._session.get_outputs()}
        found = self._session.get_modelmeta().custom_metadata_map
        self.facts: dict[str, Any] = {name: json.loads(fact) for name, fact in found.items()}

    def run(self, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the outputs by name."""
        return dict(zip(self.outputs, self._session.run(None, dict(feed)), strict=True))
