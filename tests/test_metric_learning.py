"""AdaptiveDistance with the losses and miners of pytorch-metric-learning."""

import pytest
import torch

import ahop_layers as ah

metric = pytest.importorskip(
    "pytorch_metric_learning", reason="pytorch-metric-learning is not installed: pip install '.[metric]'"
)
from pytorch_metric_learning import distances, losses, miners  # noqa: E402

pytestmark = pytest.mark.slow


def test_it_is_the_cosine_similarity_until_it_is_trained():
    distance, cosine = ah.metric_learning.AdaptiveDistance(16, blocks=4), distances.CosineSimilarity()
    x, y = torch.randn(6, 16), torch.randn(4, 16)
    for pair in ((x,), (x, y)):
        torch.testing.assert_close(distance(*pair), cosine(*pair))
    torch.testing.assert_close(distance.pairwise_distance(x[:4], y), distance.compute_mat(x[:4], y).diagonal())
    assert distance.is_inverted


@pytest.mark.parametrize("loss", ["TripletMarginLoss", "ContrastiveLoss", "NTXentLoss", "MultiSimilarityLoss"])
@pytest.mark.parametrize("miner", [None, "TripletMarginMiner", "MultiSimilarityMiner", "BatchHardMiner"])
def test_losses_and_miners_train_it(loss, miner):
    distance = ah.metric_learning.AdaptiveDistance(16, blocks=4)
    reference = distances.CosineSimilarity()
    margins = {"pos_margin": 1, "neg_margin": 0} if loss == "ContrastiveLoss" else {}
    criterion, expected = (getattr(losses, loss)(distance=each, **margins) for each in (distance, reference))
    mine = None if miner is None else getattr(miners, miner)(distance=distance)
    x, labels = torch.randn(12, 16, requires_grad=True), torch.arange(12) % 3
    mined = None if mine is None else mine(x, labels)
    value = criterion(x, labels, mined)
    torch.testing.assert_close(value, expected(x, labels, mined))
    value.backward()
    assert {id(p) for p in ah.similarity_parameters(criterion)} <= {id(p) for p in criterion.parameters()}
    assert distance.similarity.w.grad.abs().sum() > 0
    assert x.grad.abs().sum() > 0


def test_it_learns_to_ignore_values_that_are_wrong():
    """Most values of an embedding are wrong, in other places each time: the best blocks tell the class."""
    centers, labels = torch.randn(10, 32), torch.arange(240) % 10
    noisy = torch.where(torch.rand(240, 32) < 0.75, 4 * torch.randn(240, 32), centers[labels])
    distance = ah.metric_learning.AdaptiveDistance(32, bases=("l1",), init="l1", normalize_embeddings=False)

    def accuracy():
        with torch.no_grad():
            return (distance(noisy[40:], centers).argmax(-1) == labels[40:]).float().mean().item()

    before, criterion = accuracy(), losses.NCALoss(softmax_scale=0.1, distance=distance)
    optimizer = torch.optim.Adam(criterion.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        criterion(noisy[:40], labels[:40], ref_emb=centers, ref_labels=torch.arange(10)).backward()
        optimizer.step()
    assert accuracy() > before + 0.1
