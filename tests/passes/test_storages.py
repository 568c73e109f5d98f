import torch
from torch import nn

from remat.passes.storages import Storages, main_device, tensors_of
from tests.passes.joints import capture


def test_views_share_a_storage_and_outputs_of_one_op_do_not() -> None:
    norm = nn.BatchNorm1d(6)
    captured = capture(lambda x: norm(x).view(-1).split(9)[0].sum(), torch.randn(4, 6))
    storages = captured.lowered.storages
    named = {node.name: node for node in captured.joint.nodes}
    op = next(node for node in captured.joint.nodes if "batch_norm" in node.name)
    assert len(storages.created[op]) == 5
    view = next(node for name, node in named.items() if name.startswith("view"))
    assert storages.is_alias(view)
    assert storages.held[view] == storages.held[view.all_input_nodes[0]]
    split = next(node for name, node in named.items() if name.startswith("split"))
    assert storages.held[split] == storages.held[view]


def test_bytes_are_rounded_up_to_what_the_allocator_hands_out() -> None:
    w = torch.randn(3, requires_grad=True)
    joint = capture(lambda w: w.exp().sum(), w).joint
    exact, rounded = Storages.of(joint), Storages.of(joint, granularity=512)
    assert exact.bytes[0] == 12
    assert rounded.bytes[0] == 512
    assert set(Storages.of(joint, device_type="cuda").bytes) == {0}
    assert main_device(t for node in joint.nodes for t in tensors_of(node)).type == "cpu"


def test_a_getitem_holds_the_storage_its_op_creates() -> None:
    norm = nn.LayerNorm(6)
    captured = capture(lambda x: norm(x).sum(), torch.randn(4, 6, requires_grad=True))
    storages = captured.lowered.storages
    op = next(n for n in captured.joint.nodes if n.name == "native_layer_norm")
    holders = [storages.holder[s].name for s in storages.created[op]]
    assert holders == ["getitem", "getitem_1", "getitem_2"]
