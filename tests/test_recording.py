"""What is done to recorded programs: nothing that changes what they compute."""

import torch

from dissensus.training.recording import record_function

aten = torch.ops.aten


def products(program: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.target is aten.bmm.default]


def test_a_product_that_is_only_used_turned_is_computed_turned():
    a, b = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64)

    def weight_gradient(a, b):
        return (torch.bmm(a.transpose(1, 2), b).transpose(-1, -2) + 1,)

    program = record_function(weight_gradient, [a, b])
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

    program = record_function(both, [a, b])
    assert len(products(program)) == 1
    torch.testing.assert_close(program(a, b), both(a, b))
