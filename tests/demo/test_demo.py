"""The demo workload learns, and does so bit for bit."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from resilient_sdk.demo.corpus import ByteText, text
from resilient_sdk.demo.model import PRESETS, build_gpt
from resilient_sdk.training.data import open_feed
from resilient_sdk.training.rng import seed_everything


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Several on a busy machine spin while they wait for each other: minutes instead of seconds.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(steps: int, dtype: torch.dtype) -> tuple[list[float], torch.Tensor]:
    seed_everything(1)
    config = PRESETS["tiny"]
    model = build_gpt(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    feed = open_feed(ByteText(config.context), rank=0, world_size=1, micro_batch_size=8, seed=1, epochs=None)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(feed.draw())
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_and_two_runs_are_the_same(dtype: torch.dtype) -> None:
    first, weights = losses(30, dtype)
    assert 5.2 < first[0] < 5.9  # ln 256 = 5.55: it knows nothing yet
    assert sum(first[-5:]) / 5 < 4
    again, same = losses(30, dtype)
    assert again == first
    assert torch.equal(weights, same)


@pytest.mark.parametrize(("name", "millions"), [("tiny", 0.5), ("small", 8)])
def test_presets_have_the_size_they_say(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = build_gpt(PRESETS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(
        millions, rel=0.1
    )


def test_the_future_is_not_seen() -> None:
    seed_everything(1)
    model = build_gpt(PRESETS["tiny"]).eval()
    batch = torch.randint(0, 256, (1, 33))
    other = batch.clone()
    other[0, 20:] = (other[0, 20:] + 1) % 256
    one = [model(part[:, :20]).item() for part in (batch, other)]
    assert one[0] == one[1]
    assert model(batch).item() != model(other).item()


def test_the_text_is_ordered_and_long_enough() -> None:
    assert text() == text()
    assert len(text()) > 300_000
    data = ByteText(64)
    assert data[0].shape == (65,)
    assert data[0].dtype == torch.long
    assert bytes(torch.cat([data[i] for i in range(3)]).tolist()) == text()[: 3 * 65]
    starts = [bytes(a.tolist() + b.tolist()) for a, b in pairwise([data[0], data[1]])]
    assert starts[0] == text()[:130]


def test_a_text_that_is_too_short_is_refused() -> None:
    assert len(ByteText(4, b"x" * 14)) == 2
    with pytest.raises(ValueError, match="3 bytes do not fill one window of 5"):
        ByteText(4, b"abc")
