"""What is done to traced programs: nothing that changes what they compute, and nothing is left behind."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dissensus.engines.row_updates import update_by_adam
from dissensus.engines.trace import trace

aten = torch.ops.aten


def products(program: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.target is aten.bmm.default]


def test_a_product_that_is_only_used_turned_is_computed_turned():
    a, b = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64)

    def weight_gradient(a, b):
        return (torch.bmm(a.transpose(1, 2), b).transpose(-1, -2) + 1,)

    program = trace(weight_gradient, [a, b])
    (product,) = products(program)
    assert all(user.target is aten.add.Tensor for user in product.users)
    (found,) = program(a, b)
    assert found.is_contiguous()
    torch.testing.assert_close(found, b.transpose(1, 2) @ a + 1)


def test_a_product_that_is_used_as_it_is_too_stays():
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 4)

    def both(a, b):
        product = torch.bmm(a, b)
        return product.transpose(1, 2) + product

    program = trace(both, [a, b])
    assert len(products(program)) == 1
    torch.testing.assert_close(program(a, b), both(a, b))


def test_a_product_that_is_cast_before_it_is_turned_is_computed_turned():
    a, b = torch.randn(3, 4, 5), torch.randn(3, 4, 6)

    def weight_gradient(a, b):
        product = torch.bmm(a.bfloat16().transpose(1, 2), b.bfloat16())
        return (product.float().transpose(1, 2) + 1,)

    program = trace(weight_gradient, [a, b])
    (product,) = products(program)
    assert product.meta["val"].shape == (3, 6, 5)
    (found,) = program(a, b)
    assert found.is_contiguous()
    torch.testing.assert_close(found, b.transpose(1, 2) @ a + 1, atol=0.1, rtol=0.02)


def traced_update(gradient) -> torch.fx.Node:
    """Trace, for a GPU that need not be there, an update of two rows by what a function gives; return its node."""

    def step(values, first, second, rows, rate, source):
        update_by_adam(values, first, second, [gradient(source)], rows, None, None, rate, rate, 0.9, 0.999)
        return ()

    with FakeTensorMode():
        values, first, second = (torch.empty(6, 64, device="cuda") for _ in range(3))
        rows, rate = torch.empty(2, dtype=torch.int64, device="cuda"), torch.empty(2, 1, device="cuda")
        source = torch.empty(2, 5, 4, device="cuda")
        program = trace(step, [values, first, second, rows, rate, source])
    update = torch.ops.dissensus.update_by_adam.default
    (node,) = (node for node in program.graph.nodes if node.target is update)
    return node


def test_an_update_takes_the_gradients_of_parameters_as_they_were_computed():
    def gradient(source):
        weight = torch.bmm(source.bfloat16().transpose(1, 2), source.bfloat16()).float().reshape(2, 16)
        padding = torch.zeros(2, 44, device="cuda")
        return torch.cat([weight, source.sum(1), padding], dim=1)

    weight, bias = traced_update(gradient).args[3]
    assert weight.target is aten.bmm.default
    assert weight.meta["val"].dtype == torch.bfloat16
    assert bias.target is aten.sum.dim_IntList


def test_an_update_takes_no_part_that_is_an_input_of_the_step():
    """A buffer could be changed, in place, between the gradient that it is and the update."""

    def gradient(source):
        return torch.cat([source.sum(1), source.view(2, 20)], dim=1)

    (row,) = traced_update(gradient).args[3]
    assert row.target is aten.cat.default


def test_torch_keeps_no_source_of_programs():
    from torch.fx.graph_module import _loader

    before = len(_loader.eval_cache)
    program = trace(lambda a: (a.exp() + 1,), [torch.ones(3)])
    assert len(_loader.eval_cache) == before
    torch.testing.assert_close(program(torch.zeros(3))[0], torch.full((3,), 2.0))


def test_tracing_computes_nothing():
    a = torch.ones(3)
    trace(lambda a: a.mul_(2.0), [a])
    assert torch.equal(a, torch.ones(3))
