import pytest
import torch
from torch import nn

from remat.passes.layers import layers, normalise, source_line
from tests.passes.joints import capture


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("L['self'].transformer.h.0.attn", "transformer.h.0.attn"),
        ("L['self']", ""),
        ("L['self']._modules['layers']._modules['3'].mlp", "layers.3.mlp"),
        ("L['model'].encoder", "encoder"),
        ("L['fn']", ""),
    ],
)
def test_paths_are_dotted_from_the_model_down(path: str, wanted: str) -> None:
    assert normalise(path) == wanted


def test_nearly_every_node_of_a_model_has_a_layer_and_a_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    joint = capture(lambda x: model(x).square().mean(), torch.randn(3, 4)).joint
    found = layers(joint.nodes)
    calls = [node for node in joint.nodes if node.op == "call_function"]
    gelu = next(node for node in calls if node.name == "gelu")
    backward = next(node for node in calls if node.name == "gelu_backward")
    assert found[gelu] == found[backward]
    assert found[gelu].endswith("1")
    assert sum(bool(found[node]) for node in calls) >= 0.8 * len(calls)
    assert "passes/test_layers.py:" in source_line(gelu)


def test_the_closure_of_a_step_function_is_no_layer() -> None:
    assert normalise("L['fn'].__closure__[0].cell_contents.layers.1") == "layers.1"
    assert normalise("L['self'].__closure__[0].cell_contents") == ""
