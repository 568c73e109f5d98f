import torch

from remat.passes import runtime


def test_a_replayed_draw_is_the_first_one_and_moves_nothing() -> None:
    device = torch.device("cpu")
    state = runtime.random_state(device)
    first = torch.rand(5)
    torch.rand(3)
    after = torch.get_rng_state()
    again = runtime.replay_random(state, device, torch.rand, 5)
    assert torch.equal(first, again)
    assert torch.equal(after, torch.get_rng_state())
    assert state.numel() == runtime.random_state_bytes(device)


def test_the_generator_is_left_alone_if_the_op_raises() -> None:
    state = torch.get_rng_state()
    torch.rand(3)
    after = torch.get_rng_state()
    try:
        runtime.replay_random(state, torch.device("cpu"), torch.rand, -1)
    except RuntimeError:
        assert torch.equal(after, torch.get_rng_state())
    else:
        raise AssertionError("a negative size was accepted")
