"""Probes of a model on a GPU: the same numbers as on the CPU, and outputs that keep their bits."""

import pytest
import torch

from qed.probes import ProbeConfig, measure, observe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = ProbeConfig(length=320, num_tokens=640, chunk_tokens=128)


@pytest.fixture(scope="module")
def make():
    from qed.model import QEDConfig, QEDForCausalLM

    def build(backend=None):
        torch.manual_seed(0)
        config = QEDConfig(
            vocab_size=512, hidden_size=128, num_hidden_layers=2, num_heads=2, head_dim=64, intermediate_size=256,
            initializer_range=0.1, theta_init=2.0, dt_range=(1e-3, 1e-1), backend=backend,
        )  # fmt: skip
        return QEDForCausalLM(config).eval()

    return build


@pytest.fixture(scope="module")
def windows():
    return torch.randint(512, (2, 320), generator=torch.Generator().manual_seed(0)).tolist()


def test_outputs_keep_their_bits(make, windows):
    model, ids = make().cuda().bfloat16(), torch.tensor(windows, device="cuda")
    received = []
    with torch.no_grad():
        plain = model(ids).logits
        with observe(model, lambda layer, mixer, activations: received.append(layer)):
            watched = model(ids).logits
    assert received == [0, 1]
    assert torch.equal(plain, watched)


def test_float64_on_the_gpu_is_float64_on_the_cpu(make, windows):
    """The PyTorch forms on both devices, so that nothing but the order of sums differs."""
    record, rows = measure(make("chunked").double(), windows, CONFIG, progress=False)
    other, other_rows = measure(make("chunked").double().cuda(), windows, CONFIG, progress=False)
    for one, two in zip([*record["summaries"], *rows], [*other["summaries"], *other_rows], strict=True):
        if "mean" in one:
            assert one["count"] == two["count"]
            assert two["mean"] == pytest.approx(one["mean"], rel=1e-6, abs=1e-12)
            assert two["max"] == pytest.approx(one["max"], rel=1e-6, abs=1e-12)
    for one, two in zip(record["attribution"], other["attribution"], strict=True):
        assert two["share_this_step"] == pytest.approx(one["share_this_step"], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_the_carried_states_are_the_kernels(make, windows, dtype, most):
    record, _ = measure(make().to(dtype).cuda(), windows, CONFIG, progress=False)
    assert record["state_difference"] < most
    assert record["loss"]["as_trained"] > 0
